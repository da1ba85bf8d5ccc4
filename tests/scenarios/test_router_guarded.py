"""`tailpack router serve` with everything shut: TLS, client certificates, tokens, and workers that demand them too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protos.tls import ClientTls, ServerTls, client_context
from router.auth import file_lines, new_token
from router.client import AsyncTailpack
from router.tokenizer import Tokenizer
from tests.certificates import Authority
from tests.scenarios.fake_worker import FakeWorker, Script, worker_info
from tests.scenarios.http_harness import Reply, read_reply, request_bytes
from tests.scenarios.router_harness import ONCE, ROOT, answer
from tests.scenarios.tiny_tokenizer import EOS, write_tokenizer

HANG_S = 60.0


@contextlib.contextmanager
def router(log: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The process; ended at the end, whatever the test did."""
    command = [sys.executable, "-m", "protos.cli", "router", "serve", *arguments, "--log-json"]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


async def get(url: str, path: str, context: ssl.SSLContext, headers: dict[str, str]) -> Reply:
    host, _, port = url.removeprefix("https://").rpartition(":")
    async with asyncio.timeout(HANG_S):
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        try:
            writer.write(request_bytes("GET", path, headers=headers))
            return await read_reply(reader)
        finally:
            writer.close()


async def ready_line(process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    assert process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), HANG_S)
    assert line, log.read_text()
    ready: dict[str, Any] = json.loads(line)
    return ready


async def test_a_router_with_everything_shut_serves_those_it_knows(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model")
    authority = Authority(tmp_path)
    door, client, worker_cert = (authority.issue(name) for name in ("door", "client", "worker"))
    token, tokens, log = new_token(), tmp_path / "tokens.toml", tmp_path / "router.log"
    tokens.write_text(file_lines("team", token))
    tokenizer = Tokenizer(model)
    info = worker_info(tokenizer_digest=tokenizer.digest, vocab_size=tokenizer.vocab_size)
    tokenizer.close()
    worker = FakeWorker(lambda submit: Script([5, EOS]), info)
    worker.tls = ServerTls(worker_cert.cert, worker_cert.key, authority.cert)
    address = await worker.start()
    shown = ClientTls(authority.cert, client.cert, client.key)
    files = {
        "tokens": tokens,
        "tls-cert": door.cert,
        "tls-key": door.key,
        "tls-client-ca": authority.cert,
        "tls-ca": authority.cert,
        "tls-client-cert": client.cert,
        "tls-client-key": client.key,
        "local-socket": tmp_path / "router.sock",
    }
    arguments = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    arguments += ["--worker", address, "--model-dir", str(model), "--listen", "0.0.0.0:0"]
    arguments += ["--metrics", "127.0.0.1:0"]
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(worker.stop)
        process = stack.enter_context(router(log, *arguments))
        ready = await ready_line(process, log)
        grpc_address, url = (ready[key].replace("0.0.0.0", "127.0.0.1") for key in ("address", "http"))
        async with AsyncTailpack(grpc_address, token=token, tls=shown) as caller:
            await answer(caller, "hi")
            assert worker.submits[-1].tenant == "team"
        bearer = {"authorization": f"Bearer {token}"}
        models = await get(url, "/v1/models", client_context(shown), bearer)
        assert models.status == 200 and models.json["data"][0]["id"] == "tiny"
        assert (await get(url, "/v1/models", client_context(shown), {})).status == 401
        with pytest.raises((OSError, EOFError)):
            await get(url, "/v1/models", client_context(ClientTls(authority.cert)), bearer)
        assert (await get(url, "/metrics", client_context(shown), bearer)).status == 404
        own_door = ready["metrics"].removesuffix("/metrics")
        with pytest.raises((OSError, EOFError)):
            await get(own_door, "/metrics", client_context(ClientTls(authority.cert)), {})
        page = (await get(own_door, "/metrics", client_context(shown), {})).body.decode()
        assert 'tailpack_router_requests_total{door="session",outcome="finished"' in page
        (line,) = (
            line for line in page.splitlines() if line.startswith("tailpack_tls_certificate_expires_in_seconds ")
        )
        assert 364 * 86400 < float(line.split()[1]) < 365 * 86400
        async with AsyncTailpack(f"unix:{files['local-socket']}", tenant="operator", retry=ONCE) as local:
            await answer(local, "hi")
            assert worker.submits[-1].tenant == "operator"
        # Renewed, by another authority, on both doors.
        renewed_folder = tmp_path / "renewed"
        renewed_folder.mkdir()
        renewed = Authority(renewed_folder)
        renewed.issue("door").move_to(door)
        shown = ClientTls(renewed.cert, client.cert, client.key)
        async with AsyncTailpack(grpc_address, token=token, tls=shown, retry=ONCE) as caller:
            await answer(caller, "hi")
        assert (await get(url, "/v1/models", client_context(shown), bearer)).status == 200
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, HANG_S) == 0
    told = log.read_text()
    assert "certificate renewed" in told
    assert token not in told
    assert "plain text" not in told  # TLS is on


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tls-cert", "none.pem", "--tls-key", "none.key"], "TLS_FILE_MISSING"),
        (["--tokens", "none.toml"], "TOKENS_FILE_UNREADABLE"),
    ],
)
def test_a_router_that_cannot_be_shut_does_not_start(tmp_path: Path, arguments: list[str], reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        worker = f"127.0.0.1:{nobody.getsockname()[1]}"
        command = [sys.executable, "-m", "protos.cli", "router", "serve", "--worker", worker]
        command += ["--model-dir", str(tmp_path), "--listen", "127.0.0.1:0", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 1
    assert reason in done.stderr and "Traceback" not in done.stderr
