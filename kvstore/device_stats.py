"""A device's numbers, by group and mode, as ``Stats`` reports them."""

from __future__ import annotations

from kvstore.arena import Arenas
from kvstore.sequences import SequenceTable
from protos import kvstore_pb2
from protos.page_hash import PAGE_TOKENS


def device_stats(table: SequenceTable, arenas: Arenas) -> kvstore_pb2.DeviceStats:
    """Counts and bytes of the tables; the caller adds what it alone knows (name, epoch, worker)."""
    geometry, ever = table.geometry, table.counters
    groups = []
    for group in geometry.groups:
        message = kvstore_pb2.GroupStats(
            group=group.name,
            mode=group.mode,
            preset=group.preset,
            window=group.effective_window,
            page_bytes=group.page_bytes,
            bytes_per_token=group.page_bytes / group.keep_every / PAGE_TOKENS,
            tail_slot_bytes=geometry.tail_slot_bytes(group),
            retention=group.retention,
            pending_ring_bytes=geometry.pending_ring_bytes(group),
            checkpoint_pages=table.checkpoints.budget if geometry.keeps_open_pages(group) else 0,
        )
        if (pages := table.groups.get(group.name)) is not None:
            message.pages_total, message.pages_free = pages.num_pages, pages.num_free
            message.pages_promised, message.pages_open = pages.num_promised, pages.num_open
            message.pages_sealed, message.pages_cached = pages.num_sealed, pages.num_cached
            message.pages_sealed_ever = ever["pages_sealed", group.name]
            message.pages_evicted_ever = ever["pages_evicted", group.name]
            message.pages_relinked_ever = ever["pages_relinked", group.name]
            message.pages_split_ever = ever["pages_split", group.name]
            message.pages_freed_behind_window_ever = ever["pages_freed_behind_window", group.name]
            message.pages_left_out_ever = ever["pages_left_out", group.name]
            message.pages_reused_ever = ever["pages_reused", group.name]
        if (tails := arenas.tails.get(group.name)) is not None:
            message.tail_slots_total = tails.num_pages
            message.tail_slots_used = len(table) + len(table.checkpoints)
        made = [arena for arena in (arenas.pages.get(group.name), arenas.tails.get(group.name)) if arena]
        message.arena_bytes = sum(arena.memory.allocated_bytes for arena in made)
        groups.append(message)
    return kvstore_pb2.DeviceStats(
        geometry_digest=geometry.digest(),
        sequences=len(table),
        max_sequences=table.max_sequences,
        groups=groups,
        prefix_hits_exact=ever["prefix_hits_exact", ""],
        prefix_hits_inexact=ever["prefix_hits_inexact", ""],
        prefix_misses=ever["prefix_misses", ""],
        prefix_tokens_reused=ever["prefix_tokens_reused", ""],
        truncates_exact=ever["truncates_exact", ""],
        truncates_deep=ever["truncates_deep", ""],
        forks=ever["forks", ""],
        checkpoints=len(table.checkpoints),
        checkpoint_slots=table.checkpoints.budget,
        checkpoints_evicted_ever=table.checkpoints.num_evicted,
    )
