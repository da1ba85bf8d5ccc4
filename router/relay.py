"""One answer on its way from a worker's steps to its caller: offsets, text, stop strings, a bounded buffer.

The worker's side (`feed`, `fail`) never waits; the caller's side (`next_chunk`) takes all that has gathered since, so a
slow reader gets fewer and larger chunks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from protos import router_pb2, rpc, types_pb2, worker_pb2
from protos.errors import CapacityError, InternalError, InvalidRequest, TailpackError
from protos.histogram import Histogram
from router.detokenizer import Detokenizer
from router.metrics import TokenPace
from router.replay import Skip
from router.stop_strings import StopStringFilter
from router.token_log import TokenLog, TokenLogs
from router.unread import Unread

MAX_PENDING_BYTES = 4 << 20
"""Of one answer, unread by its caller. Text of about half a million tokens; far below gRPC's message limit."""

SETTLE_S = 2.0
"""How long the last chunk waits for the worker's word after an abort. Its text is with the caller by then."""

_LOGPROB_BYTES = 32  # of one TokenLogprob in memory, roughly


class Source(Protocol):
    """The worker's side of one relay: router/subscription.py."""

    def complete(self) -> None: ...

    def cancel(self) -> None: ...

    def more(self) -> None: ...

    def leave(self) -> None: ...


