"""A death in each phase of a sequence's life, on purpose: every stream ends with the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.dying_worker import Death
from tests.chaos.node import Node
from tests.chaos.settings import KINDS
from tests.chaos.streams import Ask, Caller, Stream, Whole, asks, undisturbed
from tests.chaos.zygote import Zygote

pytestmark = pytest.mark.slow

SEED = 20261130
NUM_STREAMS = 6  # more than run at once: the last ones are queued
HANG_S = 120.0

ENGINE, HELD, CLIENT, CONTROL = "worker.engine", "worker.sequence_kv", "kvstore.client", "kvstore.control"

# (phase, setting, death of the worker's first life). Counts include the warm-up's: one open, one step, one commit.
DEATHS = [
    ("submitted", "dense", f"after:{ENGINE}:Engine.submit:6"),
    ("queued", "dense", f"before:{ENGINE}:Engine._admit:4"),
    ("opened in the store", "dense", f"after:{CLIENT}:Attachment.open:5"),
    ("accepted", "dense", f"after:{HELD}:SequenceKv.open:6"),
    ("mid-prefill", "dense", f"after:{HELD}:SequenceKv.keep_rows:4"),
    ("mid-prefill, committed", "dense", f"after:{HELD}:SequenceKv.publish:5"),
    ("reserved", "dense", f"after:{CLIENT}:Attachment.reserve:6"),
    ("before a seal", "dense", f"before:{CLIENT}:Attachment.seal:4"),
    ("mid-seal", "dense", f"after:{CLIENT}:Attachment.seal:4"),
    ("between rows and log", "dense", f"after:{HELD}:SequenceKv.keep_rows:30"),
    ("between log and commit word", "dense", f"after:{CONTROL}:ControlBlock.append_tokens:40"),
    ("between two sequences' commits", "dense", f"after:{CONTROL}:ControlBlock.commit:60"),
    ("between commit and send", "dense", f"after:{ENGINE}:Engine._commit:30"),
    ("sent", "dense", f"after:{ENGINE}:Engine._publish:40"),
    ("before a release", "dense", f"before:{CLIENT}:Attachment.release:3"),
    ("released, its end not sent", "dense", f"after:{CLIENT}:Attachment.release:3"),
    ("whole, not released", "turboquant", f"before:{HELD}:SequenceKv.release:2"),
    ("whole, not released, v4", "v4", f"before:{HELD}:SequenceKv.release:2"),
    ("mid-truncate, before the store's", "dense", f"rollback:40+before:{CLIENT}:Attachment.truncate:2"),
    ("mid-truncate, cut in the store", "dense", f"rollback:40+after:{CLIENT}:Attachment.truncate:2"),
    ("truncated", "dense", f"rollback:40+after:{HELD}:SequenceKv.truncate:3"),
    ("mid-fork", "recompute", f"before:{CLIENT}:Attachment.fork:1"),
    ("mid-fork, forked in the store", "recompute", f"after:{CLIENT}:Attachment.fork:1"),
    ("mid-fork, both there", "recompute", f"after:{HELD}:SequenceKv._fill_fork:2"),
    ("grown", "recompute", f"after:{HELD}:SequenceKv.grow:2"),
    ("dropped", "recompute", f"after:{ENGINE}:Engine._drop:1"),
    ("packed, not committed", "turboquant", "after:worker.kv_moves:pack:20"),
    ("packed and committed, not sealed", "turboquant", f"before:{CLIENT}:Attachment.seal:3"),
    ("mid-seal, packed", "turboquant", f"after:{CLIENT}:Attachment.seal:3"),
    ("between rows and log, packed", "turboquant", f"after:{HELD}:SequenceKv.keep_rows:30"),
    ("tails of a chunk half moved", "turboquant", "after:worker.kv_moves:fill_tails:9"),
    ("mid-checkpoint", "turboquant", f"after:{CLIENT}:Attachment.checkpoint:3"),
    ("mid-truncate, packed", "turboquant", f"rollback:40+after:{CLIENT}:Attachment.truncate:2"),
    ("truncated, packed", "turboquant", f"rollback:40+after:{HELD}:SequenceKv.truncate:3"),
    ("guesses in the rows, not logged", "v4", f"after:{HELD}:SequenceKv.keep_rows:20"),
    ("guesses logged, not committed", "v4", f"after:{CONTROL}:ControlBlock.append_tokens:20"),
    ("guesses committed, not sealed", "v4", f"after:{ENGINE}:Engine._commit:20"),
    ("mid-seal, v4", "v4", f"after:{CLIENT}:Attachment.seal:2"),
    ("mid-truncate, v4", "v4", f"rollback:24+after:{CLIENT}:Attachment.truncate:1"),
    ("mid-prefill, v4", "v4", f"after:{ENGINE}:Engine._commit:4"),
]

# Of the store's first life.
STORE_DEATHS = [
    ("opening", "dense", "after:kvstore.device:Device.open:4"),
    ("handing pages out", "dense", "after:kvstore.device:Device.reserve:5"),
    ("before it seals", "dense", "before:kvstore.device:Device.seal:4"),
    ("sealed, not answered", "dense", "after:kvstore.device:Device.seal:4"),
    ("mid-seal", "dense", "after:kvstore.sequences:SequenceTable.seal:4"),
    ("releasing", "dense", "after:kvstore.device:Device.release:3"),
    ("mid-release", "dense", "after:kvstore.sequences:SequenceTable.release:3"),
    ("forked, not answered", "recompute", "after:kvstore.device:Device.fork:1"),
    ("mid-fork", "recompute", "after:kvstore.sequences:SequenceTable.fork:1"),
    ("cut, not answered", "turboquant", "after:kvstore.device:Device.truncate:1"),
    ("sealed, not answered, packed", "turboquant", "after:kvstore.device:Device.seal:3"),
    ("checkpointed, not answered", "turboquant", "after:kvstore.device:Device.checkpoint:3"),
    ("sealed, not answered, v4", "v4", "after:kvstore.device:Device.seal:2"),
]

# Of the worker's first two lives: the second dies while it adopts what the first has left.
MID_DECODE = f"after:{HELD}:SequenceKv.keep_rows:30"
ADOPTING = [
    ("attached", "dense", "after:worker.shell:_attach:1"),
    ("before it adopts", "dense", f"before:{ENGINE}:Engine.adopt:1"),
    ("half adopted", "turboquant", f"after:{HELD}:SequenceKv._take:2"),
    ("adopted, not served", "dense", f"after:{ENGINE}:Engine.adopt:1"),
    ("served, first step", "dense", f"after:{HELD}:SequenceKv.keep_rows:1"),
    ("served, first commit", "turboquant", f"after:{ENGINE}:Engine._commit:1"),
    ("joined", "dense", "after:worker.resumable:Answers.join:1"),
    ("before it adopts, v4", "v4", f"before:{ENGINE}:Engine.adopt:1"),
    ("first step, v4", "v4", f"after:{HELD}:SequenceKv.keep_rows:1"),
    ("forked twice", "recompute", f"after:{CLIENT}:Attachment.fork:1"),
]

# Of the store's first two lives: the second dies while it takes the memory over.
TAKING_OVER = [
    ("rebuilt, not verified", "dense", "before:kvstore.device:Device.verify_rebuilt:1"),
    ("taken over, not adopted", "dense", "after:kvstore.attachments:Attachments._take_over:1"),
    ("adopted, not answered", "turboquant", "after:kvstore.device:Device.adopt:1"),
    ("its first page", "dense", "after:kvstore.device:Device.reserve:1"),
    ("adopted, not answered, v4", "v4", "after:kvstore.device:Device.adopt:1"),
]

# A worker that stands still there, and must be ended by the store, not by us.
STANDSTILLS = [
    ("between rows and log", "dense", f"after:{HELD}:SequenceKv.keep_rows:30:stop"),
    ("mid-seal", "turboquant", f"after:{CLIENT}:Attachment.seal:3:stop"),
    ("between commit and send", "v4", f"after:{ENGINE}:Engine._commit:20:stop"),
]


# Errors of a device in a worker that lives; the second one while it adopts what the first has left.
FAILURES = [
    ("in a step", "dense", ["fail:worker.model_runner:ModelRunner.run:30"]),
    ("packing", "turboquant", ["fail:worker.kv_moves:pack:20"]),
    ("half adopted", "turboquant", [MID_DECODE, f"fail:{HELD}:SequenceKv._take:2"]),
]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as running:
        yield running


class Scene:
    """A node of one setting, streams that are asked for once, and what they must say."""

    def __init__(self, zygote: Zygote, kind: str, models: Path) -> None:
        self.zygote = zygote
        self.kind = KINDS[kind]
        self.setting = self.kind.setting(kind, models)
        rng = random.Random(f"{kind} {SEED}")
        self.wanted = asks(
            rng,
            NUM_STREAMS,
            vocab_size=self.kind.vocab_size,
            prompts=self.kind.prompts,
            most_tokens=self.kind.most_tokens,
        )
        self.expected: dict[Ask, Whole] = {}

    async def undisturbed(self) -> None:
        async with Node(self.zygote, self.setting) as node:
            self.expected = await undisturbed(node.addresses[0], self.wanted)
            await node.stop()

    def caller(self, node: Node) -> Caller:
        left = [Stream(f"s{number}", ask, self.expected[ask]) for number, ask in enumerate(self.wanted)]
        return Caller(node.addresses[0], lambda: left.pop(0) if left else None, at_once=NUM_STREAMS)

    async def all_end(self, caller: Caller) -> None:
        async with asyncio.timeout(HANG_S):
            await caller.run()
        assert len(caller.ended) == len(self.wanted)

    async def check_end(self, node: Node) -> None:
        await node.idle()
        await node.stop()
        assert not node.faults, node.faults


@pytest.fixture(scope="module")
def scenes(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scene]:
    """Filled as they are asked for."""
    folder = tmp_path_factory.mktemp("models")
    scenes = {kind: Scene(zygote, kind, folder) for kind in KINDS}
    for scene in scenes.values():
        asyncio.run(scene.undisturbed())
    return scenes


def check_nothing_lost(caller: Caller, *deaths: str) -> None:
    """Of sequences whose store lives: they were adopted, and no committed token was computed again. But that of one
    which died between a cut in its store and the copies that this asks for. One that died at the last submission may
    have opened none.
    """
    half_cut = any(f"after:{CLIENT}:Attachment.truncate" in death for death in deaths)
    longest = max(len(stream.ask.prompt) + stream.ask.max_tokens for stream in caller.ended) if half_cut else 0
    may_be_none = any(f"{ENGINE}:Engine.submit:{NUM_STREAMS}" in death for death in deaths)
    assert may_be_none or sum(load.sequences_adopted for load in caller.loads) > 0
    assert sum(load.tokens_recomputed_after_adoption for load in caller.loads) <= longest


async def worker_dies(scene: Scene, *deaths: str, errors_expected: bool = False) -> None:
    """Of the worker's first lives, one each; every caller gets all of its answer."""
    node = Node(scene.zygote, scene.setting, errors_expected=errors_expected)
    node.workers[0].deaths = [Death.parse(death) for death in deaths]
    async with node:
        caller = scene.caller(node)
        await scene.all_end(caller)
        assert len(node.workers[0].died) == len(deaths), "it never came there"
        check_nothing_lost(caller, *deaths)
        await scene.check_end(node)


