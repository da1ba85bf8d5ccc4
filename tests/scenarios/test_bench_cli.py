"""`tailpack bench` against a fake router: what it sends, what it counts, and how it ends."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from protos import errors, router_pb2
from protos.errors import TailpackError
from router.bench_cli import bench_group
from router.bench_load import GENERATOR_FULL, UNFINISHED, Generator, Load, Run, run_load
from router.bench_statistics import Durations, Mix
from router.client import AsyncTailpack
from tests.scenarios import fake_router
from tests.scenarios.fake_router import TEXTS, Call, FakeRouter, Plan, fake_routers
from tests.scenarios.router_harness import ONCE, ROOT, until

WHOLE = Plan()
SHORT: dict[str, Any] = {"warmup_s": 0.0, "seconds": None}


async def bench(router: FakeRouter, load: Load, stop: asyncio.Event | None = None) -> Run:
    async with AsyncTailpack(router.address, retry=ONCE) as client:
        return await run_load(client, load, stop or asyncio.Event(), lambda run: None)


class Waits(FakeRouter):
    """Answers nobody before so many have called."""

    def __init__(self, callers: int) -> None:
        super().__init__()
        self.callers = callers
        self.everyone = asyncio.Event()
        self.most = 0

    async def Generate(self, request: router_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        async for chunk in FakeRouter.Generate(self, request, context):
            self.most = max(self.most, self.num_running)
            if len(self.calls) >= self.callers:
                self.everyone.set()
            await self.everyone.wait()
            yield chunk


async def test_a_closed_loop_has_so_many_callers() -> None:
    router = Waits(3)
    await router.start()
    try:
        run = await bench(router, Load(concurrency=3, requests=20, **SHORT))
        assert len(router.calls) == run.measured.num_answered == 20
        assert router.most == 3
        measured = run.measured
        assert measured.ttft.count == measured.e2e.count == measured.tpot.count == 20
        assert measured.itl.count == 20 * (len(TEXTS) - 1)
        assert measured.window_tokens == measured.tokens_by_second.total() == 20 * len(TEXTS)
        assert measured.window_ended == 20 and not measured.errors
        assert run.num_in_flight == 0 and not run.interrupted
    finally:
        await router.stop()


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    router = Waits(30)
    await router.start()
    try:
        run = await bench(router, Load(rate=500.0, requests=30, **SHORT))
        assert run.measured.num_answered == router.most == 30
    finally:
        await router.stop()


async def test_what_is_sent_has_the_mix_and_is_the_same_with_the_same_seed() -> None:
    async def sent(seed: int) -> list[router_pb2.GenerateRequest]:
        async with fake_routers(lambda call: WHOLE) as (router,):
            mixes: dict[str, Any] = {"prompt_tokens": Mix.parse("3,40"), "max_tokens": Mix.parse("5,6")}
            await bench(router, Load(concurrency=1, requests=30, seed=seed, **mixes, **SHORT))
            return [call.request for call in router.calls if isinstance(call.request, router_pb2.GenerateRequest)]

    requests = await sent(1)
    assert requests == await sent(1) != await sent(2)
    assert {len(request.token_ids.ids) for request in requests} == {3, 40}
    assert {request.stop.max_tokens for request in requests} == {5, 6}
    assert all(request.stop.ignore_eos for request in requests)
    tokens = {token for request in requests for token in request.token_ids.ids}
    assert max(tokens) < 100 and 1 not in tokens  # within the vocabulary, and no end of a text
    assert len({tuple(request.token_ids.ids[:3]) for request in requests}) > 20


async def test_errors_are_counted_by_reason_and_not_tried_again() -> None:
    def plan(call: Call) -> Plan:
        return Plan(at=2, error=errors.CapacityError("full", retry_after_ms=1)) if call.number % 3 == 0 else WHOLE

    async with fake_routers(plan) as (router,):
        run = await bench(router, Load(concurrency=4, requests=12, **SHORT))
        assert run.measured.errors == {"NO_CAPACITY": 4}
        assert run.measured.num_answered == 8 and len(router.calls) == 12


async def test_too_many_in_flight_are_not_sent_and_counted() -> None:
    async with fake_routers(lambda call: Plan(at=1, hang=True)) as (router,):
        load = Load(rate=2000.0, seconds=0.3, warmup_s=0.0, drain_s=0.0, max_in_flight=5)
        run = await bench(router, load)
        assert len(router.calls) == 5
        assert run.measured.errors[GENERATOR_FULL] > 5
        assert run.measured.errors[UNFINISHED] == 5  # ended where the drain was over
        await until(lambda: router.num_running == 0)


@pytest.mark.parametrize(
    ("loop", "left_over"), [({"concurrency": 4}, 4), ({"rate": 300.0}, 20)], ids=["closed", "open"]
)
async def test_stopped_early_it_keeps_what_it_has(loop: dict[str, Any], left_over: int) -> None:
    stop, seen = asyncio.Event(), list[Run]()
    load = Load(seconds=600.0, warmup_s=0.0, **loop)
    plan = lambda call: WHOLE if call.number < 6 else Plan(at=1, hang=True)
    async with fake_routers(plan) as (router,), AsyncTailpack(router.address, retry=ONCE) as client:
        running = asyncio.create_task(run_load(client, load, stop, seen.append))
        await until(lambda: len(router.calls) >= 6 + left_over and seen[0].measured.num_answered == 6)
        stop.set()
        run = await running
        assert run.interrupted
        assert run.measured.num_answered == 6 and not run.measured.errors
        assert run.measured.window_s < 600
        await until(lambda: router.num_running == 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_tokens": Mix.parse("5000")}, "PROMPT_TOO_LONG"),
        ({"model": "other"}, "MODEL_NOT_NAMED"),
    ],
)
async def test_what_cannot_be_measured_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    async with fake_routers(lambda call: WHOLE) as (router,):
        with pytest.raises(TailpackError) as caught:
            await bench(router, Load(concurrency=1, requests=1, **SHORT, **change))
        assert caught.value.reason == reason
        router.worker_state = "lost"
        with pytest.raises(errors.Unavailable):
            await bench(router, Load(concurrency=1, requests=1, **SHORT))
        assert router.calls == []


def test_the_load_generator_says_when_it_was_the_bottleneck() -> None:
    def durations(seconds: float) -> Durations:
        found = Durations()
        found.add(seconds)
        return found

    quiet, late = durations(0.0001), durations(0.05)
    assert Generator(quiet, 0.2).busy(quiet) == ""
    assert "event loop" in Generator(late, 0.2).busy(quiet)
    assert "50 ms late" in Generator(quiet, 0.2).busy(late)
    assert "95% of a core" in Generator(quiet, 0.95).busy(quiet)


# --- the command ---


def _command(address: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "protos.cli", "bench", "--router", address, "--warmup-s", "0", *arguments]


async def test_the_command_writes_a_table_records_and_a_picture(tmp_path: Path) -> None:
    async with fake_routers(lambda call: WHOLE) as (router,):
        arguments = ["--requests", "9", "--json", str(tmp_path / "r.jsonl"), "--plot", str(tmp_path / "p.png")]
        command = _command(router.address, *arguments)
        done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "9 answers" in done.stdout and "TTFT" in done.stdout and "no errors" in done.stdout
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    names = ["ttft", "itl", "tpot", "e2e", "output-throughput", "request-rate"]
    assert [record["case"] for record in records] == [f"closed-8-p128-o64-{name}" for name in names]
    keys = {"bench", "value", "unit", "spread", "repeats", "floor", "floor_by", "rival", "rival_value", "rival_why"}
    keys |= {"error", "machine", "versions", "date", "commit", "command", "kind"}
    for record in records:
        assert keys <= set(record)
        assert record["value"] > 0 and record["kind"] == "measured" and record["bench"] == "cluster"
    assert records[0]["percentiles"]["p50"] <= records[0]["percentiles"]["p99"] <= records[0]["percentiles"]["max"]
    picture = (tmp_path / "p.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


@pytest.mark.parametrize("own_streams", [False, True])
async def test_requests_share_a_session_or_have_streams_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_streams: bool
) -> None:
    monkeypatch.setattr(fake_router, "SESSIONS", True)
    async with fake_routers(lambda call: WHOLE) as (router,):
        arguments = [
            "--requests",
            "9",
            "--json",
            str(tmp_path / "r.jsonl"),
            *(["--own-streams"] if own_streams else []),
        ]
        command = _command(router.address, *arguments)
        done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert (router.num_sessions, len(router.calls)) == (0 if own_streams else 1, 9)
    assert json.loads((tmp_path / "r.jsonl").read_text().splitlines()[0])["load"]["own_streams"] is own_streams


async def test_ctrl_c_ends_it_and_prints_what_there_is() -> None:
    async with fake_routers(lambda call: WHOLE if call.number < 5 else Plan(at=1, hang=True)) as (router,):
        command = _command(router.address, "--seconds", "600", "--concurrency", "2")
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            await until(lambda: router.num_running == 2 and len(router.calls) == 7, 30.0)
            process.send_signal(signal.SIGINT)
            stdout, stderr = await asyncio.wait_for(process.communicate(), 30)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert (process.returncode, stderr) == (130, b"")
        assert b"5 answers" in stdout and b"interrupted" in stdout
        await until(lambda: router.num_running == 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rate", "5", "--concurrency", "2"], "one of them"),
        (["--seconds", "5", "--requests", "2"], "one of them"),
        (["--prompt-tokens", "x"], "BAD_MIX"),
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "finite"),
        (["--seconds", "nan"], "finite"),
        (["--timeout-s", "nan"], "finite"),
        (["--json", "p.png", "--plot", "p.png"], "same file"),
        (["engines"], "No such command"),
    ],
)
def test_wrong_usage(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(bench_group, arguments)
    assert result.exit_code == 2 and says in result.output


def test_what_cannot_be_written_is_said_before_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: str) -> str:
        result = CliRunner().invoke(bench_group, ["--router", "127.0.0.1:1", *arguments])
        assert isinstance(result.exception, errors.ConfigError)
        return result.exception.reason

    assert refused("--json", str(tmp_path / "none" / "r.jsonl")) == "BAD_PATH"
    assert refused("--plot", str(tmp_path / "p.bmp")) == refused("--plot", str(tmp_path / "png")) == "BAD_PLOT"
    real: Callable[[str], Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    assert refused("--plot", str(tmp_path / "p.png")) == "NOT_INSTALLED"
