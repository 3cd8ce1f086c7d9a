"""Probe: rank the context tokens with stored KV, from layer `first` on.

- `kv_dev`: how far the stored from the exact KV is (CacheBlend, arXiv 2405.16444)
- `qci`: the suffix's attention onto the stored keys (ProphetKV, arXiv 2602.02579)
- `qci_final`: the same at the last layer, of the suffix that saw no context (FusionRAG)
- `position`: the first tokens of every chunk but the first (EPIC)
- `auto`: `kv_dev` or `qci`, by how concentrated the first layer's QCI scores are

Each returns a `Ranking` of every probed request.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.auto_signal import AutoRule
from planner.types import Deviation, Signal
from replicas.attention import SelectedAttention
from replicas.batch import merge_rows
from replicas.model import Hidden
from replicas.phase_clock import Phase
from replicas.scores import attention_mass, kv_deviation
from replicas.selection import kept_candidates, top_rows
from replicas.walk import Steps, Walk, pick

# layer -> (rows, rotated K, V), exact where the Probe computed them
FreshKv = dict[int, tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Candidate rows of one request, and how much each deserves to be recomputed."""

    rows: Tensor  # [num_ranked], int64, ascending
    scores: Tensor  # [num_ranked], float32, the same on every rank


class Probe:
    """One batch's Probe: layers [first, first + length) for the requests in `probed`."""

    def __init__(
        self,
        walk: Walk,
        hidden: Hidden,
        probed: list[int],
        *,
        first: int,
        length: int,
        deviation: Deviation,
    ) -> None:
        """hidden: every row of the batch as it enters layer `first`."""
        self._walk = walk
        self._hidden = hidden
        self._probed = probed
        self._first = first
        self._length = length
        self._deviation = deviation
        self._candidates = {i: walk.behind_front(i, walk.batch.candidates[i]) for i in probed}
        self.fresh: FreshKv = {}  # what Patch keeps

    def rank(self, signal: Signal, rule: AutoRule) -> Steps[dict[int, Ranking]]:
        if signal is Signal.AUTO:
            return (yield from self._auto(rule))
        self._walk.trace.signal = signal
        walks = {
            Signal.KV_DEV: self._kv_dev,
            Signal.QCI: self._qci,
            Signal.QCI_FINAL: self._qci_final,
            Signal.POSITION: self._position,
        }
        return (yield from walks[signal]())

    # ---- kv_dev ----

    def _kv_dev(self) -> Steps[dict[int, Ranking]]:
        """Gradual filtering: each layer scores the best candidates of the one before."""
        walk, model, batch = self._walk, self._walk.model, self._walk.batch
        offsets = batch.offsets
        rows = merge_rows(
            [torch.arange(offsets[i], offsets[i + 1], device=model.device) for i in self._probed]
        )
        stream = self._hidden.select(rows)
        candidates, rankings = self._candidates, {}
        for step in range(1, self._length + 1):
            layer = self._first + step - 1
            yield from walk.arrival(layer)
            stored_k, stored_v = walk.stitch(layer)
            with walk.trace.clock.span(Phase.PROBE, layer):
                projected = model.project(layer, stream)
                k = model.rotate(layer, batch.positions[rows], projected.k)
                self.fresh[layer] = (rows, k, projected.v)
                merged = merge_rows(list(candidates.values()))
                at = torch.searchsorted(rows, merged)
                scores = model.reduce_scores(
                    kv_deviation(
                        stored_k[merged],
                        stored_v[merged],
                        k[at],
                        projected.v[at],
                        parts=self._deviation,
                    )
                )
                rankings = {
                    i: Ranking(mine, scores[torch.searchsorted(merged, mine)])
                    for i, mine in candidates.items()
                }
                if step < self._length:
                    candidates = {i: self._kept(i, step, ranked) for i, ranked in rankings.items()}
                    keep = merge_rows(
                        [*candidates.values(), *(batch.always[i] for i in self._probed)]
                    )
                    stored_k[rows], stored_v[rows] = k, projected.v
                    kept = pick(projected, torch.searchsorted(rows, keep))
                    stream = walk.attend(layer, kept, stored_k, stored_v, walk.rows(keep))
                    rows = keep
            yield
        return rankings

    def _kept(self, request_idx: int, step: int, ranking: Ranking) -> Tensor:
        total = len(self._walk.batch.candidates[request_idx])
        coverage = self._walk.trace.coverages[request_idx]
        count = kept_candidates(coverage, total, step, self._length)
        return top_rows(ranking.rows, ranking.scores, count)

    # ---- qci ----

    def _qci(self) -> Steps[dict[int, Ranking]]:
        walker = _QuestionWalk(self._walk, self._hidden, self._candidates, self._first)
        for step in range(self._length):
            yield from walker.step(is_last=step == self._length - 1)
        return self._rankings(walker.mass)

    def _auto(self, rule: AutoRule) -> Steps[dict[int, Ranking]]:
        """One layer of `qci` says which signal; its work is kept if that is `qci`."""
        walker = _QuestionWalk(self._walk, self._hidden, self._candidates, self._first)
        yield from walker.step(is_last=self._length == 1)
        rankings = self._rankings(walker.mass)
        entropies = [normalised_entropy(r.scores) for r in rankings.values() if len(r.rows) > 1]
        signal = self._walk.trace.signal = rule.choose(entropies)
        if signal is Signal.KV_DEV:
            return (yield from self._kv_dev())
        for step in range(1, self._length):
            yield from walker.step(is_last=step == self._length - 1)
        return self._rankings(walker.mass)

    def _rankings(self, mass: dict[int, Tensor]) -> dict[int, Ranking]:
        """Over all ranks' heads."""
        scores = self._walk.model.reduce_scores(torch.cat(list(mass.values())))
        parts = scores.split([len(m) for m in mass.values()])
        return {i: Ranking(self._candidates[i], part) for i, part in zip(mass, parts, strict=True)}

    # ---- baselines ----

    def _qci_final(self) -> Steps[dict[int, Ranking]]:
        """The suffix walks alone, from the embeddings on; its last queries rank the context by the
        last layer's stored keys (FusionRAG, arXiv 2601.12904).

        It stands where the prompt has it, so that distances are those of the prompt.
        """
        walk, model, batch = self._walk, self._walk.model, self._walk.batch
        suffix = [batch.suffix[i] for i in self._probed]
        rows = torch.cat(suffix)
        positions = batch.positions[rows]
        offsets = [0, *itertools.accumulate(len(s) for s in suffix)]
        order = torch.cat([torch.arange(len(s), device=model.device) for s in suffix])
        alone = SelectedAttention(order, offsets, offsets, model.dtype)
        stream = model.embed(batch.token_ids[rows])
        mass: dict[int, Tensor] = {}
        for layer in range(model.num_layers):
            stored_k = None
            if layer == model.num_layers - 1:
                yield from walk.arrival(layer)
                stored_k = walk.stitch(layer)[0]
            with walk.trace.clock.span(Phase.PROBE, layer):
                projected = model.project(layer, stream)
                q = model.rotate(layer, positions, projected.q)
                if stored_k is None:
                    k = model.rotate(layer, positions, projected.k)
                    attended = alone(q, k, projected.v, model.scale)
                    stream = model.finish(layer, projected.residual, attended)
                else:
                    ranges = itertools.pairwise(offsets)
                    for i, (start, end) in zip(self._probed, ranges, strict=True):
                        keys = stored_k[self._candidates[i]]
                        mass[i] = attention_mass(q[start:end], keys, model.scale)
            yield
        return self._rankings(mass)

    def _position(self) -> Steps[dict[int, Ranking]]:
        """The first tokens of every chunk but the first (EPIC, arXiv 2410.15332)."""
        yield from ()
        batch = self._walk.batch
        ranked = {}
        for i, rows in self._candidates.items():
            ranks = batch.ranks[i][len(batch.ranks[i]) - len(rows) :]  # those behind the front
            ranked[i] = Ranking(rows, -ranks.float())
        return ranked


