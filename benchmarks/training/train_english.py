"""Trains the English adapter: `python -m benchmarks.training.train_english OUT --base FOLDER`.

FOLDER is the prepared SmolLM2-135M-Instruct (`python -m deploy.models` makes and prints it). One
thread, a fixed number of steps, seeded. Tasks that go badly are drawn more often, contexts grow
over the first quarter. A part of the sequences whose answers stand in one document has isolated
documents, as reused chunks are: what needs one document only is not to depend on the others.
"""

import argparse
import os
import random
import time
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import torch

from benchmarks.quality.types import Question, Split
from benchmarks.training.english_batches import (
    PromptIds,
    Turns,
    answer_all,
    lay_out,
    training_context,
)
from benchmarks.training.english_network import AdaptedLlama
from benchmarks.training.english_tasks import TASKS, english_context
from benchmarks.training.schedule import learning_rate, training_log
from cluster.config import PromptConfig
from cluster.prompt import PromptBuilder
from cluster.tokenizer import HfTokenizer

SHARES = {  # of the contexts, before they are weighed by how badly a task goes
    "single": 0.14,
    "two_hop": 0.26,
    "three_hop": 0.10,
    "pr": 0.18,
    "vt": 0.22,
    "ref": 0.14,
}
SMALLEST_NEED = 0.4  # of a task that is learned
ISOLATED_SHARES = {"single": 0.5, "pr": 0.5}
MAX_SEQUENCE_TOKENS = 900
FEWEST_DOCUMENTS, MOST_DOCUMENTS = 6, 12
GROWTH_SHARE = 0.25  # of the steps

WARMUP_STEPS = 20
DECAY_SHARE = 0.7
MAX_GRAD_NORM = 1.0
REPORT_EVERY = 25
HELD_OUT_EVERY = 100
MEMORY = 0.98  # of the running accuracy of a task


class Mixture:
    """Draws tasks, and learns from their accuracy which of them are needed most."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._accuracy = dict.fromkeys(TASKS, 0.0)

    def draw(self) -> str:
        weights = [SHARES[task] * max(SMALLEST_NEED, 1.0 - self._accuracy[task]) for task in TASKS]
        return self._rng.choices(TASKS, weights)[0]

    def note(self, question: Question, exact: bool) -> None:
        if question.task == "vt" and question.facts["hops"] == 0:
            return  # easy: the number stands beside the name
        self._accuracy[question.task] += (1 - MEMORY) * (exact - self._accuracy[question.task])


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    tokenizer = HfTokenizer.load(args.base)
    prompts = PromptIds(tokenizer, PromptBuilder(tokenizer, PromptConfig()))
    model = AdaptedLlama(args.base, torch.bfloat16, args.seed)
    if args.init is not None:
        model.load_adapter(args.init)
    parameters = model.parameters()
    optimizer = torch.optim.AdamW(
        parameters, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0, foreach=True
    )
    mixture = Mixture(rng)
    say = training_log(args.out)
    size = sum(parameter.numel() for parameter in parameters)
    say(
        f"start seed {args.seed} steps {args.steps} tokens a step {args.tokens} lr {args.lr} "
        f"parameters {size}" + (" from an adapter" if args.init else "")
    )
    started, num_tokens = time.monotonic(), 0
    losses: list[float] = []
    met: dict[str, list[bool]] = defaultdict(list)
    for step in range(1, args.steps + 1):
        model.refresh()
        grown = 1.0 if args.init else min(1.0, step / args.steps / GROWTH_SHARE)
        sequences = draw_batch(rng, mixture, prompts, grown, args.tokens)
        loss, exact = answer_all(model, sequences)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        rate = learning_rate(step, args.steps, warmup_steps=WARMUP_STEPS, decay=DECAY_SHARE)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        num_tokens += sum(len(one.ids) for one in sequences)
        losses.append(loss.item())
        asked = [question for one in sequences for question in one.questions]
        for question, right in zip(asked, exact, strict=True):
            mixture.note(question, right)
            met[label(question)].append(right)
        if step % REPORT_EVERY == 0:
            say(
                f"step {step} seconds {time.monotonic() - started:.0f} "
                f"cpu {time.process_time():.0f} tokens {num_tokens / 1e6:.3f}M "
                f"loss {sum(losses) / len(losses):.3f} | {rates(met)}"
            )
            losses.clear()
            met.clear()
            model.save_adapter(args.out)
        if step % HELD_OUT_EVERY == 0 or step == args.steps:
            model.refresh()
            say(f"step {step} held out | {rates(held_out(model, prompts))}")
    model.save_adapter(args.out)
    say(f"done step {args.steps} seconds {time.monotonic() - started:.0f} tokens {num_tokens}")


def draw_batch(
    rng: random.Random, mixture: Mixture, prompts: PromptIds, grown: float, tokens: int
) -> list[Turns]:
    max_documents = round(FEWEST_DOCUMENTS + grown * (MOST_DOCUMENTS - FEWEST_DOCUMENTS))
    sequences: list[Turns] = []
    while sum(len(one.ids) for one in sequences) < tokens - MAX_SEQUENCE_TOKENS / 4:
        task = mixture.draw()
        context = training_context(rng, task, max_documents)
        isolated = rng.random() < ISOLATED_SHARES.get(task, 0.0)
        one = lay_out(prompts, context, max_tokens=MAX_SEQUENCE_TOKENS, isolated=isolated)
        sequences.append(one)
    return sequences


def held_out(model: AdaptedLlama, prompts: PromptIds, contexts: int = 3) -> dict[str, list[bool]]:
    """A quick look at names and templates of the tests: full attention, few questions."""
    met: dict[str, list[bool]] = defaultdict(list)
    for task in TASKS:
        for index in range(contexts):
            rng = random.Random(f"held out {task} {index}")
            context = english_context(task, rng, Split.TEST, num_documents=9, num_fillers=1)
            one = lay_out(prompts, context, max_tokens=MAX_SEQUENCE_TOKENS)
            with torch.no_grad():
                _, exact = answer_all(model, [one])
            for question, right in zip(one.questions, exact, strict=True):
                met[label(question)].append(right)
    return met


def label(question: Question) -> str:
    return f"vt{question.facts['hops']}" if question.task == "vt" else question.task


def rates(met: dict[str, list[bool]]) -> str:
    return " ".join(f"{name} {sum(v) / len(v):.2f}/{len(v)}" for name, v in sorted(met.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the adapter; training.log is appended to")
    parser.add_argument("--base", type=Path, required=True, help="folder of the prepared model")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=2600, help="of a step, about")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--init", type=Path, help="an adapter to go on from: full contexts at once")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
