"""All that goes wrong at a router's doors, at once: `python -m tests.load.storm [--full] [--records FILE]`.

Cancelled requests, slow readers, huge bodies, half-open connections, wrong certificates, wrong tokens, and two tenants
who probe each other, over TLS with client certificates and tokens, at the gRPC and the HTTP door; beside them a caller
who behaves. Afterwards nothing may be left, nobody may have seen another's text, and every refusal has its name.
Router, fake workers and callers share one process, so that all they hold can be counted.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import ssl
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import grpc
import psutil

from protos import logs, router_pb2, router_pb2_grpc, rpc, worker_pb2
from protos.errors import DeadlineExceeded, InvalidRequest, NotFound, RequestCancelled
from protos.tls import ClientTls, ServerCertificate, ServerTls
from router import client, find, http_server, relay, requests
from router.auth import Authenticator, file_lines, new_token
from router.client import AsyncTailpack, RetryPolicy, build_request
from router.http import HttpDoor
from router.http_server import HttpServer
from router.tokenizer import Tokenizer
from tests.bench.bench_gil import describe
from tests.certificates import Authority, Issued
from tests.scenarios.fake_worker import Script, worker_info
from tests.scenarios.http_harness import read_chunk, read_head, read_reply, request_bytes
from tests.scenarios.router_harness import Harness, cluster, until
from tests.scenarios.tiny_tokenizer import EOS, write_tokenizer

MARK = "never-in-a-log"  # in every prompt
TENANTS = ("a", "b", "good")
HANG_S = 300.0
"""A bound on what would otherwise hang; nothing is measured by it."""
SETTLE_S = 30.0
MODEL_TOKENS = 100_000


@dataclass(frozen=True)
class Sizes:
    """Of one storm. half_open: sockets of each kind at each door; intruders: of each kind at each door."""

    cancels: int
    slow_readers: int
    bodies: int
    body_bytes: int
    half_open: int
    intruders: int
    probes: int
    handshake_s: float
    at_once: int = 64


SMALL = Sizes(160, 8, 1, 20_000_000, half_open=6, intruders=2, probes=8, handshake_s=4.0)
FULL = Sizes(5000, 100, 8, 50_000_000, half_open=100, intruders=50, probes=500, handshake_s=20.0)


@dataclass
class World:
    """The doors, and what callers need to come through them."""

    harness: Harness
    grpc_address: str
    http_address: tuple[str, int]
    http: HttpServer
    authority: Authority
    client: Issued
    tokens: dict[str, str]
    rng: random.Random
    ends: Counter[str] = field(default_factory=Counter)
    good_s: list[float] = field(default_factory=list)  # of the caller who behaves, per answer

    @property
    def tls(self) -> ClientTls:
        return ClientTls(self.authority.cert, self.client.cert, self.client.key)

    def https(self, shown: Issued | None, ca: Path | None = None) -> ssl.SSLContext:
        """For HTTP. protos.tls would not show an expired certificate."""
        context = ssl.create_default_context(cafile=str(ca or self.authority.cert))
        if shown is not None:
            context.load_cert_chain(shown.cert, shown.key)
        return context

    def credentials(self, shown: Issued | None, ca: Path | None = None) -> grpc.ChannelCredentials:
        """For gRPC; likewise."""
        pair = (shown.key.read_bytes(), shown.cert.read_bytes()) if shown else (None, None)
        return grpc.ssl_channel_credentials((ca or self.authority.cert).read_bytes(), *pair)

    def caller(self, tenant: str) -> AsyncTailpack:
        once = RetryPolicy(max_retries=0)
        return AsyncTailpack(self.grpc_address, token=self.tokens[tenant], tls=self.tls, retry=once)

    @asynccontextmanager
    async def connection(
        self, context: ssl.SSLContext | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """To the HTTP door."""
        async with asyncio.timeout(HANG_S):
            reader, writer = await asyncio.open_connection(*self.http_address, ssl=context or self.https(self.client))
        try:
            yield reader, writer
        finally:
            writer.transport.abort()  # what a server does not read would keep a polite close waiting

    def headers(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.tokens[tenant]}"}


def words_of(tenant: str) -> str:
    return f"only for {tenant}. "


def check_own(tenant: str, text: str) -> None:
    """Whether a tenant was answered with its own words, in full or cut off."""
    own = words_of(tenant) * (len(text) // len(words_of(tenant)) + 1)
    assert own.startswith(text), f"{tenant} was told {text[:200]!r}"


# --- what happens ---


async def cancels(world: World, sizes: Sizes) -> None:
    """Requests that end after 0 to 50 ms in every way that a caller can leave."""
    turns = asyncio.Semaphore(sizes.at_once)

    async def one(client: AsyncTailpack, tenant: str, number: int, way: str, after_s: float) -> None:
        async with turns:
            request_id, text = f"cancel-{number}", ""
            try:
                if way == "http":
                    text = await leave_http(world, tenant, request_id, after_s)
                    end = "left"
                else:
                    limit_s = after_s + 0.001 if way == "deadline" else HANG_S
                    prompt = [5] * (number % 300 + 1)
                    async with aclosing(client.generate(prompt, request_id=request_id, timeout_s=limit_s)) as chunks:
                        ends = time.monotonic() + after_s
                        with suppress(TimeoutError):
                            async with asyncio.timeout_at(asyncio.get_running_loop().time() + after_s):
                                async for chunk in chunks:
                                    text += chunk.text
                        await asyncio.sleep(ends - time.monotonic())
                        if way == "Cancel":
                            await client.cancel(request_id)
                        end = "left"
            except (RequestCancelled, DeadlineExceeded) as error:
                end = error.reason
            check_own(tenant, text)
            world.ends[f"cancel by {way}: {end}"] += 1

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        clients = {tenant: await stack.enter_async_context(world.caller(tenant)) for tenant in ("a", "b")}
        for number in range(sizes.cancels):
            tenant = world.rng.choice(("a", "b"))
            way = world.rng.choice(("leave", "leave", "Cancel", "deadline", "http"))
            group.create_task(one(clients[tenant], tenant, number, way, world.rng.uniform(0, 0.05)))


async def leave_http(world: World, tenant: str, request_id: str, after_s: float) -> str:
    """Begins a streamed completion and cuts the connection; returns what text came."""
    text = ""
    async with world.connection() as (reader, writer):
        headers = world.headers(tenant) | {"x-request-id": request_id}
        body = {"model": "tiny", "prompt": f"{MARK} {tenant}", "stream": True, "max_tokens": 4000}
        writer.write(request_bytes("POST", "/v1/completions", body, headers))
        with suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                status, _ = await read_head(reader)
                assert status == 200, status
                while piece := await read_chunk(reader):
                    for line in piece.decode().splitlines():
                        if line.startswith("data: {"):
                            text += json.loads(line[6:])["choices"][0]["text"]
    return text


async def slow_readers(world: World, sizes: Sizes) -> None:
    """Half of them read a little now and then and leave; the others stop reading, and are ended by name."""
    small_window = [
        ("grpc.http2.lookahead_bytes", 1 << 16),  # else gRPC takes in megabytes that nobody reads
        ("grpc.http2.bdp_probe", 0),
        ("grpc.use_local_subchannel_pool", 1),  # one that does not read holds up what shares its connection
    ]
    workers = world.harness.workers

    async def one(tenant: str, number: int) -> None:
        request_id, text, stuck = f"slow-{number}", "", number % 2 == 1
        async with grpc.aio.secure_channel(
            world.grpc_address, world.credentials(world.client), options=small_window
        ) as channel:
            call = router_pb2_grpc.RouterStub(channel).Generate(
                build_request([5], max_tokens=90_000),
                metadata=rpc.metadata(request_id, token=world.tokens[tenant]),
                timeout=HANG_S,
            )
            try:
                while isinstance(chunk := await call.read(), router_pb2.GenerateResponse):
                    text += chunk.text
                    if not stuck and len(text) > 20_000:
                        break
                    await asyncio.sleep(0 if stuck else 0.05)
                    while stuck and not any(f"{tenant}/{request_id}" in worker.aborts for worker in workers):
                        await asyncio.sleep(0.1)
                end = "left"
            except grpc.RpcError as failure:
                end = rpc.error_from(failure).reason
            call.cancel()
        check_own(tenant, text)
        world.ends[f"{'stuck' if stuck else 'slow'} reader: {end}"] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(sizes.slow_readers):
            group.create_task(one("ab"[number // 2 % 2], number))


async def bodies(world: World, sizes: Sizes) -> None:
    """Huge prompts and bodies, whole, cut off, too large for gRPC, and of callers who have no token."""
    text = (MARK + " word") * (sizes.body_bytes // len(MARK + " word"))
    body = json.dumps({"model": "tiny", "prompt": text}).encode()

    turns = asyncio.Semaphore(3)

    async def by_grpc(what: str, prompt: str, token: str) -> None:
        async with turns, rpc.channel(world.grpc_address, tls=world.tls) as channel:
            call = router_pb2_grpc.RouterStub(channel).Generate(
                router_pb2.GenerateRequest(text=prompt), metadata=rpc.metadata(token=token), timeout=HANG_S
            )
            world.ends[f"body by gRPC, {what}: {await reason_of(call.read())}"] += 1

    async def by_http(what: str, headers: dict[str, str], data: bytes, send: int | None = None) -> None:
        async with turns, world.connection() as (reader, writer):
            sent = request_bytes("POST", "/v1/completions", data, headers)[:send]
            if send is None:
                # Answered before it is read to the end: the answer may come while we still write.
                writer.write(sent)
                reply = await asyncio.wait_for(read_reply(reader), HANG_S)
                world.ends[f"body by HTTP, {what}: {reply.status} {reply.json['error']['code']}"] += 1
            else:
                writer.write(sent)
                await asyncio.sleep(0.2)
                world.ends[f"body by HTTP, {what}: left"] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(sizes.bodies):
            group.create_task(by_grpc("whole", text, world.tokens["a"]))
            group.create_task(by_grpc("wrong token", text, new_token()))
            group.create_task(by_http("whole", world.headers("a"), body))
            group.create_task(by_http("wrong token", {"authorization": f"Bearer {new_token()}"}, body))
            half = json.dumps({"model": "tiny", "prompt": text[: 8 << 20]}).encode()  # of a size that is allowed
            group.create_task(by_http("cut off", world.headers("a"), half, send=len(half) // 2))
        over = text * ((rpc.MAX_MESSAGE_BYTES + 1) // len(text) + 1)
        group.create_task(by_grpc("over gRPC's limit", over, world.tokens["a"]))


async def reason_of(call: Coroutine[Any, Any, Any]) -> str:
    try:
        await call
    except grpc.RpcError as failure:
        return rpc.error_from(failure).reason
    return "answered"


async def half_open(world: World, sizes: Sizes) -> None:
    """Sockets that say nothing, or half of something, until the server has enough of them."""
    hello = bytes.fromhex("1603010200010001fc0303")  # the beginning of a TLS ClientHello
    address = world.grpc_address.rpartition(":")
    doors = {"gRPC": (address[0], int(address[2])), "HTTP": world.http_address}
    within_tls = {"gRPC": b"PRI * HTTP/2.0\r\n\r\nSM", "HTTP": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-half"}

    turns = asyncio.Semaphore(16)  # they share an event loop with the server, whose clock runs while they shake hands

    async def one(door: str, what: str, said: bytes, context: ssl.SSLContext | None) -> None:
        async with turns:
            began = time.monotonic()
            reader, writer = await asyncio.open_connection(*doors[door], ssl=context)
        try:
            writer.write(said)
            async with asyncio.timeout(10 * sizes.handshake_s):
                with suppress(ConnectionError, ssl.SSLError):
                    await reader.read()
        finally:
            writer.transport.abort()
        assert time.monotonic() - began > sizes.handshake_s / 2, "a caller on a slow line would have been cut off"
        world.ends[f"half-open at {door}, {what}: closed by the server"] += 1

    context = world.https(world.client)
    of_grpc = world.https(world.client)
    of_grpc.set_alpn_protocols(["h2"])
    async with asyncio.TaskGroup() as group:
        for door, said in within_tls.items():
            secure = of_grpc if door == "gRPC" else context
            for _ in range(sizes.half_open):
                group.create_task(one(door, "silent", b"", None))
                group.create_task(one(door, "half a TLS hello", hello, None))
                group.create_task(one(door, "silent inside TLS", b"", secure))
                group.create_task(one(door, "half a head inside TLS", said, secure))


async def intruders(world: World, sizes: Sizes, folder: Path) -> None:
    """Wrong certificates and wrong tokens, at both doors."""
    foreign_folder = folder / "foreign"
    foreign_folder.mkdir()
    foreign = Authority(foreign_folder)  # of the same name
    expired = world.authority.issue("expired", from_day=-3, to_day=-1)
    certificates: dict[str, tuple[Issued | None, Authority]] = {
        "no certificate": (None, world.authority),
        "a foreign certificate": (foreign.issue("client"), world.authority),
        "an expired certificate": (expired, world.authority),
        "trusts another authority": (world.client, foreign),
    }
    good, stranger = world.tokens["a"], new_token()
    tokens: dict[str, dict[str, str]] = {
        "no token": {},
        "a malformed token": {"authorization": "Bearer letmein"},
        "an unknown token": {"authorization": f"Bearer {stranger}"},
        "another's tenant": {"authorization": f"Bearer {good}", "x-tenant": "b"},
    }

    async def by_grpc(what: str, credentials: grpc.ChannelCredentials | None, sent: dict[str, str]) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = (
            grpc.aio.secure_channel(world.grpc_address, credentials, options=options)
            if credentials
            else grpc.aio.insecure_channel(world.grpc_address, options=options)
        )
        async with channel:
            call = router_pb2_grpc.RouterStub(channel).Generate(
                router_pb2.GenerateRequest(text=MARK), metadata=tuple(sent.items()), timeout=HANG_S
            )
            world.ends[f"{what} at gRPC: {await reason_of(call.read())}"] += 1

    async def by_http(what: str, context: ssl.SSLContext, sent: dict[str, str]) -> None:
        try:
            async with world.connection(context) as (reader, writer):
                writer.write(request_bytes("POST", "/v1/completions", {"model": "tiny", "prompt": MARK}, sent))
                reply = await asyncio.wait_for(read_reply(reader), HANG_S)
                end = f"{reply.status} {reply.json['error']['code']}"
        except ssl.SSLCertVerificationError:
            end = "SERVER_CERTIFICATE_REFUSED"
        except (OSError, EOFError):
            end = "CONNECTION_CLOSED"
        world.ends[f"{what} at HTTP: {end}"] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(sizes.intruders):
            for what, (shown, ca) in certificates.items():
                with_token = {"authorization": f"Bearer {good}"}
                group.create_task(by_grpc(what, world.credentials(shown, ca.cert), with_token))
                group.create_task(by_http(what, world.https(shown, ca.cert), with_token))
            group.create_task(by_grpc("plain text", None, {"authorization": f"Bearer {good}"}))
            for what, sent in tokens.items():
                group.create_task(by_grpc(what, world.credentials(world.client), sent))
                group.create_task(by_http(what, world.https(world.client), sent))


async def probes(world: World, sizes: Sizes) -> None:
    """b does its worst to a's requests, whose ids it knows; a's answers are whole all the same."""

    async def victim(client: AsyncTailpack, number: int, running: asyncio.Event) -> None:
        text = ""
        async for chunk in client.generate([5] * 20, request_id=f"probed-{number}", max_tokens=60, resumable=True):
            text += chunk.text
            running.set()
        check_own("a", text)
        assert text == words_of("a") * 4, text
        world.ends["probed request: whole"] += 1

    async def prober(client: AsyncTailpack, number: int, running: asyncio.Event) -> None:
        await running.wait()
        request_id = f"probed-{number}"
        for spelt in (request_id, f"absent-{number}", f"a/{request_id}"):
            try:
                world.ends[f"probe by Cancel: found {await client.cancel(spelt)}"] += 1
            except InvalidRequest as error:
                world.ends[f"probe by Cancel: {error.reason}"] += 1
            try:
                async for _ in client.resume(spelt, token_offset=0, text_offset=0):
                    raise AssertionError("somebody else's answer")
            except (NotFound, InvalidRequest) as error:
                world.ends[f"probe by Resume: {error.reason}"] += 1
        text = ""
        async for chunk in client.generate([5] * 20, request_id=request_id, max_tokens=60):
            text += chunk.text
        assert text == words_of("b") * 4, text
        world.ends["probe by the same id: own answer"] += 1

    async with world.caller("a") as a, world.caller("b") as b:
        for first in range(0, sizes.probes, 8):
            async with asyncio.TaskGroup() as group:
                for number in range(first, min(first + 8, sizes.probes)):
                    running = asyncio.Event()
                    group.create_task(victim(a, number, running))
                    group.create_task(prober(b, number, running))


async def behave(world: World, stop: asyncio.Event) -> None:
    """Small requests, one after another, at both doors; each must be answered in full, whatever goes on around it."""
    async with world.caller("good") as client:
        while not stop.is_set():
            began = time.monotonic()
            answer = await client.complete(f"{MARK} hi", max_tokens=100, timeout_s=HANG_S)
            assert answer.text == words_of("good") * 4, answer.text
            world.good_s.append(time.monotonic() - began)
            async with world.connection() as (reader, writer):
                body = {"model": "tiny", "prompt": MARK, "max_tokens": 100}
                writer.write(request_bytes("POST", "/v1/completions", body, world.headers("good")))
                reply = await asyncio.wait_for(read_reply(reader), HANG_S)
                assert reply.status == 200, reply.body
                assert reply.json["choices"][0]["text"] == words_of("good") * 4
            await asyncio.sleep(0.05)
    world.ends["well-behaved request: answered"] += 2 * len(world.good_s)


# --- the world, and what must be so afterwards ---


def scripts(tokenizer: Tokenizer, sizes: Sizes) -> Callable[[worker_pb2.Submit], Script]:
    words = {tenant: tokenizer.encode(words_of(tenant)) for tenant in TENANTS}

    def script(submit: worker_pb2.Submit) -> Script:
        own = words[submit.tenant]
        match submit.request_id.partition("/")[2].partition("-")[0]:
            case "cancel":
                return Script(own, endless=True, first_s=0.0001 * (len(submit.prompt_token_ids) % 300), every_s=0.002)
            case "slow":
                # Whole words in each step, so that a step's text is words of its tenant.
                return Script(own, endless=True, per_step=40 * len(own), every_s=0.02 * (sizes.slow_readers / 8) ** 1.5)
            case "probed":
                return Script([*own * 4, EOS], every_s=0.002)
        return Script([*own * 4, EOS], per_step=len(own))

    return script


@contextmanager
def limits(sizes: Sizes) -> Iterator[None]:
    """Those of the doors, where a small storm cannot wait as long."""
    with (
        patch.object(rpc, "HANDSHAKE_TIMEOUT_MS", int(sizes.handshake_s * 1000)),
        patch.object(http_server, "TLS_HANDSHAKE_TIMEOUT_S", sizes.handshake_s),
        patch.object(http_server, "HEAD_TIMEOUT_S", sizes.handshake_s),
        # Callers, router and workers share one event loop: what is slow to answer is still there.
        patch.object(client, "UNARY_TIMEOUT_S", HANG_S),
        patch.object(requests, "CANCEL_TIMEOUT_S", HANG_S),
        patch.object(find, "FIND_TIMEOUT_S", HANG_S),
        patch.object(relay, "MAX_PENDING_BYTES", 1 << 16),  # fake workers are too slow to fill 4 MB of many
    ):
        yield


@asynccontextmanager
async def world_of(folder: Path, sizes: Sizes, seed: int) -> AsyncIterator[World]:
    """Doors with TLS, client certificates and tokens, in front of two workers with TLS."""
    model = write_tokenizer(folder / "model")
    authority = Authority(folder)
    door, shown = authority.issue("door"), authority.issue("client")
    tls = ServerTls(door.cert, door.key, authority.cert)
    tokens = {tenant: new_token() for tenant in TENANTS}
    file = folder / "tokens.toml"
    file.write_text("\n".join(file_lines(tenant, token) for tenant, token in tokens.items()))
    authenticator = Authenticator(file)
    tokenizer = Tokenizer(model)
    infos = [
        worker_info(
            tokenizer_digest=tokenizer.digest, vocab_size=tokenizer.vocab_size, max_sequence_tokens=MODEL_TOKENS
        )
        for _ in range(2)
    ]
    with limits(sizes):
        async with cluster(
            model,
            scripts(tokenizer, sizes),
            infos=infos,
            tokens=authenticator,
            tls=tls,
            worker_tls=(tls, ClientTls(authority.cert, shown.cert, shown.key)),
        ) as harness:
            http = HttpServer(
                HttpDoor(harness.requests, tenant_of=authenticator.tenant_of), ServerCertificate(tls).ssl_context()
            )
            url = await http.start("127.0.0.1:0")
            host, _, port = url.removeprefix("https://").rpartition(":")
            try:
                yield World(
                    harness, harness.address, (host, int(port)), http, authority, shown, tokens, random.Random(seed)
                )
            finally:
                await http.stop()
                tokenizer.close()


def held(world: World) -> list[str]:
    """What is left of anybody's requests and connections, in words; empty when all is clean."""
    harness = world.harness
    left, admission = harness.nothing_left(), harness.requests.admission
    if admission.held_bytes:
        left.append(f"{admission.held_bytes} bytes of requests")
    left += [f"tenant {tenant}: {use}" for tenant, use in harness.requests.tenants.in_use().items()]
    if connections := len(world.http._server.server_state.connections):
        left.append(f"{connections} HTTP connections")
    if (
        reading := world.http._config.app.num_reading_bytes
        if hasattr(world.http._config.app, "num_reading_bytes")
        else 0
    ):
        left.append(f"{reading} bytes of bodies")
    counters = harness.requests.counters
    ended = counters.finished + counters.cancelled + counters.failed + counters.rejected
    if counters.requests != ended:
        left.append(f"{counters.requests} requests, of which {ended} ended")
    return left


