"""Load on a running cluster: so many callers in a loop (closed), or arrivals at a rate, come what may (open).

In an open loop a latency counts from when its request was due, so a cluster, or a load generator, that falls behind
cannot hide it (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from protos import router_pb2, types_pb2
from protos.errors import InvalidRequest, TailpackError, Unavailable
from router.bench_statistics import Durations, Ended, Measured, Mix, poisson_arrivals
from router.client import PREFIX_REUSE, AsyncTailpack

LAG_EVERY_S = 0.02
BUSY_LAG_S = 0.01
BUSY_CPU = 0.85
ERROR_PAUSE_S = 0.1
"""In a closed loop a caller waits so long after an error: refusals are quick, and would else be all that happens."""

_POOL_TOKENS = 1 << 16
_OWN_TOKENS = 8

GENERATOR_FULL = "LOAD_GENERATOR_FULL"
UNFINISHED = "UNFINISHED"
"""Reasons of the load generator's own, beside those of errors."""


@dataclass(frozen=True)
class Load:
    """What to send. Either concurrency (closed loop) or rate (open loop, requests/s), and seconds or requests.

    Args:
        warmup_s: at the start; what was due then is not measured.
        seconds: that are measured, from the end of the warm-up.
        requests: that are measured.
        drain_s: after the last was sent, for those that run; what is not answered then is ended, as UNFINISHED.
        seed: of lengths, prompts and arrivals; they are the same again with the same seed.
        own_streams: each request has a stream of its own, whether or not the router has sessions.
        max_in_flight: in an open loop; what is due beyond that is not sent, and counted as LOAD_GENERATOR_FULL.
    """

    concurrency: int | None = None
    rate: float | None = None
    prompt_tokens: Mix = field(default_factory=lambda: Mix((128,), (1.0,)))
    max_tokens: Mix = field(default_factory=lambda: Mix((64,), (1.0,)))
    seconds: float | None = 10.0
    requests: int | None = None
    warmup_s: float = 2.0
    drain_s: float = 30.0
    timeout_s: float = 300.0
    seed: int = 0
    model: str = ""
    prefix_reuse: str = "none"
    own_streams: bool = False
    max_in_flight: int = 4096


@dataclass
class Generator:
    """How the load generator itself fared in the window. cpu_share: of one core."""

    lag: Durations = field(default_factory=Durations)  # of the event loop
    cpu_share: float = 0.0

    def busy(self, late: Durations) -> str:
        """Why the figures are partly its own, in words; "" where they are not."""
        why = []
        if self.lag.count and (lag := self.lag.percentile(99)) > BUSY_LAG_S:
            why.append(f"its event loop was late by {lag * 1e3:.0f} ms (p99)")
        if late.count and (lateness := late.percentile(99)) > BUSY_LAG_S:
            why.append(f"it sent requests {lateness * 1e3:.0f} ms late (p99)")
        if self.cpu_share > BUSY_CPU:
            why.append(f"it used {self.cpu_share:.0%} of a core")
        return ", ".join(why)


@dataclass
class Run:
    """A load test as far as it has come; the screen reads it while it goes on."""

    load: Load
    model: types_pb2.ModelInfo
    measured: Measured
    generator: Generator = field(default_factory=Generator)
    started: float = field(default_factory=time.monotonic)
    num_sent: int = 0
    num_in_flight: int = 0
    interrupted: bool = False

    def now_s(self) -> float:
        return time.monotonic() - self.started


