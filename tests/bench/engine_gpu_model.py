"""Random models and KV memory on a device, for the engine's benchmark: no files, no store."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernels.page_layout import FRAGMENTS
from kvstore.arena import Arena, Memory
from kvstore.geometry import CacheGeometry, apply_mode
from protos.page_hash import PAGE_TOKENS
from worker.due import base_after
from worker.kv_view import TORCH_DTYPES, KvView
from worker.models.llama import Llama, LlamaConfig
from worker.random_weights import RandomWeights

DTYPE = "bfloat16"
LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
SMALL: dict[str, Any] = LLAMA_3_8B | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
SCALE = 0.05  # of rows in packed pages


def random_llama(raw: dict[str, Any], device: torch.device, max_tokens: int, spread: float = 1.0) -> Llama:
    config = LlamaConfig.parse(raw)
    return Llama(config, raw, RandomWeights(config, TORCH_DTYPES[DTYPE], device, spread), max_tokens)


def in_blocks(network: Llama) -> Llama:
    """The same model with its products' weights in FP8 blocks; the original stays as it is."""
    other = copy.copy(network)
    other.layers = list(network.layers)
    other.use_blocks()
    return other


class TorchMemory:
    """``worker.device_memory.Driver`` over torch's own allocator, on any device."""

    granularity = 512

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[int, torch.Tensor] = {}

    def reserve(self, num_bytes: int) -> int:
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._held[memory.data_ptr()] = memory
        return memory.data_ptr()

    def tensor(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        return self._held.pop(address)[:num_bytes]  # lives as long as the view does

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def import_fd(self, fd: int) -> None: ...
    def release(self, handle: Any) -> None: ...
    def map(self, address: int, num_bytes: int, handle: Any) -> None: ...
    def unmap(self, address: int, num_bytes: int) -> None: ...
    def free(self, address: int, num_bytes: int) -> None: ...


@dataclass(frozen=True)
class Cache:
    """KV memory of ``rows`` sequences of up to ``max_tokens``, and which pages and tail slots are whose."""

    kv: KvView
    geometry: CacheGeometry
    rows: int
    max_tokens: int
    tables: dict[str, list[list[int]]]  # by group: page ids of each row

    @classmethod
    def make(cls, config: LlamaConfig, mode: str, rows: int, max_tokens: int, device: torch.device) -> Cache:
        """mode: "dense", "fp8" or a preset of turboquant."""
        kind, preset = (mode, "") if mode in ("dense", "fp8") else ("turboquant", mode)
        geometry = apply_mode(config.geometry(DTYPE, max_tokens), kind, preset).with_page_layout(FRAGMENTS)
        per_row = -(-max_tokens // PAGE_TOKENS)
        arenas, tails, tables = {}, {}, {}
        for group in geometry.groups:
            arenas[group.name] = _arena(group.name, rows * per_row, group.page_bytes)
            if group.has_tail:
                tails[group.name] = _arena(group.name, rows, geometry.tail_slot_bytes(group))
            order = torch.randperm(rows * per_row).view(rows, per_row)
            tables[group.name] = order.tolist()
        kv = KvView(geometry, arenas, tails, TorchMemory(device))  # type: ignore[arg-type]
        return cls(kv, geometry, rows, max_tokens, tables)

    def bases(self, num_tokens: int) -> dict[str, int]:
        """Of sequences that have grown to so many tokens one by one."""
        return {
            group.name: 0 if group.mode == "dense" else base_after(self.geometry, group, 0, num_tokens, 1)
            for group in self.geometry.groups
        }

    def slots(self, row: int) -> dict[str, int]:
        return {group.name: row for group in self.geometry.groups if group.has_tail}

    def pages(self, row: int, num_tokens: int) -> dict[str, list[int]]:
        """Of dense groups all that the row has; of packed ones those that are sealed."""
        bases = self.bases(num_tokens)
        return {
            group.name: self.tables[group.name][row][
                : None if group.mode == "dense" else bases[group.name] // PAGE_TOKENS
            ]
            for group in self.geometry.groups
        }

    def fill(self) -> None:
        """Rows of noise everywhere, finite ones."""
        for view in self.kv.regions.values():
            if view.tail is not None:
                view.tail.normal_()
            if view.pages is not None:
                view.pages.normal_()
        for group in self.geometry.groups:
            if not group.packed:
                continue
            for piece in _pieces(self.kv.page_bytes(group.name)):
                piece.random_(0, 120 if group.mode == "fp8" else 256)  # finite codes
        for view in self.kv.regions.values():
            if view.packed is not None:
                planes = view.packed.planes
                at = planes.scales_offset
                scales = planes.heads[:, :, at : at + 4 * planes.rows].view(torch.float32)
                scales.fill_(SCALE)

    def kv_bytes(self, num_tokens: int) -> int:
        """What attention reads of all rows with so many tokens each."""
        total, bases = 0, self.bases(num_tokens)
        for group in self.geometry.groups:
            if group.mode == "dense":
                total += group.page_bytes * num_tokens // PAGE_TOKENS
                continue
            tail = sum(2 * region.heads * region.dim for region in group.regions) * (num_tokens - bases[group.name])
            total += group.page_bytes * bases[group.name] // PAGE_TOKENS + tail
        return self.rows * total


def _arena(name: str, count: int, size: int) -> Arena:
    return Arena(name, count, size, Memory((-1,), count * size, (count * size,)))


def _pieces(memory: torch.Tensor, size: int = 1 << 30) -> Iterator[torch.Tensor]:
    rows = max(1, size // memory.shape[1])
    for first in range(0, len(memory), rows):
        yield memory[first : first + rows]
