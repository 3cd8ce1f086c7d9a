"""What both trainings share: how the learning rate goes, and a log that is printed as it grows."""

from collections.abc import Callable
from pathlib import Path

FINAL_LR = 0.03  # of the full rate


def learning_rate(step: int, steps: int, *, warmup_steps: int, decay: float) -> float:
    """Share of the full rate: a short rise, a plateau, a fall over the last part of the steps.

    decay: the share of the steps in which it falls
    """
    left = (steps - step) / steps
    return min(1.0, step / warmup_steps, max(FINAL_LR, left / decay))


def training_log(folder: Path) -> Callable[[str], None]:
    """Prints lines and appends them to `training.log` of a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "training.log"

    def say(line: str) -> None:
        print(line, flush=True)
        with path.open("a") as log:
            log.write(line + "\n")

    return say
