"""Two router processes before real workers: answers go on through the other one, also when a router is killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from protos import router_pb2, router_pb2_grpc, rpc, types_pb2
from router.client import AsyncTailpack
from tests.e2e.cluster import ClusterProcess
from tests.scenarios.router_harness import Answer, Process, answer

NUM_TOKENS = 40


@pytest.fixture
def second(cluster: ClusterProcess) -> Iterator[Process]:
    workers = [argument for worker in cluster.workers for argument in ("--worker", worker)]
    serve = ("-m", "protos.cli", "router", "serve", "--listen", "127.0.0.1:0", "--http", "none")
    process = Process(*serve, *workers, "--model-dir", str(cluster.model))
    yield process
    process.end()


async def test_cut_at_every_token_and_killed_it_goes_on_through_the_other_router(
    cluster: ClusterProcess, second: Process
) -> None:
    address = await asyncio.to_thread(second.address)
    async with AsyncTailpack(address) as client, AsyncTailpack(cluster.router) as other:
        golden = await answer(other, "hello", max_tokens=NUM_TOKENS, ignore_eos=True)
        stop = golden.text[len(golden.text) * 2 // 3 :][:3]
        async with rpc.channel(address) as here, rpc.channel(cluster.router) as there:
            doors = router_pb2_grpc.RouterStub(here), router_pb2_grpc.RouterStub(there)
            while not all(worker.state == "ready" for worker in await client.list_workers()):
                await asyncio.sleep(0.05)
            for stops in ([], [stop]):
                text = golden.text.partition(stop)[0] if stops else golden.text
                cuts = (_cut(*doors, cut, stops) for cut in range(1, NUM_TOKENS + 1))
                for got in await asyncio.gather(*cuts):
                    assert (got.text, got.token_ids) == (text, golden.token_ids[: len(got.token_ids)])
        assert (await other.stats()).resumes >= 2 * NUM_TOKENS
        # The client does the same by itself when its router is killed.
        async with AsyncTailpack(f"{address},{cluster.router}") as both:
            seen: list[int] = []
            texts = ""
            chunks = both.generate("hello", max_tokens=400, ignore_eos=True, resumable=True)
            async for chunk in chunks:
                seen += chunk.token_ids
                texts += chunk.text
                if second.popen.poll() is None and len(seen) >= 10:
                    second.send(signal.SIGKILL)
                    await asyncio.to_thread(second.popen.wait, 10)
        whole = await answer(other, "hello", max_tokens=400, ignore_eos=True)
        assert (seen, texts) == (whole.token_ids, whole.text)
        assert (await other.stats()).resumes > 2 * NUM_TOKENS


async def _cut(
    here: router_pb2_grpc.RouterAsyncStub, there: router_pb2_grpc.RouterAsyncStub, cut: int, stops: list[str]
) -> Answer:
    request = router_pb2.GenerateRequest(
        chat=router_pb2.Chat(messages=[router_pb2.ChatMessage(role="user", content="hello")]),
        stop=types_pb2.StopConditions(max_tokens=NUM_TOKENS, ignore_eos=True),
        stop_strings=stops,
        resumable=True,
    )
    request_id = f"cut-{cut}-{len(stops)}"
    call = here.Generate(request, metadata=rpc.metadata(request_id), timeout=60)
    chunks: list[router_pb2.GenerateResponse] = []
    while sum(len(c.token_ids) for c in chunks) < cut:
        chunk = await call.read()
        if not isinstance(chunk, router_pb2.GenerateResponse):
            break
        chunks.append(chunk)
    call.cancel()
    place = router_pb2.ResumeRequest(
        request_id=request_id,
        token_offset=sum(len(c.token_ids) for c in chunks),
        text_offset=sum(len(c.text.encode()) for c in chunks),
    )
    chunks[-1].ClearField("finish_reason")  # it may have had all, without knowing
    return Answer([*chunks, *[c async for c in there.Resume(place, timeout=60)]]).check()
