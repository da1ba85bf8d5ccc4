"""Two tenants with the same prompts on real workers: nothing of one's cache is the other's, nor tells of it."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from router.client import AsyncTailpack, Chunk, RetryPolicy
from tests.e2e.cluster import ClusterProcess
from tests.e2e.probe import assert_nothing_left_over

PROMPT_TOKENS = 300  # two whole pages and a piece
MOST_TURNS = 12
ONCE = RetryPolicy(max_retries=0)


async def ask(cluster: ClusterProcess, tenant: str | None, prompt: list[int]) -> Chunk:
    """The last chunk of a short answer."""
    async with AsyncTailpack(cluster.router, tenant=tenant, retry=ONCE) as client:
        asked = client.generate(prompt, max_tokens=4, ignore_eos=True, prefix_reuse="any", timeout_s=60.0)
        chunks = [chunk async for chunk in asked]
    chunks[-1].worker_id = chunks[0].worker_id
    return chunks[-1]


async def warm(cluster: ClusterProcess, tenant: str | None, prompt: list[int]) -> set[str]:
    """Asks until each worker has answered from its cache; the workers, by id."""
    async with AsyncTailpack(cluster.router) as client:
        workers = {worker.info.worker_id for worker in await client.list_workers()}
    hits: dict[str, int] = defaultdict(int)
    for _ in range(MOST_TURNS):
        last = await ask(cluster, tenant, prompt)
        hits[last.worker_id] = max(hits[last.worker_id], last.usage.cached_prompt_tokens)
        if all(hits[worker] for worker in workers):
            break
    return {worker for worker, cached in hits.items() if cached}


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_tenant_s_prefixes_are_nobody_else_s(cluster: ClusterProcess) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompt = [rng.randrange(5, 250) for _ in range(PROMPT_TOKENS)]
    warmed = await warm(cluster, "a", prompt)
    assert warmed, "the owner itself has no hits: this test could not fail"
    unseen = await ask(cluster, "fresh", [rng.randrange(5, 250) for _ in range(PROMPT_TOKENS)])
    assert unseen.usage.cached_prompt_tokens == 0
    owner = await ask(cluster, "a", prompt)
    print(f"prefill {unseen.timings.prefill_ns / 1e6:.1f} ms unseen, {owner.timings.prefill_ns / 1e6:.1f} ms cached")
    for stranger in ("b", "aa", "A", "a.", None):  # None: the default tenant
        first = await ask(cluster, stranger, prompt)
        print(f"prefill {first.timings.prefill_ns / 1e6:.1f} ms for {stranger}")
        assert first.usage == unseen.usage, stranger
        seen = {first.worker_id}
        for _ in range(2):
            again = await ask(cluster, stranger, prompt)
            expected = again.worker_id in seen  # its own it may have
            assert bool(again.usage.cached_prompt_tokens) == expected, (stranger, again.usage)
            seen.add(again.worker_id)
    assert (await ask(cluster, "a", prompt)).usage.cached_prompt_tokens
    await assert_nothing_left_over(cluster)
