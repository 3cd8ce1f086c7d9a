"""From scores to the tokens that are recomputed."""

import math

import torch
from torch import Tensor


def selection_size(coverage: float, num_candidates: int) -> int:
    """⌈r·N⌉; the product is rounded to 9 digits first, so that 0.15 · 20 is 3 and not 4."""
    return min(num_candidates, math.ceil(round(coverage * num_candidates, 9)))


def kept_candidates(coverage: float, num_candidates: int, step: int, num_steps: int) -> int:
    """Candidates that stay after step 1..num_steps of gradual filtering.

    The share falls geometrically from all candidates to the coverage (CacheBlend filters
    gradually, its schedule is not published).
    """
    return selection_size(coverage ** (step / num_steps), num_candidates)


def top_rows(rows: Tensor, scores: Tensor, count: int) -> Tensor:
    """The `count` rows with the highest scores, sorted ascending; ties go to the earlier row.

    rows: [n], int64, ascending; scores: [n]. A score that is not finite counts as the highest:
    what cannot be judged is recomputed.
    """
    safe = torch.where(scores.isfinite(), scores, torch.inf)
    order = torch.sort(safe, descending=True, stable=True).indices[:count]
    return rows[order].sort().values
