"""What the load asks: a few questions over passages that they share."""

from dataclasses import dataclass
from typing import Any

_NAMES = ("Wend", "Arle", "Tarn", "Sorrel", "Quill", "Morrow", "Fenner", "Hale", "Ister", "Dunmore")
_MAX_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    index: int
    question: str
    documents: tuple[str, ...]


def make_prompts(num_prompts: int) -> tuple[Prompt, ...]:
    """Each has three passages of about twenty tokens; neighbours share two of them."""
    passages = [
        f"The ferry to {name} leaves pier {index + 2} at {index + 6} and is back by noon."
        for index, name in enumerate(_NAMES[:num_prompts])
    ]
    return tuple(
        Prompt(
            index=index,
            question=f"When does the ferry to {_NAMES[index]} leave?",
            documents=tuple(passages[(index + step) % num_prompts] for step in range(3)),
        )
        for index in range(num_prompts)
    )


def body_of(prompt: Prompt, *, model: str, recompute: dict[str, Any]) -> dict[str, Any]:
    """A request for an answer of a known length; recompute: the `cachesmith` field."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt.question}],
        "documents": list(prompt.documents),
        "max_tokens": _MAX_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "slo": {"ttft_ms": 60_000},
        "cachesmith": recompute,
    }
