"""What is measured: curves of accuracy against coverage, one for each signal and depth."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner import STATIC_POLICIES, Deviation, RecomputeConfig, Signal

COVERAGES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
CHUNK_STARTS = (1, 2, 4, 8, 16, 32)  # EPIC's k
FULL_PREFILL, FULL_REUSE = "full_prefill", "full_reuse"

# warm-up depths as shares of the layers, besides the first two layers
DEPTH_SHARES = (0.125, 0.19, 0.25, 0.32, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One configuration of a curve."""

    label: str
    config: RecomputeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A configuration at several coverages, and where it departs from what is served.

    `config.coverage` is that of a curve without a grid.
    """

    name: str
    config: RecomputeConfig
    coverages: tuple[float, ...] = ()
    chunk_starts: tuple[int, ...] = ()  # instead of coverages: tokens of every chunk but the first
    is_random: bool = False  # tokens drawn by lot; the signal is not used
    keeps_fresh: bool = True  # exact KV that the Probe computed goes into the cache
    filters: bool = True  # `kv_dev` over several layers drops candidates from layer to layer

    def points(self) -> Iterator[Point]:
        for coverage in self.coverages:
            yield Point(label=f"r={coverage:g}", config=replace(self.config, coverage=coverage))
        for k in self.chunk_starts:
            yield Point(label=f"k={k}", config=replace(self.config, tokens_per_chunk=k))
        if not self.coverages and not self.chunk_starts:
            yield Point(label=f"r={self.config.coverage:g}", config=self.config)


def kv_dev(w: int, p: int = 1, deviation: Deviation = Deviation.KV, **extra) -> Curve:
    config = RecomputeConfig(signal=Signal.KV_DEV, warmup_depth=w, probe_len=p, deviation=deviation)
    return Curve(name=f"kv_dev w={w} p={p}", config=config, **{"coverages": COVERAGES, **extra})


def qci(w: int, p: int, **extra) -> Curve:
    config = RecomputeConfig(signal=Signal.QCI, warmup_depth=w, probe_len=p)
    return Curve(name=f"qci w={w} p={p}", config=config, **{"coverages": COVERAGES, **extra})


def random_choice(w: int = 1) -> Curve:
    config = RecomputeConfig(warmup_depth=w, probe_len=0)
    return Curve(name=f"random w={w}", config=config, coverages=COVERAGES, is_random=True)


def static_policy(name: str) -> Curve:
    """A baseline as it is published: one point."""
    return Curve(name=name, config=STATIC_POLICIES[name])


def bounds() -> list[Curve]:
    return [static_policy(FULL_PREFILL), static_policy(FULL_REUSE)]


def baselines() -> list[Curve]:
    """The published methods; those with a coverage at every coverage."""
    curves = bounds()
    for name in ("cacheblend", "prophetkv", "fusionrag"):
        curves.append(replace(static_policy(name), coverages=COVERAGES))
    curves.append(replace(static_policy("epic"), chunk_starts=CHUNK_STARTS))
    curves.append(random_choice())
    return curves


def depths(num_layers: int) -> list[int]:
    """Warm-up depths worth a curve."""
    shares = [round(share * num_layers) for share in DEPTH_SHARES]
    return sorted({1, 2, *shares} & set(range(1, num_layers)))


def signal_curves(num_layers: int) -> list[Curve]:
    """Each signal over the depths, and splits of one rank depth into WarmUp and Probe."""
    every = depths(num_layers)
    curves = [kv_dev(w) for w in every]
    curves += [qci(w, 1) for w in (0, *every)]
    for depth in rank_depths(num_layers):
        for w in sorted({0, 1, depth // 2}):
            curves.append(qci(w, depth - w))
    return list({curve.name: curve for curve in curves}.values())


def rank_depths(num_layers: int) -> list[int]:
    """The anchors of the demand profile: where the final ranking stands; fewer for small models."""
    return sorted({max(2, round(share * num_layers)) for share in (0.125, 0.25, 0.5)})


def standard(num_layers: int) -> list[Curve]:
    return [*baselines(), *signal_curves(num_layers)]


def named(curves: Sequence[Curve], wanted: Sequence[str]) -> list[Curve]:
    """Those whose names start with one of `wanted`; full prefill is always among them.

    Raises ValueError for a name that fits none.
    """
    for name in wanted:
        if not any(curve.name.startswith(name) for curve in curves):
            raise ValueError(f"no curve is called {name}: {', '.join(c.name for c in curves)}")
    return [c for c in curves if c.name == FULL_PREFILL or c.name.startswith(tuple(wanted))]