def resources() -> tuple[int, int]:
    """(descriptors, tasks) of this process."""
    gc.collect()
    return psutil.Process().num_fds(), len(asyncio.all_tasks())


@dataclass
class Outcome:
    ends: Counter[str]
    good_s: list[float]
    took_s: float
    rss_before: int
    rss_peak: int
    rss_after: int
    tokens: list[str]


async def storm(folder: Path, sizes: Sizes, seed: int) -> Outcome:
    """Runs it all at once, then waits for everything to be given back. Raises AssertionError for what is not so."""
    process = psutil.Process()
    async with world_of(folder, sizes, seed) as world:
        stop = asyncio.Event()
        stop.set()
        await behave(world, stop)  # what is made once is made
        fds_before, tasks_before = resources()
        rss_before = rss_peak = process.memory_info().rss
        stop.clear()

        async def watch() -> None:
            nonlocal rss_peak
            while True:
                rss_peak = max(rss_peak, process.memory_info().rss)
                await asyncio.sleep(0.1)

        began = time.monotonic()
        watching, good = asyncio.create_task(watch()), asyncio.create_task(behave(world, stop))
        async with asyncio.TaskGroup() as group:
            group.create_task(cancels(world, sizes))
            group.create_task(slow_readers(world, sizes))
            group.create_task(bodies(world, sizes))
            group.create_task(half_open(world, sizes))
            group.create_task(intruders(world, sizes, folder))
            group.create_task(probes(world, sizes))
        stop.set()
        await good
        watching.cancel()
        took_s = time.monotonic() - began
        await until(lambda: not held(world), SETTLE_S, lambda: held(world))
        del watching, good
        await until(
            lambda: resources()[0] <= fds_before, SETTLE_S, lambda: f"descriptors {fds_before} -> {resources()}"
        )
        await until(
            lambda: resources()[1] <= tasks_before, SETTLE_S, lambda: [t.get_name() for t in asyncio.all_tasks()]
        )
        return Outcome(
            world.ends,
            world.good_s,
            took_s,
            rss_before,
            rss_peak,
            process.memory_info().rss,
            list(world.tokens.values()),
        )


