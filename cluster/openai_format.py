"""Response bodies and server-sent events, in the shapes of OpenAI's API."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.gateway import Piece, Served
from cluster.timeline import chrome_trace

DONE_EVENT = "data: [DONE]\n\n"


def sse_event(payload: Mapping[str, Any]) -> str:
    """One server-sent event. JSON escapes every newline, so one line always holds it."""
    return f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n"


def cachesmith_field(served: Served) -> dict[str, Any]:
    """What was planned, what was done, and where the time went; milliseconds, fractions 0-1."""
    result, plan, timings = served.result, served.plan, served.result.timings
    field: dict[str, Any] = {
        "policy": result.policy,
        "signal": str(result.signal),
        "warmup_depth": result.warmup_depth,
        "probe_len": result.probe_len,
        "coverage": round(result.coverage, 4),
        "planned_coverage": round(plan.coverage, 4),
        "pass_probability": round(plan.pass_probability, 4),
        "budget_ms": round(plan.budget_ms, 3),
        "expected_ms": round(plan.expected_ms, 3),
        "queue_ms": round(served.queue_ms, 3),
        "hold_ms": round(timings.hold_ms, 3),
        "load_ms": round(timings.load_ms, 3),
        "warmup_ms": round(timings.warmup_ms, 3),
        "probe_ms": round(timings.probe_ms, 3),
        "patch_ms": round(timings.patch_ms, 3),
        "write_ms": round(timings.write_ms, 3),
        "fill_ms": round(timings.fill_ms, 3),
        "stall_ms": round(timings.stall_ms, 3),
        "pause_ms": round(timings.pause_ms, 3),
        "compute_ms": round(timings.compute_ms, 3),
        "block_wait_ms": round(timings.block_wait_ms, 3),
        "ttft_ms": round(served.ttft_ms, 3),
        "slo_ttft_ms": served.ttft_slo_ms,
        "slo_met": served.slo_met,
        "cached_tokens": dict(result.cached_tokens),
        "num_context_tokens": result.num_context_tokens,
        "num_miss_tokens": result.num_miss_tokens,
        "num_recomputed_tokens": result.num_recomputed_tokens,
        "num_filled_tokens": result.num_filled_tokens,
        "batch_size": result.batch_size,
        "replica": served.replica_id,
        "parked": result.parked,
        "recovered": result.recovered,
        "full_prefill": result.full_prefill,
    }
    if served.wants_timeline:
        field["explanation"] = served.explanation
        field["timeline"] = chrome_trace(
            result,
            queue_ms=served.queue_ms,
            ttft_ms=served.ttft_ms,
            ttft_slo_ms=served.ttft_slo_ms,
            replica_id=served.replica_id,
            explanation=served.explanation,
        )
    return field


def usage_field(num_prompt: int, num_generated: int, served: Served | None) -> dict[str, Any]:
    cached = sum(served.result.cached_tokens.values()) if served else 0
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """Writes one request's answer: `chat` decides between the two endpoints' shapes."""

    chat: bool
    response_id: str
    created: int
    model: str
    num_prompt_tokens: int
    include_usage: bool = False  # a chunk of its own after the last
    continuous_usage: bool = False  # usage so far in every chunk

    def response(self, text: str, last: Piece) -> dict[str, Any]:
        """The whole answer at once."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice["finish_reason"] = last.finish_reason
        body = self._head("chat.completion" if self.chat else "text_completion")
        body["choices"] = [choice]
        body["usage"] = usage_field(self.num_prompt_tokens, last.num_generated, last.served)
        if last.served is not None:
            body["cachesmith"] = cachesmith_field(last.served)
        return body

    def first_event(self) -> str | None:
        """Chat streams open with the role."""
        return self._event({"role": "assistant", "content": ""}, None) if self.chat else None

    def event(self, piece: Piece) -> str:
        """One piece; the last one carries finish_reason and the `cachesmith` field."""
        content = {"content": piece.text} if self.chat else {"text": piece.text}
        if self.chat and piece.finish_reason and not piece.text:
            content = {}
        return self._event(content, piece)

    def usage_event(self, last: Piece) -> str:
        body = self._head(self._chunk_object)
        body["choices"] = []
        body["usage"] = usage_field(self.num_prompt_tokens, last.num_generated, last.served)
        return sse_event(body)

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _event(self, content: dict[str, Any], piece: Piece | None) -> str:
        choice: dict[str, Any] = {"index": 0, "logprobs": None}
        if self.chat:
            choice["delta"] = content
        else:
            choice.update(content)
        choice["finish_reason"] = piece.finish_reason if piece else None
        body = self._head(self._chunk_object)
        body["choices"] = [choice]
        if self.continuous_usage:
            num_generated = piece.num_generated if piece else 0
            served = piece.served if piece else None
            body["usage"] = usage_field(self.num_prompt_tokens, num_generated, served)
        elif self.include_usage:
            body["usage"] = None
        if piece is not None and piece.served is not None:
            body["cachesmith"] = cachesmith_field(piece.served)
        return sse_event(body)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }
