"""A worker that was killed, seen from its door: its successor's adopted sequences are joined, or ended; and whole
processes, killed under load.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from protos import rpc, types_pb2, worker_pb2, worker_pb2_grpc
from tests.scenarios.kvstore_process import StoreProcess
from tests.scenarios.test_worker_resume import leave, resume
from tests.scenarios.test_worker_service import Scene, hello, read_step, scene, tokens
from tests.unit.tiny import write_model
from worker.sequence import Request, Sampling, StopConditions

EOS, ABORTED = types_pb2.FINISH_REASON_EOS, types_pb2.FINISH_REASON_ABORTED
PROMPT = (1, 2, 3)


def submission(
    request_id: str = "r",
    emitted: Sequence[int] = (),
    *,
    tenant: str = "",
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = 5000,
    resumable: worker_pb2.Resumable | None = None,
    **sampling: Any,
) -> worker_pb2.Submit:
    return worker_pb2.Submit(
        request_id=request_id,
        tenant=tenant,
        prompt_token_ids=prompt,
        emitted_token_ids=emitted,
        sampling=types_pb2.Sampling(**sampling),
        stop=types_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        resumable=resumable,
    )


def adopt(s: Scene, submit: worker_pb2.Submit, emitted: Sequence[int], grace_s: float = 60.0) -> Request:
    """As a starting worker does."""
    request = Request.from_proto(submit, f"adopted#{submit.request_id}")
    abort = partial(s.engine.abort, request.request_id, owner=request.owner)
    s.service._answers.adopt(request, emitted, abort, grace_s=grace_s)
    return request


async def say(call: Any, submit: worker_pb2.Submit) -> None:
    await call.write(worker_pb2.RouterMessage(submit=submit))


RESUMABLE = worker_pb2.Resumable(grace_ms=60_000, request_digest=b"digest", caller_request=b"opaque", attempt=1)


@pytest.mark.parametrize("resumable", [None, RESUMABLE])
async def test_a_submission_goes_on_with_what_was_adopted_behind_the_tokens_that_it_has(
    resumable: worker_pb2.Resumable | None,
) -> None:
    async with scene() as s:
        request = adopt(s, submission(resumable=resumable), [5, 6, 7])
        call = await s.router()
        await say(call, submission(emitted=[5], resumable=resumable))
        (output,) = (await read_step(call)).sequences
        assert (output.request_id, output.token_offset, list(output.token_ids)) == ("r", 1, [6, 7])
        assert output.joined, "so that the router knows that nothing is computed again"
        s.engine.step(tokens(request, 3, 8))
        (output,) = (await read_step(call)).sequences
        assert (output.token_offset, list(output.token_ids), output.joined) == (3, [8], False)
        s.engine.step(tokens(request, 4, 9, finish=EOS))
        (output,) = (await read_step(call)).sequences
        assert (output.token_offset, list(output.token_ids), output.finish_reason) == (4, [9], EOS)
        assert not s.engine.submitted and not s.engine.aborted
        assert s.service._answers.num_joined == 1
        assert s.service._answers.holds("r") == (resumable is not None), "what is not resumable is through"


async def test_much_that_was_logged_comes_in_pieces() -> None:
    async with scene() as s:
        adopt(s, submission(), range(3000))
        call = await s.router()
        await say(call, submission())
        got: list[int] = []
        while len(got) < 3000:
            (output,) = (await read_step(call)).sequences
            assert output.token_offset == len(got)
            got += output.token_ids
            assert output.more == (len(got) < 3000)
            await call.write(worker_pb2.RouterMessage(more=worker_pb2.More(subscription_id="r")))
        assert got == list(range(3000))


@pytest.mark.parametrize(
    "changes",
    [
        {"emitted": [5, 9]},
        {"emitted": [5, 6, 7, 8]},
        {"prompt": [1, 2]},
        {"max_tokens": 8},
        {"temperature": 0.5},
        {"seed": 8},
        {"resumable": RESUMABLE},
    ],
)
async def test_what_differs_is_computed_anew(changes: dict[str, Any]) -> None:
    async with scene() as s:
        old = adopt(s, submission(temperature=1.0, seed=7), [5, 6, 7])
        call = await s.router()
        await say(call, submission(**{"temperature": 1.0, "emitted": [5], **changes}))
        await s.engine.until(lambda: bool(s.engine.submitted))
        assert s.engine.aborted == [("r", None, old.owner)]
        assert s.engine.submitted[0].emitted == tuple(changes.get("emitted", [5]))
        s.engine.step(tokens(old, 3, 1, finish=ABORTED), tokens(s.engine.submitted[0], 1, 2))
        (output,) = (await read_step(call)).sequences
        assert (list(output.token_ids), output.finish_reason) == ([2], 0), "the old one's end is nobody's news"


@pytest.mark.parametrize("seed", [None, 7])
async def test_the_seed_that_was_drawn_stays(seed: int | None) -> None:
    async with scene() as s:
        adopt(s, submission(temperature=1.0, seed=7), [5])
        call = await s.router()
        await say(call, submission(temperature=1.0, seed=seed))
        assert list((await read_step(call)).sequences[0].token_ids) == [5]


async def test_logprobs_are_given_of_what_this_life_emits_alone() -> None:
    """A caller who lacks those of a token that was logged gets the token computed again."""
    async with scene() as s:
        whole, short = (adopt(s, submission(name, logprobs=0), [5, 6]) for name in ("whole", "short"))
        call = await s.router()
        await say(call, submission("whole", [5, 6], logprobs=0))
        await say(call, submission("short", [5], logprobs=0))
        await s.engine.until(lambda: bool(s.engine.submitted))
        assert s.engine.submitted[0].request_id == "short" and s.engine.aborted[0][0] == "short"
        assert short.owner != whole.owner
        s.engine.step(tokens(whole, 2, 7))
        (output,) = (await read_step(call)).sequences
        assert (output.request_id, output.token_offset, list(output.token_ids)) == ("whole", 2, [7])


async def test_what_is_not_resumable_ends_with_the_session_that_joined_it() -> None:
    async with scene() as s:
        plain = adopt(s, submission("plain"), [5])
        lasting = adopt(s, submission("lasting", resumable=RESUMABLE), [5])
        call = await s.router()
        await say(call, submission("plain"))
        await say(call, submission("lasting", resumable=RESUMABLE))
        got = [o.request_id for _ in range(2) for o in (await read_step(call)).sequences]
        assert sorted(got) == ["lasting", "plain"]
        call.cancel()
        await s.engine.until(lambda: bool(s.engine.aborted))
        assert s.engine.aborted == [("plain", None, plain.owner)]
        other = await s.router("other")
        await other.write(resume("lasting", "lasting#1"))
        assert list((await read_step(other)).sequences[0].token_ids) == [5]
        await other.write(leave("lasting#1"))
        assert lasting.owner not in [owner for _, _, owner in s.engine.aborted]


async def test_what_nobody_joins_is_ended() -> None:
    async with scene() as s:
        now = 0.0
        s.service._answers._clock = lambda: now
        adopt(s, submission("plain"), [5], grace_s=2.0)
        adopt(s, submission("lasting", resumable=RESUMABLE), [5], grace_s=2.0)
        s.service._answers.expire()
        assert not s.engine.aborted
        now = 2.5
        s.service._answers.expire()
        assert [request_id for request_id, *_ in s.engine.aborted] == ["plain"], "a resumable one has its own time"


async def test_only_what_is_resumable_can_be_resumed_and_anybodys_can_be_aborted() -> None:
    async with scene() as s:
        adopt(s, submission("t/plain", tenant="t"), [5])
        adopt(s, submission("t/lasting", tenant="t", resumable=RESUMABLE), [5])
        call = await s.router()
        for name, there in (("t/plain", False), ("t/lasting", True)):
            find = await s.stub.Find(worker_pb2.FindRequest(request_id=name, tenant="t"))
            assert (find.found, find.output_tokens) == (there, int(there))
            await call.write(resume(name, f"{name}#1", "t"))
            (output,) = (await read_step(call)).sequences
            assert (output.error.reason == "UNKNOWN_REQUEST") != there
        assert not (await s.stub.Abort(worker_pb2.AbortRequest(request_id="t/plain", tenant="u"))).found
        assert (await s.stub.Abort(worker_pb2.AbortRequest(request_id="t/plain", tenant="t"))).found
        assert [request_id for request_id, tenant, _ in s.engine.aborted if tenant is None] == ["t/plain"]


async def test_another_tenants_submission_joins_nothing() -> None:
    async with scene() as s:
        adopt(s, submission(tenant="t"), [5])
        call = await s.router()
        await say(call, submission(tenant="u"))
        (output,) = (await read_step(call)).sequences
        assert output.error.reason == "DUPLICATE_REQUEST" and not s.engine.aborted


# --- whole processes ---


@dataclass
class Router:
    """One session after the other with a worker process; submits again what has not ended, with what it has."""

    asked: dict[str, worker_pb2.Submit]
    got: dict[str, list[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    load: types_pb2.WorkerLoad = field(default_factory=types_pb2.WorkerLoad)
    features: Sequence[str] = ()

    async def has(self, num_tokens: int, session: asyncio.Task[None]) -> None:
        async with asyncio.timeout(60):
            while sum(map(len, self.got.values())) < num_tokens and not session.done():
                await asyncio.sleep(0.005)

    async def until_all(self, address: str) -> None:
        """Until all have ended, or the session breaks."""
        async with rpc.channel(address) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Session()
            await call.write(hello())
            for name, submit in self.asked.items():
                if name not in self.ended:
                    again = worker_pb2.Submit()
                    again.CopyFrom(submit)
                    again.emitted_token_ids.extend(self.got.setdefault(name, []))
                    await say(call, again)
            while len(self.ended) < len(self.asked):
                message = await asyncio.wait_for(call.read(), 60)
                if not isinstance(message, worker_pb2.WorkerMessage):
                    return
                self.features = self.features or message.welcome.info.features
                self.load = message.step.load
                for output in message.step.sequences:
                    got = self.got[output.request_id]
                    assert not output.error.reason, output.error
                    assert output.token_offset == len(got)
                    got += output.token_ids
                    if output.finish_reason:
                        self.ended.add(output.request_id)


@dataclass
class Node:
    """A kvstore and a worker, each a process that can be killed and started again."""

    model: Path
    folder: Path
    store: StoreProcess = field(init=False)
    worker: asyncio.subprocess.Process = field(init=False)
    address: str = "127.0.0.1:0"

    def start_store(self) -> None:
        self.store = StoreProcess(folder=self.folder)

    async def start_worker(self) -> None:
        command = [sys.executable, "-m", "protos.cli", "worker", "serve", "--model", str(self.model), "--deterministic"]
        command += ["--kv-socket", str(self.store.socket), "--listen", self.address, "--arena-bytes", "32M"]
        command += ["--kv-mode", "turboquant", "--threads", "1"]
        with (self.model / "worker.log").open("ab") as log:
            self.worker = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=log)
        assert self.worker.stdout is not None
        line = await asyncio.wait_for(self.worker.stdout.readline(), 60)
        assert line, (self.model / "worker.log").read_text()
        self.address = json.loads(line)["address"]

    async def kill_worker(self) -> None:
        self.worker.kill()
        await self.worker.wait()

    def kill_store(self) -> None:
        self.store.stop(signal.SIGKILL)


@asynccontextmanager
async def node(model: Path, folder: Path) -> AsyncIterator[Node]:
    n = Node(model, folder)
    n.start_store()
    try:
        await n.start_worker()
        yield n
        n.worker.terminate()
        assert await asyncio.wait_for(n.worker.wait(), 40) == 0
        assert n.store.device().sequences == 0
    finally:
        if n.worker.returncode is None:
            await n.kill_worker()
        if n.store.process.poll() is None:
            n.store.stop()


async def test_worker_and_store_processes_die_in_turn(tmp_path: Path) -> None:
    """The worker is killed and adopts; the store is killed and the worker brings it the memory; the worker again: what
    it adopts came out of the new store's books.
    """
    model = write_model(tmp_path / "model", seed=8)
    asked = {f"r{n}": submission(f"r{n}", prompt=range(3, 60 + 70 * n), max_tokens=700) for n in range(3)}
    quiet, router = Router(asked), Router(asked)
    async with node(model, Path(os.path.realpath(tmp_path)) / "kv") as n:
        await quiet.until_all(n.address)
        assert "adopt" in quiet.features

        session = asyncio.create_task(router.until_all(n.address))
        await router.has(150, session)
        await n.kill_worker()
        await asyncio.gather(session, return_exceptions=True)
        await n.start_worker()
        session = asyncio.create_task(router.until_all(n.address))
        await router.has(250, session)
        assert (router.load.sequences_adopted, router.load.tokens_recomputed_after_adoption) == (3, 0)
        assert router.load.prompt_tokens == 0, "nothing was prefilled again"

        n.kill_store()
        n.start_store()
        await router.has(1000, session)
        await n.kill_worker()
        await asyncio.gather(session, return_exceptions=True)
        assert len(router.ended) < 3, "the test means to kill it before that"
        await n.start_worker()
        await router.until_all(n.address)
        assert router.load.sequences_adopted > 0 and router.load.tokens_recomputed_after_adoption == 0
    assert router.got == quiet.got


def test_the_request_that_is_frozen_is_the_request_that_is_thawed() -> None:
    request = Request("r", "t", PROMPT, Sampling(temperature=0.5, seed=3), StopConditions(9, (4,)), resumable=RESUMABLE)
    assert Request.thawed(request.frozen(), [*PROMPT, 8, 9], "") == request
