"""Corners of a relay that need an exact order of events."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from protos import types_pb2, worker_pb2
from protos.errors import CapacityError, InternalError, InvalidRequest, WorkerLost
from protos.histogram import STEP_BOUNDS_S, Histogram
from router import relay as relay_module
from router.detokenizer import Detokenizer, TokenBytes
from router.relay import Relay
from router.replay import Place, Skip
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
