"""Every tensor of a step is on the model's device: torch's device without memory stands in for a GPU.

Its operations check devices, shapes and dtypes and compute nothing, so what is left behind on the CPU is refused as it
would be on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import decode, loader, pages_cuda
from kernels.decode import DecodeLayer
from kernels.page_layout import FRAGMENTS
from kernels.pages_cuda import PageGroup, PageRows
from kvstore.arena import Memory
from kvstore.client import Arena
from kvstore.geometry import CacheGeometry, apply_mode
from tests.unit.fake_gpu_kernels import FakeGpuKernels
from tests.unit.tiny import TINY, Harness, write_model
from worker import gpu_pages, model_runner
from worker.batch import Batch, SpanWork, build_batch
from worker.gpu_pages import GpuPages
from worker.kv_view import KvView, Workspace
from worker.models import gpu_attention
from worker.models.llama import Llama, LlamaConfig

NOWHERE = torch.device("meta")
NUM_PAGES, NUM_SLOTS = 8, 4


class NoMemory:
    """``worker.device_memory.Driver``, as far as mapping arenas without chunks takes it."""

    granularity = 1

    def reserve(self, num_bytes: int) -> int:
        return 0

    def free(self, address: int, num_bytes: int) -> None: ...
    def synchronize(self) -> None: ...
    def tensor(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=NOWHERE)


class NoLaunch:
    """``kernels.loader.PreparedLaunch``."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def set_ctas(self, *_: int) -> None: ...
    def __call__(self, stream: int) -> None: ...


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kernels of ``pages_cuda`` that were launched: 0 seal, 1 restore."""
    seen: list[int] = []
    address = torch.Tensor.data_ptr

    def launch(group: PageGroup, kernel: int, pages: torch.Tensor, results: tuple[torch.Tensor, ...]) -> None:
        for tensor in (group.arena, group.regions, group.units, pages, *results):
            assert tensor.device == NOWHERE
        seen.append(kernel)

    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 1 << 20 if self.is_meta else address(self))
    monkeypatch.setattr(gpu_attention, "DecodeLayer", partial(DecodeLayer, arch="sm_90a"))
    monkeypatch.setattr(loader, "load", lambda cell, index: {})
    monkeypatch.setattr(loader, "PreparedLaunch", NoLaunch)
    monkeypatch.setattr(decode, "_current_stream", lambda index: 0)
    monkeypatch.setattr(pages_cuda, "_launch", launch)
    return seen


def view(geometry: CacheGeometry) -> KvView:
    def arena(name: str, count: int, size: int) -> Arena:
        return Arena(name, count, size, Memory((), count * size), "cuda:0")

    pages = {g.name: arena(g.name, NUM_PAGES, g.page_bytes) for g in geometry.groups if g.has_pages}
    tails = {g.name: arena(g.name, NUM_SLOTS, geometry.tail_slot_bytes(g)) for g in geometry.groups if g.has_tail}
    return KvView(geometry, pages, tails, driver=NoMemory())  # type: ignore[arg-type]


def tensors(of: Any) -> list[torch.Tensor]:
    """The tensors of a dataclass, but for places: what is read of them is read by the host."""
    values = [getattr(of, each.name) for each in fields(of)]
    return [value for value in values if isinstance(value, torch.Tensor)]


def step(geometry: CacheGeometry, deterministic: bool) -> Batch:
    """Two decode rows and a prompt chunk behind 256 tokens that are packed, or in dense pages."""
    bases = {group.name: 256 if group.packed else 0 for group in geometry.groups}
    pages = {group.name: [1, 2] if group.packed else [1, 2, 3, 4, 5] for group in geometry.groups}
    work = [
        SpanWork(range(count), start, pages, True, True, bases, {g.name: slot for g in geometry.groups if g.has_tail})
        for slot, (start, count) in enumerate(((450, 1), (390, 122), (500, 1)))
    ]
    return build_batch(work, geometry, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("mode", "preset", "edges"),
    [("dense", "", (0, 0)), ("turboquant", "tq4v3", (1, 0)), ("fp8", "", (0, 0)), ("window", "", (0, 0))],
)
def test_a_step_leaves_nothing_on_the_cpu(
    launched: list[int], mode: str, preset: str, edges: tuple[int, int], deterministic: bool
) -> None:
    window = {"model_type": "mistral", "sliding_window": 200} if mode == "window" else {}
    raw = {**TINY, "head_dim": 64, "num_hidden_layers": 2, "attention_bias": True, **window}
    config = LlamaConfig.parse(raw)
    geometry = apply_mode(config.geometry("bfloat16", 1024), mode, preset, edges).with_page_layout(FRAGMENTS)
    with torch.inference_mode():
        weights = {
            name: torch.empty(shape, dtype=torch.bfloat16, device=NOWHERE) for name, shape in config.tensors().items()
        }
        network, kv = Llama(config, raw, weights, 1024), view(geometry)
        pages = GpuPages(kv)
        attend = gpu_attention.GpuAttention(kv, q_heads=config.q_heads, max_sequences=2, max_sequence_tokens=1024)
        attend.load()
        batch = step(geometry, deterministic).to(network.device)
        groups = batch.groups.values()
        written = [to for group in groups for to in (group.pages, group.tails) if to is not None]
        assert len(written) >= len(groups)
        for part in (batch, *written, *(group.decode for group in groups)):
            assert tensors(part) and {tensor.device for tensor in tensors(part)} == {NOWHERE}
        workspace = Workspace(batch)
        logits = network.forward(batch, kv, workspace, attend)
        assert logits.device == NOWHERE and logits.shape == (3, config.vocab_size)
        packed = [group.name for group in geometry.groups if group.packed]
        for name in packed:
            pages.refill(name, [PageRows(1, 0, 2, 128, begin=0, end=100)])
            with suppress(NotImplementedError):  # checksums come back to the host: there are none
                pages.start_seal(name, [PageRows(1, 384, 1, 6, 0)], workspace).checksums()
    layers = len({region.layer for group in geometry.groups if group.packed for region in group.regions})
    assert launched == [1] * layers + [1, 0] * len(packed)


@pytest.mark.parametrize("mode", ["dense", "turboquant"])
def test_kernels_are_loaded_while_their_gpu_is_the_threads_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    """CuPy loads a module onto the current GPU, whatever index the caller has in mind."""
    FakeGpuKernels(monkeypatch)
    current: list[torch.device] = []
    loaded: list[str] = []

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def noting(name: str) -> None:
        real = getattr(loader, name)

        def note(*arguments: Any, **more: Any) -> Any:
            assert current, f"{name} on whatever GPU was current"
            loaded.append(name)
            return real(*arguments, **more)

        monkeypatch.setattr(loader, name, note)

    monkeypatch.setattr(model_runner, "_current", entered)
    for name in ("load", "PreparedLaunch"):
        noting(name)
    Harness.load(write_model(tmp_path, head_dim=64), device="cuda:1", dtype="float16", kv_mode=mode)
    assert set(loaded) == ({"PreparedLaunch"} if mode == "dense" else {"load", "PreparedLaunch"})


def test_a_seals_results_are_waited_for_on_the_stream_that_they_come_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event without a stream is recorded on the thread's current GPU, which knows nothing of another's launches."""

    class Event:
        def record(self, stream: object = None) -> None:
            self.behind = stream

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: ("stream", device))
    second = torch.device("cuda", 1)
    assert vars(gpu_pages._event_behind(second)) == {"behind": ("stream", second)}
