"""What a replica knows of the link that stored KV comes over, and when that is news."""

from planner.timeline import Link

BATCH_WEIGHT = 0.3  # of a batch in what is smoothed
NEWS = 0.02  # relative; less is not told, since every change costs the scheduler its curves
LEAST_SHARE = 0.002  # a change of the share that is less than this is no news


class LinkTracker:
    """Smooths what batches see.

    link: as last told
    loaded_share: of stored tokens, those that came over the link and were not in the node's memory,
    as last told; a replica that has seen none expects all to come over it
    """

    def __init__(self, link: Link, *, is_guess: bool = False) -> None:
        """is_guess: the first batch that sees the link is believed at once"""
        self.link = link
        self._is_guess = is_guess
        self.loaded_share = 1.0
        self._bytes_per_ms = link.bytes_per_ms
        self._latency_ms = link.latency_ms
        self._share = 1.0

    def observe(
        self,
        *,
        loaded: int,
        stored: int,
        batch_size: int = 1,
        bytes_per_ms: float | None = None,
        latency_ms: float | None = None,
    ) -> None:
        """loaded, stored: tokens that came over the link, and all that were stored, of a batch, or
        of one of the `batch_size` requests that are told of one by one.

        None: nothing was seen of it.
        """
        if stored == 0:
            return
        batch_weight = BATCH_WEIGHT / batch_size
        self._share += batch_weight * (loaded / stored - self._share)
        weight = 1.0 if self._is_guess else batch_weight
        if bytes_per_ms is not None:
            self._bytes_per_ms += weight * (bytes_per_ms - self._bytes_per_ms)
            self._is_guess = False
        if latency_ms is not None:
            self._latency_ms += weight * (latency_ms - self._latency_ms)
        share_change = abs(self._share - self.loaded_share)
        is_news = (
            abs(self._bytes_per_ms / self.link.bytes_per_ms - 1.0) > NEWS
            or abs(self._latency_ms - self.link.latency_ms) > NEWS * self.link.latency_ms
            or share_change > max(LEAST_SHARE, NEWS * self.loaded_share)
        )
        if is_news:
            self.loaded_share = self._share
            self.link = Link(bytes_per_ms=self._bytes_per_ms, latency_ms=self._latency_ms)
