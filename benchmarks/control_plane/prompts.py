"""Requests with documents of a small collection, as retrieval finds them."""

import json
import random
from collections.abc import Sequence

MODEL = "instant"
WORDS = ("the", "of", "and", "ferry", "engine", "river", "mountain", "station", "paper", "winter")
WORDS_PER_DOCUMENT = 480  # about as many tokens
NUM_DOCUMENTS = 64  # that retrieval finds; as MAX_DOCUMENTS of the benchmark


class Prompts:
    """Requests with documents of a small collection, drawn at random."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._documents = [
            " ".join(self._rng.choices(WORDS, k=WORDS_PER_DOCUMENT)) for _ in range(NUM_DOCUMENTS)
        ]

    def bodies(self, num_documents: int, count: int) -> list[bytes]:
        return [self._body(self._rng.sample(self._documents, num_documents)) for _ in range(count)]

    def all_documents(self) -> list[bytes]:
        return [self._body(self._documents[i : i + 8]) for i in range(0, NUM_DOCUMENTS, 8)]

    def _body(self, documents: Sequence[str]) -> bytes:
        return json.dumps(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": "When does the ferry leave?"}],
                "documents": [{"text": text} for text in documents],
                "stream": True,
                "max_tokens": 2,
            }
        ).encode()
