"""Processes that die, leave or drain: killed workers, killed clients, SIGTERM to the router, and the command line."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import errors, router_pb2, rpc, types_pb2
from protos.cli import main
from protos.errors import TailpackError
from router import server
from router.answer_output import json_line
from router.client import AsyncTailpack
from router.server import RouterConfig
from router.service import SERVICE_NAME
from tests.scenarios.fake_worker import FakeWorker, Script, worker_info
from tests.scenarios.router_harness import ONCE, ROOT, Answer, Process, answer, cluster, fake_worker_process, until
from tests.scenarios.tiny_tokenizer import EOS

IDS = [10, 11, 12, 13]


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.end()


# --- workers that die ---


async def test_a_worker_killed_after_the_first_token_costs_the_caller_nothing(
    folder: Path, processes: list[Process]
) -> None:
    """Another one computes again what was sent, and goes on behind it."""
    processes.append(fake_worker_process("--endless", "--every-s", "0.01", "--token-ids", ",".join(map(str, IDS))))
    async with cluster(folder, Script(IDS, endless=True), addresses=[processes[0].address()]) as it:
        it.workers[0].report(types_pb2.WorkerLoad(num_running=50, pages_free=99, pages_total=99))
        await until(lambda: it.requests.registry.links[it.workers[0].address].load.num_running == 50)
        chunks, seen = [], 0
        async for chunk in it.client.generate("x", max_tokens=1000):
            chunks.append(chunk)
            seen += len(chunk.token_ids)
            if len(chunks) == 3:
                processes[0].send(signal.SIGKILL)
        assert Answer(chunks).check().token_ids == IDS * 250
        (again,) = it.workers[0].submits
        assert list(again.emitted_token_ids) == (IDS * 250)[: len(again.emitted_token_ids)] != []
        stats = await it.client.stats()
        assert (stats.recovered_recomputed, stats.finished, stats.failed) == (1, 1, 0)
        await it.settled()
        assert sorted(worker.state for worker in await it.client.list_workers()) == ["lost", "ready"]


async def test_a_killed_worker_that_nobody_replaces_is_worker_lost(folder: Path, processes: list[Process]) -> None:
    processes.append(fake_worker_process("--endless", "--every-s", "0.01"))
    async with cluster(folder, Script(), infos=[], addresses=[processes[0].address()]) as it:
        seen = 0
        with pytest.raises(errors.WorkerLost) as caught:
            async for chunk in it.client.generate("x", max_tokens=4000):
                seen += len(chunk.token_ids)
                if seen == 3:
                    processes[0].send(signal.SIGKILL)
        assert seen >= 3
        assert caught.value.reason == "WORKER_LOST"
        assert caught.value.retry_after_ms and "within 0.3 s" in caught.value.message
        assert (await it.client.stats()).recovered_lost == 1
        await it.settled()


async def test_a_worker_killed_before_the_first_token_costs_the_caller_nothing(
    folder: Path, processes: list[Process]
) -> None:
    processes.append(fake_worker_process("--first-s", "60"))
    async with cluster(folder, Script([*IDS, EOS]), addresses=[processes[0].address()]) as it:
        # Both are idle: of several requests, some go to the one that is about to die.
        (doomed,) = (link for link in it.requests.registry.links.values() if link.address != it.workers[0].address)
        running = [asyncio.create_task(answer(it.client, "x")) for _ in range(8)]
        await until(lambda: doomed.own.num_sequences + len(it.workers[0].submits) == len(running))
        hit = doomed.own.num_sequences
        assert 0 < hit < len(running)
        processes[0].send(signal.SIGKILL)
        for got in await asyncio.gather(*running):
            assert got.token_ids == [*IDS, EOS]
        assert (await it.client.stats()).retries == hit
        await it.settled()


async def test_a_restarted_worker_is_found_again_with_its_sequences_lost(
    folder: Path, processes: list[Process]
) -> None:
    listen = f"127.0.0.1:{_free_port()}"
    arguments = ("--listen", listen, "--worker-id", "w-1", "--endless", "--every-s", "0.01")
    processes.append(fake_worker_process(*arguments))
    processes[0].address()
    async with cluster(folder, Script(), infos=[], addresses=[listen]) as it:
        link = it.requests.registry.links[listen]
        assert link.info is not None
        first = link.info.incarnation
        stream = it.client.generate("x", max_tokens=4000)
        await anext(stream)
        processes[0].end()
        with pytest.raises(errors.WorkerLost):
            async for _ in stream:
                pass
        processes.append(fake_worker_process(*arguments))
        await until(lambda: link.state == "ready")
        assert link.info.worker_id == "w-1"
        assert link.info.incarnation != first
        assert (await answer(it.client, "x", max_tokens=5)).last.usage.output_tokens == 5
        await it.settled()


@pytest.mark.slow
async def test_a_worker_stopped_by_sigstop_is_found_lost_by_keepalive(folder: Path, processes: list[Process]) -> None:
    """A frozen process keeps its connection: only unanswered pings tell (10 s + 5 s)."""
    processes.append(fake_worker_process("--endless", "--every-s", "0.01"))
    async with cluster(folder, Script(), infos=[], addresses=[processes[0].address()]) as it:
        stream = it.client.generate("x", max_tokens=4000)
        await anext(stream)
        processes[0].send(signal.SIGSTOP)
        with pytest.raises(errors.WorkerLost):
            async with asyncio.timeout(25):
                async for _ in stream:
                    pass


# --- clients that die ---


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "ctrl-c"])
@pytest.mark.parametrize("first_s", [0.0, 60.0], ids=["decoding", "prefilling"])
async def test_a_client_that_is_gone_frees_its_sequence(
    folder: Path, processes: list[Process], number: signal.Signals, first_s: float
) -> None:
    async with cluster(folder, Script(IDS, endless=True, first_s=first_s, every_s=0.01)) as it:
        client = Process("-m", "protos.cli", "generate", "hello", "--router", it.address, "--max-tokens", "4000")
        processes.append(client)
        await until(lambda: it.workers[0].active)
        if not first_s:
            assert client.popen.stdout is not None
            assert await asyncio.to_thread(client.popen.stdout.read, 1)
        client.send(number)
        await until(lambda: it.workers[0].aborts)
        code = await asyncio.to_thread(client.popen.wait, 60)
        assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)
        await it.settled()


# --- the router process ---


@asynccontextmanager
async def _worker(script: Script) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(lambda submit: script, worker_info())
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


def _router(folder: Path, worker: str, *arguments: str) -> Process:
    return Process(
        "-m", "protos.cli", "router", "serve", "--listen", "127.0.0.1:0", "--worker", worker,
        "--model-dir", str(folder), *arguments,
    )  # fmt: skip


async def _health(address: str, service: str) -> int:
    async with rpc.channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True, timeout=60)).status)


async def test_sigterm_drains(folder: Path, processes: list[Process]) -> None:
    """Not ready at once, new calls refused, running streams complete, then exit 0."""
    async with _worker(Script(IDS * 20, hold_at=3)) as worker:
        processes.append(router := _router(folder, worker.address))
        address = await asyncio.to_thread(router.address)
        async with AsyncTailpack(address, retry=ONCE) as client:
            await _until_ready(address)
            assert await _health(address, "") == health_pb2.HealthCheckResponse.SERVING
            running = asyncio.create_task(answer(client, "x"))
            await until(lambda: worker.active)
            router.send(signal.SIGTERM)
            while await _health(address, SERVICE_NAME) == health_pb2.HealthCheckResponse.SERVING:
                await asyncio.sleep(0.005)
            with pytest.raises(errors.Unavailable) as caught:
                await answer(client, "new")
            assert caught.value.reason == "DRAINING"
            assert caught.value.retry_after_ms
            worker.gate.set()
            assert (await running).token_ids == IDS * 20
        assert await asyncio.to_thread(router.popen.wait, 60) == 0


@pytest.mark.parametrize("how", ["second signal", "grace is over"])
async def test_a_drain_ends(folder: Path, processes: list[Process], how: str) -> None:
    async with _worker(Script(IDS, endless=True, every_s=0.02)) as worker:
        grace = "60" if how == "second signal" else "0.3"
        processes.append(router := _router(folder, worker.address, "--drain-s", grace))
        address = await asyncio.to_thread(router.address)
        async with AsyncTailpack(address, retry=ONCE) as client:
            await _until_ready(address)
            running = asyncio.create_task(answer(client, "x", max_tokens=4000))
            await until(lambda: worker.active)
            router.send(signal.SIGTERM)
            if how == "second signal":
                while await _health(address, SERVICE_NAME) == health_pb2.HealthCheckResponse.SERVING:
                    await asyncio.sleep(0.005)  # else both would be one signal
                assert not running.done()
                router.send(signal.SIGTERM)
            with pytest.raises(TailpackError):
                await asyncio.wait_for(running, 60)
        assert await asyncio.to_thread(router.popen.wait, 60) == 0
        await until(lambda: not worker.active)


async def test_ready_follows_the_workers(folder: Path, processes: list[Process]) -> None:
    processes.append(worker := fake_worker_process())
    processes.append(router := _router(folder, worker.address()))
    address = await asyncio.to_thread(router.address)
    await _until_ready(address)
    worker.end()
    while await _health(address, SERVICE_NAME) == health_pb2.HealthCheckResponse.SERVING:
        await asyncio.sleep(0.01)
    assert await _health(address, "") == health_pb2.HealthCheckResponse.SERVING


def test_a_router_that_cannot_start_says_why(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = _cli("router", "serve", "--listen", listen, "--worker", "127.0.0.1:1", "--model-dir", str(folder))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "PORT_IN_USE" in ended.stderr
    ended = _cli("router", "serve", "--listen", "127.0.0.1:0", "--worker", "127.0.0.1:1", "--model-dir", str(tmp_path))
    assert ended.returncode == 1
    assert "BAD_TOKENIZER" in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_a_router_whose_http_port_is_taken_leaves_no_door_open(folder: Path, tmp_path: Path) -> None:
    """Where it is part of another process, which lives on."""
    own = tmp_path / "router.sock"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = RouterConfig(f"unix:{own}", ("127.0.0.1:1",), folder, http=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.MonkeyPatch.context() as patch, pytest.raises(errors.ConfigError, match="PORT_IN_USE"):
            patch.setattr(rpc, "check_free", lambda address: None)  # it is taken behind the look
            await server.serve(config, lambda *_: None)
    with pytest.raises(errors.Unavailable):
        async with AsyncTailpack(f"unix:{own}", retry=ONCE) as client:
            await client.stats()


# --- tailpack generate ---


def _cli(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        [sys.executable, "-m", "protos.cli", *arguments], cwd=ROOT, input=stdin, capture_output=True, timeout=60
    )
    return subprocess.CompletedProcess(ended.args, ended.returncode, ended.stdout.decode(), ended.stderr.decode())


async def _generate(address: str, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(_cli, "generate", "--router", address, *arguments, stdin=stdin)


async def test_generate_streams_text_and_reads_prompts_from_everywhere(folder: Path, tmp_path: Path) -> None:
    prompt = "Où est 日本 🎉?"
    (tmp_path / "prompt.txt").write_text(prompt)
    async with cluster(folder, Script()) as it:
        ids = it.tokenizer.encode("Paris 🎉 STOP there")
        it.workers[0].script = lambda submit: Script([*ids, EOS])
        chat = await _generate(it.address, prompt, "--stop", " STOP", "--stats")
        assert (chat.returncode, chat.stdout) == (0, "Paris 🎉\n")
        assert "finish stop_string" in chat.stderr
        assert "tokens/s" in chat.stderr
        for arguments, stdin in (
            (["--file", str(tmp_path / "prompt.txt")], b""),
            (["--file", "-"], prompt.encode()),
            (["-"], prompt.encode()),
        ):
            got = await _generate(it.address, "--raw", *arguments, stdin=stdin)
            assert (got.returncode, got.stdout, got.stderr) == (0, "Paris 🎉 STOP there\n", "")
        by_chat, *raw = (list(submit.prompt_token_ids) for submit in it.workers[0].submits)
        assert raw == [it.tokenizer.encode(prompt)] * 3
        assert len(by_chat) > len(raw[0])
        lines = (await _generate(it.address, "x", "--json", "--max-tokens", "3")).stdout.splitlines()
        chunks = [json.loads(line) for line in lines]
        assert [token_id for chunk in chunks for token_id in chunk.get("token_ids", [])] == ids[:3]
        assert chunks[-1]["finish_reason"] == "FINISH_REASON_LENGTH"


async def test_generate_passes_its_options_on(folder: Path) -> None:
    async with cluster(folder, Script([5, EOS])) as it:
        done = await _generate(
            it.address, "x", "--max-tokens", "7", "--temperature", "0.5", "--seed", "9", "--system", "Be brief.",
            "--top-k", "4", "--top-p", "0.9", "--min-p", "0.1", "--repetition-penalty", "1.2", "--ignore-eos",
            "--request-id", "id-1", "--tenant", "t-1", "--timeout-s", "30",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (submit,) = it.workers[0].submits
        assert (submit.request_id, submit.tenant, submit.stop.max_tokens, submit.stop.ignore_eos) == (
            "t-1/id-1", "t-1", 7, True,
        )  # fmt: skip
        expected = types_pb2.Sampling(temperature=0.5, seed=9, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
        assert submit.sampling == expected
        assert submit.deadline_unix_ns


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "says"),
    [
        ([], b"", 2, "give a PROMPT"),
        (["x", "--file", "y"], b"", 2, "not both"),
        (["x", "--raw", "--system", "y"], b"", 2, "--system needs"),
        (["x", "--max-tokens", "-1"], b"", 1, "BAD_MAX_TOKENS"),
        (["x", "--max-tokens", "0"], b"", 1, "allowed: 1 to"),
        (["x", "--timeout-s", "nan"], b"", 1, "BAD_TIMEOUT_S"),
        (["x", "--logprobs", "2"], b"", 2, "--json"),
        (["x", "--json", "--logprobs", "-1"], b"", 1, "allowed: 0 to 20"),
        (["x", "--temperature", "nan"], b"", 1, "BAD_TEMPERATURE"),
        (["x", "--seed", "-1"], b"", 1, "BAD_SEED"),
        ([""], b"", 1, "EMPTY_PROMPT"),
        (["-"], b"", 1, "EMPTY_PROMPT"),
        (["-"], b"ab\xffcd", 1, "BAD_UTF8"),
        (["-"], b"x" * (50 << 20), 1, "PROMPT_TOO_LARGE"),
        (["--file", "/nowhere/at/all"], b"", 1, "PROMPT_UNREADABLE"),
        (["x", "--request-id", "é"], b"", 1, "BAD_REQUEST_ID"),
        (["x", "--tenant", "a\nb"], b"", 1, "BAD_TENANT"),
        (["x"], b"", 1, "no router at 127.0.0.1:1; start one with `"),
    ],
)
def test_generate_refuses_by_name_in_one_paragraph(
    arguments: list[str],
    stdin: bytes,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process: a new one each would take longer than all that is refused here."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    with pytest.raises(SystemExit) as end:
        main(["generate", "--router", "127.0.0.1:1", *arguments])
    out, err = capsys.readouterr()
    assert end.value.code == code, err
    assert says in err
    assert "Traceback" not in err
    assert out in ("", "\n")


async def test_an_answer_that_cannot_be_written_ends_by_name_and_ends_its_work(folder: Path) -> None:
    async with cluster(folder, Script(IDS, endless=True, every_s=0.01)) as it:
        command = [sys.executable, "-m", "protos.cli", "generate", "--router", it.address, "x", "--max-tokens", "4000"]
        with Path("/dev/full").open("wb") as full:
            ended = await asyncio.to_thread(
                subprocess.run, command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, timeout=60
            )
        assert (ended.returncode, ended.stderr.count(b"\n")) == (1, 1), ended.stderr
        assert b"OUTPUT_FAILED" in ended.stderr
        closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command[:-1], "5"]
        ended = await asyncio.to_thread(subprocess.run, closed, cwd=ROOT, stderr=subprocess.PIPE, timeout=60)
        assert (ended.returncode, ended.stderr) == (0, b"")
        await it.settled()


@pytest.mark.parametrize("how", ["killed", "drained", "deadline"])
async def test_what_ended_an_answer_early_is_said_after_its_text(
    folder: Path, processes: list[Process], how: str
) -> None:
    """No lines of gRPC's own, and no advice to start a router that is or was there."""
    async with _worker(Script(IDS, endless=True, every_s=0.02)) as worker:
        processes.append(router := _router(folder, worker.address, "--drain-s", "0.1"))
        address = await asyncio.to_thread(router.address)
        await _until_ready(address)
        more = ("--timeout-s", "1.5") if how == "deadline" else ()
        command = ("-m", "protos.cli", "generate", "x", "--router", address, "--max-tokens", "4000", *more)
        processes.append(client := Process(*command, stderr=subprocess.PIPE))
        stdout, stderr = client.popen.stdout, client.popen.stderr
        assert stdout is not None and stderr is not None
        text = await asyncio.to_thread(stdout.read, 1)  # it is on the screen
        if how != "deadline":
            router.send(signal.SIGKILL if how == "killed" else signal.SIGTERM)
        text += await asyncio.to_thread(stdout.read)
        line = await asyncio.to_thread(stderr.read)
        assert await asyncio.to_thread(client.popen.wait, 60) == 1
    assert len(text) > 1
    assert text.endswith("\n")
    assert line.count("\n") == 1, line
    pattern = (
        r"the deadline of 1\.5 s passed" if how == "deadline" else rf"the router at {address} stopped, or .* lost,"
    )
    assert re.match(rf"Error: {pattern} after [1-9]\d* tokens?; ", line)
    assert "start one" not in line


