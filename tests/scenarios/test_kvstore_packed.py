"""Packed groups in a real store: what the worker is told over gRPC, tails, forks, checkpoints, Verify, Watch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from kvstore import client
from kvstore.arena import bytes_for_pages
from kvstore.client import (
    Admitted,
    Attachment,
    Checkpointed,
    Forked,
    OpenRequest,
    PageCopy,
    Refill,
    Relinked,
    Split,
    TailCopy,
    page_checksum,
)
from kvstore.geometry import CacheGeometry, LayerGroup, Region, apply_mode
from kvstore.pages import PageState
from protos import kvstore_pb2
from protos.errors import KvStoreLost, NotFound
from tests.scenarios.kvstore_process import StoreProcess, eventually, unheard

MODEL = CacheGeometry(
    (LayerGroup("full", tuple(Region(layer, k, 1, 64, "float32") for layer in range(3) for k in "kv")),)
)
GEOMETRY = apply_mode(MODEL, "turboquant", "tq4", (1, 0))
SLOTS, KEPT, PAGES = 3, 2, 24
ARENA = bytes_for_pages(GEOMETRY, PAGES, SLOTS + KEPT, KEPT)
PROMPT = list(range(700))


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    with StoreProcess() as running:
        yield running


def attach(store: StoreProcess, geometry: CacheGeometry = GEOMETRY, arena_bytes: int = ARENA) -> Attachment:
    return store.attach(
        geometry=geometry, arena_bytes=arena_bytes, max_sequences=SLOTS, max_sequence_tokens=1500, checkpoint_slots=KEPT
    )


def opened(
    attachment: Attachment, prompt: list[int] = PROMPT, *, reuse: bool = True, exact_only: bool = False
) -> Admitted:
    (answer,) = attachment.open([OpenRequest("r", "t", prompt, 1200, reuse=reuse, exact_only=exact_only)])
    assert isinstance(answer, Admitted)
    return answer


def prefill(attachment: Attachment, slot: int, num_tokens: int) -> None:
    """Writes a mark into every page it was handed, and seals."""
    new = attachment.reserve([(slot, num_tokens, 1)])
    checksums = {}
    for group, pages in new.get(slot, {}).items():
        for page in pages:
            if page.source is None:
                memory = attachment.arenas[group].page(page.page_id)
                memory[:8] = page.index.to_bytes(8, "little")
                if GEOMETRY.group(group).packed:
                    checksums[group, page.page_id] = page_checksum(memory)
    attachment.control.commit(slot, num_tokens)
    attachment.seal([(slot, num_tokens, 1)], checksums)


def test_a_packed_sequence_from_open_to_exact_resume(store: StoreProcess) -> None:
    with attach(store) as a:
        assert {name: arena.num_pages for name, arena in a.arenas.items()} == {
            "full": PAGES,
            "full-edges": PAGES + KEPT,  # a checkpoint has a page for what is open
        }
        assert {name: arena.num_pages for name, arena in a.tails.items()} == {"full": SLOTS + KEPT}
        first = opened(a)
        slot = first.slot
        assert (first.num_cached, first.prefix_exact, first.tail_slots) == (0, True, {"full": slot})
        assert first.bases == {"full": 0, "full-edges": 0}
        prefill(a, slot, 700)
        assert {g.name: a.control.base(slot, g.name) for g in GEOMETRY.groups} == {"full": 512, "full-edges": 640}
        assert a.reserve([(slot, 700, 1)]) == {}
        kept = a.checkpoint(slot, 700, "prompt_end")
        open_page = a.control.sequence_pages(slot, "full-edges")[5]
        assert kept == Checkpointed(
            [PageCopy("full-edges", open_page, PAGES, 700 - 640)], [TailCopy("full", slot, SLOTS)]
        )
        a.tails["full"].page(slot)[:4] = b"tail"

        pages = a.control.sequence_pages(slot, "full")
        fork = a.fork(slot, "f", 1200, b"frozen")
        assert isinstance(fork, Forked)
        assert fork.pages["full"] == pages
        assert fork.tail_copies == [TailCopy("full", slot, fork.slot)]
        assert [c.num_tokens for c in fork.copies] == [60]
        assert a.control.token_log(fork.slot) == PROMPT
        assert (a.control.request_id(fork.slot), a.control.frozen_request(fork.slot)) == ("f", b"frozen")
        assert a.control.pages["full"]["refs"][pages].tolist() == [2] * 4

        a.control.append_tokens(slot, [5])
        cut = a.truncate(slot, 300)
        assert (cut.exact, cut.bases, cut.num_tokens) == (False, {"full": 128, "full-edges": 256}, 300)
        assert cut.refills == [Refill("full", slot, 128, 172, pages[1:3])]
        (copy,) = cut.copies
        assert (copy.group, copy.num_tokens) == ("full-edges", 44)
        assert isinstance(copy, PageCopy)
        assert (a.control.logged(slot), a.control.committed(slot)) == (300, 300)
        a.control.append_tokens(slot, list(range(300, 600)))
        new = a.reserve([(slot, 600, 1)])[slot]
        assert [page.source for page in new["full"]] == [Relinked(), Split(pages[2], 44)]
        a.control.commit(slot, 600)
        sealed = a.seal([(slot, 600, 1)])
        assert sealed.bases == {slot: {"full": 384, "full-edges": 512}}
        assert a.verify() == []
        a.release([slot, fork.slot])

        again = opened(a, [*PROMPT, 1, 2, 3], exact_only=True)
        assert (again.num_cached, again.prefix_exact) == (700, True)
        assert again.copies == [PageCopy("full-edges", PAGES, again.pages["full-edges"][5], 60)]
        assert again.tail_copies == [TailCopy("full", SLOTS, again.slot)]
        assert again.pages["full"] == pages
        nothing = opened(a, PROMPT, reuse=False)
        assert nothing.num_cached == 0
        other = store.device()
        assert (other.prefix_hits_exact, other.prefix_misses, other.forks, other.truncates_deep) == (1, 1, 1, 1)
        packed = other.groups[0]
        assert (packed.mode, packed.preset, packed.pages_relinked_ever, packed.pages_split_ever) == (
            "turboquant",
            "tq4",
            1,
            1,
        )
        assert sum(g.arena_bytes for g in other.groups) == ARENA
        assert (packed.tail_slots_used, packed.tail_slots_total) == (3, SLOTS + KEPT)


def test_pins_end_with_the_attachment_and_cached_pages_serve_the_next_one(store: StoreProcess) -> None:
    with attach(store) as a:
        prefill(a, opened(a).slot, 700)
    with attach(store) as a:
        group = store.device().groups[0]
        assert (group.pages_sealed, group.pages_promised, group.pages_cached) == (0, 0, 4)
        answer = opened(a)
        assert (answer.num_cached, answer.prefix_exact) == (512, False)
        assert [r.num_tokens for r in answer.refills] == [256]
        assert a.control.committed(answer.slot) == 0  # until the worker has refilled
        assert a.verify() == []


def test_memory_in_another_mode_is_given_up_and_never_reused(store: StoreProcess) -> None:
    with attach(store) as a:
        prefill(a, opened(a).slot, 700)
    with attach(store, apply_mode(MODEL, "fp8")) as a:
        assert opened(a).num_cached == 0


def test_corruption_is_reported_by_name_and_the_store_goes_on(store: StoreProcess) -> None:
    with attach(store) as a:
        slot = opened(a).slot
        prefill(a, slot, 700)
        page = a.control.sequence_pages(slot, "full")[2]
        digest = bytes(a.control.pages["full"]["hash"][page]).hex()
        a.arenas["full"].page(page)[100] ^= 1
        assert a.verify() == [f"cpu:0: group 'full': the checksum of page {page} (hash {digest}) is wrong"]
        assert client.verify(store.socket) == a.verify()
        a.arenas["full"].page(page)[100] ^= 1
        assert a.verify() == []


def test_tables_at_odds_stop_the_store(store: StoreProcess) -> None:
    with attach(store) as a:
        slot = opened(a).slot
        prefill(a, slot, 700)
        a.control.pages["full"]["state"][a.control.sequence_pages(slot, "full")[0]] = PageState.FREE
        with pytest.raises(Exception, match="differs in the control block"):
            client.verify(store.socket)
        assert store.process.wait(60) != 0
        with pytest.raises(KvStoreLost):
            a.open([OpenRequest("r", "", [1], 1)])


def test_an_idle_store_checks_itself(store: StoreProcess) -> None:
    with attach(store) as a:
        slot = opened(a).slot
        prefill(a, slot, 700)
        a.arenas["full"].page(a.control.sequence_pages(slot, "full")[1])[0] ^= 1
        eventually(lambda: any(line.get("event") == "integrity problem" for line in store.log()), timeout_s=40)


def test_watch_starts_with_a_snapshot_and_goes_on_from_a_cursor(store: StoreProcess) -> None:
    with pytest.raises(NotFound):
        next(client.watch(store.socket, "cpu:9"))
    with attach(store) as a:
        slot = opened(a).slot
        prefill(a, slot, 400)
        hashes = {bytes(h) for h in a.control.pages["full"]["hash"] if h.any()}
        assert len(hashes) == 2
        seen: list[kvstore_pb2.WatchResponse] = []
        three = threading.Event()

        def reader() -> None:
            for response in a.watch():
                seen.append(response)
                if len(seen) == 2:
                    three.set()
                    return

        thread = threading.Thread(target=reader)
        thread.start()
        eventually(lambda: len(seen) == 1)
        prefill(a, slot, 700)
        assert three.wait(60)
        thread.join(60)
        snapshot, more = seen
        assert (snapshot.snapshot, snapshot.lost) == (True, False)
        assert {e.hash for e in snapshot.added if e.group == "full"} == hashes
        assert len([e for e in more.added if e.group == "full"]) == 2
        again = a.watch(incarnation=snapshot.incarnation, cursor=snapshot.cursor)
        assert next(again) == more
        again.close()  # type: ignore[attr-defined]
        stale = a.watch(incarnation="another life", cursor=3)
        lost = next(stale)
        assert (lost.lost, lost.snapshot, len(lost.added)) == (True, True, 4 + 5)
        stale.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("call", ["fork", "checkpoint", "truncate"])
def test_a_stale_epoch_ends_the_attachment_by_name(store: StoreProcess, call: str) -> None:
    """The store answers STALE_EPOCH (test_kvstore_attach has it raw); for a client it means that all is over."""
    with attach(store) as a:
        a.epoch -= 1
        calls: dict[str, Callable[[], object]] = {
            "fork": lambda: a.fork(0, "f", 1),
            "checkpoint": lambda: a.checkpoint(0, 1, "turn_end"),
            "truncate": lambda: a.truncate(0, 0),
        }
        with unheard(a), pytest.raises(KvStoreLost, match="this epoch is over"):
            calls[call]()
        assert a.lost is not None
