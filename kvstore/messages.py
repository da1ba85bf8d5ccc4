"""The store's answers as protobuf messages and back: `X_message` writes, `X_from` reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvstore.answers import (
    Admitted,
    Adopted,
    Checkpointed,
    Forked,
    NewPage,
    PageCopy,
    Refill,
    Refused,
    Relinked,
    SealResult,
    Split,
    TailCopy,
    Truncated,
)
from kvstore.arena import ArenaPlan
from kvstore.control import ControlBlock
from protos import kvstore_pb2

NO_TAIL = -1


def tail_copy_message(copy: TailCopy) -> kvstore_pb2.TailCopy:
    return kvstore_pb2.TailCopy(group=copy.group, from_slot=copy.from_slot, to_slot=copy.to_slot)


def tail_copies_from(copies: Iterable[kvstore_pb2.TailCopy]) -> list[TailCopy]:
    return [TailCopy(c.group, c.from_slot, c.to_slot) for c in copies]


def page_copy_message(copy: PageCopy) -> kvstore_pb2.PageCopy:
    return kvstore_pb2.PageCopy(
        group=copy.group, from_page=copy.from_page, to_page=copy.to_page, num_tokens=copy.num_tokens
    )


def page_copies_from(copies: Iterable[kvstore_pb2.PageCopy]) -> list[PageCopy]:
    return [PageCopy(c.group, c.from_page, c.to_page, c.num_tokens) for c in copies]


def refill_message(refill: Refill) -> kvstore_pb2.Refill:
    return kvstore_pb2.Refill(
        group=refill.group,
        tail_slot=refill.tail_slot,
        first_token=refill.first_token,
        num_tokens=refill.num_tokens,
        page_ids=refill.page_ids,
    )


def refills_from(refills: Iterable[kvstore_pb2.Refill]) -> list[Refill]:
    return [Refill(r.group, r.tail_slot, r.first_token, r.num_tokens, list(r.page_ids)) for r in refills]


def _groups(
    pages: Mapping[str, Sequence[int]], bases: Mapping[str, int], tail_slots: Mapping[str, int]
) -> list[kvstore_pb2.SequenceGroup]:
    return [
        kvstore_pb2.SequenceGroup(
            group=group, base=base, page_ids=pages.get(group, ()), tail_slot=tail_slots.get(group, NO_TAIL)
        )
        for group, base in bases.items()
    ]


def _groups_from(
    groups: Iterable[kvstore_pb2.SequenceGroup],
) -> tuple[dict[str, list[int]], dict[str, int], dict[str, int]]:
    """pages, bases, tail slots."""
    groups = list(groups)
    return (
        {g.group: list(g.page_ids) for g in groups},
        {g.group: int(g.base) for g in groups},
        {g.group: g.tail_slot for g in groups if g.tail_slot != NO_TAIL},
    )


def open_message(result: Admitted | Refused) -> kvstore_pb2.OpenResult:
    if isinstance(result, Refused):
        return kvstore_pb2.OpenResult(
            short_group=result.short_group,
            pages_needed=result.pages_needed,
            pages_free=result.pages_free,
            pages_total=result.pages_total,
        )
    return kvstore_pb2.OpenResult(
        admitted=True,
        slot=result.slot,
        num_cached=result.num_cached,
        prefix_exact=result.prefix_exact,
        junction=result.junction,
        groups=_groups(result.pages, result.bases, result.tail_slots),
        copies=map(page_copy_message, result.copies),
        tail_copies=map(tail_copy_message, result.tail_copies),
        refills=map(refill_message, result.refills),
    )


def open_from(r: kvstore_pb2.OpenResult) -> Admitted | Refused:
    if not r.admitted:
        return Refused(r.short_group, int(r.pages_needed), int(r.pages_free), int(r.pages_total))
    pages, bases, tail_slots = _groups_from(r.groups)
    return Admitted(
        slot=r.slot,
        tail_slots=tail_slots,
        num_cached=r.num_cached,
        prefix_exact=r.prefix_exact,
        pages=pages,
        bases=bases,
        refills=refills_from(r.refills),
        tail_copies=tail_copies_from(r.tail_copies),
        junction=r.junction,
        copies=page_copies_from(r.copies),
    )


def adopted_message(adopted: Adopted) -> kvstore_pb2.AdoptedSequence:
    """Without what stands in the control block: token ids and the frozen request."""
    return kvstore_pb2.AdoptedSequence(
        slot=adopted.slot,
        request_id=adopted.request_id,
        tenant_salt=adopted.tenant_salt,
        num_prompt_tokens=adopted.num_prompt_tokens,
        num_logged=len(adopted.token_ids),
        num_committed=adopted.num_committed,
        max_tokens=adopted.max_tokens,
        groups=_groups(adopted.pages, adopted.bases, adopted.tail_slots),
        prefix_exact=adopted.prefix_exact,
        num_cached=adopted.num_cached,
        intact=adopted.intact,
    )


def adopted_from(message: kvstore_pb2.AdoptedSequence, control: ControlBlock) -> Adopted:
    pages, bases, tail_slots = _groups_from(message.groups)
    return Adopted(
        slot=message.slot,
        request_id=message.request_id,
        tenant_salt=message.tenant_salt,
        num_prompt_tokens=message.num_prompt_tokens,
        token_ids=control.tokens(message.slot, 0, message.num_logged),
        num_committed=message.num_committed,
        max_tokens=message.max_tokens,
        frozen_request=control.frozen_request(message.slot),
        pages=pages,
        bases=bases,
        tail_slots=tail_slots,
        prefix_exact=message.prefix_exact,
        num_cached=message.num_cached,
        intact=message.intact,
    )


def fork_message(result: Forked | Refused) -> kvstore_pb2.ForkResponse:
    if isinstance(result, Refused):
        return kvstore_pb2.ForkResponse(result=open_message(result))
    opened = kvstore_pb2.OpenResult(
        admitted=True,
        slot=result.slot,
        groups=_groups(result.pages, result.bases, result.tail_slots),
        tail_copies=map(tail_copy_message, result.tail_copies),
    )
    return kvstore_pb2.ForkResponse(result=opened, copies=map(page_copy_message, result.copies))


def fork_from(response: kvstore_pb2.ForkResponse) -> Forked | Refused:
    opened = open_from(response.result)
    if isinstance(opened, Refused):
        return opened
    return Forked(
        slot=opened.slot,
        pages=opened.pages,
        bases=opened.bases,
        copies=page_copies_from(response.copies),
        tail_copies=opened.tail_copies,
        tail_slots=opened.tail_slots,
    )


def new_page_message(page: NewPage) -> kvstore_pb2.NewPage:
    match page.source:
        case Relinked():
            return kvstore_pb2.NewPage(index=page.index, page_id=page.page_id, relinked=True)
        case Split(from_page, num_tokens):
            split = kvstore_pb2.Split(from_page=from_page, num_tokens=num_tokens)
            return kvstore_pb2.NewPage(index=page.index, page_id=page.page_id, split=split)
        case None:
            return kvstore_pb2.NewPage(index=page.index, page_id=page.page_id)


def new_page_from(page: kvstore_pb2.NewPage) -> NewPage:
    source: Relinked | Split | None = None
    match page.WhichOneof("source"):
        case "relinked":
            source = Relinked()
        case "split":
            source = Split(page.split.from_page, page.split.num_tokens)
    return NewPage(page.index, page.page_id, source)


def reserve_message(handed: Mapping[int, Mapping[str, Sequence[NewPage]]]) -> kvstore_pb2.ReserveResponse:
    return kvstore_pb2.ReserveResponse(
        sequences=[
            kvstore_pb2.ReservedPages(
                slot=slot,
                groups=[
                    kvstore_pb2.GroupPages(group=group, pages=map(new_page_message, pages))
                    for group, pages in groups.items()
                ],
            )
            for slot, groups in handed.items()
        ]
    )


def reserve_from(response: kvstore_pb2.ReserveResponse) -> dict[int, dict[str, list[NewPage]]]:
    return {s.slot: {g.group: [new_page_from(page) for page in g.pages] for g in s.groups} for s in response.sequences}


def _base_messages(bases: Mapping[str, int], first_pages: Mapping[str, int]) -> list[kvstore_pb2.GroupBase]:
    return [
        kvstore_pb2.GroupBase(group=group, base=base, first_page=first_pages.get(group, 0))
        for group, base in bases.items()
    ]


def seal_message(result: SealResult) -> kvstore_pb2.SealResponse:
    return kvstore_pb2.SealResponse(
        pages_sealed=result.pages_sealed,
        sequences=[
            kvstore_pb2.SlotBases(slot=slot, groups=_base_messages(bases, result.first_pages.get(slot, {})))
            for slot, bases in result.bases.items()
        ],
    )


def seal_from(response: kvstore_pb2.SealResponse) -> SealResult:
    return SealResult(
        pages_sealed=int(response.pages_sealed),
        bases={s.slot: {g.group: int(g.base) for g in s.groups} for s in response.sequences},
        first_pages={s.slot: {g.group: g.first_page for g in s.groups} for s in response.sequences},
    )


def truncate_message(result: Truncated) -> kvstore_pb2.TruncateResponse:
    return kvstore_pb2.TruncateResponse(
        copies=map(page_copy_message, result.copies),
        tail_copies=map(tail_copy_message, result.tail_copies),
        refills=map(refill_message, result.refills),
        exact=result.exact,
        bases=_base_messages(result.bases, {}),
        num_tokens=result.num_tokens,
    )


def truncate_from(response: kvstore_pb2.TruncateResponse) -> Truncated:
    return Truncated(
        num_tokens=response.num_tokens,
        copies=page_copies_from(response.copies),
        refills=refills_from(response.refills),
        exact=response.exact,
        bases={g.group: int(g.base) for g in response.bases},
        tail_copies=tail_copies_from(response.tail_copies),
    )


def checkpoint_message(result: Checkpointed) -> kvstore_pb2.CheckpointResponse:
    return kvstore_pb2.CheckpointResponse(
        copies=map(tail_copy_message, result.tail_copies), page_copies=map(page_copy_message, result.copies)
    )


def checkpoint_from(response: kvstore_pb2.CheckpointResponse) -> Checkpointed:
    return Checkpointed(page_copies_from(response.page_copies), tail_copies_from(response.copies))


def arena_entries(arenas: Sequence[ArenaPlan], sizes: Sequence[tuple[int, ...]]) -> list[kvstore_pb2.FdEntry]:
    """``sizes``: of each arena's chunks; none in host memory."""
    return [
        kvstore_pb2.FdEntry(
            kind=arena.kind,
            group=arena.group,
            num_bytes=arena.num_bytes,
            num_pages=arena.num_pages,
            page_bytes=arena.page_bytes,
            chunk_bytes=chunk_bytes,
        )
        for arena, chunk_bytes in zip(arenas, sizes, strict=True)
    ]
