"""What `cachesmith bench burst` runs: a load, and ways to size the replicas that face it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.simulator import Scenario

MODEL_DIR = Path(__file__).resolve().parents[1] / "models" / "synthetic"
PROFILE = MODEL_DIR / "cachesmith-profile.json"
DEMAND = Path(__file__).resolve().parents[1] / "results" / "demand_synthetic.json"
# 2,048 stored tokens, and a question: 32 words and what the template adds
NUM_CHUNKS, CHUNK_TOKENS, SUFFIX_TOKENS, CORPUS_CHUNKS = 8, 256, 32, 64

# of Serve's defaults: it waits for half a minute before it adds a replica, ten before it drops one
SERVE_DEFAULTS = {"look_back_s": 30.0, "upscale_delay_s": 30.0, "downscale_delay_s": 600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """seconds: of the run; rate_per_s: its mean; load_s: of a model

    down_after_s: how long fewer replicas have to be enough, with every rule that is not Serve's own
    """

    seconds: float
    rate_per_s: float
    load_s: float
    slo_times: float
    max_replicas: int
    down_after_s: float
    factor: float = 10.0
    share: float = 0.3
    num_bursts: int = 2
    cv: float = 3.0

    @property
    def num_requests(self) -> int:
        return round(self.seconds * self.rate_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to size the replicas. sizing: as in a simulated fleet; num: replicas at the start"""

    name: str
    sizing: dict[str, Any] = field(default_factory=lambda: {"kind": "fixed"})
    num: int = 1

    @property
    def is_fixed(self) -> bool:
        return self.sizing["kind"] == "fixed"


def ways(burst: Burst) -> list[Way]:
    """Our rule, Serve's as it comes and tuned to be quick, and every fixed number."""
    most = {"max_replicas": burst.max_replicas}
    quick = {
        "look_back_s": 2.0,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": burst.down_after_s,
    }
    slo = {"kind": "slo", **most, "down_after_s": burst.down_after_s}
    return [
        Way(name="slo", sizing=slo),
        Way(name="serve", sizing={"kind": "ongoing", **most, **SERVE_DEFAULTS}),
        Way(name="serve quick", sizing={"kind": "ongoing", **most, **quick}),
        *[Way(name=f"fixed {num}", num=num) for num in range(1, burst.max_replicas + 1)],
    ]


def scenario_of(burst: Burst, way: Way) -> Scenario:
    """Costs and demand as measured of the synthetic model; all chunks are stored."""
    tokens = NUM_CHUNKS * CHUNK_TOKENS
    return Scenario.model_validate(
        {
            "num_requests": burst.num_requests,
            "arrivals": {
                "kind": "burst",
                "factor": burst.factor,
                "share": burst.share,
                "num_bursts": burst.num_bursts,
                "cv": burst.cv,
            },
            "load": {"rate_per_s": burst.rate_per_s},
            "slo": {"times_full_prefill": burst.slo_times},
            "tasks": [
                {
                    "name": "rag",
                    "num_chunks": [NUM_CHUNKS, NUM_CHUNKS],
                    "chunk_tokens": [CHUNK_TOKENS, CHUNK_TOKENS],
                    "prefix_tokens": 1,
                    "suffix_tokens": [SUFFIX_TOKENS, SUFFIX_TOKENS],
                    "output_tokens": [1, 1],
                    "corpus_chunks": CORPUS_CHUNKS,
                }
            ],
            "models": [
                {
                    "profile": PROFILE,
                    "truth": DEMAND,
                    "believes": DEMAND,
                    "fleet": {
                        "replicas": way.num,
                        "host_tokens": 2 * CORPUS_CHUNKS * tokens,
                        "redis_tokens": 0,
                        "startup_s": burst.load_s,
                        "sizing": way.sizing,
                    },
                }
            ],
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one way. qsa: share of all requests; replica_s: from each order to its end"""

    way: str
    is_fixed: bool
    qsa: float
    replica_s: float
    p99_ttft_ms: float | None
    errors: int
    most_replicas: int | None = None

    @property
    def row(self) -> tuple[object, ...]:
        return (self.way, self.qsa, self.replica_s, self.p99_ttft_ms, self.errors)


HEADER = ("sizing", "QSA", "replica-s", "P99 TTFT ms", "errors")


def best_at_cost(outcomes: Sequence[Outcome], of: Outcome) -> Outcome | None:
    """The fixed size with the best QSA for no more replica-seconds; of equals, the cheapest."""
    affordable = [o for o in outcomes if o.is_fixed and o.replica_s <= of.replica_s]
    return max(affordable, key=lambda o: (o.qsa, -o.replica_s), default=None)


def cheapest_as_good(outcomes: Sequence[Outcome], of: Outcome) -> Outcome | None:
    """The fixed size with the fewest replica-seconds whose QSA is no worse."""
    good = [o for o in outcomes if o.is_fixed and o.qsa >= of.qsa]
    return min(good, key=lambda o: o.replica_s, default=None)
