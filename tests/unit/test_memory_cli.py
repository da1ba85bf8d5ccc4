"""`tailpack memory`: answers of workers and stores, put together by the memory that they are of."""

from __future__ import annotations

import io

from rich.console import Console

from protos import kvstore_pb2, types_pb2, worker_pb2
from worker.memory_cli import FREE_COLOUR, OTHER_COLOUR, UNKNOWN_COLOUR, Use, _picture, _table, gathered

GPU = "cuda:GPU-0"


def worker(name: str, host: str, uses: dict[tuple[str, str], int], gpu: tuple[int, int] = (0, 0)) -> object:
    return worker_pb2.InfoResponse(
        info=types_pb2.WorkerInfo(worker_id=name),
        memory=worker_pb2.WorkerMemory(
            host=host,
            uses=[
                worker_pb2.MemoryUse(memory=memory, owner=owner, num_bytes=size)
                for (memory, owner), size in uses.items()
            ],
            gpu_total_bytes=gpu[0],
            gpu_free_bytes=gpu[1],
        ),
    )


def store(device: str, memory: str, **group: int) -> kvstore_pb2.KvStatsResponse:
    stats = kvstore_pb2.GroupStats(group="full", **group)  # type: ignore[arg-type]
    return kvstore_pb2.KvStatsResponse(
        devices=[kvstore_pb2.DeviceStats(device=device, memory=memory, control_bytes=7, groups=[stats])]
    )


def test_a_gpus_memory_is_told_to_the_byte() -> None:
    on_gpu = worker(
        "w0", "here", {(GPU, "weights"): 100, (GPU, "workspaces"): 20, ("host", "process"): 5}, (4096, 1000)
    )
    held = store(GPU, "device", pages_total=3, page_bytes=100, tail_slots_total=2, tail_slot_bytes=50, arena_bytes=1024)
    host, gpu = gathered([on_gpu], {"here": [held]})  # type: ignore[list-item]
    assert (host.memory, host.uses) == ("host", [Use("w0", "process", 5), Use(GPU, "control block", 7)])
    assert gpu.uses == [
        Use("w0", "weights", 100),
        Use("w0", "workspaces", 20),
        Use(GPU, "pages full", 300),
        Use(GPU, "tails full", 100),
        Use(GPU, "rounding full", 624),
    ]
    assert (gpu.known_bytes, gpu.other_bytes, gpu.free_bytes) == (1144, 1952, 1000)
    assert gpu.known_bytes + (gpu.other_bytes or 0) + (gpu.free_bytes or 0) == gpu.total_bytes == 4096


def test_a_stores_weights_are_told_as_they_are_held() -> None:
    held = kvstore_pb2.KvStatsResponse(
        weights=[
            kvstore_pb2.WeightsStats(model="m", memory=GPU, num_bytes=30, form="weights in FP8 blocks"),
            kvstore_pb2.WeightsStats(model="older", memory="host:node1", num_bytes=20),
        ]
    )
    host, gpu = gathered([], {"here": [held]})
    assert (host.memory, host.uses) == ("host", [Use("older", "weights", 20)])
    assert gpu.uses == [Use("m", "weights in FP8 blocks", 30)]


def test_host_memory_is_told_by_machine() -> None:
    uses = {("host", "weights"): 10, ("host", "process"): 5}
    workers = [worker("w0", "here", uses), worker("w1", "there", uses)]
    held = store("cpu:0", "host", pages_total=3, page_bytes=100, arena_bytes=300)
    here, there = gathered(workers, {"here": [held]})  # type: ignore[arg-type]
    assert (here.host, here.known_bytes, here.total_bytes, here.other_bytes) == ("here", 322, None, None)
    assert (there.host, there.known_bytes) == ("there", 15)
    assert [use.owner for use in here.uses] == ["weights", "process", "pages full", "control block"]


def test_a_picture_shows_every_part_in_its_share() -> None:
    uses = {(GPU, "weights"): 800, (GPU, "graph pools"): 1, (GPU, "unknown"): 199, ("host", "process"): 5}
    _, gpu = gathered([worker("w0", "here", uses, (2000, 900))], {})  # type: ignore[list-item]
    picture = _picture(gpu, 50)
    assert len(picture.plain) in (50, 51)
    colours = [set(str(span.style).replace(" on ", " ").split()) for span in picture.spans]
    seen = set().union(*colours)
    assert {UNKNOWN_COLOUR, OTHER_COLOUR, FREE_COLOUR} <= seen and len(seen) == 5
    weights = sum(colour == {"blue"} for colour in colours)
    free = sum(colour == {FREE_COLOUR} for colour in colours)
    assert 19 <= weights <= 20 and 22 <= free <= 23


def test_planned_bytes_stand_beside_what_is_taken() -> None:
    told = worker("w0", "here", {(GPU, "weights"): 4 << 20, (GPU, "unknown"): 0}, (64 << 20, 32 << 20))
    told.memory.uses[0].planned_bytes = 5 << 20  # type: ignore[attr-defined]
    (gpu,) = gathered([told], {})  # type: ignore[list-item]
    console = Console(width=120, file=io.StringIO())
    console.print(_table(gpu))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "planned MiB" in shown and "5.0" in shown and "unknown" in shown
    assert "other programs, stores not asked" in shown and "28.0" in shown
