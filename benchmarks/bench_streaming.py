"""Does stored KV that comes over a link hide behind the compute, as the timeline says?

The chunks of a prompt are in Redis and not in the node's arena. The prefill fetches them layer by
layer in the order that it needs them, over an emulated link, and is compared with

- `predicted`: the planner's timeline for this plan and link, at the engine's own cost just before
  the run. `error` is relative to the prefill that waits; the goal is 10% at each point.
  `link error` is the same at the price of this plan's resident runs: what is left is the link's.
- `load first`: all chunks come whole, then the same prefill runs with everything resident.
- `resident`: that prefill alone, no link.
- `full`: vLLM's own prefill of the whole prompt, nothing stored.
- `ceiling`: the later of the transfer and the resident prefill. WarmUp's layers need no transfer.

Two engines share one Redis. One waits for layers that are not there (`engine.fill_stalls: false`),
as the timeline assumes; `streamed` is its time. The other one, as served, recomputes the prompt's
front during the waits: `filling`, with the number of tokens that it recomputed so. All runs of a
link take turns.

Links: `--links` are GB/s as they are. A prefill of a small model on few cores needs so little KV
for its compute that these links hardly slow it down; `--scaled` gives links that are as slow for
this model as so many GB/s are for a large one. What decides is the ratio of the time to load a
prompt to the time of its full prefill. For a large model it is taken from 32 billion parameters
with 64 layers of 8 KV heads of 128 in bfloat16, 256 KiB a token, prefilled at 4e14 operations a
second, 0.16 ms a token: over 1 GB/s loading takes 1.6 times as long as full prefill. Here full
prefill is measured first, and the link chosen for the same ratio. Links on which a load takes
longer than --long-ms run in the first round alone.

    cachesmith bench streaming --rounds 3
"""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import redis

from benchmarks.engine import (
    CHUNK_TOKENS,
    DEFAULT_MODEL,
    Prefilled,
    prefill,
    random_request,
    running_engine,
    ticket,
)
from benchmarks.redis_server import is_installed, own_redis
from benchmarks.report import argument_parser, print_json, print_table, say
from benchmarks.timing import spread
from deploy.profiles import find_profile
from kv_tier.redis import Count, LinkLimit, RedisTierConfig
from planner import (
    CUSTOM,
    CostModel,
    EngineInfo,
    Link,
    PrefillShape,
    RagRequest,
    RecomputeConfig,
    ServingProfile,
    Signal,
    Ticket,
    Timeline,
    arrivals_ms,
    layer_times,
    run_timeline,
)
from planner.policies import FULL_PREFILL
from replicas.vllm_engine import VllmEngine

