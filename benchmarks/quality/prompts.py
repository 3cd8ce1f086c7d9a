"""From a question to token ids, as the server makes them of the same documents and text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from benchmarks.quality.types import Question
from cluster.api_types import Document, Message
from cluster.config import PromptConfig
from cluster.prompt import Prompt, PromptBuilder
from cluster.tokenizer import HfTokenizer


class Endpoint(StrEnum):
    CHAT = "chat"  # /v1/chat/completions: the model's own template around the question
    COMPLETIONS = "completions"  # /v1/completions: the text as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptForm:
    """How a model is asked: the endpoint, and the server's `prompt` settings."""

    endpoint: Endpoint = Endpoint.CHAT
    config: PromptConfig = field(default_factory=PromptConfig)


class QuestionEncoder:
    """Prompts by the server's own code, answers back to text."""

    def __init__(self, model_dir: Path, form: PromptForm) -> None:
        from transformers import AutoTokenizer

        self._form = form
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        self._builder = PromptBuilder(
            HfTokenizer(self._tokenizer, name=model_dir.name), form.config
        )

    def encode(self, question: Question) -> Prompt:
        documents = [
            Document(title=document.title, text=document.text) for document in question.documents
        ]
        if self._form.endpoint is Endpoint.COMPLETIONS:
            return self._builder.plain(question.question, documents)
        return self._builder.chat([Message(role="user", content=question.question)], documents)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True)).strip()
