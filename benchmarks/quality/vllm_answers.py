"""Answers by the production engine: one question, many configurations, one request each."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.engine import running_engine, ticket
from benchmarks.quality.curves import FULL_PREFILL, Curve, Point
from benchmarks.quality.outcomes import Outcome
from benchmarks.quality.prompts import PromptForm, QuestionEncoder
from benchmarks.quality.types import Question
from benchmarks.work import projection_share, prompt_share
from cluster.prompt import Prompt
from planner import RagRequest, SamplingOptions
from planner.policies import CUSTOM
from replicas.vllm_engine import VllmEngine


@contextmanager
def vllm_answers(
    model_dir: Path, form: PromptForm, *, dtype: str, anchor_text: str | None = None, tp: int = 1
) -> Iterator["VllmAnswers"]:
    """A started engine in this process, closed at the end."""
    with asyncio.Runner() as runner:
        running = running_engine(
            str(model_dir), dtype=dtype, anchor_text=anchor_text, tensor_parallel_size=tp
        )
        engine, info = runner.run(running.__aenter__())
        try:
            yield VllmAnswers(runner, engine, info.num_layers, model_dir, form)
        finally:
            runner.run(running.__aexit__(None, None, None))


class VllmAnswers:
    """One started engine, asked from outside its event loop."""

    def __init__(
        self,
        runner: asyncio.Runner,
        engine: VllmEngine,
        num_layers: int,
        model_dir: Path,
        form: PromptForm,
    ) -> None:
        self._runner, self._engine = runner, engine
        self.num_layers = num_layers
        self._encoder = QuestionEncoder(model_dir, form)
        self._projected = projection_share(model_dir)

    def outcomes(self, question: Question, curves: Sequence[Curve]) -> Iterator[Outcome]:
        """Every point of every curve.

        Raises ValueError for a curve that is not a configuration of the server.
        """
        for curve in curves:
            if curve.is_random or not curve.keeps_fresh or not curve.filters:
                raise ValueError(f"{curve.name} is not served: use the transformers engine")
        prompt = self._encoder.encode(question)
        for chunk in prompt.chunks:
            self._runner.run(self._engine.ingest(chunk))
        for curve in curves:
            for point in curve.points():
                yield self._runner.run(self._outcome(question, prompt, curve, point))

    async def _outcome(
        self, question: Question, prompt: Prompt, curve: Curve, point: Point
    ) -> Outcome:
        lengths = [len(chunk) for chunk in prompt.chunks]
        point = replace(point, config=point.config.for_chunks(lengths))
        policy = FULL_PREFILL if curve.name == FULL_PREFILL else CUSTOM
        request = RagRequest(
            request_id=f"{question.question_id} {curve.name} {point.label}",
            prefix_ids=prompt.prefix_ids,
            chunks=prompt.chunks,
            suffix_ids=prompt.suffix_ids,
            ttft_slo_ms=1e6,
            sampling=SamplingOptions(max_tokens=question.max_new_tokens, temperature=0.0),
        )
        its_ticket = ticket(policy, point.config, self.num_layers)
        ids: list[int] = []
        async for delta in self._engine.generate(request, its_ticket):
            ids.extend(delta.token_ids)
        share = prompt_share(
            point.config, prompt, num_layers=self.num_layers, projection_share=self._projected
        )
        return Outcome.of(
            question, prompt, curve, point, text=self._encoder.decode(ids), share=share
        )
