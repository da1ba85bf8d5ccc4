"""Weights that outlive their workers: found, shared, given up, brought to the next store, and refused."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.linear_cuda import LinearWeight, Link, _check_weight
from kvstore.arena import Memory
from kvstore.fd_server import FdServer, deliver
from kvstore.weights import WeightsStore
from kvstore.weights_client import Lease, use_weights
from protos import kvstore_pb2
from protos.errors import InvalidRequest, ModelError, PreconditionFailed
from tests.scenarios.fake_gpu import DEVICE, FakeGpu
from tests.scenarios.kvstore_process import StoreProcess
from tests.unit.block_checkpoint import SHAPE, write_blocks
from tests.unit.tiny import config_for, write_model
from worker import tiny_v4
from worker.config import WorkerConfig
from worker.memory_plan import FROM_FP8, IN_BLOCKS, WEIGHTS
from worker.models.block_weight import BlockWeight
from worker.models.llama import PRODUCTS, Llama
from worker.weights import Model, Plan, load_model
from worker.weights_arena import open_model
from worker.weights_layout import Layout, tensors
from worker.weights_memory import fill, host_memory, mapped

KEY = b"k" * 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one_store() -> Iterator[StoreProcess]:
    with StoreProcess("--weights-grace", "0.2") as process:
        yield process


@pytest.fixture
def store(one_store: StoreProcess) -> StoreProcess:
    until(lambda: not one_store.stats().weights)  # the test's before
    return one_store


def config_at(store: StoreProcess, model: Path, **changes: Any) -> WorkerConfig:
    return replace(config_for(model, **changes), kv_socket=store.socket)


def same(one: Model, other: Model) -> bool:
    mine, theirs = dict(tensors(one.network)), dict(tensors(other.network))
    assert mine.keys() == theirs.keys()
    return all(torch.equal(bits(mine[path]), bits(theirs[path])) for path in mine) and one.info == other.info


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_next_worker_maps_what_the_first_one_loaded_and_they_share_it(
    store: StoreProcess, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(config_for(model))
    first, lease = open_model(config_at(store, model))
    monkeypatch.setattr(Plan, "load", None)  # whoever would load fails
    second, other = open_model(config_at(store, model))
    assert same(first, loaded) and same(first, second)
    assert lease._given is not None and other._given is not None
    assert os.fstat(lease._given.memory.fd).st_ino == os.fstat(other._given.memory.fd).st_ino
    (told,) = store.stats().weights
    assert (told.users, told.model, told.memory) == (2, "tiny", host_memory(os.sched_getaffinity(0)))
    assert told.num_bytes == Layout.of(first.network).num_bytes
    lease.close()  # its process has ended, say; what it computes from goes on
    third, again = open_model(config_at(store, model))
    assert same(first, third)
    other.close()
    again.close()
    until(lambda: not store.stats().weights)


def test_nobody_can_write_to_weights_on_the_host(store: StoreProcess, model: Path) -> None:
    with open_model(config_at(store, model))[1] as lease:
        assert lease._given is not None
        with pytest.raises(PermissionError):
            os.pwrite(lease._given.memory.fd, b"x", 0)
        with pytest.raises(PermissionError):
            lease._given.memory.map()


def test_another_dtype_or_other_files_are_other_weights(store: StoreProcess, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    leases = [open_model(config_at(store, folder, dtype=dtype))[1] for dtype in ("float32", "bfloat16")]
    write_model(tmp_path / "m", seed=1)  # in place: as large as it was
    changed, lease = open_model(config_at(store, folder))
    assert len(store.stats().weights) == 3 and same(changed, load_model(config_for(folder)))
    for each in (*leases, lease):
        each.close()


def test_a_worker_that_dies_while_it_loads_leaves_nothing_and_who_waited_loads(store: StoreProcess) -> None:
    half = ask(store)
    found: list[Lease] = []
    waiting = threading.Thread(target=lambda: found.append(ask(store)), daemon=True)
    waiting.start()
    time.sleep(0.3)
    assert not found and not store.stats().weights
    half.close()
    waiting.join(60)
    assert found[0].found is None
    found[0].close()


def ask(store: StoreProcess, memory: str = "host") -> Lease:
    return use_weights(store.socket, worker_id="w", key=KEY, memory=memory, model="m")


def given_up(store: StoreProcess) -> int:
    return sum(line["event"] == "weights given up" for line in store.log())


@pytest.mark.parametrize("what", ["layout", "bytes", "digest"])
def test_weights_that_do_not_fit_are_refused_by_name_and_made_anew(
    store: StoreProcess, model: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = given_up(store)
    with monkeypatch.context() as patch:
        give = Lease.give

        def give_broken(self: Lease, memory: Memory, manifest: kvstore_pb2.WeightsManifest) -> None:
            if what == "layout":
                manifest.tensors[3].offset += 512
            elif what == "digest":
                manifest.weights_digest = b""
            else:
                manifest.tensors[-1].checksum ^= 1
            give(self, memory, manifest)

        patch.setattr(Lease, "give", give_broken)
        open_model(config_at(store, model))[1].close()
    opened, lease = open_model(config_at(store, model))
    assert same(opened, load_model(config_for(model)))
    assert given_up(store) == before + 1
    (told,) = store.stats().weights
    assert told.users == 1
    lease.close()


def test_weights_that_cannot_be_read_are_given_up_and_made_anew(
    store: StoreProcess, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = given_up(store)
    open_model(config_at(store, model))[1].close()

    def fails(*_: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("worker.weights_arena.damaged", fails)
    opened, lease = open_model(config_at(store, model))
    assert same(opened, load_model(config_for(model)))
    assert given_up(store) == before + 1
    lease.close()


async def test_what_nobody_uses_makes_room_before_other_weights_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = WeightsStore(FdServer(Path("none")), grace_s=100)
    hold(weights, b"o" * 16, users=0)
    hold(weights, b"u" * 16, users=1)
    hold(weights, b"e" * 16, users=0, where="host:node1")
    weights.look(time.monotonic() + 99)
    assert len(weights.stats()) == 3, "idle since it came, not since the host's start"
    served = weights.serve(asking(KEY))
    assert (await anext(served)).HasField("fill")
    assert {each.key for each in weights.stats()} == {b"u" * 16, b"e" * 16}
    await served.aclose()
    weights.close()


async def test_who_waits_too_long_for_weights_makes_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.weights.FILL_S", 0.1)
    weights = WeightsStore(FdServer(Path("none")))
    first, second = (weights.serve(asking(KEY)) for _ in range(2))
    assert (await anext(first)).HasField("fill")
    assert (await asyncio.wait_for(anext(second), 60)).HasField("fill")
    await first.aclose()
    assert KEY in weights._filling, "the second one's"
    for _ in range(2):
        hold(weights, KEY, users=0)
    assert len(weights.stats()) == 1
    await second.aclose()
    assert not weights._filling
    weights.close()


async def asking(key: bytes) -> AsyncIterator[kvstore_pb2.WeightsRequest]:
    yield kvstore_pb2.WeightsRequest(open=opening(key))
    await asyncio.Event().wait()


def opening(key: bytes, where: str = "host") -> kvstore_pb2.WeightsOpen:
    return kvstore_pb2.WeightsOpen(worker_id="w", key=key, memory=where, model="m")


def hold(weights: WeightsStore, key: bytes, *, users: int, where: str = "host") -> None:
    memory = Memory((os.memfd_create("t", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING),), 4096)
    os.ftruncate(memory.fd, 4096)
    memory.seal()
    weights._keep(opening(key, where), kvstore_pb2.WeightsFilled(num_bytes=4096), memory.fds)
    weights._held[key].users = users


def test_files_that_change_while_they_are_read_are_no_model(
    store: StoreProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "m")

    read = Plan.load

    def load(plan: Plan, progress: Any = None) -> Any:
        loaded = read(plan, progress)
        write_model(folder, seed=1)
        return loaded

    monkeypatch.setattr(Plan, "load", load)
    with pytest.raises(ModelError, match="changed"):
        open_model(config_at(store, folder))
    assert not store.stats().weights


def test_a_store_that_dies_gets_the_weights_back(model: Path) -> None:
    with StoreProcess() as store:
        _, lease = open_model(config_at(store, model))
        store.process.kill()
        store.process.wait()
        with StoreProcess(folder=store.folder) as after:
            until(lambda: len(after.stats().weights) == 1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Plan, "load", None)
                _, other = open_model(config_at(after, model))
            assert after.stats().weights[0].users == 2
            other.close()
            lease.close()


def test_a_gpus_weights_go_the_same_way(store: StoreProcess, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks: a worker gives them, the next one finds them."""
    monkeypatch.setattr("kvstore.arena.CHUNK_BYTES", 128 << 10)
    gpu, plan = FakeGpu(), Plan.of(config_for(model))
    layout = Layout.of(plan.without_weights())
    network, digest = plan.load()
    memory = fill(network, layout, gpu)
    assert len(memory.chunk_bytes) > 1 and gpu.calls.count("map") == gpu.calls.count("unmap") == len(memory.fds)
    lease = ask(store, DEVICE)
    checksums = {place.name: place.checksum(mapped(memory, gpu)) for place in layout.places}
    lease.give(memory, layout.manifest(digest, checksums))
    lease.close()
    found = ask(store, DEVICE).found
    assert found is not None and layout.mismatch(found.manifest, found.memory.num_bytes) is None
    there = mapped(found.memory, gpu)
    for path, tensor in tensors(load_model(config_for(model)).network):
        assert torch.equal(layout.by_path[path].view(there), tensor), path
    assert store.stats().weights[0].num_bytes == sum(memory.chunk_bytes)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr("worker.weights.torch_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr("worker.weights_arena.store_name", lambda device: DEVICE)
    monkeypatch.setattr("kvstore.arena.CHUNK_BYTES", 128 << 10)
    return FakeGpu()


ON_GPU = {"device": "cuda:0", "dtype": "bfloat16", "decode_graphs": True}


@pytest.mark.parametrize("stored", [False, True], ids=["quantised", "as stored"])
def test_weights_in_fp8_blocks_go_the_same_way(
    store: StoreProcess, tmp_path: Path, stored: bool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes and scales, where kernels may read them; apart from those of another form."""
    folder = (write_blocks if stored else write_model)(tmp_path / "m", **{**SHAPE, "hidden_size": 640})
    in_blocks = config_at(store, folder, **ON_GPU, weights="" if stored else "fp8_block")
    plain = replace(in_blocks, weights="bf16")
    loaded = [load_model(config) for config in (in_blocks, plain)]
    leases = [open_model(config, gpu)[1] for config in (in_blocks, plain)]
    assert [told.form for told in store.stats().weights] == [IN_BLOCKS, FROM_FP8 if stored else WEIGHTS]
    sizes = [told.num_bytes for told in store.stats().weights]
    assert sizes[0] < 0.75 * sizes[1], "the embedding is as it was"
    monkeypatch.setattr(Plan, "load", None)  # whoever would load fails
    for config, before in zip((in_blocks, plain), loaded, strict=True):
        found, lease = open_model(config, gpu)
        leases.append(lease)
        assert same(found, before) and found.form == before.form
        assert isinstance(found.network, Llama)
        for layer in found.network.layers:
            for name in PRODUCTS:
                weight = getattr(layer, name)
                assert isinstance(weight, BlockWeight) == (config is in_blocks)
                if isinstance(weight, BlockWeight):
                    linear = LinearWeight(weight.codes, weight.scales, gated=name == "gate_up")
                    _check_weight(Link(linear), torch.bfloat16, 8)
                    assert weight.padded_scales.stride(0) % 4 == 0 and not weight.padded_scales[:, 5:].any()
    if stored:  # asked for by name it is the same memory
        leases.append(open_model(replace(in_blocks, weights="fp8_block"), gpu)[1])
    assert len(store.stats().weights) == 2
    for lease in leases:
        lease.close()


@pytest.mark.parametrize("first", ["bf16", "fp8_block"])
def test_weights_of_another_form_are_refused_though_the_key_were_the_same(
    store: StoreProcess, tmp_path: Path, first: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.weights_arena._key", lambda *_: KEY)
    before, folder = given_up(store), write_model(tmp_path / "m", **SHAPE)
    forms = [first, "fp8_block" if first == "bf16" else "bf16"]
    configs = [config_at(store, folder, **ON_GPU, weights=form) for form in forms]
    open_model(configs[0], gpu)[1].close()
    opened, lease = open_model(configs[1], gpu)
    assert same(opened, load_model(configs[1])) and given_up(store) == before + 1
    lease.close()


def test_a_v4_is_laid_out_without_its_weights(tmp_path: Path) -> None:
    plan = Plan.of(config_for(tiny_v4.model_folder(tmp_path)))
    loaded = plan.load()[0]
    layout = Layout.of(plan.without_weights())
    assert layout == Layout.of(loaded)
    assert all(tensor.is_contiguous() for _, tensor in tensors(loaded))


def test_what_a_store_is_told_of_weights_is_checked(store: StoreProcess) -> None:
    def manifest(count: int = 1, offset: int = 0, name: str = "t") -> kvstore_pb2.WeightsManifest:
        tensor = kvstore_pb2.WeightsTensor(name=name, offset=offset)
        return kvstore_pb2.WeightsManifest(weights_digest=b"d" * 16, tensors=[tensor] * count)

    def held(num_bytes: int = 4096, **what: Any) -> kvstore_pb2.WeightsFilled:
        return kvstore_pb2.WeightsFilled(num_bytes=num_bytes, **{"manifest": manifest(), **what})

    opened = {"worker_id": "w", "key": KEY, "memory": "host", "model": "m"}
    for bad in (
        {**opened, "key": b"short"},
        {**opened, "memory": "disk"},
        {**opened, "model": ""},
        {**opened, "model": "m" * 201},
        {**opened, "form": "f" * 201},
        {**opened, "held": held(0)},
        {**opened, "held": held(1 << 46)},
        {**opened, "held": held(chunk_bytes=[4096])},
        {**opened, "held": held(manifest=manifest(0))},
        {**opened, "held": held(manifest=manifest(offset=4096))},
        {**opened, "held": held(manifest=manifest(name="n" * 201))},
        {**opened, "memory": DEVICE, "held": held()},
        {**opened, "memory": DEVICE, "held": held(chunk_bytes=[2048])},
    ):
        with pytest.raises(InvalidRequest) as refused:
            Lease(store.socket, kvstore_pb2.WeightsOpen(**bad))
        assert refused.value.reason == "BAD_WEIGHTS", bad
    assert not store.stats().weights


@pytest.mark.parametrize("what", ["writable", "of another size"])
def test_memory_that_can_change_is_not_taken(store: StoreProcess, what: str) -> None:
    memory = Memory((os.memfd_create("t", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING),), 4096)
    os.ftruncate(memory.fd, 4096 if what == "writable" else 8192)
    if what == "writable":
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    else:
        memory.seal()
    lease = ask(store)
    tensor = kvstore_pb2.WeightsTensor(name="t")
    lease._stream.send(
        kvstore_pb2.WeightsRequest(
            filled=kvstore_pb2.WeightsFilled(
                num_bytes=4096, manifest=kvstore_pb2.WeightsManifest(weights_digest=b"d" * 16, tensors=[tensor])
            )
        )
    )
    asked = lease._stream.receive().deliver
    deliver(Path(asked.fd_socket), asked.fd_ticket, memory.fds, timeout_s=60)
    with pytest.raises(PreconditionFailed) as refused:
        lease._stream.receive()
    assert refused.value.reason == "BAD_MEMORY"
    assert not store.stats().weights
    memory.close()
    lease.close()


def test_memory_of_one_numa_node_is_its_own(tmp_path: Path) -> None:
    for node, cpus in enumerate(("0-3,8", "4-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    assert host_memory({8, 1}, tmp_path) == "host:node0"
    assert host_memory({7}, tmp_path) == "host:node1"
    assert host_memory({3, 4}, tmp_path) == "host"
    assert host_memory({3}, tmp_path / "nothing") == "host"
