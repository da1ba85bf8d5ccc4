"""The draw of tokens (csrc/sample.cuh), run on a CPU lane by lane, beside worker/sampler.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kernels.errors import ArgumentError
from kernels.sample_cuda import NO_TOKEN, NOT_FINITE, SampleArgs, SampleState, set_sample
from kernels.step_cells import sample_cell
from tests.kernels.emulator import Emulator, needs_compiler
from worker.sampler import Draw, sample
from worker.sequence import Sampling

VOCABULARY = 1500


@pytest.fixture(scope="module")
def library() -> Emulator:
    return Emulator.of(sample_cell("bf16"))


@dataclass
class Row:
    sampling: Sampling
    token_ids: list[int]
    limit: int = 1 << 20
    stops: tuple[int, ...] = ()


def state_of(rows: list[Row], step: int = 5, slots: int = 4) -> SampleState:
    def floats(values: Any) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.float32)

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32)

    seen = torch.zeros(len(rows), -(-VOCABULARY // 32), dtype=torch.int64)
    for r, row in enumerate(rows):
        for token in row.token_ids:
            seen[r, token // 32] |= 1 << token % 32
    seeds = [row.sampling.seed or 0 for row in rows]
    words = torch.tensor([[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds])
    return SampleState(
        temperature=floats(row.sampling.temperature for row in rows),
        top_p=floats(row.sampling.top_p for row in rows),
        min_p=floats(row.sampling.min_p for row in rows),
        penalty=floats(row.sampling.repetition_penalty for row in rows),
        top_k=ints(row.sampling.top_k for row in rows),
        seed=((words + 2**31) % 2**32 - 2**31).to(torch.int32),
        limit=ints(row.limit for row in rows),
        tokens=ints(row.token_ids[-1] if row.token_ids else 0 for row in rows),
        num_tokens=ints(len(row.token_ids) for row in rows),
        stops=torch.tensor([[*row.stops, *[-1] * (2 - len(row.stops))] for row in rows], dtype=torch.int32),
        seen=((seen + 2**31) % 2**32 - 2**31).to(torch.int32),
        step=ints([step]),
        out=torch.full((slots, len(rows) + 1), 77, dtype=torch.int32),
    )


def run(library: Emulator, logits: torch.Tensor, state: SampleState, seed: int = 0) -> list[int]:
    arguments = SampleArgs()
    set_sample(arguments, logits, state)
    library.call("sample", len(logits), arguments, seed=seed)
    slots = len(state.out)
    at = int(state.step) % slots
    assert (state.out[torch.arange(slots) != at] == 77).all() and (state.out[:, len(logits) :] == 77).all()
    found: list[int] = state.out[at, : len(logits)].tolist()
    return found


def wanted(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    return [drawn.token_id for drawn in sample(logits.float(), [Draw(row.sampling, row.token_ids) for row in rows])]


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.3, "top_k": 1},
    {"temperature": 2.0, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 30, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.2},
]


@needs_compiler
@pytest.mark.parametrize("spread", [1.0, 6.0])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_are_the_samplers(library: Emulator, settings: dict[str, Any], spread: float) -> None:
    """bf16 logits have many equals, so the order among them is seen too."""
    torch.manual_seed(7)
    rows = [
        Row(Sampling(**settings, seed=s << 33 | s), torch.randint(VOCABULARY, (n,)).tolist())
        for s, n in enumerate((3, 40, 2, 9))
    ]
    logits = (spread * torch.randn(4, VOCABULARY)).to(torch.bfloat16)
    got, want = run(library, logits, state_of(rows), seed=3), wanted(logits, rows)
    # A draw that falls on a boundary between two tokens may go either way in 32 bits; here none does.
    assert got == want


@needs_compiler
def test_equals_are_taken_in_order_of_ids(library: Emulator) -> None:
    logits = torch.zeros(1, VOCABULARY, dtype=torch.bfloat16)
    logits[0, 700:] = 1.0
    for settings in ({"top_k": 5}, {"top_p": 0.004}, {"top_k": 9, "top_p": 0.5}):
        rows = [Row(Sampling(temperature=1.0, seed=11, **settings), [1, 2])]
        assert run(library, logits, state_of(rows)) == wanted(logits, rows)
    assert run(library, logits, state_of([Row(Sampling(), [1])])) == [700]


@needs_compiler
def test_a_row_goes_on_from_its_own_token(library: Emulator) -> None:
    logits = torch.randn(5, VOCABULARY).to(torch.bfloat16)
    best = logits.float().argmax(-1).tolist()
    rows = [
        Row(Sampling(), [1, 2, 3], stops=(best[4], -1)),  # goes on: it is another's stop
        Row(Sampling(), [1, 2, 3], limit=3),  # has all the tokens that it may have as input
        Row(Sampling(), []),  # padding
        Row(Sampling(), [4, 5], limit=3),  # one more
        Row(Sampling(repetition_penalty=1.0001), [6], stops=(9999, best[4])),  # draws a stop
    ]
    assert best[0] != best[4]
    state = state_of(rows)
    got = run(library, logits, state)
    assert got == [best[0], best[1], NO_TOKEN, best[3], best[4]]
    assert state.num_tokens.tolist() == [4, 0, 0, 3, 0]
    assert state.tokens.tolist() == [best[0], best[1], 0, best[3], best[4]]
    assert state.seen is not None and int(state.seen[4, best[4] // 32]) >> best[4] % 32 & 1


@needs_compiler
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_the_row(library: Emulator, value: float) -> None:
    logits = torch.randn(2, VOCABULARY).to(torch.bfloat16)
    logits[0, 1234] = value
    state = state_of([Row(Sampling(), [3]), Row(Sampling(), [3])])
    got = run(library, logits, state)
    assert got[0] == NOT_FINITE and got[1] == int(logits[1].argmax())
    assert state.num_tokens.tolist() == [0, 2] and state.tokens[0] == 3
    assert (
        run(library, torch.full_like(logits, -float("inf")), state_of([Row(Sampling(), [3])] * 2)) == [NOT_FINITE] * 2
    )


def test_states_that_do_not_fit_are_refused() -> None:
    logits, state = torch.zeros(2, VOCABULARY, dtype=torch.bfloat16), state_of([Row(Sampling(), [1])] * 2)
    for change in ({"top_p": state.top_p[:1]}, {"top_k": state.top_p}, {"out": state.out[:, :1]}, {"seen": state.seed}):
        with pytest.raises(ArgumentError, match="does not fit the draw"):
            set_sample(SampleArgs(), logits, state._replace(**change))
    with pytest.raises(ArgumentError, match="does not fit the draw"):
        set_sample(SampleArgs(), logits.double(), state)
