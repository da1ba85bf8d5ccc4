"""Sequences in a real store: admission, rows and logs that survive truncation, hashes, and nothing left over."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvstore.client import Admitted, Attachment, OpenRequest, PageCopy, Refused
from kvstore.control_layout import MAX_FROZEN_BYTES
from kvstore.pages import PageState
from protos import kvstore_pb2
from protos.errors import InvalidRequest, NotFound, PreconditionFailed, TailpackError, TooLarge
from protos.page_hash import PAGE_TOKENS, page_hashes
from tests.scenarios.kvstore_process import GEOMETRY, StoreProcess, eventually, worker_process


@pytest.fixture(scope="module")
def store() -> Iterator[StoreProcess]:
    with StoreProcess() as running:
        yield running


@pytest.fixture
def attachment(store: StoreProcess) -> Iterator[Attachment]:
    with store.attach() as attached:
        yield attached


def ask(request_id: str = "r", num_prompt: int = 1, max_tokens: int = 1, salt: str = "") -> OpenRequest:
    return OpenRequest(request_id, salt, list(range(num_prompt)), max_tokens, reuse=False)


def slot_of(result: Admitted | Refused) -> int:
    assert isinstance(result, Admitted), result
    return result.slot


def counts(device: kvstore_pb2.DeviceStats) -> list[tuple[int, int, int, int]]:
    """Free or cached, promised, open, sealed."""
    return [(g.pages_free + g.pages_cached, g.pages_promised, g.pages_open, g.pages_sealed) for g in device.groups]


def cpu0(store: StoreProcess) -> kvstore_pb2.DeviceStats:
    return next(device for device in store.stats().devices if device.device == "cpu:0")


def write_rows(attachment: Attachment, slot: int, first: int, last: int) -> None:
    """Stands for a forward pass: a mark of each token's id in its row of the first plane of each group."""
    tokens = attachment.control.token_log(slot)
    for group in GEOMETRY.groups:
        pages = attachment.control.sequence_pages(slot, group.name)
        for position in range(first, last):
            _row(attachment, group.name, pages[position // PAGE_TOKENS], position)[:] = tokens[position].to_bytes(
                4, "little"
            )
    attachment.control.commit(slot, last)


def read_rows(attachment: Attachment, slot: int, group: str) -> list[int]:
    pages = attachment.control.sequence_pages(slot, group)
    return [
        int.from_bytes(_row(attachment, group, pages[position // PAGE_TOKENS], position), "little")
        for position in range(attachment.control.committed(slot))
    ]


def _row(attachment: Attachment, group: str, page: int, position: int) -> memoryview:
    row_bytes = 16 * 4
    start = position % PAGE_TOKENS * row_bytes
    return attachment.arenas[group].page(page)[start : start + 4]


def copy_rows(attachment: Attachment, copies: list[PageCopy]) -> None:
    for copy in copies:
        group = attachment.geometry.group(copy.group)
        old, new = attachment.arenas[copy.group].page(copy.from_page), attachment.arenas[copy.group].page(copy.to_page)
        for plane in group.planes():
            size = plane.num_bytes // PAGE_TOKENS * copy.num_tokens
            new[plane.offset : plane.offset + size] = old[plane.offset : plane.offset + size]


def page_entries_agree(attachment: Attachment) -> None:
    """The page entries of the control block say what its slots say; nobody holds the others, free or cached."""
    control = attachment.control
    for group in GEOMETRY.groups:
        entries = control.pages[group.name]
        held: dict[int, PageState] = {}
        for slot in control.live_slots():
            for index, page in enumerate(control.sequence_pages(slot, group.name)):
                sealed = (index + 1) * PAGE_TOKENS <= control.base(slot, group.name)
                held[page] = PageState.SEALED if sealed else PageState.OPEN
        for page, (state, refs) in enumerate(zip(entries["state"].tolist(), entries["refs"].tolist(), strict=True)):
            assert refs == (page in held), page
            assert state == held[page] if page in held else state in (PageState.FREE, PageState.CACHED), page
        hashed = entries["hash"].any(axis=1).tolist()
        assert hashed == [state in (PageState.SEALED, PageState.CACHED) for state in entries["state"].tolist()]
    assert attachment.verify() == []


def test_a_full_arena_refuses_by_numbers_and_admits_after_a_release(attachment: Attachment) -> None:
    results = attachment.open([ask("a", 200, 5 * 128), ask("b", 1, 4 * 128), ask("c", 1, 3 * 128)])
    assert results[1] == Refused("full", 4, 3, 8)
    a, c = slot_of(results[0]), slot_of(results[2])
    assert attachment.open([ask("b", 1, 4 * 128)]) == [Refused("full", 4, 0, 8)]
    assert attachment.release([a]) == 0  # it held no page, only a promise
    b = slot_of(attachment.open([ask("b", 1, 4 * 128)])[0])
    attachment.release([b, c])


def test_out_of_slots_names_no_group(attachment: Attachment) -> None:
    slots = [slot_of(r) for r in attachment.open([ask(max_tokens=128) for _ in range(4)])]
    assert attachment.open([ask(max_tokens=128)]) == [Refused("", 1, 4, 8)]
    attachment.release(slots)


def test_what_can_never_fit_shows_in_the_total(store: StoreProcess) -> None:
    with store.attach(pages=3, device="cpu:3") as small:
        assert small.open([ask(max_tokens=4 * 128)]) == [Refused("full", 4, 3, 3)]


def test_a_sequence_from_open_to_release(store: StoreProcess, attachment: Attachment) -> None:
    request = OpenRequest("req-1", "tenant", list(range(1000, 1300)), 600, b"frozen\0")
    slot = slot_of(attachment.open([request])[0])
    control = attachment.control
    assert (control.request_id(slot), control.salt(slot), control.frozen_request(slot)) == (
        "req-1",
        "tenant",
        b"frozen\0",
    )
    assert control.token_log(slot) == list(range(1000, 1300))
    assert (control.committed(slot), control.live_slots()) == (0, [slot])
    new = attachment.reserve([(slot, 300, 1)])
    assert {group: len(pages) for group, pages in new[slot].items()} == {"full": 3, "window": 3}
    assert [page.page_id for page in new[slot]["full"]] == control.sequence_pages(slot, "full")
    assert attachment.reserve([(slot, 384, 1)]) == {}
    write_rows(attachment, slot, 0, 300)
    sealed = attachment.seal([(slot, 300, 1)])
    assert (sealed.pages_sealed, sealed.bases) == (4, {slot: {"full": 256, "window": 256}})
    assert attachment.seal([(slot, 300, 1)]).pages_sealed == 0
    expected = list(
        page_hashes(control.token_log(slot), salt="tenant", weights_digest=b"w" * 16, geometry_digest=GEOMETRY.digest())
    )
    for group in ("full", "window"):
        entries = control.pages[group][control.sequence_pages(slot, group)]
        assert [bytes(h) for h in entries["hash"]] == [*expected, bytes(16)]
        assert [bytes(h) for h in entries["parent"]] == [bytes(16), expected[0], bytes(16)]
        assert entries["state"].tolist() == [PageState.SEALED, PageState.SEALED, PageState.OPEN]
        assert entries["refs"].tolist() == [1] * 3
        assert control.base(slot, group) == 256
    assert counts(cpu0(store)) == [(5, 2, 1, 2)] * 2
    for token in range(100):
        control.append_tokens(slot, [token])
        attachment.reserve([(slot, 301 + token, 1)])
        write_rows(attachment, slot, 300 + token, 301 + token)
    assert read_rows(attachment, slot, "full") == control.token_log(slot)
    assert attachment.release([slot]) == 8
    assert counts(cpu0(store)) == [(8, 0, 0, 0)] * 2
    assert control.live_slots() == []
    for group in ("full", "window"):
        states = control.pages[group]["state"]
        assert sorted(states.tolist()) == [PageState.FREE] * 6 + [PageState.CACHED] * 2
        assert (states != PageState.FREE).tolist() == control.pages[group]["hash"].any(axis=1).tolist()
        assert not control.pages[group]["refs"].any()
    assert attachment.verify() == []


@pytest.mark.parametrize("cut", [0, 1, 127, 128, 130, 255, 256, 299, 300])
def test_truncated_sequences_read_their_own_rows_and_go_on(attachment: Attachment, cut: int) -> None:
    slot = slot_of(attachment.open([ask("r", 300, 600)])[0])
    attachment.reserve([(slot, 300, 1)])
    write_rows(attachment, slot, 0, 300)
    attachment.seal([(slot, 300, 1)])
    sealed = {g.name: bytes(attachment.arenas[g.name].buffer) for g in GEOMETRY.groups}
    before = {g.name: attachment.control.sequence_pages(slot, g.name) for g in GEOMETRY.groups}
    copies = attachment.truncate(slot, cut).copies
    if cut >= 256 or cut % 128 == 0:
        assert not copies  # elsewhere there is one, unless the page is seen by nobody else and taken again
    assert (attachment.control.logged(slot), attachment.control.committed(slot)) == (cut, cut)
    page_entries_agree(attachment)
    copy_rows(attachment, copies)
    assert read_rows(attachment, slot, "full") == list(range(cut))
    more = [7000 + i for i in range(200)]
    attachment.control.append_tokens(slot, more)
    attachment.reserve([(slot, cut + 200, 1)])
    write_rows(attachment, slot, cut, cut + 200)
    for group in GEOMETRY.groups:
        assert read_rows(attachment, slot, group.name) == [*range(cut), *more]
        for index in range(cut // 128):  # pages that stayed sealed were not touched
            page = before[group.name][index]
            assert page == attachment.control.sequence_pages(slot, group.name)[index]
            size = group.page_bytes
            assert (
                bytes(attachment.arenas[group.name].page(page)) == sealed[group.name][page * size : (page + 1) * size]
            )
    attachment.release([slot])


def test_misuse_is_named_and_hurts_nobody(store: StoreProcess, attachment: Attachment) -> None:
    slot = slot_of(attachment.open([ask("r", 10, 100)])[0])
    other = (slot + 1) % 4  # not open
    cases: list[tuple[type[TailpackError], str, object]] = [
        (InvalidRequest, "EMPTY_PROMPT", lambda: attachment.open([ask(), ask(num_prompt=0)])),
        (InvalidRequest, "INVALID_REQUEST", lambda: attachment.open([ask(num_prompt=2, max_tokens=1)])),
        (TooLarge, "TOO_LARGE", lambda: attachment.open([ask(max_tokens=1025)])),
        (InvalidRequest, "FIELD_TOO_LONG", lambda: attachment.open([ask(request_id="x" * 257)])),
        (InvalidRequest, "FIELD_TOO_LONG", lambda: attachment.open([ask(salt="ü" * 129)])),
        (
            InvalidRequest,
            "FIELD_TOO_LONG",
            lambda: attachment.open([OpenRequest("r", "", [1], 1, bytes(MAX_FROZEN_BYTES + 1))]),
        ),
        (InvalidRequest, "OVER_PROMISE", lambda: attachment.reserve([(slot, 101, 1)])),
        (NotFound, "UNKNOWN_SLOT", lambda: attachment.reserve([(slot, 1, 1), (other, 1, 1)])),
        (NotFound, "UNKNOWN_SLOT", lambda: attachment.reserve([(4_000_000, 1, 1)])),
        (NotFound, "UNKNOWN_SLOT", lambda: attachment.truncate(other, 0)),
        (NotFound, "UNKNOWN_SLOT", lambda: attachment.release([slot, other])),
        (InvalidRequest, "DUPLICATE_SLOT", lambda: attachment.release([slot, slot])),
        (PreconditionFailed, "NOT_COMMITTED", lambda: attachment.seal([(slot, 1, 1)])),
        (PreconditionFailed, "TRUNCATE_EXTENDS", lambda: attachment.truncate(slot, 11)),
    ]
    for kind, reason, call in cases:
        with pytest.raises(TailpackError) as caught:
            call()  # type: ignore[operator]
        assert (type(caught.value), caught.value.reason) == (kind, reason)
        assert cpu0(store).sequences == 1, reason
    attachment.release([slot])
    assert counts(cpu0(store)) == [(8, 0, 0, 0)] * 2


def test_1000_sequences_opened_and_released_leave_the_stats_as_they_were(
    store: StoreProcess, attachment: Attachment
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    at_start = cpu0(store)
    live: list[int] = []
    opened = 0
    while opened < 1000:
        if live and (rng.random() < 0.5 or len(live) == 4):
            attachment.release([live.pop(rng.randrange(len(live)))])
            continue
        prompt = rng.randrange(1, 300)
        (result,) = attachment.open([ask(f"r{opened}", prompt, rng.randrange(prompt, 512))])
        if isinstance(result, Refused):
            attachment.release([live.pop()])
            continue
        opened += 1
        live.append(result.slot)
        attachment.reserve([(result.slot, prompt, 1)])
        attachment.control.commit(result.slot, prompt)
        if rng.random() < 0.5:
            attachment.seal([(result.slot, prompt, 1)])
        if rng.random() < 0.3:
            attachment.truncate(result.slot, rng.randrange(prompt + 1))
        if opened % 50 == 0:
            page_entries_agree(attachment)
    attachment.release(live)
    at_end = cpu0(store)
    for device in (at_start, at_end):
        for field in ("prefix_misses", "truncates_exact"):
            device.ClearField(field)
        for group in device.groups:
            group.pages_free += group.pages_cached
            for name in ("pages_sealed_ever", "pages_evicted_ever", "pages_cached"):
                group.ClearField(name)
    assert at_end == at_start
    assert attachment.verify() == []
    assert attachment.control.live_slots() == []
    page_entries_agree(attachment)


def test_two_processes_get_the_same_hashes_for_the_same_tokens(store: StoreProcess) -> None:
    code = (
        "a = attach(device='cpu:{device}')\n"
        "slot = a.open([OpenRequest('r', '{salt}', list(range(256)), 256, b'')])[0].slot\n"
        "a.reserve([(slot, 256, 1)]); a.control.commit(slot, 256); a.seal([(slot, 256, 1)])\n"
        "pages = a.control.sequence_pages(slot, 'full')\n"
        "say([bytes(h).hex() for h in a.control.pages['full']['hash'][pages]]); a.close()\n"
    )
    lines = []
    for device, salt in ((5, "t"), (6, "t"), (7, "other")):
        with worker_process(store, code.format(device=device, salt=salt)) as worker:
            assert worker.stdout
            lines.append(worker.stdout.readline())
            worker.wait(60)
    here = [
        h.hex() for h in page_hashes(range(256), salt="t", weights_digest=b"w" * 16, geometry_digest=GEOMETRY.digest())
    ]
    assert lines[0] == lines[1] == f"{here}\n"
    assert lines[2] != lines[0]
    eventually(lambda: all(d.sequences == 0 for d in store.stats().devices))
