"""Answers by the phases over the transformers adapter: one question, many configurations.

WarmUp and Probe of a curve run once, Patch once for each of its coverages; the answers of many
configurations are decoded together. What is computed is what the server computes: these are its
own phases.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.quality.coverage_search import CoverageSearch
from benchmarks.quality.coverage_sweep import CoverageSweep
from benchmarks.quality.curves import Curve, Point
from benchmarks.quality.decoding import greedy_answers
from benchmarks.quality.outcomes import Outcome
from benchmarks.quality.prompts import PromptForm, QuestionEncoder
from benchmarks.quality.scoring import passes
from benchmarks.quality.types import Question
from benchmarks.walked_prefill import ChunkMemory, DeviceCache, stored_job
from benchmarks.work import projection_share, prompt_share
from cluster.prompt import Prompt
from replicas.batch import PrefillJob
from replicas.config import EngineConfig
from replicas.transformers_model import TransformersModel
from replicas.vllm_args import anchor_ids

TOKENS_TOGETHER = 40_000  # in caches that are decoded together: a few GiB
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@contextmanager
def walked_answers(
    model_dir: Path,
    form: PromptForm,
    *,
    dtype: str,
    device: str = "cpu",
    anchor_text: str | None = None,
    seed: int = 0,
) -> Iterator["WalkedAnswers"]:
    """With the engine's own life, as the vLLM adapter needs it."""
    yield WalkedAnswers(
        model_dir, form, dtype=DTYPES[dtype], device=device, anchor_text=anchor_text, seed=seed
    )


class WalkedAnswers:
    """One model in this process. Not for several threads."""

    def __init__(
        self,
        model_dir: Path,
        form: PromptForm,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        anchor_text: str | None = None,
        seed: int = 0,
    ) -> None:
        hf_model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation="sdpa"
        )
        self._model = TransformersModel(hf_model.to(device).eval())
        self._encoder = QuestionEncoder(model_dir, form)
        config = EngineConfig(model_dir=str(model_dir), anchor_text=anchor_text)
        self._anchor = anchor_ids(config)
        self._projected = projection_share(model_dir)
        self._seed = seed
        eos = hf_model.generation_config.eos_token_id
        self._eos = set(eos if isinstance(eos, list) else [eos])

    @property
    def num_layers(self) -> int:
        return self._model.num_layers

    @torch.inference_mode()
    def outcomes(self, question: Question, curves: Sequence[Curve]) -> Iterator[Outcome]:
        """Every point of every curve."""
        prompt, memory, job = self._stored(question)
        variants: list[_Variant] = []
        for curve in curves:
            variants += self._variants(question, prompt, job, memory, curve)
            if len(variants) * len(job.token_ids) >= TOKENS_TOGETHER:
                yield from self._answered(question, prompt, job, variants)
                variants = []
        if variants:
            yield from self._answered(question, prompt, job, variants)

    @torch.inference_mode()
    def searched(
        self, question: Question, curves: Sequence[Curve], *, gate: float
    ) -> Iterator[Outcome]:
        """The points at which each curve's smallest sufficient coverage is looked for.

        gate: the score, 0-1, that an answer needs to pass
        """
        prompt, memory, job = self._stored(question)
        searches = [CoverageSearch(curve) for curve in curves]
        sweeps = [self._sweep(question, job, memory, curve) for curve in curves]
        while open_ := [pair for pair in zip(searches, sweeps, strict=True) if pair[0].point]:
            variants = []
            for search, sweep in open_:
                assert search.point is not None
                variants.append(self._variant(prompt, search.curve, search.point, sweep))
            for (search, _), outcome in zip(
                open_, self._answered(question, prompt, job, variants), strict=True
            ):
                search.saw(passed=passes(outcome.gold, gate))
                yield outcome

    def _stored(self, question: Question) -> tuple[Prompt, ChunkMemory, PrefillJob]:
        """A question's prompt with all of its chunks in a memory of its own."""
        prompt = self._encoder.encode(question)
        memory = ChunkMemory(self._model.device)  # of this question: chunks seldom come again
        job = stored_job(
            self._model,
            memory,
            prompt.prefix_ids,
            prompt.chunks,
            prompt.suffix_ids,
            coverage=1.0,  # each point has its own
            anchor=self._anchor,
        )
        if job.segments:
            memory.start([s.location.key for s in job.segments if s.location is not None])
        return prompt, memory, job

    def _sweep(
        self, question: Question, job: PrefillJob, memory: ChunkMemory, curve: Curve
    ) -> CoverageSweep:
        seed = f"{self._seed}/{question.question_id}"
        return CoverageSweep(self._model, memory, job, curve, seed=seed)

    def _variants(
        self, question: Question, prompt: Prompt, job: PrefillJob, memory: ChunkMemory, curve: Curve
    ) -> Iterator["_Variant"]:
        sweep = self._sweep(question, job, memory, curve)
        for point in curve.points():
            yield self._variant(prompt, curve, point, sweep)

    def _variant(
        self, prompt: Prompt, curve: Curve, point: Point, sweep: CoverageSweep
    ) -> "_Variant":
        lengths = [len(chunk) for chunk in prompt.chunks]
        point = replace(point, config=point.config.for_chunks(lengths))
        return _Variant(curve, point, sweep.cache(point.config.coverage), sweep.entropy)

    def _answered(
        self,
        question: Question,
        prompt: Prompt,
        job: PrefillJob,
        variants: Sequence["_Variant"],
    ) -> Iterator[Outcome]:
        answers = greedy_answers(
            self._model.model,
            job.token_ids[-1],
            [variant.cache for variant in variants],
            num_tokens=len(job.token_ids) - 1,
            max_new_tokens=question.max_new_tokens,
            eos=self._eos,
        )
        for variant, ids in zip(variants, answers, strict=True):
            share = prompt_share(
                variant.point.config,
                prompt,
                num_layers=self.num_layers,
                projection_share=self._projected,
                filters=variant.curve.filters,
            )
            yield Outcome.of(
                question,
                prompt,
                variant.curve,
                variant.point,
                text=self._encoder.decode(ids),
                share=share,
                entropy=variant.entropy,
            )


@dataclass(frozen=True, slots=True)
class _Variant:
    """One configuration of a question, prefilled."""

    curve: Curve
    point: Point
    cache: DeviceCache
    entropy: float | None
