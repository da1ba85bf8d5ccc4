"""Append, truncate, fork, release, seal, evict, match, checkpoint, detach in any order, against an oracle that keeps
everything (tests/unit/kv_oracle.py).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstore.answers import Admitted, Forked
from protos.page_hash import PAGE_TOKENS
from tests.unit.kv_oracle import GEOMETRIES, Worker

MAX_TOKENS = 1400
PICK = st.integers(0, 2**16)


class KvMatchesAnOracle(RuleBasedStateMachine):
    """Prompts come from two stems a salt, so that prefixes coincide and part."""

    geometry = ""

    @initialize(
        num_pages=st.integers(8, 30),
        margin=st.sampled_from([0, 7, 16, 100]),
        step=st.sampled_from([1, 4, 9]),
        checkpoints=st.integers(0, 3),
        seed=st.integers(0, 2**32 - 1),
    )
    def start(self, num_pages: int, margin: int, step: int, checkpoints: int, seed: int) -> None:
        self.worker = Worker(
            GEOMETRIES[self.geometry],
            num_pages=num_pages,
            margin=margin,
            max_step_tokens=step,
            max_tokens=MAX_TOKENS,
            checkpoint_slots=checkpoints,
        )
        self.step = step
        self.random = random.Random(seed)
        self.stem = [self.random.randrange(1000) for _ in range(MAX_TOKENS)]

    def pick(self, number: int) -> int | None:
        slots = sorted(self.worker.expected)
        return slots[number % len(slots)] if slots else None

    @rule(
        stem=st.integers(1, 700),
        rest=st.one_of(st.just(0), st.integers(0, 200)),
        more=st.integers(1, 600),
        salt=st.sampled_from(["a", "b"]),
        chunk=st.sampled_from([1, 60, 128, 200, 512, 2000]),
        reuse=st.sampled_from([True, True, True, False]),
        exact_only=st.booleans(),
    )
    def open(self, stem: int, rest: int, more: int, salt: str, chunk: int, reuse: bool, exact_only: bool) -> None:
        prompt = self.stem[:stem] + [self.random.randrange(1000, 2000) for _ in range(rest)]
        result = self.worker.open(salt, prompt, min(MAX_TOKENS, len(prompt) + more), reuse=reuse, exact_only=exact_only)
        if isinstance(result, Admitted):
            if not reuse:
                assert result.num_cached == 0
            self.finish_prefill(result.slot, chunk if chunk > 1 else 37)

    def finish_prefill(self, slot: int, chunk: int) -> None:
        e = self.worker.expected[slot]
        while e.num_rows < len(e.tokens):
            self.worker.prefill(slot, chunk)
        if self.random.random() < 0.5:
            self.worker.checkpoint(slot, "prompt_end")

    @precondition(lambda self: self.worker.expected)
    @rule(number=PICK, count=st.one_of(st.integers(1, 40), st.integers(100, 300)), follow=st.booleans())
    def decode(self, number: int, count: int, follow: bool) -> None:
        slot = self.pick(number)
        if slot is None:
            return
        e = self.worker.expected[slot]
        count = min(count, e.max_tokens - len(e.tokens))
        while count > 0:
            step = min(count, self.random.randint(1, self.step))
            n = len(e.tokens)
            tokens = self.stem[n : n + step] if follow and n + step < MAX_TOKENS else []
            self.worker.decode(slot, tokens or [self.random.randrange(1000) for _ in range(step)])
            count -= step

    @precondition(lambda self: self.worker.expected)
    @rule(number=PICK, back=st.one_of(st.integers(0, 20), st.integers(0, 400)), to_start=st.sampled_from([0, 0, 0, 1]))
    def truncate(self, number: int, back: int, to_start: int) -> None:
        slot = self.pick(number)
        if slot is None:
            return
        e = self.worker.expected[slot]
        keep = 0 if to_start else max(0, len(e.tokens) - back)
        exact = self.worker.truncate(slot, keep)
        if back <= self.worker.geometry.margin and not to_start and exact is not None:
            states = self.worker.table.sequence(slot).groups.values()
            assert exact or any(state.lossy_end for state in states) or e.num_rows < keep
        if exact is not None:
            self.recompute(slot)

    def recompute(self, slot: int) -> None:
        """Tokens that stay logged and whose rows a kept boundary took away."""
        e = self.worker.expected[slot]
        while e.num_rows < len(e.tokens):
            self.worker.prefill(slot, 100)
        if not e.tokens:
            e.append([1])
            self.worker.prefill(slot, 1)

    @precondition(lambda self: self.worker.expected)
    @rule(number=PICK, more=st.integers(1, 400))
    def fork(self, number: int, more: int) -> None:
        slot = self.pick(number)
        if slot is None:
            return
        e = self.worker.expected[slot]
        result = self.worker.fork(slot, min(MAX_TOKENS, len(e.tokens) + more))
        if isinstance(result, Forked):
            assert result.slot != slot
            self.worker.check_sequence(result.slot)

    @precondition(lambda self: self.worker.expected)
    @rule(number=PICK)
    def checkpoint(self, number: int) -> None:
        slot = self.pick(number)
        if slot is not None:
            self.worker.checkpoint(slot)

    @precondition(lambda self: self.worker.expected)
    @rule(number=PICK)
    def release(self, number: int) -> None:
        slot = self.pick(number)
        if slot is not None:
            self.worker.release(slot)

    @precondition(lambda self: self.worker.expected)
    @rule(number=PICK)
    def compute_again(self, number: int) -> None:
        """Its tokens and more, with reuse and then without: exact pages take the place of inexact ones."""
        slot = self.pick(number)
        if slot is None:
            return
        e = self.worker.expected[slot]
        tokens = e.tokens + [self.random.randrange(1000) for _ in range(min(400, MAX_TOKENS - len(e.tokens)))]
        for reuse in (True, False):
            self.worker.release(slot)
            result = self.worker.open(e.salt, tokens, len(tokens), reuse=reuse)
            if not isinstance(result, Admitted):
                return
            slot = result.slot
            self.finish_prefill(slot, 200)

    @rule()
    def store_dies(self) -> None:
        for slot in self.worker.expected:
            self.worker._log(slot)
        self.worker.store_dies()

    @precondition(lambda self: self.worker.expected)
    @rule(
        number=PICK,
        count=st.integers(0, 9),
        after=st.sampled_from(["reserve", "rows", "packed", "log", "commit"]),
        unfinished=st.integers(0, 300),
    )
    def worker_dies(self, number: int, count: int, after: str, unfinished: int) -> None:
        """In a decode step, or in a chunk of some tokens that were sent and have no rows (``count`` 0)."""
        slot = self.pick(number)
        if slot is None:
            return
        e = self.worker.expected[slot]
        room = e.max_tokens - len(e.tokens)
        tokens = [self.random.randrange(1000) for _ in range(min(count, room, self.step))]
        if not tokens:
            end = len(e.tokens) + min(unfinished, room)
            while self.worker.laps(slot, end):
                end -= 1
            e.append([self.random.randrange(1000) for _ in range(end - len(e.tokens))])
            if end == e.num_rows:
                return
        adopted = self.worker.die_in_step(slot, tokens, after)
        for each in adopted.values():
            assert each.intact, each
        self.recompute(slot)

    @rule(goodbye=st.booleans())
    def detach(self, goodbye: bool) -> None:
        self.worker.detach(goodbye=goodbye)
        for table in self.worker.table.groups.values():
            assert (table.num_open, table.num_sealed, table.num_promised) == (0, 0, 0)

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "worker"):
            self.worker.check()
            self.worker.verify()


@pytest.mark.parametrize("geometry", list(GEOMETRIES))
def test_kv_matches_an_oracle(geometry: str) -> None:
    """Up to 25 rules an example: some 4,500 rules over the fourteen geometries."""
    machine: Any = type("Kv", (KvMatchesAnOracle,), {"geometry": geometry})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=10 if geometry.startswith("v4") else 16,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


assert PAGE_TOKENS == 128