PLANS = {
    "kv_dev w1 p1 r.15": RecomputeConfig(coverage=0.15),
    "kv_dev w5 p1 r.35": RecomputeConfig(warmup_depth=5, coverage=0.35),
    "qci w0 p2 r.20": RecomputeConfig(
        signal=Signal.QCI, warmup_depth=0, probe_len=2, coverage=0.20
    ),
}
FULL = RecomputeConfig(warmup_depth=None, probe_len=0)
LINKS, SCALED = (3.0, 1.0, 0.3, 0.1, 0.05), (3.0, 1.0, 0.3, 0.05)  # GB/s
LARGE_TOKEN_BYTES = 64 * 2 * 8 * 128 * 2
LARGE_TOKEN_MS = 2 * 32e9 / 4e11
DEADLINE_MS = 600_000.0
MAX_TRIES = 3  # of a run whose chunks did not all come from Redis
SETTLED_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """All chunks stored, the rest computed by every plan."""

    shape: PrefillShape
    layer_bytes: float  # of the stored KV

    def predict(
        self, config: RecomputeConfig, cost: CostModel, link: Link | None = None
    ) -> Timeline:
        """What the planner expects of it. link: None where all of it is resident."""
        w, p = config.depths(cost.num_layers)
        times = layer_times(
            [self.shape],
            [config.coverage],
            signal=config.signal,
            warmup_depth=w,
            probe_len=p,
            cost=cost,
        )
        behind = cost.num_layers - w
        return run_timeline(times, arrivals_ms([self.layer_bytes] * behind, link))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A run, and what was expected of it just before."""

    ran: Prefilled
    cost: CostModel


@dataclass(slots=True, kw_only=True)
class Point:
    """The runs of one plan over one link, as many as rounds."""

    plan: str
    link: Link
    loads_ms: list[float] = field(default_factory=list)
    resident: list[Expected] = field(default_factory=list)
    waiting: list[Expected] = field(default_factory=list)
    filling: list[Expected] = field(default_factory=list)
    full_ms: list[float] = field(default_factory=list)
    seen_bytes_per_ms: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("streaming", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as in `cachesmith serve`")
    parser.add_argument("--tokens", type=int, default=2048, help="chunk tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--links", type=float, nargs="*", default=LINKS, metavar="GB_S")
    parser.add_argument("--scaled", type=float, nargs="*", default=SCALED, metavar="GB_S")
    parser.add_argument("--latency-ms", type=float, default=0.3, help="of every request")
    parser.add_argument("--long-ms", type=float, default=15_000.0, help="longer loads run once")
    parser.add_argument(
        "--plans",
        nargs="+",
        choices=list(PLANS),
        default=list(PLANS),
        metavar="NAME",
        help=f"some of: {', '.join(map(repr, PLANS))}",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.tokens < CHUNK_TOKENS:
        parser.error(f"need a round and {CHUNK_TOKENS} tokens, or more")
    if not (args.links or args.scaled) or min(*args.links, *args.scaled, 1.0) <= 0.0:
        parser.error("need a link or more, faster than 0")
    if args.latency_ms < 0:
        parser.error("--latency-ms must not be negative")
    results: list[dict[str, Any]] = []
    if is_installed():
        results = asyncio.run(_measure(args))
        _print(results)
    else:
        print("there is no redis-server: nothing to measure")
    print_json("streaming", seed=args.seed, results=results)


# ---- links ----


def scaled_link(gb_per_s: float, *, num_bytes: float, full_ms: float) -> float:
    """Bytes a millisecond over which `num_bytes` take as long, against the full prefill, as a
    prompt of the large model takes over so many GB/s."""
    load_to_full = LARGE_TOKEN_BYTES / (gb_per_s * 1e6) / LARGE_TOKEN_MS
    return num_bytes / (load_to_full * full_ms)


def links_of(
    plain: Sequence[float],
    scaled: Sequence[float],
    *,
    num_bytes: float,
    full_ms: float,
    latency_ms: float,
) -> list[Link]:
    """Fastest first. plain, scaled: GB/s"""
    speeds = [gb_per_s * 1e6 for gb_per_s in plain]
    speeds += [scaled_link(one, num_bytes=num_bytes, full_ms=full_ms) for one in scaled]
    return [
        Link(bytes_per_ms=speed, latency_ms=latency_ms) for speed in sorted(speeds, reverse=True)
    ]


# ---- runs ----


async def _measure(args: Any) -> list[dict[str, Any]]:
    configs = {name: PLANS[name] for name in args.plans}
    async with AsyncExitStack() as stack:
        url = stack.enter_context(own_redis())["tcp"]
        config = RedisTierConfig(
            url=url,
            lookup_deadline_ms=DEADLINE_MS,
            value_deadline_ms=DEADLINE_MS,
            fetch_deadline_ms=DEADLINE_MS,
        )
        path = find_profile(args.model)
        options: dict[str, Any] = {
            "redis": config,
            "profile": None if path is None else ServingProfile.load(path),
        }
        waiter, info = await stack.enter_async_context(
            running_engine(args.model, fill_stalls=False, **options)
        )
        filler, _ = await stack.enter_async_context(running_engine(args.model, **options))
        stored = redis.Redis.from_url(url)
        stack.callback(stored.close)
        bench = _Bench(waiter, filler, info, stored, _request(waiter, args.seed, args.tokens))
        full_ms = await bench.warm_up(configs)
        links = links_of(
            args.links,
            args.scaled,
            num_bytes=bench.num_bytes,
            full_ms=full_ms,
            latency_ms=args.latency_ms,
        )
        points = [[Point(plan=name, link=link) for name in configs] for link in links]
        for round_no in range(args.rounds):
            for of_link in points:
                load_ms = bench.num_bytes / of_link[0].link.bytes_per_ms
                if round_no > 0 and load_ms > args.long_ms:
                    continue
                started = time.perf_counter()
                await bench.run(of_link)
                spent_s = time.perf_counter() - started
                say(
                    f"round {round_no + 1} of {args.rounds}, "
                    f"{of_link[0].link.bytes_per_ms / 1e6:.3g} GB/s: {spent_s:.0f} s"
                )
        return [row(point, bench.prompt) for of_link in points for point in of_link]


def _request(engine: VllmEngine, seed: int, num_tokens: int) -> RagRequest:
    """A prefix of one token is not stored: all that is, is chunks."""
    request = random_request(engine, random.Random(seed), num_chunks=num_tokens // CHUNK_TOKENS)
    return replace(request, prefix_ids=request.prefix_ids[:1])


class _Bench:
    """Two engines, one prompt whose chunks are in Redis."""

    def __init__(
        self,
        waiter: VllmEngine,
        filler: VllmEngine,
        info: EngineInfo,
        stored: "redis.Redis",
        request: RagRequest,
    ) -> None:
        self._waiter = waiter
        self._filler = filler
        self._num_layers = info.num_layers
        self._stored = stored
        self._request = request
        self._num_cached = sum(map(len, request.chunks))
        shape = PrefillShape(
            num_cached=self._num_cached,
            num_always=request.num_prompt_tokens - self._num_cached,
        )
        self.prompt = Prompt(shape=shape, layer_bytes=info.kv_token_bytes * self._num_cached)

    @property
    def num_bytes(self) -> float:
        """Of the stored KV, all layers."""
        return self.prompt.layer_bytes * self._num_layers

    async def warm_up(self, configs: dict[str, RecomputeConfig]) -> float:
        """Store the chunks, let every path allocate, and return full prefill's time."""
        for engine in (self._waiter, self._filler):
            await _settled(engine)
        self._stored.flushall()
        for chunk in self._request.chunks:
            await self._waiter.ingest(chunk)
        await _settled(self._waiter)
        num_keys, wanted = self._stored.dbsize(), len(self._request.chunks) * (self._num_layers + 1)
        if num_keys != wanted:
            raise SystemExit(f"Redis holds {num_keys} keys of the chunks, and not {wanted}")
        full = [await self._full() for _ in range(3)]
        for engine in (self._waiter, self._filler):
            for config in configs.values():
                await self._forget(engine)
                for _ in range(2):  # from Redis, then resident
                    await prefill(engine, self._request, self._ticket(engine, config))
        return min(full)

    async def run(self, points: Sequence[Point]) -> None:
        """One round over one link. points: of that link, one for each plan"""
        link = points[0].link
        limit = LinkLimit(bytes_per_ms=link.bytes_per_ms, latency_ms=link.latency_ms)
        full_ms = await self._full()
        load_ms = await self._load(limit)
        for point in points:
            point.full_ms.append(full_ms)
            point.loads_ms.append(load_ms)
            ran = await self._prefill(self._waiter, point, link=None)
            if ran.ran.result.cached_tokens.get("host") != self._num_cached:
                say(f"{point.plan}: not all was resident, {ran.ran.result.cached_tokens}")
            point.resident.append(ran)
        for point in points:
            point.waiting.append(await self._stream(self._waiter, point, limit))
            speed = self._waiter.tier_report().redis
            assert speed is not None
            point.seen_bytes_per_ms.append(speed.bytes_per_ms)
            point.filling.append(await self._stream(self._filler, point, limit))

    async def _full(self) -> float:
        plain = ticket(FULL_PREFILL, FULL, self._num_layers)
        return (await prefill(self._waiter, self._request, plain)).ttft_ms

    async def _load(self, limit: LinkLimit) -> float:
        """Bring all chunks in, and wait until they are whole; they stay."""
        await self._forget(self._waiter)
        before = _chunks_read(self._waiter)
        self._waiter.emulate_link(limit)
        started = time.perf_counter()
        await asyncio.gather(*(self._waiter.ingest(chunk) for chunk in self._request.chunks))
        spent_ms = (time.perf_counter() - started) * 1e3
        self._waiter.emulate_link(None)
        await _settled(self._waiter)
        num_read = _chunks_read(self._waiter) - before
        if num_read != len(self._request.chunks):
            say(f"only {num_read} of {len(self._request.chunks)} chunks were loaded")
        return spent_ms

    async def _stream(self, engine: VllmEngine, point: Point, limit: LinkLimit) -> Expected:
        """The chunks are in Redis alone."""
        for _ in range(MAX_TRIES):
            await self._forget(engine)
            engine.emulate_link(limit)
            ran = await self._prefill(engine, point, link=point.link)
            engine.emulate_link(None)  # what is still on its way hurries
            if ran.ran.result.cached_tokens.get("redis") == self._num_cached:
                return ran
            say(f"{point.plan}: not all came from Redis, {ran.ran.result.cached_tokens}")
        raise SystemExit(f"the chunks did not come from Redis, {MAX_TRIES} times")

    async def _forget(self, engine: VllmEngine) -> None:
        """Nothing is in the node's arena."""
        await _settled(engine)
        await engine.cache.clear_host()
        host = engine.tier_report().host
        assert host is not None and host.num_entries == host.num_leases == 0

    async def _prefill(self, engine: VllmEngine, point: Point, *, link: Link | None) -> Expected:
        cost = engine.cost
        its_ticket = self._ticket(engine, PLANS[point.plan], link=link)
        return Expected(ran=await prefill(engine, self._request, its_ticket), cost=cost)

    def _ticket(
        self, engine: VllmEngine, config: RecomputeConfig, *, link: Link | None = None
    ) -> Ticket:
        """As a scheduler would plan it, so that the engine's cost follows the machine."""
        made = ticket(CUSTOM, config, self._num_layers)
        plan = replace(
            made.plan,
            expected_ms=self.prompt.predict(config, engine.cost, link).total_ms,
            num_cached=self._num_cached,
            cost_scale=engine.cost.scale,
        )
        return replace(made, plan=plan)