@pytest.mark.parametrize(("kind", "death"), [case[1:] for case in DEATHS], ids=[case[0] for case in DEATHS])
async def test_a_worker_s_death(scenes: dict[str, Scene], kind: str, death: str) -> None:
    await worker_dies(scenes[kind], death)


@pytest.mark.parametrize(("kind", "death"), [case[1:] for case in ADOPTING], ids=[case[0] for case in ADOPTING])
async def test_a_worker_s_death_while_it_adopts(scenes: dict[str, Scene], kind: str, death: str) -> None:
    await worker_dies(scenes[kind], death if "fork" in death else MID_DECODE, death)


@pytest.mark.parametrize(("kind", "death"), [case[1:] for case in STANDSTILLS], ids=[case[0] for case in STANDSTILLS])
async def test_a_worker_that_stands_still_is_ended_by_its_store(
    scenes: dict[str, Scene], kind: str, death: str
) -> None:
    await worker_dies(scenes[kind], death)


@pytest.mark.parametrize(("kind", "deaths"), [case[1:] for case in FAILURES], ids=[case[0] for case in FAILURES])
async def test_a_worker_whose_device_fails(scenes: dict[str, Scene], kind: str, deaths: list[str]) -> None:
    await worker_dies(scenes[kind], *deaths, errors_expected=True)


