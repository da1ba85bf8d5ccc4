"""Corners of a relay that need an exact order of events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from protos import router_pb2, rpc, types_pb2, worker_pb2
from protos.errors import CapacityError, InternalError, InvalidRequest, WorkerLost
from protos.histogram import STEP_BOUNDS_S, Histogram
from router import relay as relay_module
from router.detokenizer import Detokenizer, TokenBytes
from router.relay import Relay
from router.replay import Place, Skip
from router.token_log import TokenLog, TokenLogs
from router.unread import Unread

TOKENS = TokenBytes(tuple(bytes([byte]) for byte in range(256)))


@dataclass
class Asked:
    """The worker's side: keeps what it is asked."""

    asked: list[str] = field(default_factory=list)

    def complete(self) -> None:
        self.asked.append("complete")

    def cancel(self) -> None:
        self.asked.append("cancel")

    def more(self) -> None:
        self.asked.append("more")

    def leave(self) -> None:
        self.asked.append("leave")


def make(*stop_strings: str, skip: Skip | None = None, unread: Unread | None = None) -> tuple[Relay, list[str]]:
    """A relay whose tokens are bytes, and what it asked of the worker."""
    source = Asked()
    made = Relay(
        "r",
        "w",
        num_prompt_tokens=3,
        detokenizer=Detokenizer(TOKENS),
        stop_strings=stop_strings,
        source=source,
        itl=Histogram(STEP_BOUNDS_S),
        skip=skip,
        unread=unread,
    )
    return made, source.asked


def output(offset: int, data: bytes = b"", finish: types_pb2.FinishReason.ValueType = 0) -> worker_pb2.SequenceOutput:  # type: ignore[assignment]
    return worker_pb2.SequenceOutput(request_id="r", token_offset=offset, token_ids=list(data), finish_reason=finish)


async def test_chunks_gather_while_nobody_reads() -> None:
    relay, _ = make()
    for position in range(100):
        relay.feed(output(position, b"x"))
    chunk = await relay.next_chunk()
    assert chunk is not None
    assert (chunk.text, chunk.token_offset, len(chunk.token_ids)) == ("x" * 100, 0, 100)


async def test_an_answer_that_is_complete_stays_complete_when_the_worker_dies() -> None:
    relay, asked = make("STOP")
    relay.feed(output(0, b"one STOP two"))
    assert asked == ["complete"]
    relay.fail(WorkerLost("gone"))
    chunk = await relay.next_chunk()
    assert chunk is not None
    assert (chunk.text, chunk.stop_string) == ("one ", "STOP")
    assert chunk.finish_reason == types_pb2.FINISH_REASON_STOP_STRING
    assert chunk.usage.output_tokens == len("one STOP")
    assert await relay.next_chunk() is None


async def test_the_stop_string_in_the_last_output_needs_no_abort() -> None:
    relay, asked = make("STOP")
    relay.feed(output(0, b"one STOP", types_pb2.FINISH_REASON_LENGTH))
    chunk = await relay.next_chunk()
    assert chunk is not None
    assert chunk.finish_reason == types_pb2.FINISH_REASON_STOP_STRING
    assert asked == []


async def test_text_before_an_error_comes_first() -> None:
    relay, _ = make()
    relay.feed(output(0, b"one"))
    relay.fail(WorkerLost("gone"))
    chunk = await relay.next_chunk()
    assert chunk is not None
    assert (chunk.text, chunk.finish_reason) == ("one", types_pb2.FINISH_REASON_UNSPECIFIED)
    with pytest.raises(WorkerLost):
        await relay.next_chunk()


async def test_tokens_after_a_gap_are_not_shown() -> None:
    relay, asked = make()
    relay.feed(output(0, b"a"))
    relay.feed(output(2, b"c"))
    relay.feed(output(1, b"b"))
    chunk = await relay.next_chunk()
    assert chunk is not None
    assert chunk.text == "a"
    with pytest.raises(InternalError):
        await relay.next_chunk()
    assert asked == ["leave"]


