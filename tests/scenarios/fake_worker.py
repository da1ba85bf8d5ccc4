"""A worker without a model: real gRPC, scripted answers. In this process, or as one of its own that can be killed.

    python tests/scenarios/fake_worker.py --token-ids 5,6,7 --first-s 0.1 --every-s 0.01

prints one JSON line {"address": ...} when it listens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: the root of the checkout is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from protos import errors, rpc, types_pb2, worker_pb2, worker_pb2_grpc
from protos.limits import choice_ids
from protos.tls import ServerTls
from worker.resumable import Answers, Limits, Subscription, goes_on_with
from worker.sequence import Request

REPORT_S = 0.5
SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name


@dataclass(frozen=True)
class Script:
    """How one sequence goes."""

    token_ids: Sequence[int] = ()  # repeated up to max_tokens when `endless`
    first_s: float = 0.0  # before the first token: queue and prefill
    every_s: float = 0.0  # between steps
    per_step: int = 1
    hold_at: int | None = None  # with so many tokens out it waits for the worker's gate
    endless: bool = False
    finish: int = types_pb2.FINISH_REASON_EOS  # when the tokens are out (LENGTH at max_tokens)
    error: errors.TailpackError | None = None  # instead of a finish
    skip_at: int | None = None  # this token is never sent
    repeat_at: int | None = None  # this token is sent twice
    begin_off_by: int = 0  # where tokens were emitted elsewhere: the first one sent is so much behind them
    deaf: bool = False  # aborts are not answered
    logprobs: bool = False
    seed: int = 0
    usage_off_by: int = 0
    cached: int = 0  # prompt tokens that needed no computing
    prefix_exact: bool = False


Outbox = asyncio.Queue[worker_pb2.WorkerMessage]
Emit = Callable[[worker_pb2.SequenceOutput], None]


@dataclass(frozen=True)
class _Sequence:
    submit: worker_pb2.Submit
    script: Script
    outbox: Outbox | None  # of the session that submitted it; None: it is resumable
    emit: Emit
    task: asyncio.Task[None]


@dataclass
class _Session:
    """What a session's subscriptions have goes out at once."""

    send: Callable[[worker_pb2.SequenceOutput], None]
    subscriptions: dict[str, Subscription] = field(default_factory=dict)

    def news(self, subscription: Subscription) -> None:
        if (piece := subscription.take()) is not None:
            self.send(piece)


