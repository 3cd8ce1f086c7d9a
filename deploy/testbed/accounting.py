"""What the load's answers come to: right, wrong, lost, doubled, failed.

An answer is compared with one that the same cluster gave when nothing was broken, and that went the
same way:

- computed as a whole (coverage 1, or the engine's own prefill): the text is that of full prefill.
- otherwise its `cachesmith` field says signal, depths and how many context tokens were chosen. With
  no chunk missed and no stall filled these decide which KV there was, so the text is that of a
  request that asks for just this.
- chunks that were missed are computed exactly, and the field does not say which they were. Of such
  an answer only the length is known: it counts as unverified.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from deploy.testbed.client import Answer


class Way(NamedTuple):
    """How an answer was computed, as far as it decides the text."""

    prompt: int
    signal: str
    warmup_depth: int
    probe_len: int
    num_chosen: int  # of the context tokens, of which there are
    num_context: int

    @property
    def recompute(self) -> dict[str, Any]:
        """The `cachesmith` field of a request that goes this way."""
        # the server rounds up: half a token less, so that it comes to the same number
        coverage = max(self.num_chosen - 0.5, 0.0) / self.num_context
        return {
            "signal": self.signal,
            "warmup_depth": self.warmup_depth,
            "probe_len": self.probe_len,
            "coverage": coverage,
        }


def is_whole(did: Mapping[str, Any]) -> bool:
    """Whether every context token was computed with the others."""
    return bool(did["full_prefill"] or did["recovered"] or did["coverage"] >= 1.0)


def way_of(answer: Answer) -> Way | None:
    """None where the answer does not say enough."""
    did = answer.did
    if did is None or did["num_miss_tokens"] or did["num_filled_tokens"]:
        return None
    num_context = did["num_context_tokens"]
    return Way(
        prompt=answer.prompt,
        signal=did["signal"],
        warmup_depth=did["warmup_depth"],
        probe_len=did["probe_len"],
        num_chosen=round(did["coverage"] * num_context),
        num_context=num_context,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """Texts of answers when nothing was broken."""

    whole: Mapping[int, str]  # prompt → text of full prefill
    ways: Mapping[Way, str]
    num_tokens: int  # of every answer


def is_answered(answer: Answer) -> bool:
    return answer.error is None and answer.is_closed and answer.did is not None


def is_lost(answer: Answer) -> bool:
    """Neither an end nor an error."""
    return answer.error is None and not (answer.is_closed and answer.did is not None)


def is_doubled(answer: Answer, references: References) -> bool:
    """Whether the client got tokens or an end more than once."""
    return answer.num_ends > 1 or (answer.num_tokens or 0) > references.num_tokens


def expected_text(answer: Answer, references: References) -> str | None:
    """None where nobody knows."""
    assert answer.did is not None
    if is_whole(answer.did):
        return references.whole[answer.prompt]
    way = way_of(answer)
    return None if way is None else references.ways.get(way)


def is_wrong(answer: Answer, references: References) -> bool:
    """Whether an answered request got another text than it had to."""
    if answer.num_tokens != references.num_tokens:
        return True
    expected = expected_text(answer, references)
    if answer.is_exact:
        return answer.text != references.whole[answer.prompt]
    return expected is not None and answer.text != expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Numbers of requests. `sent` = `answered` + `lost` + all `errors`."""

    sent: int
    accepted: int  # HTTP 200 begun
    answered: int
    errors: dict[str, int]
    wrong: int
    lost: int
    doubled: int
    unverified: int
    retried_connections: int
    worst_ttft_ms: float
    p50_ttft_ms: float
    p99_ttft_ms: float

    @property
    def num_errors(self) -> int:
        return sum(self.errors.values())


def tally(answers: Sequence[Answer], references: References) -> Tally:
    answered = [a for a in answers if is_answered(a)]
    ttfts = sorted(a.ttft_ms for a in answered if a.ttft_ms is not None)
    return Tally(
        sent=len(answers),
        accepted=sum(a.status == 200 for a in answers),
        answered=len(answered),
        errors=dict(Counter(a.error for a in answers if a.error is not None)),
        wrong=sum(is_wrong(a, references) for a in answered),
        lost=sum(is_lost(a) for a in answers),
        doubled=sum(is_doubled(a, references) for a in answers),
        unverified=sum(not a.is_exact and expected_text(a, references) is None for a in answered),
        retried_connections=sum(a.num_refused for a in answers),
        worst_ttft_ms=ttfts[-1] if ttfts else 0.0,
        p50_ttft_ms=_quantile(ttfts, 0.5),
        p99_ttft_ms=_quantile(ttfts, 0.99),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    """The requests that were sent within one second."""

    second: int
    sent: int
    answered: int
    errors: int
    worst_ttft_ms: float


def by_second(answers: Sequence[Answer]) -> list[Second]:
    groups: dict[int, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(int(answer.started_s), []).append(answer)
    return [
        Second(
            second=second,
            sent=len(group),
            answered=sum(is_answered(a) for a in group),
            errors=sum(a.error is not None for a in group),
            worst_ttft_ms=max((a.ttft_ms or 0.0 for a in group), default=0.0),
        )
        for second, group in sorted(groups.items())
    ]


def _quantile(values: Sequence[float], share: float) -> float:
    """values: in order"""
    return values[min(int(len(values) * share), len(values) - 1)] if values else 0.0
