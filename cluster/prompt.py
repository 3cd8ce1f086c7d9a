"""From messages and documents to prefix, chunks and suffix, each tokenised by itself."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.api_types import Document, Message
from cluster.config import PromptConfig
from cluster.errors import ApiError, ChatTemplateError
from cluster.token_cache import TokenCache


class ChatTokenizer(Protocol):
    """The two things that prompts need of a tokenizer."""

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]: ...

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The chat template's text, up to where the assistant begins to speak."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids of one prompt; their concatenation is what the model sees."""

    prefix_ids: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    suffix_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prefix_ids) + sum(map(len, self.chunks)) + len(self.suffix_ids)


class PromptBuilder:
    """Renders and tokenises prompts. A document's token ids never depend on what is around it.

    Raises ChatTemplateError at construction if the model's template can not carry documents.
    """

    def __init__(self, tokenizer: ChatTokenizer, config: PromptConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._cache = TokenCache(config.token_cache_tokens)
        # random, so that no message can hold it and move the documents
        self._sentinel = f"[documents:{secrets.token_hex(16)}]"
        self._split(tokenizer.render_chat([{"role": "user", "content": self._sentinel}]))

    def chat(self, messages: Sequence[Message], documents: Sequence[Document]) -> Prompt:
        """The documents stand at the start of the last user message.

        Without documents (or only empty ones) the messages are rendered as they are.
        """
        turns = [{"role": message.role, "content": message.text} for message in messages]
        if any(self._sentinel in turn["content"] for turn in turns):
            raise ApiError(400, "a message holds the server's own marker", param="messages")
        chunks = self.document_chunks(documents)
        asked = [i for i, turn in enumerate(turns) if turn["role"] == "user"]
        if documents and not asked:
            raise ApiError(
                400, "documents need a message with role user to go before", param="messages"
            )
        flat = tuple(chunk for pieces in chunks for chunk in pieces)
        if not flat:
            return Prompt(prefix_ids=(), chunks=(), suffix_ids=self._encode(self._render(turns)))
        question = fill(self._config.question_template, question=turns[asked[-1]]["content"])
        turns[asked[-1]]["content"] = self._config.intro + self._sentinel + question
        before, after = self._render_split(turns)
        return Prompt(prefix_ids=self._encode(before), chunks=flat, suffix_ids=self._encode(after))

    def plain(self, prompt: str, documents: Sequence[Document]) -> Prompt:
        """A completion's prompt after its documents, without a template.

        Special tokens (BOS) as the tokenizer adds them to a text.
        """
        flat = tuple(chunk for pieces in self.document_chunks(documents) for chunk in pieces)
        if not flat:
            return Prompt(
                prefix_ids=(), chunks=(), suffix_ids=self._encode(prompt, add_special_tokens=True)
            )
        return Prompt(
            prefix_ids=self._encode(self._config.intro, add_special_tokens=True),
            chunks=flat,
            suffix_ids=self._encode(fill(self._config.question_template, question=prompt)),
        )

    def document_chunks(self, documents: Sequence[Document]) -> list[list[tuple[int, ...]]]:
        """The chunks of each document, none for an empty one; long documents are cut in order."""
        texts = [self._document_text(document) for document in documents]
        found = {text: self._cache.get(text) for text in texts if text is not None}
        new = [text for text, pieces in found.items() if pieces is None]
        size = self._config.max_chunk_tokens
        for text, ids in zip(
            new, self._tokenizer.encode(new, add_special_tokens=False), strict=True
        ):
            pieces = tuple(tuple(ids[i : i + size]) for i in range(0, len(ids), size))
            found[text] = pieces
            self._cache.put(text, pieces)
        return [list(found[text] or ()) if text is not None else [] for text in texts]

    def num_new_chars(self, documents: Sequence[Document]) -> int:
        """Characters of these documents that are not tokenised yet."""
        texts = {self._document_text(document) for document in documents}
        return sum(len(text) for text in texts if text is not None and text not in self._cache)

    def _document_text(self, document: Document) -> str | None:
        if not document.text or document.text.isspace():
            return None
        if not document.title:
            return fill(self._config.untitled_template, text=document.text)
        return fill(self._config.document_template, title=document.title, text=document.text)

    def _render(self, turns: Sequence[dict[str, str]]) -> str:
        try:
            return self._tokenizer.render_chat(turns)
        except ChatTemplateError as exc:  # templates refuse some role orders
            raise ApiError(400, str(exc), param="messages") from exc

    def _render_split(self, turns: Sequence[dict[str, str]]) -> tuple[str, str]:
        try:
            return self._split(self._render(turns))
        except ChatTemplateError as exc:
            raise ApiError(400, str(exc), param="messages") from exc

    def _split(self, rendered: str) -> tuple[str, str]:
        parts = rendered.split(self._sentinel)
        if len(parts) != 2:
            raise ChatTemplateError(
                f"the model's chat template writes a user message {len(parts) - 1} times, "
                "so documents can not be placed in it"
            )
        return parts[0], parts[1]

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode([text], add_special_tokens=add_special_tokens)[0])


def fill(template: str, **values: str) -> str:
    """Put values in for `{name}`, in one pass: braces in the values stay what they are."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), template)
