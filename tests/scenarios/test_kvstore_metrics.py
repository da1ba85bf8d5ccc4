"""What a store exports, against its own stats; and what is left of the page when its event loop is stuck."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore import metrics
from kvstore.client import Admitted, OpenRequest
from kvstore.metrics import KvStoreMetrics
from protos import kvstore_pb2
from tests.scenarios.kvstore_process import StoreProcess, eventually, worker_process


def samples(url: str) -> dict[tuple[str, ...], float]:
    """(name, values of the labels in the order of their names) -> value."""
    with urllib.request.urlopen(url, timeout=60) as page:
        text = page.read().decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def last_label(page: dict[tuple[str, ...], float], *rest: str) -> dict[str, float]:
    """The samples of one name and all labels but the last, by that."""
    return {key[-1]: value for key, value in page.items() if key[:-1] == rest}


def test_pages_sequences_and_reuse_are_what_the_stats_say() -> None:
    with StoreProcess("--metrics", "127.0.0.1:0") as store:
        url = store.ready["metrics"]
        assert not any(name.startswith("tailpack_kvstore") and "device" in name for name, *_ in samples(url))
        with store.attach() as attachment:
            for number in range(2):  # the second finds what the first has sealed
                request = OpenRequest(f"r{number}", "", list(range(300)), 320)
                (opened,) = attachment.open([request])
                assert isinstance(opened, Admitted)
                attachment.reserve([(opened.slot, 300, 1)])
                attachment.control.append_tokens(opened.slot, list(range(300)))
                attachment.control.commit(opened.slot, 300)
                attachment.seal([(opened.slot, 300, 1)])
            page, device = samples(url), store.device()
            for group in device.groups:
                of_group = ("cpu:0", group.group, "dense", "host")
                states = {
                    key[-1]: value for key, value in page.items() if key[:-1] == ("tailpack_kvstore_pages", *of_group)
                }
                assert states == {
                    "free": group.pages_free,
                    "open": group.pages_open,
                    "sealed": group.pages_sealed,
                    "cached": group.pages_cached,
                }
                assert sum(states.values()) == group.pages_total == 8
                assert states["open"] == 2 and states["sealed"] == 2
                assert page["tailpack_kvstore_pages_promised", *of_group] == group.pages_promised
                assert page["tailpack_kvstore_arena_bytes", *of_group] == group.arena_bytes > 0
            assert page["tailpack_kvstore_attached", "cpu:0", "w0"] == 1
            assert page["tailpack_kvstore_sequences", "cpu:0"] == 2
            lookups = {
                key[-1]: value for key, value in page.items() if key[0] == "tailpack_kvstore_prefix_lookups_total"
            }
            assert lookups == {"exact": 1, "inexact": 0, "miss": 1}
            assert page["tailpack_kvstore_prefix_tokens_reused_total", "cpu:0"] == 256
            assert page["tailpack_kvstore_integrity_problems", "cpu:0"] == 0
        eventually(lambda: ("tailpack_kvstore_attached", "cpu:0", "w0") not in samples(url))  # nobody lingers
        assert samples(url)["tailpack_kvstore_sequences", "cpu:0"] == 0


def test_what_outlives_its_worker_is_counted() -> None:
    code = "a = attach(); a.open([OpenRequest('r', '', [1], 200)]); say('on'); sys.stdin.readline()\n"
    with StoreProcess("--metrics", "127.0.0.1:0") as store, worker_process(store, code) as worker:
        url = store.ready["metrics"]
        assert worker.stdout
        worker.stdout.readline()
        assert samples(url)["tailpack_kvstore_orphans", "cpu:0"] == 0
        worker.kill()
        eventually(lambda: samples(url)["tailpack_kvstore_orphans", "cpu:0"] == 1)
        store.attach().close()
        outlived = last_label(samples(url), "tailpack_kvstore_outlived_total", "cpu:0")
        killed = outlived.pop("suspects_killed")  # or gone before that
        assert outlived == {"sequences_adopted": 1, "orphans_released": 0}
        assert killed in (0, 1)
        assert samples(url)["tailpack_kvstore_orphans", "cpu:0"] == 0


def test_a_stuck_event_loop_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LOOP_TIMEOUT_S", 0.05)
    stats = kvstore_pb2.KvStatsResponse(devices=[kvstore_pb2.DeviceStats(device="cpu:0")])
    service: Any = SimpleNamespace(stats=lambda: stats, num_problems=lambda device: 3)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        collector = KvStoreMetrics(loop, service)
        families = {family.name: family for family in collector.collect()}
        assert [s.value for s in families["tailpack_kvstore_integrity_problems"].samples] == [3]
        let_go = threading.Event()
        loop.call_soon_threadsafe(let_go.wait)
        time.sleep(0.01)
        assert list(collector.collect()) == []
        let_go.set()
        monkeypatch.setattr(metrics, "LOOP_TIMEOUT_S", 10.0)
        assert len(list(collector.collect())) == len(families)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
