"""Single requests to vLLM's AsyncLLM: our sampling options in, our deltas out."""

import os
from collections.abc import AsyncGenerator
from itertools import count
from typing import Any

from planner.types import PrefillResult, SamplingOptions
from replicas.connector_types import RequestParams, ResultParams
from replicas.interface import EngineDeadError, GenerationDelta

DETOKENIZED_BEFORE = 8  # prompt tokens that a first token's text is read behind


class VllmRequests:
    """Numbers requests of one engine, and knows what ends an answer in vLLM."""

    def __init__(self, engine: Any, max_model_len: int) -> None:
        self._engine = engine
        self._max_model_len = max_model_len
        self._serial = count()
        self._eos_ids = _eos_ids(engine.vllm_config.model_config, engine.get_tokenizer())

    async def run(
        self,
        token_ids: list[int],
        sampling: SamplingOptions,
        params: RequestParams | None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[Any, None]:
        """vLLM's outputs of one request. Ending the iteration early aborts it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

        serial = next(self._serial)
        prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
        extra: dict[str, Any] | None = None
        if params is not None:
            extra = {"kv_transfer_params": params.to_wire()}
            # KV with reused parts must never enter vLLM's prefix cache under the plain tokens
            prompt["cache_salt"] = f"cachesmith-{os.getpid()}-{serial}"
        options = SamplingParams(
            max_tokens=max(1, min(sampling.max_tokens, self._max_model_len - len(token_ids))),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            stop=list(sampling.stop),
            ignore_eos=sampling.ignore_eos,
            logprobs=0 if sampling.logprobs else None,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra,
        )
        outputs = self._engine.generate(
            prompt, options, request_id=f"cs-{serial}", priority=priority
        )
        try:
            async for out in outputs:
                yield out
        except VllmEngineDeadError as exc:
            raise EngineDeadError("the vLLM engine ended during the request") from exc
        finally:
            await outputs.aclose()

    def finish_reason(self, answer: ResultParams, options: SamplingOptions) -> str | None:
        """Of an answer that may end with its first token."""
        if answer.first_token in self._eos_ids and not options.ignore_eos:
            return "stop"
        ends = answer.result.num_prompt_tokens + 1 >= self._max_model_len
        return "length" if options.max_tokens <= 1 or ends else None

    def text_of(self, prompt_ids: list[int], token_id: int) -> str:
        """A token's text behind its prompt; nothing yet for a part of a character."""
        before = prompt_ids[-DETOKENIZED_BEFORE:]
        tokenizer = self._engine.get_tokenizer()
        known = tokenizer.decode(before, skip_special_tokens=True)
        text = tokenizer.decode([*before, token_id], skip_special_tokens=True)
        return "" if text.endswith("\ufffd") else text.removeprefix(known)


def delta_of(out: Any, num_generated: int, result: PrefillResult | None) -> GenerationDelta:
    (completion,) = out.outputs
    return GenerationDelta(
        text=completion.text,
        num_generated=num_generated,
        token_ids=tuple(completion.token_ids),
        logprobs=_logprobs(completion),
        finish_reason=completion.finish_reason if out.finished else None,
        result=result,
    )


def _logprobs(completion: Any) -> tuple[float, ...] | None:
    """Of the new tokens of one vLLM output."""
    if not completion.logprobs:
        return None
    new = completion.logprobs[-len(completion.token_ids) :]
    return tuple(at[token].logprob for token, at in zip(completion.token_ids, new, strict=True))


def _eos_ids(model_config: Any, tokenizer: Any) -> frozenset[int]:
    """What ends an answer in vLLM: the tokenizer's token, and those of the generation config."""
    configured = (model_config.try_get_generation_config() or {}).get("eos_token_id") or []
    ids = {configured} if isinstance(configured, int) else set(configured)
    return frozenset(ids | {tokenizer.eos_token_id} - {None})
