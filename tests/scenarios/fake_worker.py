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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: the root of the checkout is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from protos import errors, rpc, types_pb2, worker_pb2, worker_pb2_grpc
from protos.tls import ServerTls

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name


@dataclass(frozen=True)
class Script:
    """How one sequence goes."""

    token_ids: Sequence[int] = ()  # repeated up to max_tokens when `endless`
    first_s: float = 0.0  # before the first token: queue and prefill
    every_s: float = 0.0  # between steps
    per_step: int = 1
    endless: bool = False
    finish: int = types_pb2.FINISH_REASON_EOS  # when the tokens are out (LENGTH at max_tokens)
    error: errors.TailpackError | None = None  # instead of a finish
    skip_at: int | None = None  # this token is never sent
    repeat_at: int | None = None  # this token is sent twice
    deaf: bool = False  # aborts are not answered
    logprobs: bool = False
    seed: int = 0
    usage_off_by: int = 0
    cached: int = 0  # prompt tokens that needed no computing
    prefix_exact: bool = False


@dataclass(frozen=True)
class _Sequence:
    submit: worker_pb2.Submit
    script: Script
    outbox: asyncio.Queue[worker_pb2.WorkerMessage]  # of the session that submitted it
    task: asyncio.Task[None]


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
    outboxes: set[asyncio.Queue[worker_pb2.WorkerMessage]] = field(default_factory=set)
    address: str = ""
    tls: ServerTls | None = None
    refuse_new: errors.TailpackError | None = None
    load: types_pb2.WorkerLoad = field(
        default_factory=lambda: types_pb2.WorkerLoad(pages_free=10_000, pages_total=10_000)
    )
    _server: rpc.RpcServer | None = None

    async def start(self, address: str = "127.0.0.1:0") -> str:
        self._server = rpc.RpcServer("fake-worker", tls=self.tls)
        self._server.add(worker_pb2_grpc.add_WorkerServicer_to_server, self, SERVICE_NAME)
        self.address = await self._server.start(address)
        return self.address

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[worker_pb2.WorkerMessage]:
        self.num_sessions += 1
        outbox: asyncio.Queue[worker_pb2.WorkerMessage] = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests, outbox))
        self.outboxes.add(outbox)
        try:
            await asyncio.sleep(self.welcome_s)
            yield worker_pb2.WorkerMessage(welcome=worker_pb2.Welcome(info=self.info, load=self.load))
            while True:
                message = await outbox.get()
                yield message
        finally:
            self.outboxes.discard(outbox)
            reader.cancel()
            for request_id, sequence in list(self.active.items()):
                if sequence.outbox is outbox:
                    sequence.task.cancel()
                    del self.active[request_id]

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortResponse:
        found = request.request_id in self.active and self.active[request.request_id].submit.tenant == request.tenant
        if found:
            self._abort(request.request_id)
        return worker_pb2.AbortResponse(found=found)

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

    async def _read(self, requests: Any, outbox: asyncio.Queue[worker_pb2.WorkerMessage]) -> None:
        async for message in requests:
            match message.WhichOneof("message"):
                case "submit":
                    self._submit(message.submit, outbox)
                case "abort":
                    self.aborts.append(message.abort.request_id)
                    self._abort(message.abort.request_id)

    def _submit(self, submit: worker_pb2.Submit, outbox: asyncio.Queue[worker_pb2.WorkerMessage]) -> None:
        self.submits.append(submit)
        if submit.request_id in self.active:
            error: errors.TailpackError | None = errors.AlreadyExists("running", reason="DUPLICATE_REQUEST")
        else:
            error = self.refuse_new
        if error is not None:
            self._send(outbox, _failed(submit.request_id, 0, error))
            return
        script = self.script(submit)
        task = asyncio.create_task(self._run(submit, script, outbox))
        self.active[submit.request_id] = _Sequence(submit, script, outbox, task)

    def _abort(self, request_id: str) -> None:
        sequence = self.active.get(request_id)
        if sequence is None or sequence.script.deaf:
            return
        del self.active[request_id]
        sequence.task.cancel()
        self._send(
            sequence.outbox,
            worker_pb2.SequenceOutput(request_id=request_id, finish_reason=types_pb2.FINISH_REASON_ABORTED),
        )

    async def _run(self, submit: worker_pb2.Submit, script: Script, outbox: Any) -> None:
        await asyncio.sleep(script.first_s)
        limit = submit.stop.max_tokens
        tokens = list(script.token_ids)
        if script.endless:
            tokens = (tokens * (limit // max(1, len(tokens)) + 1))[:limit]
        finish = types_pb2.FINISH_REASON_LENGTH if len(tokens) >= limit else script.finish
        tokens = tokens[:limit]
        position = 0
        while position < len(tokens) or not tokens:
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
                output.usage.prompt_tokens = len(submit.prompt_token_ids)
                output.usage.output_tokens = len(tokens) + script.usage_off_by
                output.usage.cached_prompt_tokens = script.cached
                output.usage.prefix_exact = script.prefix_exact
                output.timings.prefill_ns = 1000
            if ended:
                del self.active[submit.request_id]
            if script.skip_at is None or not position <= script.skip_at < position + len(step):
                self._send(outbox, output)
            if script.repeat_at is not None and position <= script.repeat_at < position + len(step):
                self._send(outbox, output)
            position += len(step)
            self.num_emitted[submit.request_id] = position
            if ended:
                if script.error is not None:
                    self._send(outbox, _failed(submit.request_id, position, script.error))
                return
            await asyncio.sleep(script.every_s)

    def _send(self, outbox: Any, output: worker_pb2.SequenceOutput) -> None:
        load = types_pb2.WorkerLoad()
        load.CopyFrom(self.load)
        load.num_running += len(self.active)
        outbox.put_nowait(worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(sequences=[output], load=load)))


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
