"""Trains the synthetic model from nothing: `python -m benchmarks.training.train_synthetic OUT`.

One thread, a fixed number of steps, seeded. Variable tracking comes first, passage retrieval joins
once it is learned: both together from the start learn neither. A task gets harder by a level when
its questions are answered; the hardest levels reach 32 chunks and 2,000 tokens.
"""

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: more threads are slower here

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from benchmarks.training.schedule import learning_rate, training_log
from benchmarks.training.synthetic_batches import (
    ANSWER,
    BINDING,
    HELPER,
    Batch,
    PrLevel,
    VtLevel,
    pr_batch,
    vt_batch,
)
from benchmarks.training.synthetic_network import new_model, synthetic_config, target_logits
from benchmarks.training.synthetic_words import save_tokenizer


def _vt(chunks, shortest, longest, chains, min_hops, max_hops, questions, scrambled=0.0):
    return VtLevel(
        num_chunks=chunks,
        shortest=shortest,
        longest=longest,
        num_chains=chains,
        min_hops=min_hops,
        max_hops=max_hops,
        num_questions=questions,
        scrambled=scrambled,
    )


def _pr(chunks, shortest, longest, names, questions):
    return PrLevel(
        num_chunks=chunks,
        shortest=shortest,
        longest=longest,
        num_names=names,
        num_questions=questions,
    )


VT_LEVELS = (
    _vt(2, 20, 26, 4, 0, 1, 6),
    _vt(3, 20, 26, 4, 1, 1, 6),
    _vt(4, 20, 28, 4, 1, 2, 8),
    _vt(6, 20, 28, 4, 2, 3, 8, scrambled=0.2),
    _vt(8, 20, 34, 5, 2, 4, 8, scrambled=0.3),
    _vt(12, 20, 40, 6, 3, 4, 10, scrambled=0.3),
    _vt(16, 24, 48, 6, 2, 4, 12, scrambled=0.3),
    _vt(24, 24, 60, 7, 1, 4, 16, scrambled=0.3),
    _vt(32, 30, 62, 8, 1, 4, 20, scrambled=0.3),
)
PR_LEVELS = (
    _pr(3, 14, 18, 2, 4),
    _pr(4, 18, 26, 3, 6),
    _pr(6, 20, 34, 3, 8),
    _pr(8, 22, 40, 4, 8),
    _pr(12, 24, 46, 4, 10),
    _pr(16, 28, 54, 4, 12),
    _pr(24, 28, 60, 4, 16),
    _pr(32, 30, 62, 4, 20),
)
LEVEL_UP_ACCURACY = 0.93
LEVEL_UP_WINDOW = 15  # batches at the level
PR_JOINS_AT = 6  # level of variable tracking

