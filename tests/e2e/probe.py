"""Does the cluster still answer, and is anything left over?"""

from __future__ import annotations

import asyncio

from protos import router_pb2
from router.client import AsyncTailpack
from tests.e2e.cluster import ClusterProcess

SETTLE_S = 10.0
PROBE = "The quick brown fox"


async def answer(
    client: AsyncTailpack, prompt: str | list[int] = PROBE, max_tokens: int = 8
) -> tuple[str, list[int], router_pb2.GenerateResponse]:
    """(text, token ids, last chunk), with every offset checked on the way."""
    text = ""
    token_ids: list[int] = []
    last: router_pb2.GenerateResponse | None = None
    async for chunk in client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, timeout_s=60.0):
        assert chunk.text_offset == len(text.encode()) and chunk.token_offset == len(token_ids)
        text += chunk.text
        token_ids += chunk.token_ids
        last = chunk
    assert last is not None and last.finish_reason
    return text, token_ids, last


async def assert_works(cluster: ClusterProcess) -> None:
    """A probe request is answered in full."""
    async with AsyncTailpack(cluster.router) as client:
        _, token_ids, _ = await answer(client)
    assert len(token_ids) == 8


async def left_over(cluster: ClusterProcess) -> list[str]:
    """What is still held anywhere in the cluster, in words; empty when nothing is."""
    found = []
    async with AsyncTailpack(cluster.router) as client:
        if in_flight := (await client.stats()).in_flight:
            found.append(f"router: {in_flight} in flight")
        for worker in await client.list_workers():
            load = worker.load
            counts = (load.num_running, load.num_waiting, load.queued_tokens, load.pages_total - load.pages_free)
            if any(counts) or worker.in_flight:
                found.append(
                    f"{worker.info.worker_id}: running, waiting, queued tokens, pages held {counts}, "
                    f"{worker.in_flight} in flight at the router"
                )
    for device in cluster.kv_stats().devices:
        if device.sequences:
            found.append(f"kvstore {device.device}: {device.sequences} sequences")
        for group in device.groups:
            # Cached pages belong to no sequence: they are evicted when somebody needs the room.
            out = group.pages_total - group.pages_free - group.pages_cached
            held = (out, group.pages_promised, group.pages_open, group.pages_sealed)
            if any(held) or group.tail_slots_used:
                found.append(f"kvstore {device.device} {group.group}: pages out, promised, open, sealed {held}")
    return found


async def assert_nothing_left_over(cluster: ClusterProcess) -> None:
    """Waits until all that ended has been given back everywhere."""
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while found := await left_over(cluster):
        assert asyncio.get_running_loop().time() < deadline, found
        await asyncio.sleep(0.1)