@pytest.mark.parametrize("kind", ["worker", "http"])
async def test_a_server_of_another_kind_is_no_router(kind: str) -> None:
    async def answer_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with _worker(Script()) as worker, await asyncio.start_server(answer_http, "127.0.0.1", 0) as http:
        port = http.sockets[0].getsockname()[1]
        address = worker.address if kind == "worker" else f"127.0.0.1:{port}"
        ended = await _generate(address, "x")
        http.close()
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"Error: {address} is not a Tailpack router; ")


async def test_json_has_numbers_as_numbers_and_offsets_always(folder: Path) -> None:
    async with cluster(folder, Script([40, 41, EOS], logprobs=True, seed=1 << 63)) as it:
        ended = await _generate(it.address, "x", "--json", "--logprobs", "0", "--stop", "zz")
    chunks = [json.loads(line) for line in ended.stdout.splitlines()]
    text_offset = token_offset = 0
    for chunk in chunks:
        assert (chunk["text_offset"], chunk["token_offset"]) == (text_offset, token_offset)
        text_offset += len(chunk["text"].encode())
        token_offset += len(chunk["token_ids"])
        assert chunk["request_id"]
    assert token_offset == 3
    assert chunks[0]["seed"] == 1 << 63
    assert chunks[0]["worker_id"]
    assert [entry["chosen"] for chunk in chunks for entry in chunk.get("logprobs", [])] == [
        {"token_id": token_id, "logprob": -0.5} for token_id in (40, 41, EOS)
    ]
    assert chunks[-1]["usage"]["output_tokens"] == 3
    assert chunks[-1]["usage"]["prefix_exact"] is False
    assert chunks[-1]["timings"] == {"queue_ns": 0, "prefill_ns": 1000, "decode_ns": 0}


def test_an_infinite_log_probability_is_null() -> None:
    chunk = router_pb2.GenerateResponse()
    chunk.logprobs.add(chosen=types_pb2.TokenLogprob(token_id=7, logprob=float("-inf")))
    assert json.loads(json_line(chunk))["logprobs"] == [{"chosen": {"token_id": 7, "logprob": None}, "top": []}]


def test_help_is_short_and_help_all_has_everything() -> None:
    short, everything = _cli("generate", "--help").stdout, _cli("generate", "--help-all").stdout
    assert "--stats" in short
    assert "--min-p" not in short
    assert "--min-p" in everything
    assert len(short.splitlines()) < 30


# --- small helpers ---


async def _until_ready(address: str) -> None:
    async with asyncio.timeout(60):
        while await _health(address, SERVICE_NAME) != health_pb2.HealthCheckResponse.SERVING:
            await asyncio.sleep(0.01)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
