"""What a replica that leaves does for the others: its node's chunks into Redis, while it may."""

import fcntl
import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kv_tier.arena_dir import ArenaDir
from kv_tier.errors import KvTierError
from kv_tier.host_tier import HostTier
from kv_tier.owners import open_private
from kv_tier.redis import ChunkWrite, RemoteTier
from kv_tier.store import EntryInfo

log = logging.getLogger(__name__)

_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """num_offered: chunks that were asked about in Redis, and written where they were not there"""

    num_offered: int
    num_left: int  # the time was up before
    is_flushed: bool  # nothing waits to be written


def hand_over(host: HostTier, remote: RemoteTier, *, timeout_ms: float) -> Handover:
    """Write what waits, then copy the host tier's chunks that Redis lacks, hottest first.

    Blocks, at most for the time and the write that is under way. Of several replicas of the node
    that leave at once, one copies and the others wait for it: two that write the same chunk could
    leave a mixture, which is a miss.
    """
    end_s = time.monotonic() + timeout_ms / 1e3
    is_flushed = remote.flush(_left_ms(end_s))
    num_offered, left = 0, deque[EntryInfo]()
    try:
        with _alone(ArenaDir(host.config.directory).handover, end_s) as is_alone:
            if is_alone:
                left.extend(hottest_first(host.entries()))
            while left and is_flushed and _left_ms(end_s) > 0.0:
                num_offered += _offer(host, remote, left.popleft())
                is_flushed = remote.flush(_left_ms(end_s))
    except (KvTierError, OSError):  # whoever leaves must not be kept by it
        log.exception("handover_failed")
    log.info("handed_over num_offered=%d num_left=%d", num_offered, len(left))
    return Handover(num_offered=num_offered, num_left=len(left), is_flushed=is_flushed)


def hottest_first(entries: list[EntryInfo]) -> list[EntryInfo]:
    """By uses; of equals, the more recently used first, as a store lists them."""
    return sorted(entries, key=lambda entry: -entry.uses)


def _offer(host: HostTier, remote: RemoteTier, entry: EntryInfo) -> bool:
    """Whether it was still there; the writer looks first whether Redis has it."""
    held = host.hold_with_tokens(entry.key)
    if held is None:
        return False
    lease, token_ids = held
    return remote.write_behind(
        ChunkWrite(
            location=lease.location,
            token_ids=token_ids,
            recompute_ms=entry.recompute_ms,
            content_id=entry.content_id,
            release=lambda: host.release([lease]),
        )
    )


@contextmanager
def _alone(path: Path, end_s: float) -> Iterator[bool]:
    """Hold the node's lock on handing over. False where it was not free in time."""
    with open_private(path) as file:
        is_locked = False
        while not is_locked:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked = True
            except BlockingIOError:
                if _left_ms(end_s) <= 0.0:
                    break
                time.sleep(_POLL_S)
        yield is_locked


def _left_ms(end_s: float) -> float:
    return max(0.0, (end_s - time.monotonic()) * 1e3)