def expected(sizes: Sizes) -> dict[str, int]:
    """How many must end in each way; of the cancelled ones only their sum is certain."""
    n, doors = sizes.intruders, ("gRPC", "HTTP")
    return {
        "slow reader: left": sizes.slow_readers // 2,
        "stuck reader: SLOW_READER": sizes.slow_readers // 2,
        "body by gRPC, whole: PROMPT_TOO_LARGE": sizes.bodies,
        "body by gRPC, wrong token: TOKEN_UNKNOWN": sizes.bodies,
        "body by gRPC, over gRPC's limit: TOO_LARGE": 1,
        "body by HTTP, whole: 413 BODY_TOO_LARGE": sizes.bodies,
        "body by HTTP, wrong token: 401 TOKEN_UNKNOWN": sizes.bodies,
        "body by HTTP, cut off: left": sizes.bodies,
        **{
            f"half-open at {door}, {what}: closed by the server": sizes.half_open
            for door in doors
            for what in ("silent", "half a TLS hello", "silent inside TLS", "half a head inside TLS")
        },
        **{
            f"{what} at {door}: CONNECTION_CLOSED": n
            for door in doors
            for what in ("no certificate", "a foreign certificate", "an expired certificate")
        },
        **{f"trusts another authority at {door}: SERVER_CERTIFICATE_REFUSED": n for door in doors},
        "plain text at gRPC: CONNECTION_CLOSED": n,
        **{
            f"{what} at {door}: {status}{reason}": n
            for door, codes in (("gRPC", ("", "", "", "")), ("HTTP", ("401 ", "401 ", "401 ", "403 ")))
            for status, (what, reason) in zip(
                codes,
                (
                    ("no token", "TOKEN_MISSING"),
                    ("a malformed token", "TOKEN_MALFORMED"),
                    ("an unknown token", "TOKEN_UNKNOWN"),
                    ("another's tenant", "TENANT_MISMATCH"),
                ),
                strict=True,
            )
        },
        "probed request: whole": sizes.probes,
        "probe by Cancel: found False": 2 * sizes.probes,
        "probe by Cancel: BAD_REQUEST_ID": sizes.probes,
        "probe by Resume: UNKNOWN_REQUEST": 2 * sizes.probes,
        "probe by Resume: BAD_REQUEST_ID": sizes.probes,
        "probe by the same id: own answer": sizes.probes,
    }


