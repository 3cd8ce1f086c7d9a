"""The control plane's benchmark: its engine and its client tell the truth, and its parts run."""

import asyncio
import json
import random
import subprocess
import sys
import time

import pytest
from aiohttp import web

from benchmarks.bench_control_plane import main
from benchmarks.control_plane.instant_engine import InstantEngine, InstantEngineConfig
from benchmarks.control_plane.open_loop import Client, Sample
from benchmarks.control_plane.path_rows import _path_row
from benchmarks.control_plane.process_cpu import descendants_cpu_s
from planner import RagRequest, RecomputeConfig, RequestPlan, SamplingOptions, Ticket

REQUEST = RagRequest(
    request_id="r",
    prefix_ids=(1,),
    chunks=((2, 3), (4,), (2, 3)),
    suffix_ids=(5,),
    ttft_slo_ms=100.0,
    sampling=SamplingOptions(max_tokens=3),
)
TICKET = Ticket(
    replica_id="a",
    batch_id=1,
    batch_size=2,
    plan=RequestPlan.of_config("custom", RecomputeConfig(), num_layers=4),
    queue_ms=0.0,
)


async def test_the_engine_says_when_it_was_called_and_keeps_chunks():
    engine = InstantEngine(InstantEngineConfig(num_layers=4))
    before = time.monotonic_ns()
    deltas = [delta async for delta in engine.generate(REQUEST, TICKET)]
    assert before <= int(deltas[0].text) <= time.monotonic_ns()
    assert [delta.text for delta in deltas[1:]] == ["", ""]
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]
    assert deltas[-1].result and deltas[-1].result.num_prompt_tokens == 7
    assert len(engine.residency_update().added) == 2 and engine.load().num_running == 0
    assert engine.residency_update().added == ()


class StampingServer:
    """Answers with a stream, in two parts, whose first text is when the request came."""

    def __init__(self) -> None:
        self.num_requests = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.num_requests += 1
        body = await request.json()
        if body.get("broken"):
            return web.Response(status=503, text="no")
        stamp = str(time.monotonic_ns())
        response = web.StreamResponse()
        await response.prepare(request)
        for content in ({"role": "assistant", "content": ""}, {"content": stamp}):
            event = json.dumps({"choices": [{"delta": content}]})
            await response.write(f"data: {event}\n\n".encode())
        await asyncio.sleep(0.02)
        await response.write(b"data: [DONE]\n\n")
        return response


async def test_the_client_measures_to_the_stamp_and_to_the_first_byte():
    server = StampingServer()
    app = web.Application()
    app.router.add_post("/chat", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    url = f"http://{host}:{port}/chat"
    try:
        async with Client() as client:
            started = time.monotonic()
            samples = await client.load(url, [b"{}"] * 8, rate_per_s=200.0, rng=random.Random(0))
            elapsed_ms = (time.monotonic() - started) * 1e3
            with pytest.raises(RuntimeError, match="503"):
                await client.ask(url, b'{"broken": true}')
    finally:
        await runner.cleanup()
    assert server.num_requests == 9 and len(samples) == 8
    for sample in samples:
        assert 0.0 < sample.to_replica_ms < sample.to_first_byte_ms < elapsed_ms


def test_cpu_time_is_of_all_descendants():
    before = sum(descendants_cpu_s().values())
    burn = "import time\nwhile time.process_time() < 0.5: pass\ninput()"
    command = ["sh", "-c", f"'{sys.executable}' -c '{burn}'; true"]
    shell = subprocess.Popen(command, stdin=subprocess.PIPE)
    deadline = time.monotonic() + 60.0
    while (spent := sum(descendants_cpu_s().values()) - before) < 0.4:  # in ticks of 10 ms
        assert time.monotonic() < deadline, spent
        time.sleep(0.05)
    shell.communicate(b"go on\n", timeout=60.0)
    assert shell.returncode == 0 and sum(descendants_cpu_s().values()) < before + 0.4


def test_ratios_are_to_the_bare_application_of_the_same_rounds():
    def sample(ms: float) -> Sample:
        return Sample(to_replica_ms=ms, to_first_byte_ms=2 * ms)

    rounds = [
        {"bare": ([sample(base)] * 4, 10.0), "ours": ([sample(base * times)] * 4, 15.0)}
        for base, times in ((10.0, 1.5), (20.0, 1.2), (40.0, 1.1))
    ]
    row = _path_row("ours", 5.0, 8, rounds)
    assert row["requests"] == 12 and row["CPU ratio"] == 1.5
    assert row["to replica P50 ratio of rounds"] == "1.20 (1.10–1.50)"
    assert row["to first byte P99 ratio"] == pytest.approx(1.1)
    assert _path_row("bare", 5.0, 8, rounds)["to replica P50 ratio"] == 1.0


@pytest.mark.parametrize("wrong", [["--rates", "0"], ["--documents", "65"], ["--waiting", "0"]])
def test_impossible_arguments_are_refused(wrong: list[str]):
    with pytest.raises(SystemExit) as refused:
        main(wrong)
    assert refused.value.code == 2


@pytest.mark.ray
def test_admissions_are_counted_on_a_real_actor(capsys: pytest.CaptureFixture[str]):
    main(["--parts", "scheduler", "idle", "--replicas", "2", "--waiting", "4", "--seconds", "0.5"])
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    scheduler, *idle = results
    assert scheduler["admissions/s"] > 0 and scheduler["CPU ms"] > 0
    assert 1.0 <= scheduler["batch"] <= 8.0 and scheduler["decision ms"] < scheduler["P99 ms"]
    assert {row["what"] for row in idle} == {"an admission", "a call"}
    assert all(row["count"] > 0 and row["P50 ms"] <= row["P99 ms"] for row in idle)