def _chunks_read(engine: VllmEngine) -> int:
    report = engine.tier_report().redis
    assert report is not None
    return report.counts.get(Count.CHUNKS_READ, 0)


async def _settled(engine: VllmEngine) -> None:
    """Nothing is on its way, in or out, and nobody reads."""
    end_s = time.monotonic() + SETTLED_S
    while True:
        report, load = engine.tier_report(), engine.load()
        assert report.host is not None and report.redis is not None
        busy = report.host.num_reservations + report.host.num_leases + report.redis.num_backlog
        if not (busy or load.num_ingest_backlog or load.num_waiting):
            return
        if time.monotonic() > end_s:
            raise SystemExit("the chunk store did not come to rest")
        await asyncio.sleep(0.005)


# ---- what came of it ----


def row(point: Point, prompt: Prompt) -> dict[str, Any]:
    """One line of the table, all from medians of the runs."""
    config, link = PLANS[point.plan], point.link
    resident_ms = median(one.ran.ttft_ms for one in point.resident)
    expected_ms = median(prompt.predict(config, one.cost).total_ms for one in point.resident)
    price = resident_ms / expected_ms

    def predicted(by: float) -> list[Timeline]:
        costs = [replace(one.cost, scale=by * one.cost.scale) for one in point.waiting]
        return [prompt.predict(config, cost, link) for cost in costs]

    made, at_price = predicted(1.0), predicted(price)
    waiting = spread("streamed_ms", [one.ran.ttft_ms for one in point.waiting])
    predicted_ms = median(one.total_ms for one in made)
    streamed_ms = waiting["streamed_ms"]
    num_layers = point.resident[0].cost.num_layers
    w, _ = config.depths(num_layers)
    layer_ms = prompt.layer_bytes / link.bytes_per_ms
    load_ms = link.latency_ms + layer_ms * num_layers
    ceiling_ms = max(link.latency_ms + layer_ms * (num_layers - w), resident_ms)
    full_ms = median(point.full_ms)
    return {
        "plan": point.plan,
        "gb_per_s": link.bytes_per_ms / 1e6,
        "seen_gb_per_s": median(point.seen_bytes_per_ms) / 1e6,
        "rounds": len(point.waiting),
        "load_to_full": load_ms / full_ms,
        "load_ms": load_ms,
        "loaded_ms": median(point.loads_ms),
        "full_ms": full_ms,
        "resident_ms": resident_ms,
        "resident_error": expected_ms / resident_ms - 1.0,
        "load_first_ms": median(
            load + one.ran.ttft_ms for load, one in zip(point.loads_ms, point.resident, strict=True)
        ),
        **waiting,
        "stall_ms": median(one.ran.result.timings.stall_ms for one in point.waiting),
        "predicted_ms": predicted_ms,
        "predicted_stall_ms": median(one.stall_ms for one in made),
        "error": predicted_ms / streamed_ms - 1.0,
        "link_error": median(one.total_ms for one in at_price) / streamed_ms - 1.0,
        "ceiling_ms": ceiling_ms,
        "times_ceiling": streamed_ms / ceiling_ms,
        **spread("filling_ms", [one.ran.ttft_ms for one in point.filling]),
        "filled_tokens": median(one.ran.result.num_filled_tokens for one in point.filling),
        "filling_stall_ms": median(one.ran.result.timings.stall_ms for one in point.filling),
        "filling_fill_ms": median(one.ran.result.timings.fill_ms for one in point.filling),
    }


def _print(results: Sequence[dict[str, Any]]) -> None:
    columns = {
        "GB/s": "gb_per_s",
        "load ms": "load_ms",
        "load/full": "load_to_full",
        "full": "full_ms",
        "resident": "resident_ms",
        "load first": "load_first_ms",
        "streamed": "streamed_ms",
        "stall": "stall_ms",
        "predicted": "predicted_ms",
        "error": "error",
        "link error": "link_error",
        "ceiling": "ceiling_ms",
        "times": "times_ceiling",
        "filling": "filling_ms",
        "filled": "filled_tokens",
        "idle": "filling_stall_ms",
        "runs": "rounds",
    }
    for plan in dict.fromkeys(one["plan"] for one in results):
        print(f"\n{plan}: milliseconds to the first token")
        rows = [
            [_cell(name, one[name]) for name in columns.values()]
            for one in results
            if one["plan"] == plan
        ]
        print_table(list(columns), rows)


def _cell(name: str, value: Any) -> Any:
    return f"{value:+.1%}" if name.endswith("error") else value


if __name__ == "__main__":
    main()
