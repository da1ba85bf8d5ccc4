"""Who has a resumable request: all workers are asked at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from protos import router_pb2, worker_pb2
from protos.errors import Unavailable
from router.registry import Registry, WorkerLink

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


async def find(registry: Registry, wanted: str, tenant: str, *, lost_may_have_it: bool) -> Found | None:
    """Asks all workers at once who has a resumable request.

    Where two have it, the one that was placed later counts: its router had given up the other before its first token.

    Args:
        lost_may_have_it: a worker that is not connected may have it, so that "none" would be a guess. (Without, it is
            taken to be gone with all it had: else one dead worker would hold up every request with an id.)

    Raises:
        Unavailable: nobody has it, and a worker cannot be asked (WORKER_NOT_ASKED).
    """
    links = [link for link in registry.links.values() if link.state in ("ready", "draining") and link.can_resume()]
    asked = {asyncio.create_task(link.find(wanted, tenant, FIND_TIMEOUT_S)): link for link in links}
    best: tuple[int, Found] | None = None
    failures = [
        f"{link.address} is {link.state}"
        for link in registry.links.values()
        if lost_may_have_it and link.may_have_any()
    ]
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
    if best is not None:
        return best[1]
    if failures:
        raise worker_not_asked(failures)
    return None


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