@dataclass
class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """script: chooses how a submission goes. Everything it saw is kept for the test to look at."""

    script: Callable[[worker_pb2.Submit], Script]
    info: types_pb2.WorkerInfo
    welcome_s: float = 0.0
    active: dict[str, _Sequence] = field(default_factory=dict)
    submits: list[worker_pb2.Submit] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)  # request ids, in the order of the session's messages
    num_emitted: Counter[str] = field(default_factory=Counter)  # tokens, by request id
    num_sessions: int = 0
    num_messages: int = 0  # of sessions, batches as one
    outboxes: set[asyncio.Queue[worker_pb2.WorkerMessage]] = field(default_factory=set)
    address: str = ""
    tls: ServerTls | None = None
    silent: bool = False  # says nothing any more
    refuse_new: errors.TailpackError | None = None
    load: types_pb2.WorkerLoad = field(
        default_factory=lambda: types_pb2.WorkerLoad(pages_free=10_000, pages_total=10_000)
    )
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    now_s: float = 0.0  # the clock of grace times
    limits: Limits | None = None  # of kept answers
    resumes: list[str] = field(default_factory=list)  # request ids of Resume, in the order of the session's messages
    finds: list[str] = field(default_factory=list)
    cannot_find: errors.TailpackError | None = None
    adopted: list[worker_pb2.Submit] = field(default_factory=list)  # of a predecessor; with what it emitted
    _server: rpc.RpcServer | None = None

    def __post_init__(self) -> None:
        self.answers = Answers(lambda: self.now_s, self.limits)

    async def start(self, address: str = "127.0.0.1:0") -> str:
        self._server = rpc.RpcServer("fake-worker", tls=self.tls)
        self._server.add(worker_pb2_grpc.add_WorkerServicer_to_server, self, SERVICE_NAME)
        self.address = await self._server.start(address)
        for submit in self.adopted:
            self._adopt(submit)
        return self.address

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
        for sequence in self.active.values():
            sequence.task.cancel()

    async def successor(self, *, adopts: bool = True) -> FakeWorker:
        """Dies, with its sessions. The same worker again, at the same address, not started yet: ``start(it.address)``.

        adopts: it goes on with the sequences that it had.
        """
        running = [
            (each.submit, self._tokens(each.submit, each.script)[: self.num_emitted[name]], each.script.seed)
            for name, each in self.active.items()
        ]
        await self.stop()
        info = types_pb2.WorkerInfo()
        info.CopyFrom(self.info)
        info.incarnation = secrets.token_hex(8)
        successor = FakeWorker(self.script, info, address=self.address)
        for submit, emitted, seed in running if adopts else ():
            again = worker_pb2.Submit()
            again.CopyFrom(submit)
            again.emitted_token_ids[:] = emitted
            if seed:
                again.sampling.seed = seed
            successor.adopted.append(again)
        return successor

    def _adopt(self, submit: worker_pb2.Submit) -> None:
        owner = self.answers.new_owner()
        request, abort = Request.from_proto(submit, owner), lambda: self._abort(submit.request_id)
        self.answers.adopt(replace(request, emitted=()), submit.emitted_token_ids, abort, grace_s=60.0)
        self._start(submit, None, lambda output: self.answers.take(owner, [output]))

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[worker_pb2.WorkerMessage]:
        self.num_sessions += 1
        outbox: Outbox = asyncio.Queue()
        session = _Session(lambda output: self._send(outbox, output))
        reader = asyncio.create_task(self._read(requests, outbox, session))
        self.outboxes.add(outbox)
        try:
            await asyncio.sleep(self.welcome_s)
            yield worker_pb2.WorkerMessage(welcome=worker_pb2.Welcome(info=self.info, load=self.load))
            while True:
                try:
                    message = await asyncio.wait_for(outbox.get(), REPORT_S)
                except TimeoutError:
                    message = worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(load=self.load))
                if not self.silent:
                    yield message
        finally:
            self.outboxes.discard(outbox)
            reader.cancel()
            for request_id, sequence in list(self.active.items()):
                if sequence.outbox is outbox:
                    sequence.task.cancel()
                    del self.active[request_id]
            for subscription in session.subscriptions.values():
                self.answers.leave(subscription)

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortResponse:
        answer = self.answers.find(request.request_id, request.tenant)
        if answer is not None:
            self.answers.cancel(answer)
            return worker_pb2.AbortResponse(found=True)
        active = [each for each in choice_ids(request.request_id) if each in self.active]
        found = [each for each in active if self.active[each].submit.tenant == request.tenant]
        for each in found:
            self._abort(each)
        return worker_pb2.AbortResponse(found=bool(found))

    async def Find(self, request: worker_pb2.FindRequest, context: Any) -> worker_pb2.FindResponse:
        self.finds.append(request.request_id)
        if self.cannot_find is not None:
            raise self.cannot_find
        answer = self.answers.find(request.request_id, request.tenant)
        if answer is None or not answer.is_resumable:
            return worker_pb2.FindResponse()
        resumable = answer.submit.resumable
        return worker_pb2.FindResponse(
            found=True,
            request_digest=resumable.request_digest,
            caller_request=resumable.caller_request,
            prompt_tokens=answer.num_prompt_tokens,
            output_tokens=len(answer.token_ids),
            ended=answer.last is not None,
            attempt=resumable.attempt,
        )

    async def Info(self, request: Any, context: Any) -> worker_pb2.InfoResponse:
        return worker_pb2.InfoResponse(info=self.info, load=self.load)

    def goodbye(self, why: str) -> None:
        """From now on new sequences are refused."""
        self.refuse_new = errors.Unavailable("the worker is leaving", reason="DRAINING")
        for outbox in self.outboxes:
            outbox.put_nowait(worker_pb2.WorkerMessage(goodbye=worker_pb2.Goodbye(why=why)))

    def report(self, load: types_pb2.WorkerLoad) -> None:
        self.load = load
        for outbox in self.outboxes:
            outbox.put_nowait(worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(load=load)))

    async def _read(self, requests: Any, outbox: Outbox, session: _Session) -> None:
        async for message in requests:
            self.num_messages += 1
            for each in message.batch.messages if message.HasField("batch") else (message,):
                self._take(each, outbox, session)

    def _take(self, message: worker_pb2.RouterMessage, outbox: Outbox, session: _Session) -> None:
        match message.WhichOneof("message"):
            case "submit":
                self._submit(message.submit, outbox, session)
            case "abort":
                self.aborts.append(message.abort.request_id)
                subscription = session.subscriptions.get(message.abort.request_id)
                if subscription is None:
                    self._abort(message.abort.request_id)
                elif message.abort.complete:
                    self.answers.complete(subscription.answer)
                else:
                    self.answers.cancel(subscription.answer)
            case "resume":
                self._resume(message.resume, session)
            case "more":
                if subscription := session.subscriptions.get(message.more.subscription_id):
                    subscription.go_on()
            case "leave":
                name = message.leave.subscription_id
                if subscription := session.subscriptions.pop(name, None):
                    self.answers.leave(subscription, delivered=message.leave.delivered)
                    if not subscription.told_end:
                        session.send(worker_pb2.SequenceOutput(request_id=name, left=True))

    def _submit(self, submit: worker_pb2.Submit, outbox: Outbox, session: _Session) -> None:
        self.submits.append(submit)
        error = self.refuse_new
        resumable = submit.HasField("resumable")
        if error is None and (answer := self.answers.adopted(submit.request_id, submit.tenant)) is not None:
            if goes_on_with(Request.from_proto(submit, ""), answer):
                session.subscriptions[submit.request_id] = self.answers.join(answer, submit, session)
                return
            self.answers.cancel(answer)
        if not resumable and (submit.request_id in self.active or self.answers.holds(submit.request_id)):
            error = errors.AlreadyExists("running", reason="DUPLICATE_REQUEST")
        if error is not None:
            self._send(outbox, _failed(submit.request_id, 0, error))
            return
        emit: Emit = lambda output: self._send(outbox, output)
        if resumable:
            owner = self.answers.new_owner()
            try:
                subscription = self.answers.open(submit, owner, lambda: self._abort(submit.request_id), session)
            except errors.TailpackError as refusal:
                self._send(outbox, _failed(submit.request_id, 0, refusal))
                return
            session.subscriptions[subscription.name] = subscription
            if subscription.answer.owner != owner:
                return
            emit = lambda output: self.answers.take(owner, [output])
        self._start(submit, None if resumable else outbox, emit)

    def _start(self, submit: worker_pb2.Submit, outbox: Outbox | None, emit: Emit) -> None:
        script = self.script(submit)
        task = asyncio.create_task(self._run(submit, script, emit))
        self.num_emitted[submit.request_id] = len(submit.emitted_token_ids)
        self.active[submit.request_id] = _Sequence(submit, script, outbox, emit, task)

    def _resume(self, resume: worker_pb2.Resume, session: _Session) -> None:
        self.resumes.append(resume.request_id)
        name = resume.subscription_id
        try:
            session.subscriptions[name] = self.answers.resume(resume.request_id, resume.tenant, name, session)
        except errors.NotFound as unknown:
            session.send(_failed(name, 0, unknown))

    def _abort(self, request_id: str) -> None:
        sequence = self.active.get(request_id)
        if sequence is None or sequence.script.deaf:
            return
        del self.active[request_id]
        sequence.task.cancel()
        output = worker_pb2.SequenceOutput(request_id=request_id, finish_reason=types_pb2.FINISH_REASON_ABORTED)
        _end(output, sequence.submit, sequence.script, self.num_emitted[request_id])
        sequence.emit(output)

    async def _run(self, submit: worker_pb2.Submit, script: Script, emit: Emit) -> None:
        await asyncio.sleep(script.first_s)
        tokens = self._tokens(submit, script)
        finish = types_pb2.FINISH_REASON_LENGTH if len(tokens) >= submit.stop.max_tokens else script.finish
        position = len(submit.emitted_token_ids)
        if position:
            assert list(submit.emitted_token_ids) == tokens[:position], "emitted tokens that this worker would not emit"
            position += script.begin_off_by
            if len(submit.emitted_token_ids) >= len(tokens):
                del self.active[submit.request_id]
                emit(_failed(submit.request_id, position, errors.InvalidRequest("over", reason="ALREADY_FINISHED")))
                return
        while position < len(tokens) or not tokens:
            if script.hold_at is not None and position >= script.hold_at:
                await self.gate.wait()
            step = tokens[position : position + script.per_step]
            ended = position + len(step) >= len(tokens)
            output = worker_pb2.SequenceOutput(
                request_id=submit.request_id, token_offset=position, token_ids=step, seed=script.seed
            )
            if script.logprobs:
                for token_id in step:
                    output.logprobs.add(chosen=types_pb2.TokenLogprob(token_id=token_id, logprob=-0.5))
            if ended and script.error is None:
                output.finish_reason = types_pb2.FinishReason.ValueType(finish)
                _end(output, submit, script, len(tokens) + script.usage_off_by)
            if ended:
                del self.active[submit.request_id]
            if script.skip_at is None or not position <= script.skip_at < position + len(step):
                emit(output)
            if script.repeat_at is not None and position <= script.repeat_at < position + len(step):
                emit(output)
            position += len(step)
            self.num_emitted[submit.request_id] = position
            if ended:
                if script.error is not None:
                    emit(_failed(submit.request_id, position, script.error))
                return
            await asyncio.sleep(script.every_s)

    @staticmethod
    def _tokens(submit: worker_pb2.Submit, script: Script) -> list[int]:
        limit, tokens = submit.stop.max_tokens, list(script.token_ids)
        return (tokens * (limit // max(1, len(tokens)) + 1) if script.endless else tokens)[:limit]

    def _send(self, outbox: Any, output: worker_pb2.SequenceOutput) -> None:
        load = types_pb2.WorkerLoad()
        load.CopyFrom(self.load)
        load.num_running += len(self.active)
        outbox.put_nowait(worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(sequences=[output], load=load)))


def _end(output: worker_pb2.SequenceOutput, submit: worker_pb2.Submit, script: Script, num_tokens: int) -> None:
    output.usage.prompt_tokens = len(submit.prompt_token_ids)
    output.usage.output_tokens = num_tokens
    output.usage.cached_prompt_tokens = script.cached
    output.usage.prefix_exact = script.prefix_exact
    output.timings.prefill_ns = 1000


def _failed(request_id: str, offset: int, error: errors.TailpackError) -> worker_pb2.SequenceOutput:
    return worker_pb2.SequenceOutput(
        request_id=request_id,
        token_offset=offset,
        finish_reason=types_pb2.FINISH_REASON_ERROR,
        error=rpc.to_detail(error),
    )


def worker_info(
    *,
    worker_id: str = "",
    model: str = "tiny",
    vocab_size: int = 600,
    max_sequence_tokens: int = 4096,
    tokenizer_digest: bytes = b"",
    eos_token_ids: Sequence[int] = (1,),
    features: Sequence[str] = ("resume", "emitted_token_ids", "batch"),
) -> types_pb2.WorkerInfo:
    """What a worker says of itself; a new incarnation each time."""
    return types_pb2.WorkerInfo(
        worker_id=worker_id or f"fake-{secrets.token_hex(3)}",
        incarnation=secrets.token_hex(8),
        model=types_pb2.ModelInfo(
            name=model,
            architecture="fake",
            vocab_size=vocab_size,
            max_sequence_tokens=max_sequence_tokens,
            eos_token_ids=eos_token_ids,
            tokenizer_digest=tokenizer_digest,
        ),
        kv_mode="dense",
        max_running=64,
        features=features,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--worker-id", default="")
    parser.add_argument("--token-ids", default="5,6,7")
    parser.add_argument("--first-s", type=float, default=0.0)
    parser.add_argument("--every-s", type=float, default=0.0)
    parser.add_argument("--per-step", type=int, default=1)
    parser.add_argument("--endless", action="store_true")
    parser.add_argument("--life-s", type=float, default=120.0, help="ends itself after this long")
    options = parser.parse_args()
    script = Script(
        token_ids=[int(token_id) for token_id in options.token_ids.split(",")],
        first_s=options.first_s,
        every_s=options.every_s,
        per_step=options.per_step,
        endless=options.endless,
    )

    async def serve() -> None:
        worker = FakeWorker(lambda submit: script, worker_info(worker_id=options.worker_id))
        print(json.dumps({"address": await worker.start(options.listen)}), flush=True)
        await asyncio.sleep(options.life_s)

    rpc.run(serve())


if __name__ == "__main__":
    main()