def check(sizes: Sizes, ends: Counter[str]) -> None:
    """Every caller ended in the way that it had to."""
    left = Counter(ends)
    for end, number in expected(sizes).items():
        assert left.pop(end, 0) == number, f"{end}: {ends[end]}, not {number}; all: {dict(ends)}"
    cancelled = {end: left.pop(end) for end in list(left) if end.startswith("cancel by ")}
    assert sum(cancelled.values()) == sizes.cancels, cancelled
    assert left.pop("well-behaved request: answered") > 0
    assert not left, left


def records(sizes: Sizes, outcome: Outcome, command: str) -> list[dict[str, Any]]:
    """Lines of a record: how each kind of caller ended, what the well-behaved one waited, what memory it took."""
    common = describe(command)
    good = sorted(outcome.good_s)
    figures: list[tuple[str, float, str, dict[str, Any]]] = [
        ("took", round(outcome.took_s, 1), "s", {"sizes": asdict(sizes)}),
        *((end, number, "callers", {}) for end, number in sorted(outcome.ends.items())),
        (
            "well-behaved answer, gRPC",
            round(1000 * good[len(good) // 2], 1),
            "ms",
            {"spread": [round(1000 * good[0], 1), round(1000 * good[-1], 1)], "repeats": len(good)},
        ),
        ("memory before", outcome.rss_before >> 20, "MiB", {}),
        ("memory at most", outcome.rss_peak >> 20, "MiB", {"what": "router, workers and all callers in one process"}),
        ("memory after", outcome.rss_after >> 20, "MiB", {}),
    ]
    return [
        {"bench": "storm", "case": case, "value": value, "unit": unit, **more, **common}
        for case, value, unit, more in figures
    ]


@click.command()
@click.option("--full", is_flag=True, help="5,000 cancels, 100 slow readers, 50 MB bodies; else as the tests have it.")
@click.option("--seed", type=int, help="Of an earlier storm.")
@click.option("--records", "file", type=click.Path(path_type=Path), help="Write the lines here as well.")
def main(full: bool, seed: int | None, file: Path | None) -> None:
    """Raise a storm; print one record a line. Fails when something is left, or an end has the wrong name."""
    logs.configure("storm", level="error")
    sizes = FULL if full else SMALL
    seed = random.randrange(1 << 32) if seed is None else seed
    click.echo(f"seed {seed}", err=True)
    with tempfile.TemporaryDirectory(prefix="tp-") as folder:
        outcome = rpc.run(storm(Path(folder), sizes, seed))
    check(sizes, outcome.ends)
    command = f"python -m tests.load.storm{' --full' if full else ''} --seed {seed}"
    lines = [json.dumps(line) for line in records(sizes, outcome, command)]
    for line in lines:
        click.echo(line)
    if file is not None:
        file.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
