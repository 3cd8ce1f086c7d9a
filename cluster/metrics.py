"""Prometheus metrics of one application, kept where every ingress reports: in the scheduler."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cluster.messages import RequestOutcome, SchedulerStatus
from cluster.tier_metrics import TierMetrics

_TTFT_BUCKETS = (10, 25, 50, 100, 200, 300, 500, 750, 1000, 1500, 2000, 3000, 5000, 10_000, 30_000)
_QUEUE_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 60_000)
_DECISION_BUCKETS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
_COVERAGE_BUCKETS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)


class ServerMetrics:
    """Counters of finished requests, and gauges read from the scheduler's state when scraped.

    They start from zero when the scheduler restarts, as Prometheus counters may.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"cachesmith_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"cachesmith_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"cachesmith_{name}", text, ("policy",), buckets=buckets, registry=self.registry
            )

        self._requests = counter("requests", "Finished requests", ("outcome", "policy"))
        self._retries = counter("retries", "Replicas lost under a request")
        self._slo = counter("slo", "Answered requests by whether TTFT met its SLO", ("met",))
        self._prompt = counter("prompt_tokens", "Prompt tokens of answered requests")
        self._generated = counter("generated_tokens", "Tokens generated for answered requests")
        self._cached = counter("cached_tokens", "Prompt tokens with stored KV", ("tier",))
        self._miss = counter("miss_tokens", "Context tokens whose KV was in no tier")
        self._recomputed = counter(
            "recomputed_tokens", "Prompt tokens computed: misses, prefix, suffix and chosen ones"
        )
        self._recovered = counter("recovered_requests", "Stored KV failed, all was recomputed")
        self._full = counter("full_prefill_requests", "Requests that the engine prefilled itself")
        self._expected = counter("prefill_expected_ms", "Prefill time that the plans expected")
        self._actual = counter("prefill_actual_ms", "Prefill time that the same requests took")
        self._load = counter("load_ms", "Reading stored KV and rotating it, of answered requests")
        self._stall = counter("stall_ms", "Waiting idle for stored KV, of answered requests")
        self._ttft = histogram("ttft_ms", "Arrival to first token", _TTFT_BUCKETS)
        self._queue = histogram("queue_ms", "Arrival at the scheduler to ticket", _QUEUE_BUCKETS)
        self._coverage = histogram("coverage", "Context share recomputed", _COVERAGE_BUCKETS)
        self._waiting = gauge("waiting_requests", "Requests that wait for a ticket")
        self._ready = gauge("ready_replicas", "Replicas that can take requests")
        self._running = gauge(
            "running_requests", "Requests between their first and their last token", ("replica",)
        )
        self._chunks = gauge("resident_chunks", "Chunks hot on the replica's node", ("replica",))
        self._drift = gauge(
            "cost_drift",
            "Observed prefill time over what the profile, or the measurement at start, says",
            ("replica",),
        )
        self._decision = Histogram(
            "cachesmith_decision_ms",
            "Time that the scheduler takes to form and plan one batch",
            buckets=_DECISION_BUCKETS,
            registry=self.registry,
        )
        self._refused = counter("refused", "Requests that the scheduler gave up", ("reason",))
        self._backlog = gauge("ingest_backlog", "Missed chunks to compute when idle", ("replica",))
        self._tiers = TierMetrics()
        self.registry.register(self._tiers)
        for met in ("true", "false"):
            self._slo.labels(met=met)

    def record(self, outcome: RequestOutcome) -> None:
        self._requests.labels(outcome=outcome.outcome, policy=outcome.policy).inc()
        self._retries.inc(outcome.num_retries)
        if outcome.ttft_ms is not None:
            self._ttft.labels(policy=outcome.policy).observe(outcome.ttft_ms)
        if outcome.queue_ms is not None:
            self._queue.labels(policy=outcome.policy).observe(outcome.queue_ms)
        if outcome.slo_met is not None:
            self._slo.labels(met=str(outcome.slo_met).lower()).inc()
        if outcome.coverage is not None:
            self._coverage.labels(policy=outcome.policy).observe(outcome.coverage)
        if outcome.expected_ms is not None and outcome.prefill_ms is not None:
            self._expected.inc(outcome.expected_ms)
            self._actual.inc(outcome.prefill_ms)
        self._load.inc(outcome.load_ms)
        self._stall.inc(outcome.stall_ms)
        self._prompt.inc(outcome.num_prompt_tokens)
        self._generated.inc(outcome.num_generated_tokens)
        for tier, num_tokens in outcome.cached_tokens.items():
            self._cached.labels(tier=tier).inc(num_tokens)
        self._miss.inc(outcome.num_miss_tokens)
        self._recomputed.inc(outcome.num_recomputed_tokens)
        self._recovered.inc(outcome.recovered)
        self._full.inc(outcome.full_prefill)

    def decided(self, ms: float) -> None:
        self._decision.observe(ms)

    def refused(self, reason: str) -> None:
        self._refused.labels(reason=reason).inc()

    def render(self, status: SchedulerStatus) -> bytes:
        """The text exposition, with the gauges as `status` says."""
        self._waiting.set(status.num_waiting)
        self._ready.set(len(status.ready))
        for gauge in (self._running, self._chunks, self._backlog, self._drift):
            gauge.clear()
        for replica in status.replicas:
            self._running.labels(replica=replica.replica_id).set(replica.num_running)
            self._chunks.labels(replica=replica.replica_id).set(replica.num_resident_chunks)
            self._backlog.labels(replica=replica.replica_id).set(replica.num_ingest_backlog)
            self._drift.labels(replica=replica.replica_id).set(replica.cost_drift)
        self._tiers.show(status.replicas)
        return generate_latest(self.registry)
