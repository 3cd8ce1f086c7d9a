"""Answers by the phases over the transformers adapter: one question, many configurations.

WarmUp and Probe of a curve run once, Patch once for each of its coverages; the answers of a curve
are decoded together. What is computed is what the server computes: these are its own phases.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.quality.coverage_sweep import CoverageSweep
from benchmarks.quality.curves import Curve
from benchmarks.quality.outcomes import Outcome
from benchmarks.quality.prompts import PromptForm, QuestionEncoder
from benchmarks.quality.scoring import score
from benchmarks.quality.types import Question
from benchmarks.walked_prefill import ChunkMemory, DeviceCache, stored_job
from benchmarks.work import projection_share, prompt_share
from cluster.prompt import Prompt
from replicas.batch import PrefillJob
from replicas.config import EngineConfig
from replicas.transformers_model import TransformersModel
from replicas.vllm_args import anchor_ids

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
        for curve in curves:
            yield from self._curve(question, prompt, job, memory, curve)

    def _curve(
        self, question: Question, prompt: Prompt, job: PrefillJob, memory: ChunkMemory, curve: Curve
    ) -> Iterator[Outcome]:
        lengths = [len(chunk) for chunk in prompt.chunks]
        points = [
            replace(point, config=point.config.for_chunks(lengths)) for point in curve.points()
        ]
        sweep = CoverageSweep(
            self._model, memory, job, curve, seed=f"{self._seed}/{question.question_id}"
        )
        caches = [sweep.cache(point.config.coverage) for point in points]
        answers = self._decode(job, caches, question.max_new_tokens)
        for point, ids in zip(points, answers, strict=True):
            text = self._encoder.decode(ids)
            yield Outcome(
                question_id=question.question_id,
                task=question.task,
                curve=curve.name,
                point=point.label,
                text=text,
                gold=score(question.scorer, text, question.answers),
                coverage=point.config.coverage,
                share=prompt_share(
                    point.config,
                    prompt,
                    num_layers=self.num_layers,
                    projection_share=self._projected,
                    filters=curve.filters,
                ),
                num_context_tokens=sum(lengths),
                num_documents=len(question.documents),
                entropy=sweep.entropy,
            )

    def _decode(
        self, job: PrefillJob, caches: Sequence[DeviceCache], max_new_tokens: int
    ) -> list[list[int]]:
        """Greedy answers after one prompt, each over its own KV, decoded together."""
        count = len(job.token_ids) - 1
        cache = DynamicCache()
        for layer in range(self.num_layers):
            cache.update(
                _stacked([c.k[layer, :count] for c in caches]),
                _stacked([c.v[layer, :count] for c in caches]),
                layer,
            )
        device = self._model.device
        last = torch.full((len(caches), 1), job.token_ids[-1], device=device)
        answers: list[list[int]] = [[] for _ in caches]
        open_ = set(range(len(caches)))
        for _ in range(max_new_tokens):
            logits = self._model.model(last, past_key_values=cache).logits[:, -1]
            last = logits.argmax(-1, keepdim=True)
            for idx in list(open_):
                token = int(last[idx])
                if token in self._eos:
                    open_.remove(idx)
                else:
                    answers[idx].append(token)
            if not open_:
                break
        return answers


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """[num_variants, num_kv_heads, num_tokens, head_dim]"""
    return torch.stack(list(parts)).transpose(1, 2).contiguous()
