"""Who has a resumable request: all workers are asked at once, and those that are away when they are back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from protos import router_pb2, worker_pb2
from protos.errors import Unavailable
from router.registry import Registry, WorkerLink

_T = TypeVar("_T")

FIND_TIMEOUT_S = 2.0
FIND_EXTRA_S = 0.05
"""When one worker has a request, the others have this much longer: two have it where a placement was given up."""


@dataclass(frozen=True)
class Found:
    """A resumable request that runs or is kept. ``request`` has what its text depends on; of its prompt, the kind."""

    link: WorkerLink
    request: router_pb2.GenerateRequest
    digest: bytes
    num_prompt_tokens: int
    num_tokens: int  # emitted when it was looked for


async def find(registry: Registry, wanted: str, tenant: str) -> tuple[Found | None, list[str]]:
    """Asks all workers at once who has a resumable request.

    Where two have it, the one that was placed later counts: its router had given up the other before its first token.

    Returns:
        (who has it, workers that did not answer and why).
    """
    links = [link for link in registry.links.values() if link.is_connected and link.can_resume()]
    asked = {asyncio.create_task(link.find(wanted, tenant, FIND_TIMEOUT_S)): link for link in links}
    best: tuple[int, Found] | None = None
    failures: list[str] = []
    pending = set(asked)
    try:
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=FIND_EXTRA_S if best else None, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            for task in done:
                if (error := task.exception()) is not None:
                    failures.append(f"{asked[task].address}: {error}")
                elif (answer := task.result()).found and (best is None or answer.attempt > best[0]):
                    best = answer.attempt, _found(asked[task], answer)
    finally:
        for task in pending:
            task.cancel()
    return (best[1] if best is not None else None), failures


async def ask_until_back(
    registry: Registry, wait_s: float, ask: Callable[[], Awaitable[tuple[_T | None, list[str]]]]
) -> _T | None:
    """Asks the workers for something, and again when one comes back that may have it and is away.

    A worker may have it until it was away for as long as an answer can be kept; one that this router has never met,
    until it has tried to for the wait: an address where nobody is must not make every unknown request a guess.

    Args:
        wait_s: since when a worker is away, at most.
        ask: returns (what was asked for, workers that did not answer and why).

    Returns:
        None: nobody has it.

    Raises:
        Unavailable: nobody has it, and a worker that may did not come back, or does not answer (WORKER_NOT_ASKED).
    """
    woken = asyncio.Event()
    ends_s = time.monotonic() + wait_s
    waited_for: dict[str, WorkerLink] = {}
    with registry.watch(woken):
        while True:
            woken.clear()
            result, failures = await ask()
            if result is not None:
                return result
            left_s = {link: min(wait_s - away_s, ends_s - time.monotonic()) for link, away_s in _away(registry)}
            waiting = [link for link, its_s in left_s.items() if its_s > 0]
            if not waiting or registry.closed:
                break
            waited_for |= {link.address: link for link in waiting}
            try:
                async with asyncio.timeout(max(left_s.values())):
                    await woken.wait()
            except TimeoutError:
                break
    away = [link for link, _ in _away(registry) if link.may_have_any() or link.address in waited_for]
    if failures or away:
        raise worker_not_asked(failures + [f"{link.address} is {link.state}" for link in away])
    return None


def _away(registry: Registry) -> list[tuple[WorkerLink, float]]:
    return [(link, away_s) for link in registry.links.values() if (away_s := link.away_s()) is not None]


def worker_not_asked(why: list[str]) -> Unavailable:
    """why: for each such worker."""
    return Unavailable(
        "a worker that may have the request cannot be asked",
        reason="WORKER_NOT_ASKED",
        given="; ".join(why)[:2000],
        retry_after_ms=500,
    )


def _found(link: WorkerLink, answer: worker_pb2.FindResponse) -> Found:
    request = router_pb2.GenerateRequest.FromString(answer.caller_request)
    return Found(link, request, answer.request_digest, answer.prompt_tokens, answer.output_tokens)
