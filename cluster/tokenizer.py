"""The served model's tokenizer, from its folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.errors import ChatTemplateError


class HfTokenizer:
    """A Hugging Face tokenizer with its chat template. Not thread-safe: use one thread.

    Raises ChatTemplateError if the model comes without a chat template.
    """

    def __init__(self, tokenizer: Any, *, name: str) -> None:
        if not tokenizer.chat_template:
            raise ChatTemplateError(
                f"{name} has no chat template: serve an instruction-tuned model, or add "
                "chat_template.jinja to its folder"
            )
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, model_dir: Path) -> "HfTokenizer":
        from transformers import AutoTokenizer  # takes seconds: only processes that tokenise pay

        tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        return cls(tokenizer, name=model_dir.name)

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        if self._tokenizer.is_fast:  # the Rust tokenizer itself: all cores, no padding logic
            backend = self._tokenizer.backend_tokenizer
            encodings = backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
            return [encoding.ids for encoding in encodings]
        return [
            self._tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts
        ]

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as exc:  # jinja2's errors, and whatever the template raises itself
            raise ChatTemplateError(f"the model's chat template failed: {exc}") from exc
