"""``tailpack demo``: a cluster, some answers streamed at the same time, what it took, and everything stopped again."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvstore.client import stats
from protos import router_pb2, router_pb2_grpc, rpc, types_pb2
from protos.cli_options import EXIT_INTERRUPTED
from protos.errors import InvalidRequest, TailpackError
from worker.cluster import Cluster, Interrupted
from worker.cluster_config import ClusterConfig
from worker.up import interruptible

ANSWER_TIMEOUT_S = 120.0
SAMPLE_S = 0.05


@dataclass
class Answer:
    """One prompt's answer as far as it has come."""

    prompt: str
    text: str = ""
    worker_id: str = ""
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    num_tokens: int = 0
    prompt_tokens: int = 0
    finished: bool = False
    cut: bool = False  # at the token limit, in the middle of what it had to say

    @property
    def tokens_per_s(self) -> float:
        """Of decoding: from the first token to the last."""
        took = self.last_token - self.first_token
        return (self.num_tokens - 1) / took if took > 0 else 0.0


def run(config: ClusterConfig, prompts: Path | None, max_tokens: int) -> int:
    """Runs the whole show. Returns the exit status."""
    console = Console(highlight=False)
    text = prompts.read_text("utf-8") if prompts else (files("worker") / "data" / "demo_prompts.txt").read_text("utf-8")
    answers = [Answer(line.strip()) for line in text.splitlines() if line.strip()]
    if not answers:
        raise InvalidRequest("no prompts", given=prompts, allowed="one prompt a line")
    cluster = Cluster(config, console)
    with interruptible(cluster):
        try:
            with cluster:
                started = time.monotonic()
                peak = _run_beside(_answer_all(cluster, answers, max_tokens))
                _report(console, answers, time.monotonic() - started, peak)
            console.print("stopped")
            return 0
        except Interrupted:
            console.print("stopped")
            return EXIT_INTERRUPTED
        except TailpackError as failure:
            Console(stderr=True, highlight=False).print(f"Error: {failure}", markup=False, soft_wrap=True)
            return 1


def _run_beside(main: Coroutine[Any, Any, str]) -> str:
    """rpc.run in a thread: an event loop in the main thread would swallow its signals, and Ctrl-C with them."""
    result: concurrent.futures.Future[str] = concurrent.futures.Future()

    def run_there() -> None:
        try:
            result.set_result(rpc.run(main))
        except BaseException as failure:  # noqa: BLE001 - raised again below
            result.set_exception(failure)

    threading.Thread(target=run_there, name="demo", daemon=True).start()
    while not result.done():
        concurrent.futures.wait([result], timeout=0.1)
    return result.result()


async def _answer_all(cluster: Cluster, answers: list[Answer], max_tokens: int) -> str:
    """Streams all answers at the same time. Returns the most KV pages that were in use, in words."""
    pages = _Pages(cluster.kv_socket)
    sampler = asyncio.create_task(pages.sample())
    try:
        async with rpc.channel(cluster.router_address) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            with _Screen(cluster.console, answers) as screen:
                async with asyncio.TaskGroup() as group:
                    for answer in answers:
                        group.create_task(_answer(stub, answer, max_tokens, screen))
                        await asyncio.sleep(0.2)
    except* TailpackError as several:
        raise several.exceptions[0] from None
    finally:
        sampler.cancel()
    return pages.words()


async def _answer(stub: router_pb2_grpc.RouterAsyncStub, answer: Answer, max_tokens: int, screen: _Screen) -> None:
    request = router_pb2.GenerateRequest(
        chat=router_pb2.Chat(messages=[router_pb2.ChatMessage(role="user", content=answer.prompt)]),
        stop=types_pb2.StopConditions(max_tokens=max_tokens),
    )
    answer.started = time.monotonic()
    call = stub.Generate(request, timeout=ANSWER_TIMEOUT_S)
    try:
        async for chunk in call:
            answer.text += chunk.text
            answer.worker_id = answer.worker_id or chunk.worker_id
            if chunk.token_ids:
                answer.last_token = time.monotonic()
                answer.first_token = answer.first_token or answer.last_token
                answer.num_tokens += len(chunk.token_ids)
            if chunk.finish_reason:
                answer.prompt_tokens = chunk.usage.prompt_tokens
                answer.finished = True
                answer.cut = chunk.finish_reason == types_pb2.FINISH_REASON_LENGTH
            screen.show(answer)
    except grpc.RpcError as failure:
        raise rpc.error_from(failure) from failure
    finally:
        call.cancel()


class _Pages:
    """Watches how many KV pages are in use."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._peak = 0
        self._total = 0
        self._page_bytes = 0

    async def sample(self) -> None:
        while True:
            response = await asyncio.to_thread(stats, self._socket)
            groups = [group for device in response.devices for group in device.groups]
            self._total = sum(group.pages_total for group in groups)
            self._page_bytes = max((group.page_bytes for group in groups), default=0)
            self._peak = max(self._peak, sum(group.pages_open + group.pages_sealed for group in groups))
            await asyncio.sleep(SAMPLE_S)

    def words(self) -> str:
        return f"{self._peak} of {self._total} pages at once ({self._page_bytes / (1 << 20):.1f} MiB, 128 tokens each)"


class _Screen:
    """Growing answers, side by side at a terminal; elsewhere each answer when it is whole."""

    def __init__(self, console: Console, answers: list[Answer]) -> None:
        self._console = console
        self._answers = answers
        self._live = Live(console=console, refresh_per_second=12) if console.is_terminal else None

    def __enter__(self) -> _Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, answer: Answer) -> None:
        if self._live:
            self._live.update(Group(*(_lines(a) for a in self._answers if a.started)))
        elif answer.finished:
            self._console.print(_lines(answer))


def _lines(answer: Answer) -> Text:
    cursor = "" if answer.finished else "▌"
    text = " ".join(answer.text.split())
    end = (f" … ({answer.num_tokens} tokens)", "dim") if answer.cut else ("", "")
    return Text.assemble((f"▸ {answer.prompt}\n", "bold"), f"  {text}{cursor}", end)


def _report(console: Console, answers: list[Answer], took_s: float, pages: str) -> None:
    total = sum(answer.num_tokens for answer in answers)
    console.print()
    console.print(_table(answers))
    console.print(f"\n{total} tokens in {took_s:.1f} s, {total / took_s:.1f} tokens/s\nKV: {pages}")


def _table(answers: list[Answer]) -> Table:
    """One row an answer. Where it is narrow only the prompts give way: a number that is cut would be another number."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("prompt")
    table.add_column("worker", no_wrap=True)
    for column in ("in", "out", "TTFT ms", "tokens/s", "pages"):  # in and out: tokens; pages of 128 tokens
        table.add_column(column, justify="right", no_wrap=True)
    for answer in answers:
        table.add_row(
            Text(answer.prompt, no_wrap=True, overflow="ellipsis"),
            answer.worker_id,
            str(answer.prompt_tokens),
            str(answer.num_tokens),
            f"{(answer.first_token - answer.started) * 1e3:.0f}",
            f"{answer.tokens_per_s:.1f}",
            str(-(-(answer.prompt_tokens + answer.num_tokens) // 128)),
        )
    return table
