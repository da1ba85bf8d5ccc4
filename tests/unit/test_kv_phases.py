"""Rollback, resume and fork at every phase of the blocks that pending rows wait for: V4's ratios 4 and 128."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvstore.answers import Admitted, Forked
from kvstore.client import Refused
from kvstore.device import DeviceSpec
from kvstore.geometry import CacheGeometry, LayerGroup, Region
from kvstore.pages import PageState
from kvstore.pending_rings import PendingRings
from protos.errors import InternalError, PreconditionFailed
from protos.page_hash import PAGE_TOKENS
from tests.unit.kv_oracle import GEOMETRIES, RATIO_4, V4_COMPRESSED, V4_RAW, Worker

TOKENS = random.Random(4).choices(range(1000), k=1400)
START = 3 * PAGE_TOKENS
MARGIN = 16
V4 = ["v4", "v4 checkpoints", "v4 window", "v4 dense", "v4 packed"]
EVERY_PHASE = range(START, START + PAGE_TOKENS)  # lengths


def computed(groups: tuple[LayerGroup, ...], num_tokens: int, *, chunk: int = 512, **kwargs: int) -> tuple[Worker, int]:
    w = Worker(groups, num_pages=24, margin=MARGIN, **kwargs)
    return w, opened(w, num_tokens, chunk)


def opened(w: Worker, num_tokens: int, chunk: int = 512, *, reuse: bool = True) -> int:
    answer = w.open("", TOKENS[:num_tokens], 1400, reuse=reuse)
    assert isinstance(answer, Admitted)
    while w.expected[answer.slot].num_rows < num_tokens:
        w.prefill(answer.slot, chunk)
    return answer.slot


@pytest.mark.parametrize("geometry", V4)
def test_a_rollback_inside_the_margin_is_exact_at_every_phase(geometry: str) -> None:
    """By 1 to 16 tokens, each twice in a row: the second goes back over rows that the first had written again."""
    w, slot = computed(GEOMETRIES[geometry], EVERY_PHASE.start, max_step_tokens=5)
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    for n in EVERY_PHASE:
        back = 1 + (n + n // 16) % MARGIN
        for _ in range(2):
            assert w.truncate(slot, n - back) is True, f"seed {seed}, back {back} from {n}"
            assert w.expected[slot].num_rows == n - back
            w.check_sequence(slot)
            while (left := n - len(w.expected[slot].tokens)) > 0:
                w.decode(slot, [rng.randrange(1000) for _ in range(min(left, rng.randint(1, 5)))])
        w.check_sequence(slot)
        w.decode(slot, [rng.randrange(1000)])
    assert w.packed_twice == 0 == w.rows_read_packed
    w.check()
    w.verify()


@pytest.mark.parametrize("geometry", V4)
def test_a_kept_boundary_resumes_exactly_at_every_phase(geometry: str) -> None:
    """The same prompt and more, the same prompt itself (a token taken back), and a fork of it."""
    w = Worker(GEOMETRIES[geometry], num_pages=24, margin=MARGIN, checkpoint_slots=1)
    for n in EVERY_PHASE if geometry == "v4" else EVERY_PHASE[::7]:
        slot = opened(w, n, reuse=False)
        assert w.checkpoint(slot, "prompt_end")
        w.release(slot)
        for end, cached in ((n + 9, n), (n, n - 1)):
            answer = w.open("", TOKENS[:end], 1400, exact_only=True)
            assert isinstance(answer, Admitted)
            assert (answer.num_cached, answer.prefix_exact, answer.refills) == (cached, True, [])
            w.check_sequence(answer.slot)
            w.prefill(answer.slot, 9)
            w.check_sequence(answer.slot)
            fork = w.fork(answer.slot, 1400)
            assert isinstance(fork, Forked)
            parent, child = (w.table.sequence(slot).groups for slot in (answer.slot, fork.slot))
            assert all(child[name].rings == state.rings for name, state in parent.items())
            w.decode(fork.slot, [1, 2, 3])
            w.check_sequence(fork.slot)
            w.release(fork.slot)
            w.release(answer.slot)
    w.check()


@pytest.mark.parametrize("geometry", ["v4", "v4 window", "v4 packed"])
def test_a_deep_rollback_goes_to_the_last_kept_boundary_at_or_below(geometry: str) -> None:
    w, slot = computed(GEOMETRIES[geometry], 200, checkpoint_slots=3)
    kept = [200, 333, 512]
    for n in kept:
        while len(w.expected[slot].tokens) < n:
            w.decode(slot, TOKENS[len(w.expected[slot].tokens) :][:1])
        assert w.checkpoint(slot)
    while len(w.expected[slot].tokens) < 800:
        w.decode(slot, [len(w.expected[slot].tokens) % 7])
    for n, boundary in ((700, 512), (513, 512), (512, 512), (511, 333), (333, 333), (332, 200), (200, 200)):
        before = len(w.expected[slot].tokens)
        assert w.truncate(slot, n) is True
        assert (w.expected[slot].num_rows, len(w.expected[slot].tokens)) == (boundary, n), f"from {before} to {n}"
        w.check_sequence(slot)
        while w.expected[slot].num_rows < n:
            w.prefill(slot, 50)
        w.check()
        while len(w.expected[slot].tokens) < before:
            w.decode(slot, TOKENS[len(w.expected[slot].tokens) :][:1])
        w.check_sequence(slot)
    with pytest.raises(PreconditionFailed, match=r"wait for the rest of their block|behind its window") as caught:
        w.table.truncate(slot, 199, len(w.expected[slot].tokens), lambda a, b: w.expected[slot].tokens[a:b])
    assert caught.value.reason == "TRUNCATE_TOO_DEEP"
    assert w.truncate(slot, 0) is not None  # the start needs no rows
    w.check()


@pytest.mark.parametrize("geometry", ["v4", "v4 window", "v4 dense", "v4 packed"])
def test_a_rollback_inside_the_margin_goes_over_a_kept_boundary(geometry: str) -> None:
    """The checkpoint's rings hold what lies before it, too: of a sequence that went back to it, and of one resumed."""
    w, slot = computed(GEOMETRIES[geometry], 512)
    assert w.checkpoint(slot)
    while len(w.expected[slot].tokens) < 700:
        w.decode(slot, [1])
    assert w.truncate(slot, 526) is True and w.expected[slot].num_rows == 512
    w.prefill(slot, 14)
    for resumed in (False, True):
        assert w.truncate(slot, 510) is True and w.expected[slot].num_rows == 510
        w.check_sequence(slot)
        w.release(slot)
        if not resumed:
            slot = opened(w, 526)
            assert w.table.counters["prefix_tokens_reused", ""] == 512


