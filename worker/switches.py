"""What a worker was asked for when it started, beside what came of it: `tailpack features` shows both."""

from __future__ import annotations

from collections.abc import Iterable

from kernels.widths import MEASURED
from kvstore.geometry import CacheGeometry, LayerGroup
from protos import types_pb2
from worker.config import WorkerConfig
from worker.gpu_kernels import attention_kernels, page_kernels
from worker.weights_form import WeightsForm

DECODE_GRAPH_RECORDS = {"sm_90a": "h200-engine_gpu-2026-11-30.jsonl"}
"""By arch: the hardware run of captured decode steps of the llama family."""
FP8_BLOCK_RECORDS = {"sm_90a": "h200-few_rows-2026-11-30.jsonl"}
"""Runs on record of weights in FP8 blocks, by arch."""


def switches(config: WorkerConfig, geometry: CacheGeometry, arch: str, weights: WeightsForm) -> list[types_pb2.Switch]:
    """Args:
    geometry, weights: as the model was loaded with.
    arch: of the GPU, "sm_90a"; empty on a CPU.
    """
    packed = [group for group in geometry.groups if group.mode != "dense"]
    asked = f"{config.kv_mode} {config.preset}".strip()
    modes = "; ".join(f"{group.name}: {_mode(group)}" for group in geometry.groups)
    first, last = config.dense_layers
    attention = "PyTorch on the CPU"
    if arch:
        attention = f"CUDA kernels for {arch}" if attention_kernels(geometry) else f"PyTorch on {arch}"
    found = [
        types_pb2.Switch(
            name="kv-mode",
            configured=asked,
            engaged=modes if packed or config.kv_mode == "dense" else "",
            evidence=", ".join(_records(packed, arch)),
        ),
        types_pb2.Switch(
            name="attention",
            configured=config.device,
            engaged=attention,
            evidence=", ".join(_records(packed, arch)) if attention_kernels(geometry) else "",
        ),
        _switch("dense-layers", f"first {first}, last {last}" if first or last else "off", bool(packed)),
        _switch("deterministic", _on(config.deterministic), config.deterministic),
        types_pb2.Switch(
            name="decode-graphs",
            configured=_on(config.decode_graphs),
            engaged=_on(True) if config.decode_graphs else "",  # else the worker did not start
            evidence=DECODE_GRAPH_RECORDS.get(arch, "") if config.decode_graphs and attention_kernels(geometry) else "",
        ),
        _step_time_budget(config),
        types_pb2.Switch(
            name="weights",
            configured=config.weights or "as stored",
            engaged=weights.told(config.weights),
            evidence=FP8_BLOCK_RECORDS.get(arch, "") if weights.held else "",
        ),
        types_pb2.Switch(
            name="prefix-reuse",
            configured="only where a request asks" if config.deterministic else "any",
            engaged=f"{config.num_checkpoints} checkpoints" if geometry.tail_bytes else "at page boundaries",
        ),
        types_pb2.Switch(name="admission", configured=config.admission, engaged=config.admission),
    ]
    if arch and any(group.packed for group in packed):
        by = {True: f"CUDA kernels for {arch}", False: f"PyTorch on {arch}, no kernel packs such rows"}
        pages = "; ".join(f"{group.name}: {by[page_kernels(group)]}" for group in packed if group.packed)
        found.insert(2, types_pb2.Switch(name="packing", configured=config.device, engaged=pages))
    return found


def _records(groups: Iterable[LayerGroup], arch: str) -> list[str]:
    """The hardware runs on record of the packed groups' kernels on this arch; none where one group has none."""
    found: set[str] = set()
    for group in groups:
        for width in {region.dim for region in group.regions}:
            runs = [r.record for r in MEASURED if (r.arch, r.width, r.preset) == (arch, width, group.preset)]
            if not runs:
                return []
            found.update(runs)
    return sorted(found)


def _switch(name: str, configured: str, engaged: bool) -> types_pb2.Switch:
    return types_pb2.Switch(
        name=name, configured=configured, engaged=configured if engaged and configured != "off" else ""
    )


def _step_time_budget(config: WorkerConfig) -> types_pb2.Switch:
    asked = config.step_time_budget_ms
    by_itself = "twice the decode rows' own time" if config.decode_graphs else "off"
    told = {-1: by_itself, 0: "off"}.get(asked, f"{asked} ms")
    return _switch("step-time-budget", told, engaged=True)


def _mode(group: LayerGroup) -> str:
    return f"{group.mode} {group.preset}".strip()


def _on(value: bool) -> str:
    return "on" if value else "off"