class _QuestionWalk:
    """Only tokens without stored KV walk, over the cache; the suffix's attention is summed."""

    def __init__(
        self, walk: Walk, hidden: Hidden, candidates: dict[int, Tensor], first: int
    ) -> None:
        batch = walk.batch
        self._walk = walk
        self._candidates = candidates
        self._layer = first
        self._walking = walk.rows(merge_rows([batch.always[i] for i in candidates]))
        self._stream = hidden.select(self._walking.rows)
        self.mass = {
            i: torch.zeros(len(mine), device=walk.model.device) for i, mine in candidates.items()
        }

    def step(self, *, is_last: bool) -> Steps[None]:
        walk, model, layer = self._walk, self._walk.model, self._layer
        rows, positions = self._walking.rows, self._walking.positions
        yield from walk.arrival(layer)
        k, v = walk.stitch(layer)
        with walk.trace.clock.span(Phase.PROBE, layer):
            projected = model.project(layer, self._stream)
            q = model.rotate(layer, positions, projected.q)
            for i, mine in self._candidates.items():
                queries = q[torch.searchsorted(rows, walk.batch.suffix[i])]
                self.mass[i] += attention_mass(queries, k[mine], model.scale)
            if not is_last:
                k[rows] = model.rotate(layer, positions, projected.k)
                v[rows] = projected.v
                self._stream = walk.attend(layer, projected, k, v, self._walking, rotated_q=q)
        self._layer += 1
        yield


def normalised_entropy(scores: Tensor) -> float:
    """Of scores taken as a distribution: 0 when one has all, 1 when all are alike.

    scores: [n], not negative; what is not finite counts as nothing
    """
    total = torch.where(scores.isfinite(), scores, 0.0).double().clamp_min(0.0)
    share = total / total.sum().clamp_min(1e-30)
    entropy = -(share * share.clamp_min(1e-30).log()).sum()
    return float(entropy) / math.log(max(2, len(scores)))
