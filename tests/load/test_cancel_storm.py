"""2,000 requests, each cancelled after 0 to 50 ms in one of the ways a caller can leave: afterwards nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from protos.errors import CapacityError, RequestCancelled, TailpackError
from router.client import AsyncTailpack, build_request
from tests.e2e.cluster import ClusterProcess
from tests.e2e.probe import answer, assert_nothing_left_over

NUM_REQUESTS = 2000
NUM_AT_ONCE = 64
LONGEST_S = 0.05


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_cancelled_requests_leave_nothing_behind(cluster: ClusterProcess) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    ends: Counter[str] = Counter()
    async with AsyncTailpack(cluster.router) as client:
        aborted_before = await _aborted(client)
        expected = (await answer(client, "seven eight nine ten", max_tokens=32))[:2]
        turns = asyncio.Semaphore(NUM_AT_ONCE)

        async def one(number: int, prompt_tokens: int, after_s: float, way: str) -> None:
            async with turns:
                ends[f"{way}: {await _cancelled(client, f'storm-{number}', prompt_tokens, after_s, way)}"] += 1

        async with asyncio.TaskGroup() as group:
            for number in range(NUM_REQUESTS):
                way = rng.choice(("leave", "leave", "Cancel", "deadline"))
                group.create_task(one(number, rng.choice((1, 3, 40, 200, 500)), rng.uniform(0, LONGEST_S), way))
        print(dict(ends))
        assert sum(ends.values()) == NUM_REQUESTS
        assert not [end for end in ends if "bug" in end], ends
        await assert_nothing_left_over(cluster)

        # The storm did reach the engines: many were cut off while they ran or waited there.
        assert await _aborted(client) - aborted_before > NUM_REQUESTS // 10
        stats = await client.stats()
        assert stats.requests == stats.finished + stats.cancelled + stats.failed + stats.rejected
        assert (await answer(client, "seven eight nine ten", max_tokens=32))[:2] == expected


async def _aborted(client: AsyncTailpack) -> int:
    return sum(worker.load.sequences_aborted for worker in await client.list_workers())


async def _cancelled(client: AsyncTailpack, request_id: str, prompt_tokens: int, after_s: float, way: str) -> str:
    """Sends a request that would run long and ends it after ``after_s`` seconds. Returns how it ended, in a word."""
    request = build_request([7] * prompt_tokens, max_tokens=400, ignore_eos=True)
    timeout_s = max(after_s, 0.001) if way == "deadline" else 60.0

    async def read() -> str:
        async for chunk in client.stream(request, request_id=request_id, timeout_s=timeout_s):
            if chunk.finish_reason:
                return "ended"
        return "bug: no last chunk"

    task = asyncio.create_task(read())
    if way != "deadline":
        await asyncio.sleep(after_s)
        if way == "leave":
            task.cancel()
        else:
            while not await client.cancel(request_id) and not task.done():
                await asyncio.sleep(0.002)  # it has not reached the router yet
    try:
        return await task
    except asyncio.CancelledError:
        return "left"
    except RequestCancelled:
        return "cancelled"
    except CapacityError:
        return "refused"
    except TailpackError as error:
        return error.reason if error.reason == "DEADLINE_EXCEEDED" else f"bug: {error}"
