"""Independent streams of random numbers, one for each purpose.

A policy that draws more often for one purpose changes nothing for the others, so that all policies
see the same arrivals and the same requests.
"""

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """The numbers are part of every result: new ones go to the end."""

    ARRIVALS = 1
    REQUESTS = 2
    CORPUS = 3
    NOISE = 4
    FAULTS = 5


def stream(seed: int, purpose: Purpose, member: int = 0) -> np.random.Generator:
    """member: of several that draw for the same purpose, such as models"""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(int(purpose), member)))
