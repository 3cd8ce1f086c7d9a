"""One prompt and one curve: WarmUp and ranking once, then the KV of any coverage."""

import random

import torch

from benchmarks.quality.curves import Curve
from benchmarks.walked_prefill import ChunkMemory, DeviceCache
from planner import Signal
from replicas.batch import BatchJob, PrefillJob
from replicas.phases import ThreePhasePrefill
from replicas.probe import FreshKv, Ranking, normalised_entropy
from replicas.transformers_model import TransformersModel
from replicas.walk import Steps, T

ALMOST_ALL = 1.0 - 1e-9  # a coverage at which the Probe ranks, and filtering drops nothing


class CoverageSweep:
    """The phases of one request, Patch as often as wanted.

    seed: of curves that choose by lot
    """

    def __init__(
        self,
        model: TransformersModel,
        memory: ChunkMemory,
        job: PrefillJob,
        curve: Curve,
        *,
        seed: str,
    ) -> None:
        self._model, self._curve = model, curve
        self._w, p = curve.config.depths(model.num_layers)
        self._sink = DeviceCache(model, len(job.token_ids), memory)
        batch = BatchJob(
            batch_id=0,
            signal=curve.config.signal,
            warmup_depth=self._w,
            probe_len=p,
            jobs=[job],
            deviation=curve.config.deviation,
        )
        self._prefill = ThreePhasePrefill(model, memory, self._sink, batch)
        self._hidden = finished(self._prefill.warm_up())
        # what filtering keeps depends on the coverage, so each has a Probe of its own
        self._probes_each = p > 1 and curve.filters and curve.config.signal is Signal.KV_DEV
        self._seed = seed
        self._ranked: tuple[dict[int, Ranking], FreshKv] | None = None
        self.entropy: float | None = None

    def cache(self, coverage: float) -> DeviceCache:
        """KV of the prompt at this coverage, as a copy of its own."""
        if self._w < self._model.num_layers:
            rankings, fresh = self._rankings(coverage)
            self._prefill.trace.coverages = [coverage]
            selected = self._prefill.select(rankings)
            finished(self._prefill.patch(self._hidden, selected, dict(fresh)))
        return self._sink.copy()

    def _rankings(self, coverage: float) -> tuple[dict[int, Ranking], FreshKv]:
        if coverage in (0.0, 1.0):  # what is served ranks nothing then
            return {}, {}
        if self._ranked is None or self._probes_each:
            self._ranked = self._rank(coverage)
        return self._ranked

    def _rank(self, coverage: float) -> tuple[dict[int, Ranking], FreshKv]:
        rows = self._prefill.batch.candidates[0]
        if self._curve.is_random:
            rng = random.Random(self._seed)
            lots = torch.tensor([rng.random() for _ in range(len(rows))], device=rows.device)
            return {0: Ranking(rows, lots)}, {}
        probing = coverage if self._curve.filters else ALMOST_ALL
        self._prefill.trace.coverages = [probing]
        rankings, fresh = finished(self._prefill.probe(self._hidden))
        if self._curve.config.signal is Signal.QCI and self._curve.config.probe_len == 1:
            self.entropy = normalised_entropy(rankings[0].scores)
        return rankings, fresh if self._curve.keeps_fresh else {}


def finished(steps: Steps[T]) -> T:
    """Run a phase to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
