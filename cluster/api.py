"""The HTTP API: routes, error shapes, plain and streamed answers. FastAPI, without Ray."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from cluster.access import Access, Asking, Caller, caller_of
from cluster.api_types import (
    CachesmithOptions,
    ChatCompletionRequest,
    CompletionRequest,
    Document,
    GenerationRequest,
    IngestRequest,
)
from cluster.cache_api import add_cache_routes
from cluster.config import DEFAULT_MAX_BODY_BYTES
from cluster.errors import ApiError
from cluster.gateway import Gateway, Job, Piece
from cluster.messages import IngestResult
from cluster.middleware import ARRIVED, ArrivalStamp, Authenticate, BodyLimit, error_response
from cluster.openai_format import DONE_EVENT, ResponseFormat, sse_event
from cluster.prompt import Prompt, PromptBuilder
from cluster.validation import slo_header, validation_error
from kv_tier.keys import content_id
from planner import Clock

log = logging.getLogger(__name__)

T = TypeVar("T")

_QUICK_CHARS = 2_000  # tokenised in less than a millisecond
SloHeader = Annotated[str | None, Header(alias="x-slo-ttft-ms")]


class ApiFront:
    """What the routes do, over a gateway. Tokenising much has a thread of its own."""

    def __init__(
        self,
        gateway: Gateway,
        prompts: PromptBuilder,
        clock: Clock,
        *,
        model_name: str,
        default_ttft_slo_ms: float,
        may_sleep: bool = False,
    ) -> None:
        """may_sleep: without a replica all is well, a request starts one"""
        self.gateway = gateway
        self._may_sleep = may_sleep
        self.model_name = model_name
        self._prompts = prompts
        self._clock = clock
        self._default_ttft_slo_ms = default_ttft_slo_ms
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self._num_in_thread = 0

    async def chat(
        self, body: ChatCompletionRequest, request: Request, slo: str | None
    ) -> Response:
        self._check_model(body.model)
        ttft_slo_ms = self._ttft_slo_ms(body, slo)
        documents = body.documents or []
        num_chars = sum(len(message.text) for message in body.messages)
        prompt = await self._tokenized(num_chars, self._prompts.chat, body.messages, documents)
        return await self._answer(body, prompt, request, ttft_slo_ms, chat=True)

    async def complete(
        self, body: CompletionRequest, request: Request, slo: str | None
    ) -> Response:
        self._check_model(body.model)
        ttft_slo_ms = self._ttft_slo_ms(body, slo)
        documents = body.documents or []
        prompt = await self._tokenized(
            len(body.prompt), self._prompts.plain, body.prompt, documents
        )
        if prompt.num_tokens == 0:
            raise ApiError(400, "prompt: must not be empty", param="prompt")
        return await self._answer(body, prompt, request, ttft_slo_ms, chat=False)

    async def ingest(self, body: IngestRequest, caller: Caller) -> dict[str, Any]:
        salt = caller.cache_salt(body.cache_salt)
        documents = await self._in_thread(self._prompts.document_chunks, body.documents)
        unique = list(dict.fromkeys(chunk for pieces in documents for chunk in pieces))
        nodes = await self.gateway.ingest(unique, cache_salt=salt)
        results = {
            chunk: {node_id: results[i] for node_id, results in nodes.items()}
            for i, chunk in enumerate(unique)
        }
        data: list[dict[str, Any]] = []
        for index, (document, pieces) in enumerate(zip(body.documents, documents, strict=True)):
            head = {"object": "chunk", "document": index, "document_id": document.id}
            if not pieces:
                data.append({"id": None, **head, "num_tokens": 0, "status": "empty", "nodes": {}})
            for chunk in pieces:
                data.append(
                    {
                        "id": caller.chunk_id(content_id(chunk, cache_salt=salt)),
                        **head,
                        "num_tokens": len(chunk),
                        **_ingest_status(results[chunk]),
                    }
                )
        return {"object": "list", "data": data}

    async def show_chunk(self, chunk_id: str, caller: Caller) -> dict[str, Any]:
        stored_id = caller.content_id(chunk_id)
        found = await self.gateway.find_chunk(stored_id) if stored_id is not None else {}
        if not found:
            raise _no_chunk(chunk_id)
        stored = next(iter(found.values()))
        return {
            "id": chunk_id,
            "object": "chunk",
            "num_tokens": stored.num_tokens,
            "nbytes": stored.nbytes,
            "tier": stored.tier,
            "nodes": sorted(found),
        }

    async def delete_chunk(self, chunk_id: str, caller: Caller) -> dict[str, Any]:
        stored_id = caller.content_id(chunk_id)
        if stored_id is None or not await self.gateway.cache.remove(stored_id):
            raise _no_chunk(chunk_id)
        return {"id": chunk_id, "object": "chunk", "deleted": True}

    def health(self, *, in_full: bool = True) -> Response:
        """200 once the scheduler answers and a replica is ready, or may be started by a request."""
        status = self.gateway.status
        reason = None
        if status is None:
            reason = "the scheduler does not answer"
        elif not status.ready and not self._may_sleep:
            reason = "no replica is ready"
        if reason is not None:
            body = {"status": "unavailable", "reason": reason}
            return JSONResponse(body, status_code=503, headers={"Retry-After": "1"})
        assert status is not None
        if not in_full:
            return JSONResponse({"status": "ok"})
        return JSONResponse(
            {
                "status": "ok",
                "model": self.model_name,
                "num_waiting": status.num_waiting,
                "replicas": [
                    {
                        "replica": r.replica_id,
                        "num_running": r.num_running,
                        "num_resident_chunks": r.num_resident_chunks,
                        "num_ingest_backlog": r.num_ingest_backlog,
                        "reuse_refusal": r.info.reuse_refusal if r.info else None,
                        "cost_source": r.info.cost_source if r.info else None,
                        "cost_drift": round(r.cost_drift, 3),
                    }
                    for r in status.ready
                ],
            }
        )

    def models(self) -> dict[str, Any]:
        model = {
            "id": self.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "cachesmith",
            "max_model_len": self.gateway.max_model_len,
        }
        return {"object": "list", "data": [model]}

    # --- answering ---------------------------------------------------------------------------

    async def _answer(
        self,
        body: GenerationRequest,
        prompt: Prompt,
        request: Request,
        ttft_slo_ms: float,
        *,
        chat: bool,
    ) -> Response:
        max_tokens = self.gateway.max_tokens(
            prompt, body.token_limit, prompt_param="messages" if chat else "prompt"
        )
        policy, config = (body.cachesmith or CachesmithOptions()).resolve()
        job = Job(
            prompt=prompt,
            ttft_slo_ms=ttft_slo_ms,
            sampling=body.sampling(max_tokens),
            arrived_ms=request.scope[ARRIVED],
            cache_salt=caller_of(request).cache_salt(body.cache_salt),
            policy=policy,
            config=config,
            wants_timeline=bool(body.cachesmith and body.cachesmith.timeline),
        )
        answer_format = ResponseFormat(
            chat=chat,
            response_id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.model_name,
            num_prompt_tokens=prompt.num_tokens,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
        )
        if body.stream:
            return await _open_stream(self.gateway.run(job), answer_format)
        texts: list[str] = []
        last: Piece | None = None
        async with aclosing(self.gateway.run(job)) as pieces:
            async for piece in pieces:
                texts.append(piece.text)
                last = piece
        assert last is not None  # the gateway gives a last piece or raises
        return JSONResponse(answer_format.response("".join(texts), last))

    def _check_model(self, model: str) -> None:
        if model != self.model_name:
            raise ApiError(
                404,
                f"the model {model!r} does not exist; this server has {self.model_name!r}",
                code="model_not_found",
                param="model",
            )

    def _ttft_slo_ms(self, body: GenerationRequest, header: str | None) -> float:
        from_header = None if header is None else slo_header(header)
        if body.slo is not None:
            return body.slo.ttft_ms
        return from_header or self._default_ttft_slo_ms

    async def _tokenized(
        self, num_chars: int, build: Callable[..., Prompt], text: Any, documents: list[Document]
    ) -> Prompt:
        """Here if it is quick and the thread is idle: changing threads takes longer than that.

        num_chars: of `text`
        """
        if not self._num_in_thread and num_chars <= _QUICK_CHARS:
            num_chars += self._prompts.num_new_chars(documents)
            if num_chars <= _QUICK_CHARS:
                return build(text, documents)
        return await self._in_thread(build, text, documents)

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        self._num_in_thread += 1
        working = self._tokenizing.submit(work, *args)
        working.add_done_callback(lambda _: loop.call_soon_threadsafe(self._left_thread))
        return await asyncio.wrap_future(working)

    def _left_thread(self) -> None:
        self._num_in_thread -= 1


async def _open_stream(
    pieces: AsyncGenerator[Piece, None], answer_format: ResponseFormat
) -> StreamingResponse:
    """Wait for the first piece, so that what fails before it still gets its own HTTP status."""
    try:
        first = await anext(pieces)
    except BaseException:
        await pieces.aclose()
        raise
    return _EventStream(pieces, _events(first, pieces, answer_format))


async def _events(
    first: Piece, pieces: AsyncGenerator[Piece, None], answer_format: ResponseFormat
) -> AsyncGenerator[str, None]:
    """The whole stream. An error after the first token is its last event, without [DONE]."""
    yield (answer_format.first_event() or "") + answer_format.event(first)  # one message, not two
    last = first
    try:
        async for piece in pieces:
            yield answer_format.event(piece)
            last = piece
    except ApiError as exc:
        yield sse_event(exc.body())
        return
    except Exception:
        log.exception("stream_failed response_id=%s", answer_format.response_id)
        yield sse_event(_INTERNAL_ERROR.body())
        return
    if answer_format.include_usage:
        yield answer_format.usage_event(last)
    yield DONE_EVENT


class _EventStream(StreamingResponse):
    """Closes the answer with the connection, however that ends, so that its blocks are freed."""

    def __init__(
        self, pieces: AsyncGenerator[Piece, None], events: AsyncGenerator[str, None]
    ) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._open = (events, pieces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_or_end() -> Message:
            try:
                return await receive()
            except Exception:  # Serve's own way to ask the client is cancelled when it leaves
                return {"type": "http.disconnect"}

        try:
            await super().__call__(scope, receive_or_end, send)
        finally:
            for iterator in self._open:
                await iterator.aclose()


_BEARER = "An API key, or http.admin_token, where the server has some."
_INTERNAL_ERROR = ApiError(500, "internal server error", code="internal_error")


def create_api(
    front: ApiFront,
    clock: Clock,
    *,
    version: str,
    access: Access | None = None,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
) -> FastAPI:
    """The application with all routes and error handlers.

    access: None leaves everything open
    """
    access = access or Access()

    async def of_a_tenant(caller: Asking) -> None:
        access.check_tenant(caller)

    async def of_an_admin(caller: Asking) -> None:
        access.check_admin(caller)

    async def of_its_owner(caller: Asking) -> None:
        if caller.tenant is None:
            access.check_admin(caller)

    app = FastAPI(
        title="CacheSmith",
        version=version,
        summary="RAG serving with chunk KV reuse under latency objectives",
        strict_content_type=False,
        # for the schema alone: what is checked, Authenticate checks before the body is read
        dependencies=[Depends(HTTPBearer(auto_error=False, description=_BEARER))],
    )
    app.add_middleware(BodyLimit, max_body_bytes=max_body_bytes)
    app.add_middleware(Authenticate, access=access)
    app.add_middleware(ArrivalStamp, clock=clock)  # the last one added is the first to run
    _add_error_handlers(app)
    tenants = [Depends(of_a_tenant)]

    @app.post("/v1/chat/completions", response_model=None, dependencies=tenants)
    async def chat_completions(
        body: ChatCompletionRequest, request: Request, slo: SloHeader = None
    ) -> Response:
        """Answer a conversation; `documents` go before the last user message."""
        return await front.chat(body, request, slo)

    @app.post("/v1/completions", response_model=None, dependencies=tenants)
    async def completions(
        body: CompletionRequest, request: Request, slo: SloHeader = None
    ) -> Response:
        """Continue a prompt; `documents` go before it."""
        return await front.complete(body, request, slo)

    @app.post("/v1/chunks", dependencies=tenants)
    async def ingest(body: IngestRequest, caller: Asking) -> dict[str, Any]:
        """Compute the documents' chunks ahead, on every node."""
        return await front.ingest(body, caller)

    @app.get("/v1/chunks/{chunk_id}")
    async def show_chunk(chunk_id: str, caller: Asking) -> dict[str, Any]:
        return await front.show_chunk(chunk_id, caller)

    @app.delete("/v1/chunks/{chunk_id}", dependencies=[Depends(of_its_owner)])
    async def delete_chunk(chunk_id: str, caller: Asking) -> dict[str, Any]:
        """Remove a chunk from every node, and from Redis."""
        return await front.delete_chunk(chunk_id, caller)

    add_cache_routes(app, lambda: front.gateway.cache, of_an_admin)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return front.models()

    @app.get("/health", response_model=None)
    async def health(caller: Asking) -> Response:
        """200 once requests can be served, 503 with a reason before."""
        is_known = caller.tenant is not None or caller.is_admin
        return front.health(in_full=is_known or not access.needs_key)

    @app.get("/ping", response_class=PlainTextResponse)
    async def ping() -> str:
        """200 as long as this process answers at all."""
        return "pong"

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": version}

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Prometheus text; the same whichever ingress answers."""
        text = await front.gateway.metrics_text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Every error in OpenAI's shape."""

    async def refused(_: Request, exc: Exception) -> Response:
        assert isinstance(exc, ApiError)
        return error_response(exc)

    async def invalid(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, RequestValidationError)
        return await refused(request, validation_error(exc.errors()))

    async def no_route(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        message = f"{request.method} {request.url.path}: {exc.detail}"
        return await refused(request, ApiError(exc.status_code, message, code="http_error"))

    async def internal(request: Request, exc: Exception) -> Response:
        log.error("request_failed path=%r", request.url.path, exc_info=exc)
        return await refused(request, _INTERNAL_ERROR)

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, no_route)
    app.add_exception_handler(Exception, internal)


def _ingest_status(nodes: dict[str, IngestResult]) -> dict[str, Any]:
    """`stored` on all nodes, `partial` on some, `failed` on none."""
    stored = [result for result in nodes.values() if result.stored is not None]
    status = "failed" if not stored else "stored" if len(stored) == len(nodes) else "partial"
    return {"status": status, "nodes": {node: _node_status(r) for node, r in nodes.items()}}


def _node_status(result: IngestResult) -> dict[str, Any]:
    if result.stored is None:
        return {"status": "failed", "error": result.error}
    return {"status": "stored", "tier": result.stored.tier, "nbytes": result.stored.nbytes}


def _no_chunk(chunk_id: str) -> ApiError:
    return ApiError(
        404, f"no chunk {chunk_id!r} is stored", code="chunk_not_found", param="chunk_id"
    )
