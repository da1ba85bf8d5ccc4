"""Tenants at the router's gRPC door: who is let in, what each may take, and that they see nothing of each other."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from protos import errors, router_pb2, router_pb2_grpc, rpc
from protos.tls import ClientTls, ServerTls
from router import registry
from router.auth import Authenticator, file_lines, new_token
from router.client import AsyncTailpack
from router.tenants import TenantUse
from tests.certificates import Authority
from tests.scenarios.fake_worker import Script
from tests.scenarios.router_harness import ONCE, Harness, answer, cluster, until
from tests.scenarios.tiny_tokenizer import EOS

HANG_S = 60.0
"""A bound on what would otherwise hang; nothing is measured by it."""

ENDLESS = Script([5, 6], endless=True, every_s=0.002)
TOKENS = {tenant: new_token() for tenant in ("a", "b")}


def tokens_file(path: Path, **limits: Mapping[str, int]) -> Authenticator:
    lines = []
    for tenant, token in TOKENS.items():
        lines += [file_lines(tenant, token), *(f"{name} = {value}" for name, value in limits.get(tenant, {}).items())]
    file = path / "tokens.toml"
    file.write_text("\n".join(lines))
    return Authenticator(file)


def as_tenant(it: Harness, token: str | None, **settings: Any) -> AsyncTailpack:
    return AsyncTailpack(it.address, token=token, retry=ONCE, **settings)


async def refused(client: AsyncTailpack, prompt: Any = "hi", **parameters: Any) -> errors.TailpackError:
    with pytest.raises(errors.TailpackError) as caught:
        async for _ in client.generate(prompt, **parameters):
            pass
    return caught.value


# --- who is let in ---


async def test_a_token_names_the_tenant(folder: Path, tmp_path: Path) -> None:
    async with cluster(folder, Script([5, EOS]), tokens=tokens_file(tmp_path)) as it:
        with capture_logs() as logs:
            for tenant, token in TOKENS.items():
                async with as_tenant(it, token) as client:
                    await answer(client, "hi")
                    assert it.workers[0].submits[-1].tenant == tenant
                    assert (await client.stats()).finished
        assert {line["tenant"] for line in logs if line["event"] == "request"} == set(TOKENS)
        assert not any(token in str(logs) for token in TOKENS.values())


async def test_others_are_refused_by_name_on_every_method_before_their_message_is_read(
    folder: Path, tmp_path: Path
) -> None:
    async with (
        cluster(folder, Script([5, EOS]), tokens=tokens_file(tmp_path)) as it,
        rpc.channel(it.address) as channel,
    ):
        stub = router_pb2_grpc.RouterStub(channel)
        no_message: Any = channel.stream_stream("/tailpack.v1.Router/Generate")
        cancel_raw: Any = channel.unary_unary("/tailpack.v1.Router/Cancel")
        with capture_logs() as logs:
            for sent, reason, status in (
                ((), "TOKEN_MISSING", grpc.StatusCode.UNAUTHENTICATED),
                (rpc.metadata(tenant="a"), "TOKEN_MISSING", grpc.StatusCode.UNAUTHENTICATED),
                ((("authorization", "Bearer x"),), "TOKEN_MALFORMED", grpc.StatusCode.UNAUTHENTICATED),
                (rpc.metadata(token=new_token()), "TOKEN_UNKNOWN", grpc.StatusCode.UNAUTHENTICATED),
                (rpc.metadata(token=TOKENS["a"], tenant="b"), "TENANT_MISMATCH", grpc.StatusCode.PERMISSION_DENIED),
                (
                    rpc.metadata(token=TOKENS["a"]) + rpc.metadata(token=TOKENS["b"]),
                    "INVALID_REQUEST",
                    grpc.StatusCode.INVALID_ARGUMENT,
                ),
            ):
                calls: list[Any] = [
                    stub.Generate(router_pb2.GenerateRequest(text="hi"), metadata=sent).read(),
                    stub.Resume(router_pb2.ResumeRequest(request_id="r"), metadata=sent).read(),
                    stub.Cancel(router_pb2.CancelRequest(request_id="r"), metadata=sent),
                    stub.Stats(router_pb2.StatsRequest(), metadata=sent),
                    stub.ListWorkers(router_pb2.ListWorkersRequest(), metadata=sent),
                    no_message(metadata=sent, timeout=HANG_S).read(),  # an answer to what was never sent
                    cancel_raw(b"\xff\xff", metadata=sent),  # UNREADABLE_MESSAGE, had anybody looked at it
                ]
                for call in calls:
                    with pytest.raises(grpc.RpcError) as caught:
                        await call
                    error = rpc.error_from(caught.value)
                    assert (error.reason, rpc.status_of(error)) == (reason, status)
                    assert not any(token in str(caught.value) for token in TOKENS.values())
        assert not [line for line in logs if line["event"] == "request"]
        assert it.requests.counters.requests == 0 and not it.workers[0].submits


async def test_health_and_reflection_need_no_token(folder: Path, tmp_path: Path) -> None:
    async with (
        cluster(folder, Script([5, EOS]), tokens=tokens_file(tmp_path)) as it,
        rpc.channel(it.address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        services = {service.name for service in (await listing.read()).list_services_response.service}
        assert "tailpack.v1.Router" in services
        listing.cancel()


async def test_without_a_tokens_file_callers_are_taken_at_their_word(folder: Path) -> None:
    async with cluster(folder, Script([5, EOS])) as it, as_tenant(it, TOKENS["a"], tenant="b") as client:
        await answer(client, "hi")
        assert it.workers[0].submits[-1].tenant == "b"


# --- request ids are each tenant's own ---


async def test_a_tenant_s_request_ids_are_invisible_to_others(folder: Path, tmp_path: Path) -> None:
    async with (
        cluster(folder, ENDLESS, tokens=tokens_file(tmp_path)) as it,
        as_tenant(it, TOKENS["a"]) as a,
        as_tenant(it, TOKENS["b"]) as b,
        aclosing(a.generate("hi", request_id="mine")) as running,
    ):
        await anext(running)
        assert not await b.cancel("mine")
        with pytest.raises(errors.InvalidRequest, match="BAD_REQUEST_ID"):
            await b.cancel("a/mine")
        error = await refused(a, request_id="mine")
        assert error.reason == "DUPLICATE_REQUEST"
        async with aclosing(b.generate("hi", request_id="mine")) as same_id:  # no collision that would tell
            await anext(same_id)
            assert await b.cancel("mine")
            assert [chunk async for chunk in same_id][-1].finish_reason
        assert (await anext(running)).token_ids
        assert await a.cancel("mine")
    assert it.nothing_left() == []


# --- limits ---


async def test_a_tenant_at_its_limit_of_requests_waits_and_others_do_not(folder: Path, tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path, a={"max_requests": 2})
    async with (
        cluster(folder, ENDLESS, tokens=tokens) as it,
        as_tenant(it, TOKENS["a"]) as a,
        as_tenant(it, TOKENS["b"]) as b,
    ):
        async with aclosing(a.generate("hi")) as first, aclosing(a.generate("hi")) as second:
            await anext(first)
            await anext(second)
            error = await refused(a)
            assert (error.reason, error.allowed) == ("TENANT_LIMIT_REQUESTS", "2")
            assert isinstance(error, errors.CapacityError) and error.retry_after_ms
            async with aclosing(b.generate("hi")) as other:
                await anext(other)
            assert it.requests.tenants.in_use()["a"].num_requests == 2
        await it.settled()
        async with aclosing(a.generate("hi")) as again:
            await anext(again)
        await until(lambda: not it.requests.tenants.in_use(), why=it.requests.tenants.in_use)


async def test_bytes_of_a_tenant_are_limited_and_given_back(folder: Path, tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path, a={"max_request_bytes": 3000})
    async with cluster(folder, ENDLESS, tokens=tokens) as it, as_tenant(it, TOKENS["a"]) as a:
        async with aclosing(a.generate([5] * 1000)) as running:
            await anext(running)
            held = it.requests.tenants.in_use()["a"].num_bytes
            assert held == it.requests.admission.held_bytes > 1000
            error = await refused(a, [5] * 2500)
            assert error.reason == "TENANT_LIMIT_BYTES" and error.retry_after_ms
            error = await refused(a, [5] * 3500)
            assert error.reason == "TENANT_LIMIT_BYTES" and error.retry_after_ms is None
            assert it.requests.tenants.in_use()["a"] == TenantUse(1, held, None)
        await until(lambda: not it.requests.tenants.in_use())


async def test_tokens_a_minute_count_prompts_and_outputs(folder: Path, tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path, a={"tokens_per_minute": 1_000})
    script = Script([5, 6], endless=True, per_step=50)
    async with cluster(folder, script, tokens=tokens) as it, as_tenant(it, TOKENS["a"]) as a:
        began = time.monotonic()
        await answer(a, [5] * 500, max_tokens=200)
        left = it.requests.tenants.in_use()["a"].tokens_left
        refilled = 20 + (time.monotonic() - began) * 1_000 / 60  # while this test runs
        assert left == pytest.approx(1_000 - 700, abs=refilled)
        error = await refused(a, [5] * 600)
        assert error.reason == "TENANT_LIMIT_TOKENS"
        refilled = 20 + (time.monotonic() - began) * 1_000 / 60
        assert error.retry_after_ms == pytest.approx((600 - 300) * 60, abs=60 * refilled)
        await answer(a, [5] * 200, max_tokens=1)  # smaller ones fit
        it.workers[0].refuse_new = errors.CapacityError("full", reason="QUEUE_FULL")
        before = it.requests.tenants.in_use()["a"].tokens_left
        assert before is not None
        assert (await refused(a, [5] * 50)).reason == "QUEUE_FULL"
        after = it.requests.tenants.in_use()["a"].tokens_left
        assert after is not None and after >= before  # what no worker took is given back


# --- router and workers ---


async def test_router_and_worker_know_each_other_by_certificates(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_BACKOFF_S", 0.05)
    monkeypatch.setattr(registry, "REFUSED_RETRY_S", 0.05)
    authority, foreign_folder = Authority(tmp_path), tmp_path / "foreign"
    foreign_folder.mkdir()
    worker, router = authority.issue("worker"), authority.issue("router")
    foreign = Authority(foreign_folder).issue("router")
    tls = (
        ServerTls(worker.cert, worker.key, authority.cert),
        ClientTls(authority.cert, foreign.cert, foreign.key),
    )
    async with cluster(folder, Script([5, EOS]), worker_tls=tls, wait=False) as it:
        (link,) = it.requests.registry.links.values()
        await until(lambda: "closed the connection" in link.why, why=lambda: link.why)
        assert (await refused(it.client)).reason == "NO_WORKER"
        foreign.cert.write_text("broken")  # says so, and goes on trying
        await until(lambda: link.state == "refused", why=lambda: link.why)
        assert "TLS_BAD_CERTIFICATE" in link.why
        router.move_to(foreign)  # the next connection reads it
        await until(lambda: link.state == "ready", why=lambda: link.why)
        await answer(it.client, "hi")


async def test_tokens_and_certificates_together(folder: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    door, caller = authority.issue("door"), authority.issue("caller")
    tls = ServerTls(door.cert, door.key, authority.cert)
    shown = ClientTls(authority.cert, caller.cert, caller.key)
    async with cluster(
        folder, Script([5, EOS]), tokens=tokens_file(tmp_path), tls=tls, client={"tls": shown, "token": TOKENS["a"]}
    ) as it:
        await answer(it.client, "hi")
        for settings, reason in (
            ({"tls": shown}, "TOKEN_MISSING"),
            ({"tls": ClientTls(authority.cert), "token": TOKENS["a"]}, "CONNECTION_CLOSED"),
            ({"token": TOKENS["a"]}, "CONNECTION_CLOSED"),
        ):
            async with AsyncTailpack(it.address, retry=ONCE, **settings) as client:
                assert (await refused(client)).reason == reason


async def test_a_caller_without_a_tenant_cannot_spell_another_s_request(folder: Path) -> None:
    async with (
        cluster(folder, ENDLESS) as it,
        as_tenant(it, None, tenant="a") as a,
        aclosing(a.generate("hi", request_id="mine")) as running,
    ):
        await anext(running)
        with pytest.raises(errors.InvalidRequest, match="BAD_REQUEST_ID"):
            await it.client.cancel("a/mine")
        assert (await anext(running)).token_ids
