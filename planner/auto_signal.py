"""Which signal ranks a batch, when the plan leaves it open: by how concentrated attention is."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.types import Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoRule:
    """A request's QCI scores of the first Probe layer are peaked or flat; one of the two wants QCI.

    Both the threshold and the direction are calibrated by measurement on the served model.
    """

    threshold: float = 0.85  # of the normalised entropy: 0 is one token, 1 is all tokens alike
    qci_when_peaked: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold must be within 0 and 1, got {self.threshold}")

    def choose(self, entropies: Sequence[float]) -> Signal:
        """The majority's signal; a tie, or nobody to ask, is `kv_dev`.

        entropies: normalised, one a request
        """
        peaked = sum(entropy < self.threshold for entropy in entropies)
        for_qci = peaked if self.qci_when_peaked else len(entropies) - peaked
        return Signal.QCI if 2 * for_qci > len(entropies) else Signal.KV_DEV
