"""Token ids of documents that were tokenised lately: retrieval finds the same ones again."""

from collections import OrderedDict

Pieces = tuple[tuple[int, ...], ...]  # a document's chunks


class TokenCache:
    """By the document's text, least recently used first out. For one thread at a time."""

    def __init__(self, max_tokens: int) -> None:
        """max_tokens: of all documents together; 0 keeps nothing"""
        self._max_tokens = max_tokens
        self._documents: OrderedDict[str, Pieces] = OrderedDict()
        self._num_tokens = 0

    def __contains__(self, text: str) -> bool:
        return text in self._documents

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def get(self, text: str) -> Pieces | None:
        pieces = self._documents.get(text)
        if pieces is not None:
            self._documents.move_to_end(text)
        return pieces

    def put(self, text: str, pieces: Pieces) -> None:
        """text: one that is not in here"""
        assert text not in self._documents
        num_tokens = _num_tokens(pieces)
        if num_tokens > self._max_tokens:
            return
        self._documents[text] = pieces
        self._num_tokens += num_tokens
        while self._num_tokens > self._max_tokens:
            _, oldest = self._documents.popitem(last=False)
            self._num_tokens -= _num_tokens(oldest)


def _num_tokens(pieces: Pieces) -> int:
    """At least one a document, so that empty ones are bounded too."""
    return max(1, sum(map(len, pieces)))