class Relay:
    """One answer, or one stream that goes on with it. Where its worker is lost it can go on from another placement.

    Attributes:
        num_tokens: accepted from workers; those behind a stop string are not.
        ended: nothing more will come from the worker.
        is_lost: it ended by the worker's fault, and can go on (``go_on``).
        was_cut: the session with the worker broke; it said nothing.
        joined: the newest placement went on with what its worker had: nothing was computed again.
        log: the accepted tokens.
        seed: as the worker said it with the first token; 0: it did not.
        last_output: the worker's last word: usage, timings.
    """

    def __init__(
        self,
        request_id: str,
        worker_id: str,
        *,
        num_prompt_tokens: int,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str],
        source: Source,
        itl: Histogram,
        emitted: Callable[[int], None] = lambda num_tokens: None,
        skip: Skip | None = None,
        unread: Unread | None = None,
        logs: TokenLogs | None = None,
    ) -> None:
        """
        Args:
            unread: where what its caller has not read is counted with that of others; None: it is alone.
            logs: where its tokens are counted with those of others; None: it is alone.
            source: what may be asked of the worker about the sequence.
            itl: where the gaps between tokens are counted.
            emitted: told the number of tokens of each step.
            skip: what of the answer the caller has: the first chunk begins behind it.
        """
        self.num_tokens = 0
        self.ended = False
        self.is_lost = self.was_cut = self.joined = False
        self.pace = TokenPace(itl)
        self.log = TokenLog(logs or TokenLogs())
        self.seed = 0
        self.last_output: worker_pb2.SequenceOutput | None = None
        self._request_id = request_id
        self._worker_id = worker_id
        self._num_prompt_tokens = num_prompt_tokens
        self._detokenizer = detokenizer
        self._stops = StopStringFilter(stop_strings)
        self._token_by_token = bool(stop_strings)  # so that tokens end with the one that completes a stop string
        self._source = source
        self._skip = skip if skip is not None and not skip.done else None
        self._first_token = skip.place.token_offset if skip is not None else 0
        self._more_waits = False  # the worker holds back more of a replay
        self._known_again: int | None = None  # tokens of ours that a placement may send again, and has sent so far
        self._emitted = emitted
        self._unread = unread or Unread()
        self._wake = asyncio.Event()
        self._chunk = router_pb2.GenerateResponse(request_id=request_id, worker_id=worker_id)  # what gathers
        self._full: deque[router_pb2.GenerateResponse] = deque()  # gathered before it
        self._had_logprobs = False
        self._texts: list[str] = []
        self._pending_bytes = 0
        self._text_offset = skip.place.text_offset if skip is not None else 0
        self._reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED
        self._settle_until: float | None = (
            None  # loop time; set when the answer is complete but for the worker's last word
        )
        self._error: TailpackError | None = None
        self._last_chunk_taken = False

    @property
    def num_unread_bytes(self) -> int:
        """Gathered since the caller's last chunk, roughly."""
        return self._pending_bytes

    def close(self) -> None:
        """Nobody will read any more of it, and it will not go on."""
        self._forget_pending()
        self.log.close()

    def shed(self, num_bytes: int, allowed: int) -> None:
        """Frees what gathered: the answers of this router hold too much together, and this one most of it."""
        error = _slow_reader(f"{self._pending_bytes} bytes unread, {num_bytes} of all callers", f"{allowed} of all")
        if not self.ended:
            self._source.leave()
        if self.is_lost:  # without what is dropped here it cannot go on
            self.is_lost, self._error = False, None
        self.ended, self._skip = True, None
        self._error = self._error or error
        self._chunk = router_pb2.GenerateResponse(request_id=self._request_id, worker_id=self._worker_id)
        self._full.clear()
        self._forget_pending()
        self._wake.set()

    def _forget_pending(self) -> None:
        num_bytes, self._texts, self._pending_bytes = self._pending_bytes, [], 0
        self._unread.free(self, num_bytes)

    # --- the worker's side ---

    def feed(self, output: worker_pb2.SequenceOutput) -> None:
        """Takes what one step made for this sequence."""
        self.joined |= output.joined
        if self._settle_until is None and not self.ended and output.token_ids:
            self._accept(output)
        if output.finish_reason and not self.ended:
            self._finish(output)
        if self._skip is not None:
            self._check_place(self._skip)
        if output.more:
            self._more_waits = True
            self._ask_for_more()
        self._wake.set()

    def fail(self, error: TailpackError) -> None:
        """The session with the worker broke: the answer ends with an error, behind what has gathered, and can go on.
        One that was complete already stays complete.
        """
        if not self.ended:
            self.is_lost = self.was_cut = self._settle_until is None
            self._end(error)

    def go_on(self, source: Source, worker_id: str, *, repeats: bool) -> None:
        """Behind a failure: what is fed from here on comes from another placement, and begins behind the tokens here.

        Args:
            repeats: it may begin with token 0 instead. Tokens that are here must be the same, and are left out.
        """
        self.ended = self.is_lost = self.was_cut = self.joined = False
        self._error = None
        self._source, self._worker_id = source, worker_id
        self._chunk.worker_id = worker_id
        self._more_waits = False
        self._known_again = 0 if repeats else None

    def cancel(self) -> None:
        """Somebody asked to end this request: the caller gets a last chunk that says so."""
        if self.is_lost:  # nobody is there to be told
            self.is_lost, self._error = False, None
            self._reason = types_pb2.FINISH_REASON_ABORTED
            self._end_text()
            self._wake.set()
        elif not self.ended and self._settle_until is None:
            self._settle(types_pb2.FINISH_REASON_ABORTED)
            self._source.cancel()

    def _end(self, error: TailpackError) -> None:
        if self.ended:
            return
        if self._settle_until is None:
            self._error = error
        else:
            self._end_text()  # its last chunk must hold the text of all its tokens, whatever became of the worker
        self.ended = True
        self._wake.set()

    def _accept(self, output: worker_pb2.SequenceOutput) -> None:
        token_ids: list[int] = output.token_ids[:]  # going through the field itself takes several times as long
        logprobs: Sequence[types_pb2.PositionLogprobs] = output.logprobs
        if logprobs and len(logprobs) != len(token_ids):
            self._break("log-probabilities that do not match the tokens", len(logprobs), len(token_ids))
            return
        if self._known_again is not None:
            num_known = self._pass_over(output.token_offset, token_ids)
            token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]
            if self.ended or not token_ids:
                return
        elif output.token_offset != self.num_tokens:
            kind = "gap" if output.token_offset > self.num_tokens else "repeat"
            self._break(f"a {kind} in the tokens", f"offset {output.token_offset}", f"offset {self.num_tokens}")
            return
        if self.pace.first_ns is None:
            self.seed = self._chunk.seed = output.seed
        self.pace.came(len(token_ids))
        if not self._token_by_token:
            self._take(token_ids, logprobs, self._detokenizer.push(token_ids))
            return
        for position, token_id in enumerate(token_ids):
            shown = self._stops.push(self._detokenizer.push((token_id,)))
            self._take([token_id], logprobs[position : position + 1], shown)
            if self.ended:
                return
            if self._stops.matched is not None:
                if output.finish_reason:
                    self._reason = types_pb2.FINISH_REASON_STOP_STRING
                else:
                    self._settle(types_pb2.FINISH_REASON_STOP_STRING)
                    self._source.complete()
                return

    def _pass_over(self, first: int, token_ids: list[int]) -> int:
        """How many of an output's tokens are here already: another placement sends them again, from the first on."""
        if first == self.num_tokens:
            self._known_again = None
            return 0
        num_known = min(len(token_ids), self.num_tokens - first)
        if first != self._known_again:
            kind = "gap" if first > self.num_tokens else "repeat"
            self._break(f"a {kind} in the tokens", f"offset {first}", f"offset {self.num_tokens}")
        elif self.log.whole and self.log.token_ids[first : first + num_known].tolist() != token_ids[:num_known]:
            self._break("other tokens than before", f"offset {first}", "what the worker before it sent")
        else:
            self._known_again = first + num_known if first + num_known < self.num_tokens else None
        return num_known

    def _take(self, token_ids: list[int], logprobs: Sequence[types_pb2.PositionLogprobs], text: str) -> None:
        if logprobs or self._had_logprobs:
            self._keep_apart(bool(logprobs))
        self.num_tokens += len(token_ids)
        self.log.extend(token_ids)
        self._emitted(len(token_ids))
        if self._skip is not None:
            token_ids, logprobs = self._skip.tokens(token_ids, logprobs)
            text = self._new_text(self._skip, text)
            if self.ended:
                return
        self._chunk.token_ids.extend(token_ids)
        num_bytes = 4 * len(token_ids) + 4 * len(text)
        if text:
            self._texts.append(text)
        if logprobs:
            self._chunk.logprobs.extend(logprobs)
            num_bytes += _LOGPROB_BYTES * sum(1 + len(position.top) for position in logprobs)
        if num_bytes:
            self._pending_bytes += num_bytes
            self._unread.grow(self, num_bytes)
        if self._pending_bytes > MAX_PENDING_BYTES and not self.ended:
            self._end(_slow_reader(f"{self._pending_bytes} bytes unread", f"{MAX_PENDING_BYTES} bytes"))
            self._source.leave()

    def _keep_apart(self, with_logprobs: bool) -> None:
        """Tokens whose log-probabilities were lost with a worker share no chunk with others."""
        self._had_logprobs = True
        if self._chunk.token_ids and with_logprobs != bool(self._chunk.logprobs):
            self._full.append(self._gathered())

    def _settle(self, reason: types_pb2.FinishReason.ValueType) -> None:
        self._reason = reason
        self._settle_until = asyncio.get_running_loop().time() + SETTLE_S
        self._ask_for_more()
        self._wake.set()

    def _finish(self, output: worker_pb2.SequenceOutput) -> None:
        if self._settle_until is None and not self._reason:
            if output.finish_reason == types_pb2.FINISH_REASON_ERROR:
                self.is_lost = True
                self._end(rpc.from_detail(output.error))
                return
            if output.HasField("usage") and output.usage.output_tokens != self.num_tokens:
                self._break("an end that does not fit the tokens", output.usage.output_tokens, self.num_tokens)
                return
            self._reason = output.finish_reason
        self.last_output = output
        self._end_text()
        self.ended = True

    def _end_text(self) -> None:
        """What was held back is no character and no stop string now. (U+FFFD may complete a stop string, though.)"""
        if self._stops.matched is not None:
            return
        text = self._detokenizer.flush()
        if self._token_by_token:
            text = self._stops.push(text)
            if self._stops.matched is None:
                text += self._stops.flush()
            else:
                self._reason = types_pb2.FINISH_REASON_STOP_STRING
        if self._skip is not None:
            text = self._new_text(self._skip, text)
        if text:
            self._texts.append(text)

    def _break(self, what: str, given: object, allowed: object) -> None:
        self._end(
            InternalError(f"worker {self._worker_id} sent {what}", reason="TOKEN_GAP", given=given, allowed=allowed)
        )
        self._source.leave()

    # --- an answer that is made again, for a caller that has some of it ---

    def _new_text(self, skip: Skip, text: str) -> str:
        try:
            return skip.text(text)
        except InvalidRequest as inside:
            self._refuse(inside)
            return ""

    def _check_place(self, skip: Skip) -> None:
        if skip.done:
            self._skip = None
        elif self.ended or self._settle_until is not None or self.num_tokens >= skip.num_known:
            self._refuse(skip.ahead(self.num_tokens))

    def _refuse(self, error: TailpackError) -> None:
        if self._error is None:
            self._error = error
        self._skip = None
        self._forget_pending()
        del self._chunk.token_ids[:], self._chunk.logprobs[:]
        self._full.clear()
        self.ended, self.is_lost = True, False
        self._source.leave()

    def _ask_for_more(self) -> None:
        """Behind a complete answer nothing is kept of what comes, and the worker's last word is behind all of it."""
        if self._more_waits and (self._settle_until is not None or self._pending_bytes < MAX_PENDING_BYTES // 2):
            self._more_waits = False
            self._source.more()

    # --- the caller's side ---

    async def next_chunk(self) -> router_pb2.GenerateResponse | None:
        """All that has gathered; waits until something has. None behind the last chunk.

        Raises:
            TailpackError: the answer ended in an error; all before it was returned.
        """
        while not (self.ended or self._chunk.token_ids or self._texts):
            self._wake.clear()
            if self._settle_until is None:
                await self._wake.wait()
                continue
            try:
                async with asyncio.timeout_at(self._settle_until):
                    await self._wake.wait()
            except TimeoutError:
                self._end_text()
                self.ended = True
        if self._full:
            return self._full.popleft()
        if self._last_chunk_taken:
            return None
        if self._error is not None and not (self._chunk.token_ids or self._texts):
            raise self._error
        return self._take_chunk()

    def _gathered(self) -> router_pb2.GenerateResponse:
        chunk, self._chunk = self._chunk, router_pb2.GenerateResponse(request_id=self._request_id)
        chunk.text_offset = self._text_offset
        chunk.token_offset = max(self.num_tokens, self._first_token) - len(chunk.token_ids)
        if self._texts:
            chunk.text = text = "".join(self._texts)
            self._text_offset += len(text) if text.isascii() else len(text.encode())
            self._texts = []
        return chunk

    def _take_chunk(self) -> router_pb2.GenerateResponse:
        chunk = self._gathered()
        self._forget_pending()
        if self._more_waits:
            self._ask_for_more()
        if self.ended and self._error is None:
            self._last_chunk_taken = True
            self._complete(chunk)
        return chunk

    def _complete(self, chunk: router_pb2.GenerateResponse) -> None:
        chunk.finish_reason = self._reason
        chunk.usage.prompt_tokens = self._num_prompt_tokens
        chunk.usage.output_tokens = self.num_tokens
        if self.last_output is not None:
            chunk.usage.cached_prompt_tokens = self.last_output.usage.cached_prompt_tokens
            chunk.usage.prefix_exact = self.last_output.usage.prefix_exact
            chunk.timings.CopyFrom(self.last_output.timings)
        if self._reason == types_pb2.FINISH_REASON_STOP_STRING:
            chunk.stop_string = self._stops.matched or ""


def _slow_reader(given: str, allowed: str) -> CapacityError:
    return CapacityError("the caller does not read its answer", reason="SLOW_READER", given=given, allowed=allowed)
