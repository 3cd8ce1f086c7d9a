"""One batch of prefills as the phases see it: ragged, packed, no padding.

Row r of a batch is one prompt token; the rows of a request follow each other in order, so a row's
position is its distance from the request's first row.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from kv_tier.store import ChunkLocation
from planner.cost_model import CostModel
from planner.types import Deviation, Signal
from replicas.parking import ParkOrder


class SegmentKind(StrEnum):
    PREFIX = "prefix"  # exact wherever it stands: computed from position 0 without an anchor
    CHUNK = "chunk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Prompt tokens [start, end) and where their KV is stored; location None is a miss."""

    kind: SegmentKind
    start: int
    end: int
    location: ChunkLocation | None = None
    is_arriving: bool = False  # not all of it is at its location yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Prompt tokens [start, end) whose position-free KV is to be written to the store."""

    start: int
    end: int
    location: ChunkLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob:
    """One request's prefill: every prompt token but the last, which the engine itself computes."""

    request_id: str
    token_ids: list[int]  # the whole prompt
    segments: list[Segment]  # ascending; tokens after the last one are the suffix
    coverage: float
    block_ids: list[int]  # the engine's pages, in order; none for a parked prefill
    captures: list[Capture]
    band: tuple[float, float] | None = None  # the coverage may be solved again within; None: fixed
    park: ParkOrder | None = None  # no pages are free: finished layers go to host memory
    wants_timeline: bool = False

    def __post_init__(self) -> None:
        end = 0
        for segment in self.segments:
            if not end <= segment.start < segment.end < len(self.token_ids):
                raise ValueError(
                    f"segment [{segment.start}, {segment.end}) of {self.request_id} does not "
                    f"follow {end} within {len(self.token_ids)} tokens"
                )
            end = segment.end


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageTerms:
    """What the coverages of a running batch are solved again from."""

    deadline_ms: float  # of the node's clock: when the batch has to be done
    cost: CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalTerms:
    """What is expected of the stored KV that is still on its way."""

    bytes_per_ms: float  # of its link
    deadline_ms: float  # of the node's clock: what is not there then is missing


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """Requests that go through the phases together, with their shared (S, w, p)."""

    batch_id: int
    signal: Signal
    warmup_depth: int
    probe_len: int
    jobs: list[PrefillJob]
    deviation: Deviation = Deviation.KV
    terms: CoverageTerms | None = None  # to solve open coverages again with; None: as planned
    arrival: ArrivalTerms | None = None  # where stored KV is still on its way
    is_ingest: bool = False  # nobody waits for it: it runs where no other batch can

    def without_stored(self, keys: frozenset[bytes]) -> "BatchJob":
        """The same with the stored KV of these keys missing."""
        jobs = [
            replace(
                job,
                segments=[
                    replace(s, location=None, is_arriving=False)
                    if s.location is not None and s.location.key in keys
                    else s
                    for s in job.segments
                ],
            )
            for job in self.jobs
        ]
        return replace(self, jobs=jobs)


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Rows [start, end) of the batch whose KV comes from the store."""

    request_idx: int
    start: int
    end: int
    location: ChunkLocation


class PackedBatch:
    """Index tensors of one batch, made once.

    token_ids, positions: [num_rows], int64
    offsets: first row of each request, [num_requests + 1]
    pieces: what the store holds, ascending
    candidates: for each request, the rows of its stored chunk tokens
    ranks: for each request, where its candidates stand in their chunk: 0 is a chunk's first token;
        those of the prompt's first chunk stand behind all others
    suffix: for each request, the rows after its last segment, the prompt's last token among them
    always: for each request, every row without stored KV (uncached prefix, misses, suffix)
    """

    def __init__(self, job: BatchJob, device: torch.device) -> None:
        self.jobs = job.jobs
        self.offsets = [0]
        self.pieces: list[StoredPiece] = []
        self.candidates: list[Tensor] = []
        self.ranks: list[Tensor] = []
        self.suffix: list[Tensor] = []
        self.always: list[Tensor] = []
        token_ids: list[int] = []
        for idx, request in enumerate(job.jobs):
            base, length = self.offsets[-1], len(request.token_ids)
            token_ids.extend(request.token_ids)
            stored = torch.zeros(length, dtype=torch.bool)
            candidate = torch.zeros(length, dtype=torch.bool)
            rank = torch.zeros(length, dtype=torch.int64)
            suffix_start, is_first = 0, True
            for segment in request.segments:
                suffix_start = segment.end
                if segment.kind is SegmentKind.CHUNK:
                    offset = length if is_first else 0
                    rank[segment.start : segment.end] = offset + torch.arange(
                        segment.end - segment.start
                    )
                    is_first = False
                if segment.location is None:
                    continue
                self.pieces.append(
                    StoredPiece(idx, base + segment.start, base + segment.end, segment.location)
                )
                stored[segment.start : segment.end] = True
                if segment.kind is SegmentKind.CHUNK:
                    candidate[segment.start : segment.end] = True
            self.candidates.append((candidate.nonzero()[:, 0] + base).to(device))
            self.ranks.append(rank[candidate].to(device))
            self.always.append(((~stored).nonzero()[:, 0] + base).to(device))
            self.suffix.append(torch.arange(base + suffix_start, base + length, device=device))
            self.offsets.append(base + length)
        self.num_rows = self.offsets[-1]
        self.token_ids = torch.tensor(token_ids, dtype=torch.int64, device=device)
        lengths = [len(r.token_ids) for r in job.jobs]
        self.positions = torch.cat([torch.arange(n, device=device) for n in lengths])

    @property
    def num_requests(self) -> int:
        return len(self.jobs)

    def offsets_of(self, rows: Tensor) -> list[int]:
        """Half-open ranges of each request within sorted `rows`, [num_requests + 1]."""
        bounds = torch.tensor(self.offsets, dtype=rows.dtype, device=rows.device)
        return torch.searchsorted(rows, bounds).tolist()

    def slots(self, block_size: int) -> Tensor:
        """Slot of each row in the engine's paged cache, -1 for each prompt's last token and for
        parked prompts."""
        slots = torch.full((self.num_rows,), -1, dtype=torch.int64)
        for idx, job in enumerate(self.jobs):
            if job.park is not None:
                continue
            start, count = self.offsets[idx], len(job.token_ids) - 1
            slots[start : start + count] = slots_of(count, job.block_ids, block_size)
        return slots.to(self.positions.device)


def slots_of(num_tokens: int, block_ids: list[int], block_size: int) -> Tensor:
    """Slots of a prompt's first tokens in a paged cache, [num_tokens], int64."""
    positions = torch.arange(num_tokens)
    blocks = torch.tensor(block_ids, dtype=torch.int64)
    return blocks[positions // block_size] * block_size + positions % block_size


def merge_rows(parts: list[Tensor]) -> Tensor:
    """Disjoint row sets, at least one of them, as one sorted tensor."""
    return torch.cat(parts).sort().values
