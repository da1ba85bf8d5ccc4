"""The Python client's connection cut at every token, in front of real routers: the text stays whole. Both flavours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from protos import errors
from router.client import Answer, AsyncTailpack, Chunk, RetryPolicy, Tailpack
from tests.scenarios.cable import Cable
from tests.scenarios.fake_worker import Script
from tests.scenarios.router_harness import Harness, cluster, until
from tests.scenarios.tiny_tokenizer import EOS

TEXT = "Où est 日本 🎉? äöü"
QUICK = RetryPolicy(first_delay_s=0.001, max_delay_s=0.05)


@dataclass
class Scene:
    """Two routers of one worker, each behind a cable."""

    one: Harness
    two: Harness
    cables: list[Cable]
    addresses: list[str]  # of the cables
    ids: list[int]

    def cut(self) -> None:
        for cable in self.cables:
            cable.cut()

    async def settled(self) -> None:
        await self.one.settled()
        await self.two.settled()


@asynccontextmanager
async def scene(
    folder: Path, *, first_s: float = 0.0, every_s: float = 0.002, hold_at: int | None = None
) -> AsyncIterator[Scene]:
    async with cluster(folder, Script()) as one:
        ids = one.tokenizer.encode(TEXT)
        one.workers[0].script = lambda submit: Script([*ids, EOS], first_s=first_s, every_s=every_s, hold_at=hold_at)
        async with cluster(folder, Script(), num_workers=0, addresses=[one.workers[0].address]) as two:
            cables = [Cable(one.address), Cable(two.address)]
            async with cables[0].plugged() as first, cables[1].plugged() as second:
                yield Scene(one, two, cables, [first, second], ids)


def read_blocking(addresses: str, cut_at: int, cut: Callable[[], None]) -> list[Chunk]:
    """Cuts as soon as it has so many tokens."""
    chunks, tokens = [], 0
    with Tailpack(addresses, retry=QUICK) as client:
        for chunk in client.generate("x", resumable=True, timeout_s=30):
            chunks.append(chunk)
            before, tokens = tokens, tokens + len(chunk.token_ids)
            if before < cut_at <= tokens:
                cut()
    return chunks


async def read_on_loop(addresses: str, cut_at: int, cut: Callable[[], None]) -> list[Chunk]:
    chunks, tokens = [], 0
    async with AsyncTailpack(addresses, retry=QUICK) as client:
        async for chunk in client.generate("x", resumable=True, timeout_s=30):
            chunks.append(chunk)
            before, tokens = tokens, tokens + len(chunk.token_ids)
            if before < cut_at <= tokens:
                cut()
    return chunks


@pytest.mark.parametrize("flavour", ["async", "sync"])
@pytest.mark.parametrize("num_routers", [1, 2])
async def test_cut_at_every_token_the_text_is_whole(folder: Path, flavour: str, num_routers: int) -> None:
    """With two routers the answer goes on at the other one."""
    async with scene(folder) as it:
        loop = asyncio.get_running_loop()
        addresses = ",".join(it.addresses[:num_routers])
        for cut_at in range(1, len(it.ids) + 1):
            if flavour == "async":
                chunks = await read_on_loop(addresses, cut_at, it.cut)
            else:
                cut = lambda: asyncio.run_coroutine_threadsafe(_run(it.cut), loop).result(60)
                chunks = await asyncio.to_thread(read_blocking, addresses, cut_at, cut)
            answer = Answer.of(chunks)
            assert (answer.text, list(answer.token_ids), answer.finish_reason) == (TEXT, [*it.ids, EOS], "eos"), cut_at
        resumes = [(await harness.client.stats()).resumes for harness in (it.one, it.two)]
        # A cut may come behind the last chunk, already on its way; then there is nothing to resume.
        assert resumes[num_routers - 1] >= len(it.ids) // 2
        await it.settled()


async def _run(what: Callable[[], None]) -> None:
    what()


@pytest.mark.parametrize("num_routers", [1, 2])
async def test_cut_before_the_first_token_it_joins_its_own_answer(folder: Path, num_routers: int) -> None:
    async with scene(folder, first_s=0.2) as it, AsyncTailpack(",".join(it.addresses[:num_routers])) as client:
        running = asyncio.create_task(client.complete("x", resumable=True, timeout_s=30))
        await until(lambda: it.one.workers[0].active)
        it.cut()
        assert (await running).text == TEXT
        assert len(it.one.workers[0].submits) == 1  # it was not computed again
        await it.settled()


async def test_not_resumable_a_cut_ends_the_answer_and_the_work(folder: Path) -> None:
    async with scene(folder, hold_at=3) as it, AsyncTailpack(it.addresses[0], retry=QUICK) as client:
        with pytest.raises(errors.Unavailable):
            async for _ in client.generate("x", timeout_s=30):
                it.cut()
        await it.settled()


async def test_leaving_a_resumable_answer_ends_the_work(folder: Path) -> None:
    async with scene(folder, hold_at=3) as it:
        async with AsyncTailpack(it.addresses[0], retry=QUICK) as client:
            async for _ in client.generate("x", resumable=True, timeout_s=30):
                break
            await until(lambda: not it.one.workers[0].active)
        with Tailpack(it.addresses[0], retry=QUICK) as blocking:
            chunks = blocking.generate("x", resumable=True, timeout_s=30)
            await asyncio.to_thread(next, chunks)
            assert it.one.workers[0].active
            await asyncio.to_thread(chunks.close)
            await until(lambda: not it.one.workers[0].active)
        await it.settled()


async def test_many_answers_of_one_session_stay_whole_when_it_is_cut_in_the_middle_of_messages(folder: Path) -> None:
    async with scene(folder, every_s=0.001) as it:
        async with AsyncTailpack(it.addresses[0], retry=RetryPolicy(50, 0.001, 0.02)) as client:

            async def caller() -> None:
                for _ in range(6):
                    chunks = [chunk async for chunk in client.generate("x" * 4000, resumable=True)]
                    assert Answer.of(chunks).text == TEXT

            async with asyncio.TaskGroup() as callers:
                running = [callers.create_task(caller()) for _ in range(16)]
                while not all(task.done() for task in running):
                    await asyncio.sleep(0.05)
                    it.cut()
        await it.settled()