async def test_cancel_is_said_in_the_last_chunk_even_without_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "SETTLE_S", 0.01)
    relay, asked = make()
    relay.feed(output(0, b"a"))
    relay.cancel()
    relay.cancel()
    relay.feed(output(1, b"b"))  # sent before the worker knew
    chunks = [await relay.next_chunk(), await relay.next_chunk()]
    assert [chunk.text for chunk in chunks if chunk] == ["a", ""]
    assert chunks[-1] is not None
    assert chunks[-1].finish_reason == types_pb2.FINISH_REASON_ABORTED
    assert chunks[-1].usage.output_tokens == 1
    assert asked == ["cancel"]


async def test_a_worker_lost_after_a_cancel_takes_no_text_along() -> None:
    relay, _ = make("lo and behold")
    relay.feed(output(0, b"hello"))
    relay.cancel()
    relay.fail(WorkerLost("gone"))
    chunk = await relay.next_chunk()
    assert chunk is not None
    assert (chunk.text, bytes(chunk.token_ids)) == ("hello", b"hello")
    assert chunk.finish_reason == types_pb2.FINISH_REASON_ABORTED
    assert await relay.next_chunk() is None


async def test_a_replacement_character_at_the_end_can_complete_a_stop_string() -> None:
    relay, _ = make("a\ufffd")
    relay.feed(output(0, b"xa\xe6\x97", types_pb2.FINISH_REASON_LENGTH))
    chunk = await relay.next_chunk()
    assert chunk is not None
    assert (chunk.text, chunk.finish_reason) == ("x", types_pb2.FINISH_REASON_STOP_STRING)


async def test_tokens_and_text_begin_apart_where_the_caller_is() -> None:
    relay, asked = make(skip=Skip(Place(3, 1), num_known=4))
    relay.feed(output(0, b"ab"))
    relay.feed(output(2, b"cd"))
    chunk = await relay.next_chunk()
    assert chunk is not None
    assert (chunk.text, chunk.text_offset, bytes(chunk.token_ids), chunk.token_offset) == ("bcd", 1, b"d", 3)
    relay.feed(output(4, b"e"))
    chunk = await relay.next_chunk()
    assert chunk is not None
    assert (chunk.text, chunk.text_offset, bytes(chunk.token_ids), chunk.token_offset) == ("e", 4, b"e", 4)
    assert not asked


@pytest.mark.parametrize("place", [Place(5, 0), Place(0, 5)])
async def test_a_place_that_what_is_there_does_not_reach_is_refused(place: Place) -> None:
    relay, asked = make(skip=Skip(place, num_known=4))
    relay.feed(output(0, b"abcd"))
    with pytest.raises(InvalidRequest, match="BAD_OFFSET"):
        await relay.next_chunk()
    assert asked == ["leave"]


async def test_what_a_skipped_answer_ended_in_is_said_before_its_place() -> None:
    relay, _ = make(skip=Skip(Place(3, 3), num_known=1))
    relay.feed(output(0, b"a"))
    relay.fail(WorkerLost("gone"))
    with pytest.raises(InvalidRequest, match="BAD_OFFSET"):  # one token is known, and the caller says it has three
        await relay.next_chunk()
    relay, _ = make(skip=Skip(Place(3, 3), num_known=4))
    relay.feed(output(0, b"a"))
    relay.fail(WorkerLost("gone"))
    with pytest.raises(WorkerLost):
        await relay.next_chunk()


async def test_of_many_unread_answers_the_largest_ends_when_all_are_too_large_together() -> None:
    unread = Unread(1000)  # a token and its character count 8
    (small, _), (large, asked), (third, _) = (make(unread=unread) for _ in range(3))
    small.feed(output(0, b"x" * 40))
    large.feed(output(0, b"y" * 80))
    assert unread.num_bytes == 960 and not large.ended
    third.feed(output(0, b"z" * 10))
    assert (small.ended, large.ended, third.ended) == (False, True, False)
    assert asked == ["leave"] and (unread.num_bytes, unread.num_shed) == (400, 1)
    large.feed(output(80, b"y"))  # on its way still
    with pytest.raises(CapacityError, match="does not read") as caught:
        await large.next_chunk()
    assert caught.value.reason == "SLOW_READER"
    for relay, text in ((small, "x" * 40), (third, "z" * 10)):
        chunk = await relay.next_chunk()
        assert chunk is not None and chunk.text == text
    assert unread.num_bytes == 0
    small.feed(output(40, b"x" * 5))
    small.close()  # its caller left
    assert unread.num_bytes == 0


