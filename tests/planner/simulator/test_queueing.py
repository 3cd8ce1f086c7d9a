"""Against what queueing theory says in closed form."""

import numpy as np
import pytest

from planner.simulator import Ending
from tests.planner.simulator.scenarios import run, scenario, summary

# one prompt at a time, all alike, full prefill: a queue with deterministic service
TASK = {
    "name": "alike",
    "num_chunks": [4, 4],
    "chunk_tokens": [250, 250],
    "suffix_tokens": [50, 50],
    "output_tokens": [0, 0],
    "corpus_chunks": 10,
}
LIMITS = {"max_batch_requests": 1, "max_waiting": 100_000, "gather_ms": 0.0, "max_wait_ms": 1e9}


def one_server(load, num_requests=8_000):
    return scenario(
        {"noise": 0.0, "prewarmed": False},
        num_requests=num_requests,
        arrivals={"kind": "poisson"},
        load={"of_full_prefill": load},
        tasks=[TASK],
        limits=LIMITS,
    )


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_the_mean_wait_is_that_of_an_m_d_1_queue(load):
    simulation = run(one_server(load), "full_prefill", seed=3)
    service_ms = simulation.outcomes.ttft_ms.min()
    expected_ms = load * service_ms / (2 * (1 - load))
    waits = simulation.outcomes.ttft_ms - service_ms
    # waits of neighbours go together: means of 40 stretches are all but independent
    stretches = waits.reshape(40, -1).mean(axis=1)
    error = stretches.std(ddof=1) / np.sqrt(len(stretches))
    assert waits.mean() == pytest.approx(expected_ms, abs=3.5 * error)
    assert error < 0.12 * expected_ms


def test_littles_law_holds_in_the_queue_and_in_prefill():
    simulation = run(one_server(0.7, 2_000), "full_prefill")
    found = summary(simulation)
    rate = found.num_requests / (found.length_s * 1e3)
    service_ms = simulation.outcomes.ttft_ms.min()
    wait_ms = simulation.outcomes.ttft_ms.mean() - service_ms
    assert found.mean_waiting == pytest.approx(rate * wait_ms, rel=1e-9)
    assert found.mean_prefilling == pytest.approx(rate * service_ms, rel=1e-9)
    assert found.busy_share == pytest.approx(found.mean_prefilling, rel=1e-9)


FAULTS = {"mtbf_s": 8.0, "deaths": [[1.0, 0], [1.5, 1]]}


@pytest.mark.parametrize(
    "fleet",
    [
        {"replicas": 2},
        {"replicas": 2, "faults": FAULTS, "startup_s": 1.0},
        {"replicas": 2, "schedulers": 2, "faults": FAULTS, "startup_s": 0.5},
        {"max_num_seqs": 3, "kv_tokens": 14_000, "parking_tokens": 20_000},
        {
            "sizing": {"kind": "slo", "max_replicas": 4, "period_s": 1, "down_after_s": 3},
            "startup_s": 2.0,
        },
    ],
)
@pytest.mark.parametrize("policy", ["full_prefill", "edf/adaptive", "cachesmith"])
def test_every_request_ends_once(fleet, policy):
    settings = scenario(
        fleet,
        load={"of_full_prefill": 1.5},
        limits={"max_waiting": 20, "max_wait_ms": 1_500.0},
    )
    simulation = run(settings, policy)
    outcomes, found = simulation.outcomes, summary(simulation)
    assert (outcomes.ending != Ending.NONE).all()  # `Outcomes.end` refuses a second end
    ended = found.answered + found.refused + found.cancelled + found.failed
    assert ended == found.num_requests == 120
    answered = outcomes.ending == Ending.ANSWERED
    assert not np.isnan(outcomes.ttft_ms[answered]).any()
    assert (outcomes.ended_ms >= outcomes.arrival_ms).all()
    assert all(scheduler.num_waiting == 0 for scheduler in simulation.schedulers)
    if "faults" in fleet:
        assert found.num_deaths >= 2 and found.num_readmitted > 0


def test_what_waits_too_long_is_cancelled_and_what_finds_no_place_is_refused():
    settings = scenario(
        load={"of_full_prefill": 4.0}, limits={"max_waiting": 10, "max_wait_ms": 400.0}
    )
    found = summary(run(settings, "full_prefill"))
    assert found.refused > 0 and found.cancelled > 0


def test_replicas_that_are_added_help_and_are_paid():
    sizing = {"kind": "slo", "max_replicas": 4, "period_s": 1, "down_after_s": 1}
    changes = {"load": {"of_full_prefill": 1.5}, "slo": {"times_full_prefill": 4.0}}
    fixed = summary(run(scenario(**changes), "full_prefill"))
    scaled = summary(run(scenario({"sizing": sizing, "startup_s": 1.0}, **changes), "full_prefill"))
    assert fixed.replica_seconds == pytest.approx(fixed.length_s)
    assert scaled.replica_seconds > 1.2 * scaled.length_s
    assert scaled.slo_attainment > fixed.slo_attainment + 0.1
