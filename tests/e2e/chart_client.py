"""A caller inside a pod: streams resumable answers, one after another, until a file tells it to stop.

    python -m tests.e2e.chart_client ADDRESS CA STOP_FILE STREAMS MAX_TOKENS TURNS

The token is in $TAILPACK_TOKEN. Prints one JSON line when an answer begins, and one when it has ended or failed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from pathlib import Path

from protos.errors import TailpackError
from protos.tls import ClientTls
from protos.token_option import read_token
from router.client import AsyncTailpack, RetryPolicy

CALLER = secrets.token_hex(4)  # a request's id may not be used again while its answer is kept


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def stream(client: AsyncTailpack, number: int, stop: Path, max_tokens: int, turns: int) -> None:
    """Answers to the same prompt, one after another; so many ``turns``, or with 0 until the file is there."""
    turn = 0
    while not stop.exists() and (not turns or turn < turns):
        name = f"{CALLER}-{number}-{turn}"
        turn += 1
        began, text, tokens, last = time.monotonic(), "", 0, None
        try:
            async for chunk in client.generate(
                f"Stream {number} says",
                chat=False,
                request_id=name,
                max_tokens=max_tokens,
                ignore_eos=True,
                resumable=True,
            ):
                if not tokens:
                    say(event="began", name=name)
                text, tokens, last = text + chunk.text, tokens + len(chunk.token_ids), chunk
        except TailpackError as error:
            say(event="failed", name=name, tokens=tokens, error=str(error))
            continue
        assert last is not None
        seconds = round(time.monotonic() - began, 2)
        say(
            event="ended",
            name=name,
            number=number,
            tokens=tokens,
            text=text,
            seconds=seconds,
            usage=last.usage.output_tokens,
        )


async def main(address: str, ca: str, stop: str, streams: str, max_tokens: str, turns: str) -> None:
    retry = RetryPolicy(max_retries=30)
    told = lambda error, delay_s: say(event="retry", error=str(error))
    async with AsyncTailpack(
        address, token=read_token(None), tls=ClientTls(Path(ca)), retry=retry, on_retry=told
    ) as client:
        await asyncio.gather(*(stream(client, i, Path(stop), int(max_tokens), int(turns)) for i in range(int(streams))))
    say(event="stopped")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