async def test_an_answer_that_grows_past_all_others_ends_itself() -> None:
    unread = Unread(1000)
    (small, _), (large, asked) = make(unread=unread), make("STOP", unread=unread)
    small.feed(output(0, b"x" * 10))
    large.feed(output(0, b"y" * 200))
    assert (small.ended, large.ended, asked) == (False, True, ["leave"])
    assert unread.num_bytes == 80
    with pytest.raises(CapacityError):
        await large.next_chunk()


async def test_a_complete_answer_that_nobody_reads_is_dropped_by_name() -> None:
    unread = Unread(1000)
    (done, asked), (other, _) = make(unread=unread), make(unread=unread)
    done.feed(output(0, b"y" * 90, types_pb2.FINISH_REASON_LENGTH))
    assert done.ended
    other.feed(output(0, b"x" * 50))
    assert unread.num_bytes == 400 and asked == []
    with pytest.raises(CapacityError):
        await done.next_chunk()


# --- going on from another placement ---


async def lost_at(relay: Relay, count: int) -> None:
    """Its caller has so many tokens, and its worker is gone."""
    relay.feed(output(0, b"x" * count))
    chunk = await relay.next_chunk()
    assert chunk is not None and len(chunk.token_ids) == count
    relay.fail(WorkerLost("gone"))
    assert relay.is_lost and relay.was_cut and relay.ended
    with pytest.raises(WorkerLost):
        await relay.next_chunk()


async def test_it_goes_on_behind_what_its_caller_has() -> None:
    relay, asked = make()
    await lost_at(relay, 3)
    other = Asked()
    relay.go_on(other, "w-2", repeats=False)
    relay.feed(output(3, b"yz", types_pb2.FINISH_REASON_LENGTH))
    chunk = await relay.next_chunk()
    assert chunk is not None
    assert (chunk.text, chunk.token_offset, chunk.text_offset, chunk.worker_id) == ("yz", 3, 3, "w-2")
    assert chunk.usage.output_tokens == 5 and bytes(relay.log.token_ids.tolist()) == b"xxxyz"
    assert not asked and not other.asked


@pytest.mark.parametrize("offset", [0, 2, 4])
async def test_one_that_does_not_begin_there_is_a_gap(offset: int) -> None:
    relay, _ = make()
    await lost_at(relay, 3)
    relay.go_on(other := Asked(), "w-2", repeats=False)
    relay.feed(output(offset, b"xyz"))
    assert not relay.is_lost and other.asked == ["leave"]
    with pytest.raises(InternalError, match="TOKEN_GAP"):
        await relay.next_chunk()


@pytest.mark.parametrize("pieces", [[b"xxxyz"], [b"x", b"x", b"x", b"y", b"z"], [b"xx", b"xyz"], [b"xxx", b"yz"]])
async def test_what_is_made_again_from_the_first_token_is_left_out(pieces: list[bytes]) -> None:
    relay, _ = make()
    await lost_at(relay, 3)
    relay.go_on(Asked(), "w-2", repeats=True)
    offset = 0
    for piece in pieces:
        relay.feed(output(offset, piece))
        offset += len(piece)
    chunk = await relay.next_chunk()
    assert chunk is not None and (chunk.text, chunk.token_offset) == ("yz", 3)
    relay.feed(output(0, b"x"))  # once only
    with pytest.raises(InternalError, match="a repeat in the tokens"):
        await relay.next_chunk()


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        ([(0, b"xyxz")], "other tokens than before"),
        ([(1, b"xx")], "a repeat"),
        ([(0, b"x"), (2, b"x")], "a repeat"),
        ([(4, b"x")], "a gap"),
    ],
)
async def test_it_must_be_the_same_again(outputs: list[tuple[int, bytes]], says: str) -> None:
    relay, _ = make()
    await lost_at(relay, 3)
    relay.go_on(Asked(), "w-2", repeats=True)
    for offset, data in outputs:
        relay.feed(output(offset, data))
    with pytest.raises(InternalError, match=says):
        await relay.next_chunk()


