"""What a cluster does, out of what its router says of it from time to time. Pure: no clock, no I/O.

The router's and workers' numbers count from their start; rates and percentiles here are of the time between two looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from protos import kvstore_pb2, router_pb2, types_pb2
from protos.histogram import quantile

MAX_POINTS = 512
WINDOW = 10
"""Looks that the latencies of a live view are of: between two of them few requests begin."""


@dataclass(frozen=True)
class Look:
    """What the router answered at one time (seconds, any clock that only goes on)."""

    at_s: float
    stats: router_pb2.StatsResponse
    workers: Sequence[router_pb2.WorkerStatus]


@dataclass(frozen=True)
class Quantiles:
    """In seconds; None where nothing was measured."""

    p50: float | None = None
    p99: float | None = None


@dataclass(frozen=True)
class WorkerRow:
    """One worker. Rates are per second; ``step_s`` is its latest step; None where it cannot be told."""

    worker_id: str
    state: str
    why: str
    device: str
    kv_mode: str
    running: int
    waiting: int
    queued_tokens: int
    tokens_per_s: float
    prompt_tokens_per_s: float
    step_s: float | None
    pages_used: int
    pages_total: int


@dataclass(frozen=True)
class GroupRow:
    """One layer group and mode, all workers together. ``sealed_per_s``: pages packed or written."""

    group: str
    mode: str
    place: str
    pages_used: int
    pages_cached: int
    pages_total: int
    tails_used: int
    tails_total: int
    num_bytes: int
    sealed_per_s: float
    relinked_per_s: float


@dataclass(frozen=True)
class View:
    """All that ``status`` and ``top`` show."""

    router_id: str
    uptime_s: float
    in_flight: int
    streams: int
    requests_per_s: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    ttft: Quantiles
    itl: Quantiles
    totals: dict[str, int]
    workers: tuple[WorkerRow, ...]
    groups: tuple[GroupRow, ...]
    prefix_hits: dict[str, int]  # exact, inexact, miss; since the stores' devices were attached
    append_share: float  # of the time that passed, summed over workers
    seal_share: float
    unknown_kv: tuple[str, ...]  # workers whose kvstore gave no answer
    grown_bytes: dict[str, int]  # by worker: memory that nobody in it owns, beyond what is allowed


@dataclass
class History:
    """The newest looks, and the points of the curves: one for each look but the first."""

    tokens_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    itl_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    _looks: deque[Look] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, look: Look) -> View:
        """Takes a look. Rates are since the one before, latencies of the last WINDOW; of the first, since the start."""
        if self._looks and self._looks[-1].stats.router_id != look.stats.router_id:
            self._looks.clear()  # another router process answers now
        before, oldest = (self._looks[-1], self._looks[0]) if self._looks else (None, None)
        self._looks.append(look)
        shown = view(look, before)
        if before is None or oldest is None:
            return shown
        self.tokens_per_s.append(shown.tokens_per_s)
        self.ttft_s.append(shown.ttft.p50 or 0.0)
        self.itl_s.append(shown.itl.p50 or 0.0)
        ttft, itl = _quantiles(look.stats.ttft, oldest.stats.ttft), _quantiles(look.stats.itl, oldest.stats.itl)
        return replace(shown, ttft=ttft, itl=itl)


def view(look: Look, before: Look | None = None) -> View:
    """What a look shows; rates since ``before``, or since the start of what they count.

    Where another router answered ``before``, as one of several may, its numbers say nothing of this one's.
    """
    stats = look.stats
    if before is not None and before.stats.router_id != stats.router_id:
        before = None
    uptime_s = stats.uptime_ns / 1e9
    elapsed_s = max(1e-9, look.at_s - before.at_s if before else uptime_s)
    older = {w.info.incarnation: w for w in before.workers} if before else {}
    workers = tuple(_worker(w, older.get(w.info.incarnation), before, elapsed_s) for w in look.workers)
    past = before.stats if before else router_pb2.StatsResponse()
    loads = [(w.load, _past_load(w, older.get(w.info.incarnation), before)) for w in look.workers]
    return View(
        router_id=stats.router_id,
        uptime_s=uptime_s,
        in_flight=stats.in_flight,
        streams=stats.streams,
        requests_per_s=(stats.requests - past.requests) / elapsed_s,
        tokens_per_s=sum(row.tokens_per_s for row in workers),
        prompt_tokens_per_s=sum(row.prompt_tokens_per_s for row in workers),
        ttft=_quantiles(stats.ttft, past.ttft),
        itl=_quantiles(stats.itl, past.itl),
        totals={
            name: getattr(stats, name)
            for name in ("requests", "finished", "cancelled", "failed", "rejected", "retries", "resumes")
        },
        workers=workers,
        groups=_groups(look, before, elapsed_s),
        prefix_hits={
            "exact": sum(w.kv.prefix_hits_exact for w in look.workers),
            "inexact": sum(w.kv.prefix_hits_inexact for w in look.workers),
            "miss": sum(w.kv.prefix_misses for w in look.workers),
        },
        append_share=sum(now.append_ns - past.append_ns for now, past in loads) / 1e9 / elapsed_s,
        seal_share=sum(now.seal_ns - past.seal_ns for now, past in loads) / 1e9 / elapsed_s,
        unknown_kv=tuple(w.info.worker_id or w.address for w in look.workers if not w.HasField("kv")),
        grown_bytes={
            w.info.worker_id or w.address: w.load.memory_grown_bytes for w in look.workers if w.load.memory_grown_bytes
        },
    )


def _quantiles(now: router_pb2.Histogram, past: router_pb2.Histogram) -> Quantiles:
    past_counts = list(past.counts) or [0] * len(now.counts)
    since = [count - old for count, old in zip(now.counts, past_counts, strict=True)]
    return Quantiles(quantile(now.upper_bounds_s, since, 0.5), quantile(now.upper_bounds_s, since, 0.99))


def _past_load(
    worker: router_pb2.WorkerStatus, past: router_pb2.WorkerStatus | None, before: Look | None
) -> types_pb2.WorkerLoad:
    """What to subtract. A process that is new since the look before has no rates yet: it counted for another time."""
    if past is not None:
        return past.load
    return types_pb2.WorkerLoad() if before is None else worker.load


def _worker(
    worker: router_pb2.WorkerStatus,
    past: router_pb2.WorkerStatus | None,
    before: Look | None,
    elapsed_s: float,
) -> WorkerRow:
    load, info = worker.load, worker.info
    old = _past_load(worker, past, before)
    return WorkerRow(
        worker_id=info.worker_id or worker.address,
        state=worker.state,
        why=worker.why,
        device=info.device,
        kv_mode=info.kv_mode,
        running=load.num_running,
        waiting=load.num_waiting,
        queued_tokens=load.queued_tokens,
        tokens_per_s=(load.tokens_emitted - old.tokens_emitted) / elapsed_s,
        prompt_tokens_per_s=(load.prompt_tokens - old.prompt_tokens) / elapsed_s,
        step_s=load.last_step_ns / 1e9 if load.last_step_ns else None,
        pages_used=load.pages_total - load.pages_free,
        pages_total=load.pages_total,
    )


def _groups(look: Look, before: Look | None, elapsed_s: float) -> tuple[GroupRow, ...]:
    past = {(device, *_key(group)): group for device, _, group in _all_groups(before)} if before else {}
    found: dict[tuple[str, str], list[tuple[kvstore_pb2.GroupStats, kvstore_pb2.GroupStats, str]]] = {}
    for device, place, group in _all_groups(look):
        # As with workers: a device that is new since the look before shows no rates yet.
        old = past.get((device, *_key(group)), group if before else kvstore_pb2.GroupStats())
        found.setdefault(_key(group), []).append((group, old, place))
    return tuple(
        GroupRow(
            group=name,
            mode=mode,
            place="/".join(sorted({place for _, _, place in each})),
            pages_used=sum(g.pages_total - g.pages_free - g.pages_cached for g, _, _ in each),
            pages_cached=sum(g.pages_cached for g, _, _ in each),
            pages_total=sum(g.pages_total for g, _, _ in each),
            tails_used=sum(g.tail_slots_used for g, _, _ in each),
            tails_total=sum(g.tail_slots_total for g, _, _ in each),
            num_bytes=sum(g.arena_bytes for g, _, _ in each),
            sealed_per_s=sum(g.pages_sealed_ever - old.pages_sealed_ever for g, old, _ in each) / elapsed_s,
            relinked_per_s=sum(g.pages_relinked_ever - old.pages_relinked_ever for g, old, _ in each) / elapsed_s,
        )
        for (name, mode), each in found.items()
    )


def _all_groups(look: Look) -> Iterator[tuple[tuple[str, int], str, kvstore_pb2.GroupStats]]:
    """Each group of each device, with what tells one attachment of a device from the next, and where its memory is."""
    for worker in look.workers:
        for group in worker.kv.groups:
            yield (worker.info.worker_id, worker.kv.epoch), worker.kv.memory, group


def _key(group: kvstore_pb2.GroupStats) -> tuple[str, str]:
    return group.group, f"{group.mode} {group.preset}".strip()