WARMUP_STEPS = 30
MUON_LR, ADAM_LR = 0.02, 3e-3
REPORT_EVERY = 50
KIND_NAMES = {ANSWER: "answer", HELPER: "helper", BINDING: "binding"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """Which batches are not of a task's present level."""

    easier: float = 0.25  # share, so that nothing is forgotten
    harder: float = 0.15  # share, so that long prompts are met early
    harder_from: int = 5  # level


class Task:
    """One task's levels and how well the present one goes."""

    def __init__(
        self, name: str, make: Callable[..., Batch], levels: tuple, level: int, mixing: Mixing
    ) -> None:
        self.name, self.level = name, level
        self._mixing = mixing
        self._make, self._levels = make, levels
        self._recent: list[float] = []

    def batch(self, rng: np.random.Generator, max_tokens: int) -> tuple[Batch, bool]:
        """And whether it is of the present level."""
        level, mixing = self.level, self._mixing
        lot = rng.random() if level > 0 else mixing.easier
        if lot < mixing.easier:
            level = int(rng.integers(0, level))
        elif level >= mixing.harder_from and lot > 1.0 - mixing.harder:
            level = int(rng.integers(level, len(self._levels)))
        return self._make(rng, self._levels[level], max_tokens), level == self.level

    def note(self, accuracy: float) -> None:
        self._recent = [*self._recent, accuracy][-LEVEL_UP_WINDOW:]

    def rise(self) -> bool:
        full = len(self._recent) == LEVEL_UP_WINDOW
        if not full or self.level + 1 == len(self._levels):
            return False
        if np.mean(self._recent) <= LEVEL_UP_ACCURACY:
            return False
        self.level += 1
        self._recent = []
        return True


class Trainer:
    """Muon for the matrices, Adam for the rest; float32 masters of bfloat16 working copies."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.init is None:
            self.model = new_model(synthetic_config(num_layers=args.layers), args.seed)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(args.init, dtype=torch.float32)
        self._masters = dict(self.model.named_parameters())
        for master in self._masters.values():
            master.requires_grad_(False)
        self._working = {
            name: master.bfloat16().requires_grad_() for name, master in self._masters.items()
        }
        matrices = [n for n, m in self._masters.items() if m.ndim == 2 and "embed" not in n]
        rest = [n for n in self._masters if n not in matrices]
        self._optimizers = (
            torch.optim.Muon(
                [self._masters[n] for n in matrices],
                lr=MUON_LR,
                weight_decay=0.05,
                momentum=0.95,
                adjust_lr_fn="original",
            ),
            torch.optim.AdamW(
                [self._masters[n] for n in rest],
                lr=ADAM_LR,
                betas=(0.9, 0.98),
                weight_decay=0.0,
                foreach=True,
            ),
        )
        self._rates = [group["lr"] for o in self._optimizers for group in o.param_groups]

    def step(self, batch: Batch, rate: float) -> tuple[float, np.ndarray, np.ndarray]:
        """One update. Returns the loss, which targets were met, and their flat positions."""
        targets = torch.from_numpy(batch.targets).reshape(-1)
        positions = (targets >= 0).nonzero()[:, 0]
        targets = targets[positions]
        weights = torch.from_numpy(batch.weights).reshape(-1)[positions]
        ids = torch.from_numpy(batch.ids)
        logits = target_logits(self._working, self.model.config, ids, positions)
        losses = F.cross_entropy(logits, targets, reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        for name, master in self._masters.items():
            master.grad = self._working[name].grad.float()
            self._working[name].grad = None
        groups = [group for o in self._optimizers for group in o.param_groups]
        for group, full in zip(groups, self._rates, strict=True):
            group["lr"] = full * rate
        for optimizer in self._optimizers:
            optimizer.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                self._working[name].copy_(master)
        met = (logits.argmax(-1) == targets).numpy()
        return loss.item(), met, positions.numpy()

    def save(self, folder: Path) -> None:
        """As bfloat16: the type that the forward pass of the training used."""
        names = {name: weight.detach().clone() for name, weight in self._masters.items()}
        self.model.bfloat16().save_pretrained(folder)
        self.model.float()
        for name, weight in self._masters.items():
            weight.copy_(names[name])
        save_tokenizer(folder)


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(args.seed)
    trainer = Trainer(args)
    mixing = Mixing(easier=args.easier, harder_from=args.harder_from)
    vt_levels = tuple(replace(level, hop_weight=args.hop_weight) for level in VT_LEVELS)
    vt = Task("vt", vt_batch, vt_levels, args.vt_level, mixing)
    pr = Task("pr", pr_batch, PR_LEVELS, args.pr_level, mixing)
    say = training_log(args.out)
    size = sum(weight.numel() for weight in trainer.model.parameters())
    say(f"start {' '.join(f'{k}={v}' for k, v in vars(args).items())} parameters={size}")
    started, num_tokens = time.monotonic(), 0
    met_by: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    joined = False
    for step in range(1, (args.stop_at or args.steps) + 1):
        joined = joined or vt.level >= PR_JOINS_AT
        task = pr if joined and step % args.pr_every == 1 else vt
        batch, at_level = task.batch(rng, args.tokens)
        rate = learning_rate(step, args.steps, warmup_steps=WARMUP_STEPS, decay=args.decay)
        loss, met, positions = trainer.step(batch, rate)
        num_tokens += batch.ids.size
        kinds, hops = batch.kinds.reshape(-1)[positions], batch.hops.reshape(-1)[positions]
        if at_level:
            if (kinds == ANSWER).any():
                task.note(float(met[kinds == ANSWER].mean()))
            for kind in KIND_NAMES:
                for hop in np.unique(hops[kinds == kind]):
                    found = met[(kinds == kind) & (hops == hop)]
                    met_by[task.name, kind, int(hop)].append(float(found.mean()))
        if step % REPORT_EVERY == 0:
            rates = " ".join(
                f"{name}:{KIND_NAMES[kind]}{hop}={np.mean(values):.2f}"
                for (name, kind, hop), values in sorted(met_by.items())
            )
            say(
                f"step {step} seconds {time.monotonic() - started:.0f} "
                f"cpu {time.process_time():.0f} "
                f"levels vt {vt.level} pr {pr.level} loss {loss:.3f} "
                f"tokens {num_tokens / 1e6:.2f}M | {rates}"
            )
            met_by.clear()
            trainer.save(args.out)
        if task.rise():
            say(f"step {step} {task.name} rises to level {task.level}")
    trainer.save(args.out)
    say(f"done step {step} seconds {time.monotonic() - started:.0f} tokens {num_tokens}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the model; training.log is appended to")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument(
        "--decay", type=float, default=0.25, help="share of the steps in which the rate falls"
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=3000, help="of a batch")
    parser.add_argument("--init", type=Path, help="a folder to go on from, without its momentum")
    parser.add_argument("--stop-at", type=int, help="end at this step of the schedule")
    parser.add_argument("--pr-every", type=int, default=2, help="steps, once it has joined")
    parser.add_argument("--harder-from", type=int, default=5, help="level")
    parser.add_argument(
        "--easier", type=float, default=0.25, help="share of batches of lower levels"
    )
    parser.add_argument("--hop-weight", type=float, default=1.0, help="see VtLevel")
    parser.add_argument("--vt-level", type=int, default=0)
    parser.add_argument("--pr-level", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
