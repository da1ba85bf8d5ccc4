"""What a store exports to Prometheus, read from the same numbers as ``Stats``."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterable

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvstore.service import KvStoreService
from protos import kvstore_pb2
from protos.metrics import LazyCollector

log = structlog.get_logger("metrics")

LOOP_TIMEOUT_S = 2.0
_GROUP = ["device", "place", "group", "mode"]


class KvStoreMetrics(LazyCollector):
    """Asks the store on its own event loop, whose tables no other thread may read.

    Where the loop does not answer within LOOP_TIMEOUT_S, the page has nothing of the store but
    ``tailpack_event_loop_silent_seconds``, which says why.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, service: KvStoreService) -> None:
        self._loop = loop
        self._service = service

    def collect(self) -> Iterable[Metric]:
        async def ask() -> tuple[kvstore_pb2.KvStatsResponse, dict[str, int]]:
            stats = self._service.stats()
            return stats, {device.device: self._service.num_problems(device.device) for device in stats.devices}

        asked = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        try:
            stats, problems = asked.result(LOOP_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            asked.cancel()
            log.warning("the store's event loop does not answer", waited_s=LOOP_TIMEOUT_S)
            return []
        return [*_groups(stats.devices), *_devices(stats.devices, problems), *_weights(stats.weights)]


def _groups(devices: Iterable[kvstore_pb2.DeviceStats]) -> Iterable[Metric]:
    pages = GaugeMetricFamily("tailpack_kvstore_pages", "Pages; the states sum up to all.", labels=[*_GROUP, "state"])
    promised = GaugeMetricFamily(
        "tailpack_kvstore_pages_promised", "Of the free and cached ones, those that are spoken for.", labels=_GROUP
    )
    page_bytes = GaugeMetricFamily("tailpack_kvstore_page_bytes", "Of one page.", labels=_GROUP)
    arena_bytes = GaugeMetricFamily("tailpack_kvstore_arena_bytes", "Taken by pages and tails.", labels=_GROUP)
    tails = GaugeMetricFamily("tailpack_kvstore_tail_slots", "Slots for dense tails.", labels=[*_GROUP, "state"])
    tail_bytes = GaugeMetricFamily("tailpack_kvstore_tail_slot_bytes", "Of one slot.", labels=_GROUP)
    events = CounterMetricFamily(
        "tailpack_kvstore_page_events",
        "What happened to pages since the device's memory was made.",
        labels=[*_GROUP, "event"],
    )
    for device in devices:
        for group in device.groups:
            labels = [device.device, device.memory, group.group, f"{group.mode} {group.preset}".strip()]
            for state in ("free", "open", "sealed", "cached"):
                pages.add_metric([*labels, state], getattr(group, f"pages_{state}"))
            promised.add_metric(labels, group.pages_promised)
            page_bytes.add_metric(labels, group.page_bytes)
            arena_bytes.add_metric(labels, group.arena_bytes)
            tails.add_metric([*labels, "used"], group.tail_slots_used)
            tails.add_metric([*labels, "free"], group.tail_slots_total - group.tail_slots_used)
            tail_bytes.add_metric(labels, group.tail_slot_bytes)
            for event in ("sealed", "evicted", "relinked", "split", "freed_behind_window", "reused"):
                events.add_metric([*labels, event], getattr(group, f"pages_{event}_ever"))
    return pages, promised, page_bytes, arena_bytes, tails, tail_bytes, events


def _devices(devices: Iterable[kvstore_pb2.DeviceStats], problems: dict[str, int]) -> Iterable[Metric]:
    device_only = ["device"]
    attached = GaugeMetricFamily(
        "tailpack_kvstore_attached", "1: this worker holds the device.", labels=["device", "worker"]
    )
    sequences = GaugeMetricFamily("tailpack_kvstore_sequences", "Open sequences.", labels=device_only)
    most = GaugeMetricFamily("tailpack_kvstore_max_sequences", "That the device can hold.", labels=device_only)
    control = GaugeMetricFamily("tailpack_kvstore_control_bytes", "Of the control block.", labels=device_only)
    checkpoints = GaugeMetricFamily(
        "tailpack_kvstore_checkpoints", "Tails kept for exact resumes.", labels=["device", "state"]
    )
    evicted = CounterMetricFamily(
        "tailpack_kvstore_checkpoints_evicted", "Checkpoints given up for others.", labels=device_only
    )
    lookups = CounterMetricFamily(
        "tailpack_kvstore_prefix_lookups",
        "Sequences opened that might reuse a prefix, by what they found.",
        labels=["device", "result"],
    )
    reused = CounterMetricFamily(
        "tailpack_kvstore_prefix_tokens_reused", "Prompt tokens that needed no computing.", labels=device_only
    )
    truncates = CounterMetricFamily("tailpack_kvstore_truncates", "Rollbacks.", labels=["device", "kind"])
    forks = CounterMetricFamily("tailpack_kvstore_forks", "Sequences forked.", labels=device_only)
    orphans = GaugeMetricFamily(
        "tailpack_kvstore_orphans", "Sequences of a worker that is gone, waiting for the next.", labels=device_only
    )
    outlived = CounterMetricFamily(
        "tailpack_kvstore_outlived",
        "Deaths of workers and stores: sequences adopted, orphans released, suspects killed.",
        labels=["device", "what"],
    )
    integrity = GaugeMetricFamily(
        "tailpack_kvstore_integrity_problems", "Found by the idle check since the start.", labels=device_only
    )
    for device in devices:
        name = [device.device]
        if device.worker_id:
            attached.add_metric([device.device, device.worker_id], 1)
        sequences.add_metric(name, device.sequences)
        most.add_metric(name, device.max_sequences)
        control.add_metric(name, device.control_bytes)
        checkpoints.add_metric([device.device, "kept"], device.checkpoints)
        checkpoints.add_metric([device.device, "free"], device.checkpoint_slots - device.checkpoints)
        evicted.add_metric(name, device.checkpoints_evicted_ever)
        lookups.add_metric([device.device, "exact"], device.prefix_hits_exact)
        lookups.add_metric([device.device, "inexact"], device.prefix_hits_inexact)
        lookups.add_metric([device.device, "miss"], device.prefix_misses)
        reused.add_metric(name, device.prefix_tokens_reused)
        truncates.add_metric([device.device, "exact"], device.truncates_exact)
        truncates.add_metric([device.device, "deep"], device.truncates_deep)
        forks.add_metric(name, device.forks)
        orphans.add_metric(name, device.orphans)
        for what in ("sequences_adopted", "orphans_released", "suspects_killed"):
            outlived.add_metric([device.device, what], getattr(device, what))
        integrity.add_metric(name, problems[device.device])
    return (
        *(attached, sequences, most, control, checkpoints, evicted),
        *(lookups, reused, truncates, forks, orphans, outlived, integrity),
    )


def _weights(held: Iterable[kvstore_pb2.WeightsStats]) -> Iterable[Metric]:
    labels = ["model", "place"]
    num_bytes = GaugeMetricFamily("tailpack_kvstore_weights_bytes", "Models' weights held for workers.", labels=labels)
    users = GaugeMetricFamily("tailpack_kvstore_weights_users", "Workers that map them.", labels=labels)
    for weights in held:
        num_bytes.add_metric([weights.model, weights.memory], weights.num_bytes)
        users.add_metric([weights.model, weights.memory], weights.users)
    return num_bytes, users
