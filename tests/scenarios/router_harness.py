"""A router in this process, in front of fake workers, on real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from protos import kserve_pb2_grpc, router_pb2, router_pb2_grpc, rpc, types_pb2, worker_pb2
from protos.tls import ClientTls, ServerTls
from router.admission import DEFAULT_MAX_REQUEST_BYTES
from router.auth import Authenticator
from router.client import AsyncTailpack, RetryPolicy
from router.kserve import SERVICE_NAME as KSERVE_NAME
from router.kserve import KserveService
from router.requests import Requests
from router.service import SERVICE_NAME, RouterService
from router.tenants import NO_LIMITS
from router.tokenizer import Tokenizer
from tests.scenarios.fake_worker import FakeWorker, Script, worker_info

ROOT = Path(__file__).resolve().parents[2]
RECOVER_WAIT_S = 0.3
ONCE = RetryPolicy(max_retries=0)  # these tests look at what routers say


@dataclass
class Harness:
    requests: Requests
    workers: list[FakeWorker]
    address: str
    client: AsyncTailpack
    tokenizer: Tokenizer

    def nothing_left(self) -> list[str]:
        """What is still held somewhere; empty when all is clean."""
        left = []
        if self.requests.admission.num_in_flight:
            left.append(f"router: {self.requests.admission.num_in_flight} in flight")
        for link in self.requests.registry.links.values():
            own = (link.own.num_sequences, link.own.queued_tokens, link.own.num_pages)
            if any(own) or link.num_known or link.num_stray_outputs:
                left.append(f"{link.address}: own {own}, known {link.num_known}, stray {link.num_stray_outputs}")
        if self.requests.unread.num_bytes:
            left.append(f"router: {self.requests.unread.num_bytes} bytes unread")
        left += [f"{worker.address}: {list(worker.active)}" for worker in self.workers if worker.active]
        return left

    async def settled(self, timeout_s: float = 60.0) -> None:
        """Waits until nothing is left; fails with what is."""
        await until(lambda: not self.nothing_left(), timeout_s, self.nothing_left)


async def until(condition: Callable[[], object], timeout_s: float = 60.0, why: Callable[[], Any] = lambda: "") -> None:
    """Polls a condition of this process; bounded."""
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, f"not within {timeout_s} s: {why()}"
        await asyncio.sleep(0.002)


@asynccontextmanager
async def cluster(
    folder: Path,
    script: Callable[[worker_pb2.Submit], Script] | Script,
    *,
    num_workers: int = 1,
    infos: list[types_pb2.WorkerInfo] | None = None,
    addresses: list[str] | None = None,
    max_in_flight: int = 4096,
    max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES,
    tokens: Authenticator | None = None,
    tls: ServerTls | None = None,
    worker_tls: tuple[ServerTls, ClientTls] | None = None,
    client: Mapping[str, Any] = MappingProxyType({}),
    wait: bool = True,
    **settings: Any,
) -> AsyncIterator[Harness]:
    """Router and workers; all end with the block.

    Args:
        addresses: further workers, started by the test.
        worker_tls: of the workers' doors, and of the router that calls there.
        client: what the harness's client is made with besides.
        settings: what the router's Requests are made with besides.
    """
    scripted = (lambda submit: script) if isinstance(script, Script) else script
    tokenizer = Tokenizer(folder)
    if infos is None:
        infos = [_info(tokenizer) for _ in range(num_workers)]
    workers = [FakeWorker(scripted, info) for info in infos]
    to_workers = None
    if worker_tls is not None:
        of_workers, to_workers = worker_tls
        for worker in workers:
            worker.tls = of_workers
    started = [await worker.start() for worker in workers]
    requests = Requests(
        tokenizer,
        [*started, *(addresses or [])],
        max_in_flight=max_in_flight,
        max_request_bytes=max_request_bytes,
        worker_tls=to_workers,
        limits_of=tokens.limits_of if tokens else lambda tenant: NO_LIMITS,
        **{"recover_wait_s": RECOVER_WAIT_S, **settings},
    )
    server = rpc.RpcServer("router", tls=tls, tenant_of=tokens.tenant_of if tokens else None)
    server.add(router_pb2_grpc.add_RouterServicer_to_server, RouterService(requests), SERVICE_NAME)
    server.add(kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server, KserveService(requests), KSERVE_NAME)
    address = await server.start("127.0.0.1:0")
    requests.start()
    try:
        async with AsyncTailpack(address, **{"retry": ONCE, **client}) as caller:
            harness = Harness(requests, workers, address, caller, tokenizer)
            if wait:
                expected = len(started) + len(addresses or [])
                await until(lambda: len(requests.registry.ready()) == expected)
            yield harness
    finally:
        await server.stop(0)
        await requests.close()
        for worker in workers:
            await worker.stop()


def _info(tokenizer: Tokenizer) -> types_pb2.WorkerInfo:
    return worker_info(tokenizer_digest=tokenizer.digest, vocab_size=tokenizer.vocab_size)


@dataclass
class Answer:
    """All chunks of an answer, put together, with the offsets checked."""

    chunks: list[router_pb2.GenerateResponse]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk.token_ids]

    @property
    def last(self) -> router_pb2.GenerateResponse:
        return self.chunks[-1]

    def check(self) -> Answer:
        """Offsets leave no gap; only the last chunk has an end."""
        text_offset = token_offset = 0
        for chunk in self.chunks:
            assert (chunk.text_offset, chunk.token_offset) == (text_offset, token_offset)
            text_offset += len(chunk.text.encode())
            token_offset += len(chunk.token_ids)
        ends = [bool(chunk.finish_reason) for chunk in self.chunks]
        assert ends == [False] * (len(ends) - 1) + [True]
        assert self.last.usage.output_tokens == token_offset
        assert len({chunk.request_id for chunk in self.chunks}) == 1
        return self


async def answer(client: AsyncTailpack, prompt: Any, **parameters: Any) -> Answer:
    """The whole answer to a prompt."""
    return Answer([chunk async for chunk in client.generate(prompt, **parameters)]).check()


class Process:
    """A process of our own that says {"address": ...} on its first line; ended by pid."""

    def __init__(self, *arguments: str, stderr: Any = subprocess.DEVNULL) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
        )

    def address(self) -> str:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"the process ended with {self.popen.wait(60)}"
        return str(json.loads(line)["address"])

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(60)
        for stream in (self.popen.stdout, self.popen.stderr):
            if stream is not None:
                stream.close()


def fake_worker_process(*arguments: str) -> Process:
    return Process("tests/scenarios/fake_worker.py", *arguments)
