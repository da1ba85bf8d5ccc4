"""The queue's running sum against a sum."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.tiny import request
from worker.sequence import Sequence
from worker.waiting import Waiting


def sequence(length: int) -> Sequence:
    return Sequence(request("r", [1] * length), length + 1, 0)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_tokens_are_those_of_what_waits(data: st.DataObject) -> None:
    waiting, plain = Waiting(), list[Sequence]()
    for _ in range(data.draw(st.integers(0, 20))):
        new = sequence(data.draw(st.integers(1, 9)))
        match data.draw(st.sampled_from(["extend", "left", "pop", "remove", "clear"])):
            case "extend":
                more = [new, sequence(3)]
                waiting += more
                plain += more
            case "left":
                waiting.appendleft(new)
                plain.insert(0, new)
            case "pop" if plain:
                assert waiting.popleft() is plain.pop(0)
            case "remove" if plain:
                gone = data.draw(st.sampled_from(plain))
                waiting.remove(gone)
                plain.remove(gone)
            case "clear":
                waiting.clear()
                plain.clear()
        assert list(waiting) == plain
        assert waiting.num_tokens == sum(s.num_prompt for s in plain)