@pytest.mark.parametrize("geometry", ["v4", "v4 dense", "v4 packed"])
def test_a_prefix_match_stops_at_a_kept_boundary(geometry: str) -> None:
    """Pages beyond it are cached and of no use: what the compressors would need there is gone."""
    w, slot = computed(GEOMETRIES[geometry], 300)
    assert w.checkpoint(slot)
    while len(w.expected[slot].tokens) < 1000:
        w.decode(slot, TOKENS[len(w.expected[slot].tokens) :][:1])
    w.release(slot)
    answer = w.open("", TOKENS[:1001], 1400)
    assert isinstance(answer, Admitted)
    assert (answer.num_cached, answer.prefix_exact) == (300, True)
    w.check()
    other = w.open("other", TOKENS[:1001], 1400)
    assert isinstance(other, Admitted) and other.num_cached == 0  # another tenant's is not found
    w.table.checkpoints.clear()
    w.release(answer.slot)
    without = w.open("", TOKENS[:1001], 1400)
    assert isinstance(without, Admitted) and without.num_cached == 0


def test_a_match_with_its_open_page_waits_for_room_and_takes_none_from_others() -> None:
    w = Worker((V4_RAW, V4_COMPRESSED), num_pages=5, checkpoint_slots=1)
    slot = w.open("", TOKENS[:300], 300)
    assert isinstance(slot, Admitted)
    w.prefill(slot.slot, 300)
    assert w.checkpoint(slot.slot)
    w.release(slot.slot)
    other = w.open("other", TOKENS[:200], 384)
    assert isinstance(other, Admitted)
    refused = w.open("", TOKENS[:301], 400)  # 2 cached pages, an open one and one more beside 3 of 5 promised
    assert isinstance(refused, Refused) and refused.short_group == "compressed"
    w.check()
    w.release(other.slot)
    again = w.open("", TOKENS[:301], 400)
    assert isinstance(again, Admitted) and again.num_cached == 300
    (copy,) = again.copies
    table = w.table.groups["compressed"]
    assert (copy.from_page, copy.to_page, copy.num_tokens) == (table.num_pages, again.pages["compressed"][2], 44)
    assert table.state(copy.to_page) == PageState.OPEN
    w.check()