@pytest.mark.parametrize(("kind", "death"), [case[1:] for case in TAKING_OVER], ids=[case[0] for case in TAKING_OVER])
async def test_a_store_s_death_while_it_takes_over(scenes: dict[str, Scene], kind: str, death: str) -> None:
    scene = scenes[kind]
    node = Node(scene.zygote, scene.setting)
    node.store.deaths = [Death.parse("after:kvstore.device:Device.seal:3"), Death.parse(death)]
    async with node:
        caller = scene.caller(node)
        await scene.all_end(caller)
        assert len(node.store.died) == 2, "it never came there"
        assert not node.workers[0].ends, "the worker did not outlive its store"
        await scene.check_end(node)


@pytest.mark.parametrize(("kind", "death"), [case[1:] for case in STORE_DEATHS], ids=[case[0] for case in STORE_DEATHS])
async def test_a_store_s_death(scenes: dict[str, Scene], kind: str, death: str) -> None:
    scene = scenes[kind]
    node = Node(scene.zygote, scene.setting)
    node.store.deaths = [Death.parse(death)]
    async with node:
        if "truncate" in death:
            node.workers[0].deaths = [Death.parse(f"rollback:40+after:{CLIENT}:Attachment.truncate:100")]
            node.send(node.workers[0], signal.SIGKILL)
            await asyncio.sleep(0.05)
            await node.ready()
        caller = scene.caller(node)
        await scene.all_end(caller)
        assert len(node.store.died) == 1, "it never came there"
        if "truncate" not in death:  # a truncate whose answer is lost ends its worker
            assert not node.workers[0].ends, "the worker did not outlive its store"
        await scene.check_end(node)


@pytest.mark.parametrize(("kind", "num_tokens"), [("dense", 0), ("dense", 1), *((kind, 60) for kind in KINDS)])
async def test_two_deaths_at_once(scenes: dict[str, Scene], kind: str, num_tokens: int) -> None:
    """The memory is gone with its last holder: everything is computed again."""
    scene = scenes[kind]
    async with Node(scene.zygote, scene.setting) as node:
        caller = scene.caller(node)
        ending = asyncio.create_task(scene.all_end(caller))
        while caller.num_tokens < num_tokens:
            caller.news.clear()
            await asyncio.wait_for(caller.news.wait(), HANG_S)
        for server in (node.store, node.workers[0]):
            assert node.send(server, signal.SIGKILL)
        await ending
        await scene.check_end(node)