async def run_load(client: AsyncTailpack, load: Load, stop: asyncio.Event, watch: Callable[[Run], None]) -> Run:
    """Runs the whole load.

    Args:
        client: one that does not retry, or errors would hide.
        stop: ends it early; what is in flight is then ended at once and not counted.
        watch: told the run once, when it begins.

    Raises:
        Unavailable: no worker is ready. InvalidRequest: lengths that the model has no room for, MODEL_NOT_NAMED.
    """
    model = _model(await client.list_workers(), load)
    run = Run(load, model, Measured(begin_s=load.warmup_s))
    requests = _Requests(load, model)
    watch(run)
    async with _watched(run):
        sending = asyncio.create_task(
            _closed(run, client, requests) if load.concurrency else _open(run, client, requests)
        )
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([sending, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            run.interrupted = not sending.done()
            if run.measured.end_s is None:
                run.measured.end_s = run.now_s()
            for task in (sending, stopping):
                task.cancel()
            await asyncio.wait([sending, stopping])
    if not run.interrupted:
        sending.result()
    return run


def _model(workers: Sequence[router_pb2.WorkerStatus], load: Load) -> types_pb2.ModelInfo:
    models = {worker.info.model.name: worker.info.model for worker in workers if worker.state == "ready"}
    if not models:
        raise Unavailable("no worker is ready", reason="NO_WORKER", given=", ".join(w.state for w in workers) or "none")
    if load.model not in models and (load.model or len(models) > 1):
        raise InvalidRequest(
            "say which model with --model", reason="MODEL_NOT_NAMED", given=load.model, allowed=", ".join(models)
        )
    model = models[load.model or next(iter(models))]
    longest = max(load.prompt_tokens.tokens) + max(load.max_tokens.tokens)
    if longest > model.max_sequence_tokens:
        raise InvalidRequest(
            f"the longest prompt and answer have no room in model {model.name}",
            reason="PROMPT_TOO_LONG",
            given=f"{longest} tokens together",
            allowed=f"{model.max_sequence_tokens} tokens",
            hint="ask for less with --prompt-tokens or --max-tokens",
        )
    return model


class _Requests:
    """Request number i of a load, the same each time. Prompts are random tokens, and no two begin alike."""

    def __init__(self, load: Load, model: types_pb2.ModelInfo) -> None:
        self._load = load
        rng = random.Random(f"prompts {load.seed}")
        self._tokens = [token for token in range(model.vocab_size) if token not in set(model.eos_token_ids)]
        # Drawn once: drawing a long prompt's tokens takes longer than sending it.
        self._pool = rng.choices(self._tokens, k=_POOL_TOKENS + max(load.prompt_tokens.tokens))

    def __call__(self, number: int) -> router_pb2.GenerateRequest:
        rng = random.Random(f"request {self._load.seed} {number}")
        length, most = self._load.prompt_tokens.draw(rng), self._load.max_tokens.draw(rng)
        own = rng.choices(self._tokens, k=min(length, _OWN_TOKENS))
        begin = rng.randrange(_POOL_TOKENS)
        return router_pb2.GenerateRequest(
            model=self._load.model,
            token_ids=router_pb2.TokenIds(ids=own + self._pool[begin : begin + length - len(own)]),
            stop=types_pb2.StopConditions(max_tokens=most, ignore_eos=True),
            prefix_reuse=PREFIX_REUSE[self._load.prefix_reuse],
        )


async def _closed(run: Run, client: AsyncTailpack, requests: _Requests) -> None:
    """Each caller sends its next request when the last is answered."""
    load = run.load
    ends_s = load.warmup_s + load.seconds if load.seconds is not None else None
    left = load.requests

    async def caller() -> None:
        nonlocal left
        while ends_s is None or run.now_s() < ends_s:
            due_s = run.now_s()
            if due_s >= load.warmup_s and left is not None:
                if left == 0:
                    return
                left -= 1
            if not await _one(run, client, requests, due_s):
                await asyncio.sleep(ERROR_PAUSE_S)

    assert load.concurrency is not None
    await _drained(run, [asyncio.create_task(caller()) for _ in range(load.concurrency)], ends_s)


async def _open(run: Run, client: AsyncTailpack, requests: _Requests) -> None:
    """Each request is sent when it is due."""
    load, left = run.load, run.load.requests
    ends_s = load.warmup_s + load.seconds if load.seconds is not None else None
    tasks: set[asyncio.Task[Any]] = set()
    assert load.rate is not None
    try:
        for due_s in poisson_arrivals(load.rate, load.seed):
            if (ends_s is not None and due_s >= ends_s) or left == 0:
                break
            if left is not None and due_s >= load.warmup_s:
                left -= 1
            await asyncio.sleep(due_s - run.now_s())
            if run.num_in_flight >= load.max_in_flight:
                now_s = run.now_s()
                run.measured.ended(Ended(due_s, now_s, None, None, now_s, 0, 0, 0, GENERATOR_FULL))
                continue
            task = asyncio.create_task(_one(run, client, requests, due_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if ends_s is not None:
            await asyncio.sleep(ends_s - run.now_s())
        await _drained(run, list(tasks), ends_s)
    finally:
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _drained(run: Run, tasks: list[asyncio.Task[Any]], ends_s: float | None) -> None:
    """Waits for what was begun. With ends_s the window ends then, else with the last answer."""
    try:
        if ends_s is not None:
            if tasks:
                await asyncio.wait(tasks, timeout=ends_s - run.now_s())
            run.measured.end_s = ends_s
            if pending := [task for task in tasks if not task.done()]:
                await asyncio.wait(pending, timeout=run.load.drain_s)
        else:
            for task in tasks:
                await task
            run.measured.end_s = run.now_s()
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()


async def _one(run: Run, client: AsyncTailpack, requests: _Requests, due_s: float) -> bool:
    """Sends one request and reads its answer to the end; False where that was an error."""
    measured = run.measured
    request = requests(run.num_sent)
    run.num_sent += 1
    run.num_in_flight += 1
    measured.in_flight(run.now_s(), run.num_in_flight)
    sent_s = run.now_s()
    first_s: float | None = None
    last_s: float | None = None
    usage = types_pb2.Usage()
    reason = UNFINISHED
    try:
        async for chunk in client.stream(request, timeout_s=run.load.timeout_s):
            now_s = run.now_s()
            if chunk.token_ids:
                measured.chunk(now_s, len(chunk.token_ids), last_s, due_s)
                first_s, last_s = first_s if first_s is not None else now_s, now_s
            if chunk.finish_reason:
                usage = chunk.usage
                aborted = chunk.finish_reason == types_pb2.FINISH_REASON_ABORTED
                reason = "ABORTED" if aborted else ""
    except TailpackError as error:
        reason = error.reason
    finally:
        measured.in_flight(run.now_s(), run.num_in_flight)
        run.num_in_flight -= 1
        if not (run.interrupted and reason == UNFINISHED):
            measured.ended(
                Ended(
                    due_s,
                    sent_s,
                    first_s,
                    last_s,
                    run.now_s(),
                    usage.prompt_tokens,
                    usage.cached_prompt_tokens,
                    usage.output_tokens,
                    reason,
                )
            )
    return not reason


@asynccontextmanager
async def _watched(run: Run) -> AsyncIterator[None]:
    """Measures the load generator itself while the window lasts."""

    async def watch() -> None:
        await asyncio.sleep(run.load.warmup_s)
        began, began_cpu_s = time.monotonic(), time.process_time()
        while run.measured.in_window(run.now_s()):
            before = time.monotonic()
            await asyncio.sleep(LAG_EVERY_S)
            now = time.monotonic()
            run.generator.lag.add(now - before - LAG_EVERY_S)
            run.generator.cpu_share = (time.process_time() - began_cpu_s) / (now - began)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