async def test_text_goes_on_inside_a_character_and_inside_a_stop_string() -> None:
    relay, asked = make("ST\u00d6P")
    relay.feed(output(0, b"a ST\xc3"))
    chunk = await relay.next_chunk()
    assert chunk is not None and (chunk.text, len(chunk.token_ids)) == ("a ", 5)
    relay.fail(WorkerLost("gone"))
    relay.go_on(other := Asked(), "w-2", repeats=False)
    relay.feed(output(5, b"\x96P and more"))
    assert (asked, other.asked) == ([], ["complete"])
    relay.fail(WorkerLost("gone, too"))
    chunk = await relay.next_chunk()
    assert chunk is not None and (chunk.text, chunk.stop_string) == ("", "ST\u00d6P")
    assert chunk.usage.output_tokens == 7


async def test_tokens_whose_log_probabilities_were_lost_share_no_chunk_with_others() -> None:
    relay, _ = make()
    relay.feed(output(0, b"ab"))
    for offset in (2, 3):
        with_logprobs = output(offset, b"c")
        with_logprobs.logprobs.add()
        relay.feed(with_logprobs)
    relay.feed(output(4, b"de", types_pb2.FINISH_REASON_LENGTH))
    chunks = [chunk async for chunk in _all(relay)]
    assert [(chunk.text, chunk.token_offset, chunk.text_offset, len(chunk.logprobs)) for chunk in chunks] == [
        ("ab", 0, 0, 0),
        ("cc", 2, 2, 2),
        ("de", 4, 4, 0),
    ]
    assert [bool(chunk.finish_reason) for chunk in chunks] == [False, False, True]


async def _all(relay: Relay) -> AsyncIterator[router_pb2.GenerateResponse]:
    while (chunk := await relay.next_chunk()) is not None:
        yield chunk


async def test_an_answer_that_lost_its_worker_can_be_cancelled_and_shed() -> None:
    relay, asked = make()
    await lost_at(relay, 3)
    relay.cancel()
    chunk = await relay.next_chunk()
    assert chunk is not None and chunk.finish_reason == types_pb2.FINISH_REASON_ABORTED
    assert chunk.usage.output_tokens == 3 and not asked and not relay.is_lost
    unread = Unread(1000)
    (large, _), (other, _) = make(unread=unread), make(unread=unread)
    large.feed(output(0, b"y" * 90))
    large.fail(WorkerLost("gone"))
    other.feed(output(0, b"x" * 50))
    assert not large.is_lost  # it has not all tokens any more
    with pytest.raises(CapacityError):
        await large.next_chunk()


async def test_only_a_worker_s_failure_can_be_gone_on_from() -> None:
    relay, _ = make()
    relay.feed(output(1, b"a"))
    assert relay.ended and not relay.is_lost
    relay, _ = make()
    relay.feed(output(0, b"a"))
    failed = output(1, b"", types_pb2.FINISH_REASON_ERROR)
    failed.error.CopyFrom(rpc.to_detail(WorkerLost("stopping")))
    relay.feed(failed)
    assert relay.is_lost and not relay.was_cut


def test_logs_are_bounded_together() -> None:
    logs = TokenLogs(max_tokens=10)
    first, second = TokenLog(logs), TokenLog(logs)
    first.extend([1, 2, 3, 4])
    second.extend([5, 6, 7, 8, 9, 10])
    assert (logs.num_tokens, logs.num_dropped) == (10, 0)
    second.extend([11])
    assert (first.whole, second.whole, logs.num_tokens, logs.num_dropped) == (True, False, 4, 1)
    second.extend([12])
    second.close()
    first.close()
    first.close()
    assert (logs.num_tokens, logs.num_dropped) == (0, 1)
