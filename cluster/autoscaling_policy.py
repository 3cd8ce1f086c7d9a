"""Serve's autoscaling policy: the planner's rule on the scheduler's signal.

Serve's controller calls the policy in its control loop, ten times a second, for every deployment
of the cluster. A thread of its own reads the signal, so that the loop never waits for it. The
controller imports this module, so it imports little: nothing that brings torch.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import ray
from ray.serve.config import AutoscalingContext

from planner import Autoscaler, LoadSignal, ScalingConfig

log = logging.getLogger(__name__)

READ_PERIOD_S = 0.25
ANSWER_WITHIN_S = 2.0
STALE_AFTER_S = 5.0

ReadSignal = Callable[[], LoadSignal]


class SignalReader:
    """The latest signal, read by a thread from the first question for it until `stop`."""

    def __init__(self, read: ReadSignal, *, period_s: float = READ_PERIOD_S) -> None:
        """read: blocks, and raises whatever it likes"""
        self._read = read
        self._period_s = period_s
        self._latest: tuple[LoadSignal, float] | None = None
        self._error = "no signal yet"
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def latest(self) -> tuple[LoadSignal | None, float, str]:
        """The signal, how many seconds ago it was read, and what went wrong since. Never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="load-signal", daemon=True)
            self._thread.start()
        if self._latest is None:
            return None, 0.0, self._error
        signal, at_s = self._latest
        return signal, time.monotonic() - at_s, self._error

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._latest = self._read(), time.monotonic()
                self._error = ""
            except Exception as exc:  # whatever it is, the controller must go on
                self._error = repr(exc)[:200]
            self._stop.wait(self._period_s)


class SloPolicy:
    """Called by Serve's controller with its context; see the module.

    Without a fresh signal the number of replicas stays, and `policy_state` says so.
    """

    def __init__(
        self,
        *,
        scheduler: dict[str, str],
        scaling: dict[str, Any],
        read: ReadSignal | None = None,
        stale_after_s: float = STALE_AFTER_S,
    ) -> None:
        """scheduler: name and namespace of its actor; scaling: the fields of a `ScalingConfig`

        Serve keeps both as JSON.
        """
        self._scaler = Autoscaler(ScalingConfig(**scaling))
        self._stale_after_s = stale_after_s
        self._reader = SignalReader(read or (lambda: read_signal(**scheduler)))
        weakref.finalize(self, self._reader.stop)  # another deployment brings another policy

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        signal, age_s, error = self._reader.latest()
        if signal is None or age_s > self._stale_after_s:
            return ctx.target_num_replicas, {"signal": "stale", "age_s": age_s, "error": error}
        try:
            decision = self._scaler.decide(
                signal, num_target=ctx.target_num_replicas, now_s=time.monotonic()
            )
        except Exception as exc:
            log.exception("autoscaling_failed")
            return ctx.target_num_replicas, {"signal": "failed", "error": repr(exc)[:200]}
        return decision.wanted, {
            "signal": "fresh",
            "age_s": age_s,
            "wanted": decision.wanted,
            "num_waiting": len(signal.waiting),
            "work_ms": signal.work_ms,
            "tightest_slack_ms": signal.tightest_slack_ms,
            "load_ms": signal.load_ms,
            "lead_ms": decision.lead_ms,
            **asdict(decision.need),
        }


def read_signal(*, name: str, namespace: str) -> LoadSignal:
    """From the scheduler. Blocks; raises Ray's errors, and ValueError where there is none."""
    ref = ray.get_actor(name, namespace=namespace).signal.remote()
    try:
        signal: LoadSignal = ray.get(ref, timeout=ANSWER_WITHIN_S)
    except TimeoutError:
        ray.cancel(ref)
        raise
    return signal
