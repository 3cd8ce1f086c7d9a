import copy
import pickle
from pathlib import Path

import pytest
import yaml

from planner.simulator import (
    compare,
    own_best_static,
    parse_experiment,
    run_setting,
    settings_of,
)
from planner.simulator.policies import PolicySpec, named_policy

RAW = {
    "name": "test",
    "base": {"num_requests": 40, "tasks": "mhqa", "models": [{"fleet": {"replicas": 1}}]},
    "sweep": [
        {
            "name": "slo",
            "values": [
                {"label": "short", "set": {"slo.times_full_prefill": 1.0}},
                {"label": "long", "set": {"slo.times_full_prefill": 3.0}},
            ],
        },
        {
            "name": "task",
            "values": [
                {"label": "vt", "set": {"tasks": "vt"}},
                {"label": "mix", "set": {"tasks": "mix", "models.0.fleet.replicas": 2}},
            ],
        },
    ],
    "policies": ["cachesmith", "cacheblend"],
}
FILES = sorted((Path(__file__).parents[3] / "benchmarks" / "experiments").glob("*.yaml"))


def test_every_combination_is_a_setting():
    settings = settings_of(parse_experiment(RAW))
    assert [setting.name for setting in settings] == [
        "short, vt",
        "short, mix",
        "long, vt",
        "long, mix",
    ]
    assert [setting.scenario.models[0].fleet.replicas for setting in settings] == [1, 2, 1, 2]
    assert settings[2].scenario.slo.times_full_prefill == 3.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.update(polices=[]), "polices"),
        (lambda raw: raw.update(policies=["cachesmiths"]), "cachesmiths.* is no policy"),
        (lambda raw: raw.update(version=2), "version"),
        (lambda raw: raw["base"].update(num_request=1), "base.num_request"),
        (lambda raw: raw["sweep"][1]["values"][0].update(set={"tasks": "qa"}), "base.tasks"),
        (lambda raw: raw["base"].update(load={}), "base.load.*of_full_prefill"),
        (lambda raw: raw["base"].update(arrivals={"kind": "gamma"}), "base.arrivals.gamma.cv"),
        (
            lambda raw: raw["base"]["models"][0]["fleet"].update(link_gb_per_s=-1),
            "base.models.0.fleet.link_gb_per_s",
        ),
        (lambda raw: raw["base"]["models"][0].update(machine="tpu"), "machine must be one of"),
        (
            lambda raw: raw["sweep"][0]["values"][0].update(set={"models.1.name": "x"}),
            "no models.1.name",
        ),
        (lambda raw: raw.update(best_static_by=["cv"]), "'cv' is no axis"),
        (lambda raw: raw["sweep"][0]["values"][1].update(label="short"), "the same label"),
        (
            lambda raw: raw["base"]["models"][0]["fleet"].update(faults={"deaths": [[1.0, 9]]}),
            "there is no replica 9",
        ),
        (
            lambda raw: raw["base"]["models"][0]["fleet"].update(host_tokens=9, redis_tokens=5),
            "redis_tokens must be 0, or host_tokens or more",
        ),
        (
            lambda raw: raw["base"]["models"].append(dict(raw["base"]["models"][0])),
            "models: two have the same name",
        ),
        (
            lambda raw: raw.update(policies=[{"name": "x", "runs": "custom"}]),
            "static is given if and only if",
        ),
    ],
)
def test_what_is_wrong_is_named(change, words):
    raw = copy.deepcopy(RAW)
    change(raw)
    with pytest.raises(ValueError, match=words):
        settings_of(parse_experiment(raw))


def test_what_is_no_mapping_is_refused():
    with pytest.raises(ValueError, match="dictionary"):
        parse_experiment(["a"])


def test_best_static_is_one_configuration_for_all_settings_that_agree():
    raw = {**RAW, "policies": ["cacheblend", "best_static"], "best_static_by": ["slo"]}
    raw["base"] = {**RAW["base"], "num_requests": 12}
    experiment = parse_experiment(raw)
    settings = settings_of(experiment)
    runs = [[run_setting(experiment, setting, seed=1)] for setting in settings]
    rows = compare(experiment, settings, runs)
    chosen = [of_setting[-1].runs for of_setting in rows]
    assert chosen[0] == chosen[1] and chosen[2] == chosen[3]
    for places in ((0, 1), (2, 3)):
        total = sum(rows[place][-1].values["qsa"] for place in places)
        for name in runs[0][0]:
            assert total >= sum(runs[place][0][name].qsa for place in places) - 1e-9


def test_best_static_is_chosen_among_what_chooses_nothing():
    raw = {**RAW, "policies": ["cachesmith", "slo/prophetkv", "edf/epic", "best_static"]}
    experiment = parse_experiment(raw)
    setting = settings_of(experiment)[0]
    run = run_setting(experiment, setting, seed=1)
    perfect = {
        name: found.model_copy(update={"qsa": 1.0 if name == "slo/prophetkv" else 0.1})
        for name, found in run.items()
    }
    chosen, qsa = own_best_static(experiment, [perfect])
    assert chosen not in ("cachesmith", "slo/prophetkv") and qsa == 0.1


def test_a_quick_run_is_smaller():
    experiment = parse_experiment({**RAW, "quick": {"num_requests": 7, "values": 1}}).quickened()
    (setting,) = settings_of(experiment)
    assert setting.scenario.num_requests == 7


def test_named_policies():
    assert named_policy("edf/full_prefill").scheduler == "edf"
    assert named_policy("fcfs1/cacheblend").max_batch_requests == 1
    assert named_policy("cachesmith-static").request_config is None
    epic = named_policy("epic").request_config
    assert epic is not None and epic.tokens_per_chunk == 16
    assert PolicySpec(name="x").request_config is None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_ready_files_are_experiments(path):
    raw = yaml.safe_load(path.read_text())
    assert settings_of(parse_experiment(raw))


def test_a_setting_can_be_sent_to_another_process():
    experiment = parse_experiment({**RAW, "quick": {"num_requests": 10, "values": 1}}).quickened()
    (setting,) = settings_of(experiment)
    sent_run, *sent = pickle.loads(pickle.dumps((run_setting, experiment, setting)))
    assert sent_run(*sent, seed=1) == run_setting(experiment, setting, seed=1)