@pytest.mark.parametrize("keep_every", [2, 4])
def test_retention_keeps_every_nth_page_and_the_prompts_end(keep_every: int) -> None:
    groups = (replace(V4_RAW, keep_every=keep_every), V4_COMPRESSED)
    w, slot = computed(groups, 300, chunk=77)
    while len(w.expected[slot].tokens) < 1400:
        w.decode(slot, [1])
    state = w.table.sequence(slot).groups["raw"]
    end = {1, 2}  # tokens 173 to 299, the window of the token behind the prompt
    kept = {i for i, page in enumerate(state.pages) if page >= 0}
    assert len(state.pages) == 9 and kept == {i for i in range(9) if (i + 1) % keep_every == 0} | end
    group = w.device.stats().groups[0]
    assert (group.retention, group.pages_left_out_ever, group.pages_sealed_ever) == (
        "checkpoints",
        9 - len(kept),
        len(kept),
    )
    assert group.bytes_per_token == groups[0].page_bytes / 128 / keep_every
    assert len(w.pages.keys() & {("raw", page) for page in range(99)}) == len(kept), "nothing else was packed"
    w.check()
    w.verify()


def test_a_sequence_of_retention_checkpoints_is_promised_what_it_keeps() -> None:
    every, some = (CacheGeometry((replace(V4_RAW, keep_every=k), V4_COMPRESSED)) for k in (1, 16))
    spec = DeviceSpec("cpu:0", every, 4 << 20, 2, 64 << 10, b"w")
    assert spec.num_pages["raw"] == spec.num_pages["compressed"]
    counts = replace(spec, geometry=some).num_pages
    assert counts["compressed"] > spec.num_pages["compressed"]
    assert counts["raw"] == counts["compressed"] // 16 + 2 * 2 + 1
    w = Worker(some.groups, num_pages=64, max_tokens=16 << 10)
    answer = w.open("", TOKENS[:1000], 8 << 10)
    assert isinstance(answer, Admitted)
    assert w.table.groups["compressed"].num_promised == 64
    assert w.table.groups["raw"].num_promised == 3 + 2  # of 62: 15, 31, 47, and the prompt's last two


def test_a_checkpoint_takes_what_it_says_of_the_arena() -> None:
    w, slot = computed((V4_RAW, V4_COMPRESSED), 300, checkpoint_slots=2)
    raw, compressed = w.device.stats().groups
    assert (raw.checkpoint_pages, compressed.checkpoint_pages) == (0, 2)
    assert w.device.arenas.pages["compressed"].num_pages == compressed.pages_total + 2
    assert (raw.pending_ring_bytes, raw.tail_slots_total) == (0, 5)
    rows = 56 + 176  # 7 + 16 + 3 steps of 9, and 127 + ..., in eights
    assert (compressed.pending_ring_bytes, compressed.tail_slot_bytes) == (rows * 64, rows * 64)
    assert (compressed.tail_slots_total, compressed.tail_slots_used) == (5, 1)
    assert w.checkpoint(slot)
    assert w.device.stats().groups[1].tail_slots_used == 2
    for keep_every in (1, 4):  # all of it inside what was asked for
        geometry = CacheGeometry((replace(V4_RAW, keep_every=keep_every), V4_COMPRESSED))
        for num_bytes in range(1 << 20, (1 << 20) + 40_000, 1_111):
            spec = DeviceSpec("cpu:0", geometry, num_bytes, 2, 4096, b"w", checkpoint_slots=7)
            assert 0 <= num_bytes - sum(plan.num_bytes for plan in spec.plan()[0]) < 5 * geometry.groups[0].page_bytes


