import json

import pytest

from planner.simulator.traces import read_trace
from planner.simulator.workload import make_workload
from tests.planner.simulator.scenarios import run, scenario, summary


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def ragpulse(tmp_path):
    lengths = {
        "1_sys_prompt": ("sys_prompt_id", {1: 100, 2: 30}),
        "2_passages": ("passage_id", {10: 400, 11: 500, 12: 0}),
        "3_history": ("history_id", {20: 11}),
        "4_user_input": ("user_input_id", {30: 9, 31: 12}),
        "5_web_search": ("web_search_id", {40: 512}),
    }
    for name, (key, values) in lengths.items():
        rows = [{key: each, "token_length": tokens} for each, tokens in values.items()]
        write_lines(tmp_path / f"{name}.jsonl", rows)

    def row(at, passages, web, history, question):
        ids = {
            "sys_prompt": [1, 2],
            "passages_ids": passages,
            "history": history,
            "web_search": web,
            "user_input": [question],
        }
        return {
            "timestamp": at,
            "input_length": 1_000,
            "output_length": 50,
            "hash_ids": ids,
            "session_id": "s",
        }

    write_lines(
        tmp_path / "0_trace.jsonl",
        [
            row("90", [11, 10, 11, 12], [40], [20], 30),
            row("82", [10], [], [], 31),
            row("95", [], [], [20], 31),
        ],
    )
    return tmp_path


def test_ragpulse_is_read_in_order_with_its_parts(ragpulse):
    first, second, third = read_trace("ragpulse", ragpulse)
    assert [first.at_ms, second.at_ms, third.at_ms] == [0.0, 8_000.0, 13_000.0]
    assert first.prefix_tokens == 130 and first.suffix_tokens == 12
    assert first.chunks == (("p10", 400),)
    assert second.chunks == (("p11", 500), ("p10", 400), ("w40", 512))
    assert second.context_tokens == 1_412 and second.suffix_tokens == 20
    assert third.chunks == () and third.context_tokens == 0


def test_azure_is_read(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace("azure", path)
    assert first.at_ms == 0.0 and second.at_ms == pytest.approx(4_314.579, abs=1e-3)
    assert (second.context_tokens, second.output_tokens) == (396, 109)


def test_mooncakes_full_blocks_are_chunks(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    write_lines(
        path,
        [
            {"timestamp": 3_000, "input_length": 1_100, "output_length": 5, "hash_ids": [4, 7, 9]},
            {"timestamp": 6_000, "input_length": 512, "output_length": 6, "hash_ids": [4]},
        ],
    )
    first, second = read_trace("mooncake", path)
    assert first.chunks == (("b4", 512), ("b7", 512)) and first.suffix_tokens == 76
    assert second.chunks == () and second.suffix_tokens == 512 and second.at_ms == 3_000.0


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("azure", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.0,5\n", "line 2.*GeneratedTokens"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,5,5\n", "line 2"),
        ("mooncake", '{"timestamp": 1}\n', "line 1.*is missing"),
        ("mooncake", "{}}\n", "line 1"),
        ("mooncake", "", "empty"),
    ],
)
def test_files_that_are_no_traces_are_refused(tmp_path, kind, text, words):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_trace(kind, path)


def replay(path, lengths, **changes):
    return scenario(
        arrivals={"kind": "trace", "format": "ragpulse", "path": str(path), "lengths": lengths},
        **changes,
    )


def test_a_replay_has_the_rate_that_was_asked_for_and_the_traces_chunks(ragpulse):
    settings = replay(ragpulse, "trace", load={"rate_per_s": 2.0})
    workload = make_workload(settings, machines=_machines(), seed=0)
    assert workload.arrival_ms.tolist() == pytest.approx([0.0, 1_500 * 8 / 13, 1_500.0])
    assert [chunk.chunk_id for chunk in workload.chunks(1)] == ["p11", "p10", "w40"]
    assert workload.corpus[workload.popular[0]].chunk_id == "p10"
    found = summary(run(settings, "cachesmith"))
    assert found.answered == 3


def test_a_replay_of_times_has_the_tasks_lengths(ragpulse):
    workload = make_workload(replay(ragpulse, "task"), machines=_machines(), seed=0)
    assert len(workload) == 3 and len(workload.chunks(2)) >= 30


def _machines():
    from planner.simulator import MACHINES

    return [MACHINES["qwen3-8b-h200"]]
