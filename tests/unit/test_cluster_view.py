"""What `status` and `top` make of two looks at a cluster, and that their screens fit."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from protos import kvstore_pb2, router_pb2, types_pb2
from router.cluster_view import History, Look, view
from router.top_screen import screen, sparkline

BOUNDS = [0.01, 0.1, 1.0]


def histogram(*counts: int) -> router_pb2.Histogram:
    return router_pb2.Histogram(upper_bounds_s=BOUNDS, counts=counts)


def worker(
    name: str = "worker-0", *, incarnation: str = "a", state: str = "ready", emitted: int = 0, sealed: int = 0
) -> router_pb2.WorkerStatus:
    info = types_pb2.WorkerInfo(worker_id=name, incarnation=incarnation, device="cpu:0", kv_mode="turboquant tq4")
    load = types_pb2.WorkerLoad(
        num_running=3, num_waiting=2, tokens_emitted=emitted, pages_total=100, pages_free=25, seal_ns=emitted * 1000
    )
    group = kvstore_pb2.GroupStats(
        group="kv", mode="turboquant", preset="tq4", pages_total=100, pages_free=60, pages_cached=15,
        tail_slots_total=32, tail_slots_used=5, pages_sealed_ever=sealed,
    )  # fmt: skip
    kv = kvstore_pb2.DeviceStats(epoch=7, memory="host", groups=[group], prefix_hits_exact=4, prefix_misses=6)
    return router_pb2.WorkerStatus(state=state, info=info, load=load, kv=kv)


def look(at_s: float, *workers: router_pb2.WorkerStatus, requests: int = 0, ttft: tuple[int, ...] = ()) -> Look:
    stats = router_pb2.StatsResponse(
        router_id="router-1",
        uptime_ns=int((100 + at_s) * 1e9),
        requests=requests,
        ttft=histogram(*ttft) if ttft else None,
    )
    return Look(at_s, stats, workers)


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = look(10.0, worker(emitted=1000, sealed=8), requests=50, ttft=(9, 0, 0, 0))
    shown = view(look(12.0, worker(emitted=1500, sealed=18), requests=60, ttft=(9, 4, 0, 0)), before)
    assert shown.tokens_per_s == 250.0
    assert shown.requests_per_s == 5.0
    assert shown.groups[0].sealed_per_s == 5.0
    assert shown.seal_share == pytest.approx(500e3 / 2e9)
    assert shown.ttft.p50 == pytest.approx(0.055), "of the four that are new"
    assert (shown.groups[0].pages_used, shown.groups[0].pages_cached, shown.groups[0].tails_used) == (25, 15, 5)
    assert shown.prefix_hits == {"exact": 4, "inexact": 0, "miss": 6}


def test_a_look_at_another_router_is_nothing_to_count_from() -> None:
    before = look(10.0, worker(emitted=1000), requests=500, ttft=(90, 0, 0, 0))
    before.stats.router_id = "router-2"
    after = look(11.0, worker(emitted=1500), requests=111, ttft=(9, 4, 0, 0))
    assert view(after, before) == view(after)
    assert view(after, before).requests_per_s == 1.0, "of its 111 s"


def test_a_restarted_worker_shows_no_negative_and_no_made_up_rate() -> None:
    before = look(10.0, worker(emitted=1000))
    after = look(11.0, worker(emitted=30, incarnation="b"))
    assert view(after, before).tokens_per_s == 0.0
    assert view(look(12.0, worker(emitted=50, incarnation="b")), after).tokens_per_s == 20.0


def test_memory_that_grew_without_an_owner_is_shown() -> None:
    well, grown = worker("w0"), worker("w1")
    grown.load.memory_grown_bytes = 70 << 20
    shown = view(look(1.0, well, grown))
    assert shown.grown_bytes == {"w1": 70 << 20}
    console = Console(width=160, height=40, file=io.StringIO())
    console.print(screen(shown, History(), "here:1", 160, 40))
    assert "w1 holds 70 MiB that nobody owns" in console.file.getvalue()  # type: ignore[attr-defined]


def test_another_router_starts_the_curves_from_its_own_counts() -> None:
    history = History()
    history.add(look(1.0, worker(emitted=100), requests=1000))
    other = look(2.0, worker(emitted=200), requests=3)
    other.stats.router_id = "router-2"
    assert history.add(other).requests_per_s > 0
    assert list(history.tokens_per_s) == []


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (100, 30), (60, 16)])
@pytest.mark.parametrize("num_workers", [0, 1, 3, 40])
def test_the_screen_fits_its_terminal(width: int, height: int, num_workers: int) -> None:
    history = History()
    names = [f"a-worker-of-a-long-name-{index}" for index in range(num_workers)]
    history.add(look(0.0, *(worker(name) for name in names)))
    after = [worker(name, emitted=10**9, state="lost" if index == 17 else "ready") for index, name in enumerate(names)]
    shown = history.add(look(1.0, *after, requests=10**9, ttft=(1, 2, 3, 4)))
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(screen(shown, history, "127.0.0.1:7700", width, height))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "q or Ctrl-C" in text
    assert "TTFT" in text
    if num_workers == 40:
        assert "lost" in text, "what is in trouble is not among those left out"
        assert "more" in text


def test_a_curve_shows_its_newest_values() -> None:
    assert sparkline([0, 4, 8], 3) == " ▄█"
    assert sparkline([8, 0, 0, 8], 2) == " █"
    assert sparkline([], 3) == "   "
    assert sparkline([0, 0], 3) == "   "