def test_what_rings_hold_after_rollbacks() -> None:
    """Against a model that keeps which token each ring row holds; lengths go up by steps, of which some write guesses
    behind that nobody tells of, and down by rollbacks.
    """
    short, long = Region(0, "a", 2, 8, "float32", block=4, carry=4), Region(0, "b", 2, 8, "float32", block=16)
    for regions in ((short,), (long,), (short, long)):
        seed = random.randrange(1 << 32)
        rng = random.Random(seed)
        geometry = CacheGeometry((LayerGroup("g", (RATIO_4, *regions)),), margin=3, max_step_tokens=2)
        rings = PendingRings.of(geometry.groups[0], geometry)
        sizes = {region.kind: geometry.ring_rows(geometry.groups[0], region) for region in regions}
        held = {kind: [-1] * rows for kind, rows in sizes.items()}
        n = peak = floor = 0
        for _ in range(3000):
            if rng.random() < 0.6:
                end = n + rng.choice([1, 1, 2, 60])
                guesses = rng.randint(0, geometry.steps_under_way)
                for kind, rows in sizes.items():
                    for t in range(max(n, end - rows), end + guesses):
                        held[kind][t % rows] = t if t < end else -1
                n, peak, rings = end, max(peak, end), rings.after(end)
            else:
                target = max(0, n - rng.choice([1, 2, 3, 4, 8, 16, 20, 64]))
                if rng.random() < 0.3:
                    target -= target % 16
                there = all(
                    held[region.kind][t % sizes[region.kind]] == t
                    for region in regions
                    for t in range(region.first_pending(target), target)
                )
                assert rings.hold(target) <= there, f"seed {seed}: rows that are gone are said to be there"
                if peak - target <= 3 and target >= floor:
                    assert rings.hold(target), f"seed {seed}: a rollback inside the margin is refused"
                if rings.hold(target):
                    n, rings = target, rings.cut(target)
                    for rows_held in held.values():  # what lies behind the cut is no longer this sequence's
                        rows_held[:] = [t if t < n else -1 for t in rows_held]
                    if all(t < 0 for rows_held in held.values() for t in rows_held):
                        peak = floor = n
    block_start = PendingRings(((long, 40),)).after(1000)
    assert block_start.hold(160) and not block_start.hold(161)  # 160 begins a block: nothing waits there


def test_a_checkpoint_a_little_back_serves_only_what_its_rings_hold() -> None:
    w, slot = computed(GEOMETRIES["v4 dense"], 500, checkpoint_slots=1)
    e = w.expected[slot]
    least = min(n for n in range(400, 500) if w.table.sequence(slot).groups["compressed"].rings.hold(n))
    with pytest.raises(PreconditionFailed) as caught:
        w.device.checkpoint(slot, least - 1, "turn_end")
    assert caught.value.reason == "CHECKPOINT_NOT_DENSE"
    kept = w.device.checkpoint(slot, least, "turn_end")
    w._move(kept.copies, kept.tail_copies, [])
    for end, cached in ((least, 0), (least + 1, least)):  # one token less than it would need rows that are gone
        w.release(slot)
        answer = w.open("", e.tokens[:end], 1400)
        assert isinstance(answer, Admitted) and answer.num_cached == cached
        w.check_sequence(answer.slot)
        slot = answer.slot


def test_every_checkpoint_keeps_an_open_page_of_its_own() -> None:
    """Two at once, and a third in the place of the first; their sequences go on, and are gone before the resume."""
    w = Worker(GEOMETRIES["v4"], num_pages=24, checkpoint_slots=2)
    for salt in ("a", "b", "c"):
        answer = w.open(salt, TOKENS[:300], 1400)
        assert isinstance(answer, Admitted)
        w.prefill(answer.slot, 300)
        assert w.checkpoint(answer.slot)
        for _ in range(5):
            w.decode(answer.slot, [1])
        w.release(answer.slot)
    for salt, cached in (("b", 300), ("c", 300), ("a", 0)):
        answer = w.open(salt, TOKENS[:310], 400)
        assert isinstance(answer, Admitted) and answer.num_cached == cached
        w.check_sequence(answer.slot)


def test_prompts_that_part_are_told_where_although_raw_pages_are_left_out() -> None:
    w = Worker(GEOMETRIES["v4 checkpoints"], num_pages=24, checkpoint_slots=2, max_sequences=1)
    asked = []
    for number in range(4):
        answer = w.open("", TOKENS[:256] + [number] * 200, 500)
        assert isinstance(answer, Admitted)
        asked.append(answer.junction)
        w.prefill(answer.slot, 500)
        w.release(answer.slot)
    assert asked == [0, 0, 256, 256]


def test_verify_looks_at_tail_slots_and_at_what_rings_hold() -> None:
    w, slot = computed((V4_RAW, V4_COMPRESSED), 300)
    w.verify()
    state = w.table.sequence(slot).groups["compressed"]
    for wrong in (replace(state.rings, written=600), replace(state.rings, first=299)):
        held, state.rings = state.rings, wrong
        w.device._write_groups(slot)
        with pytest.raises(InternalError, match="rows that wait for the rest of their block are gone"):
            w.device.verifier.tables()
        state.rings = held
    w.device._write_groups(slot)
    w.device.control.sequence_groups[slot, 1]["tail_slot"] = 1 - slot
    with pytest.raises(InternalError, match="group 'compressed': what it holds differs"):
        w.device.verifier.tables()
