"""The most sequences of a length that one card serves beside a model's weights: counted, then opened and decoded."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.bench.engine_gpu_noise import fill
from worker.bench_engine import BenchEngine
from worker.bench_run import in_use
from worker.config import WorkerConfig
from worker.families import architecture
from worker.random_weights import random_model
from worker.sizing import Machine, most_sequences
from worker.weights import Model, dtype_name

RESERVED = 4 << 30  # for CUDA's context, workspaces, graphs and activations
MODES: dict[str, dict[str, Any]] = {
    "dense": {},
    "tq4": {"kv_mode": "turboquant", "kv_preset": "tq4"},
}


@dataclass(frozen=True)
class Size:
    num_tokens: int = 32768
    machine_bytes: int = 0  # 0: what the card has
    warm_up: int = 8
    steps: int = 24


def config_of(raw: dict[str, Any], mode: str, device: torch.device, size: Size) -> WorkerConfig:
    """As a worker has it by default, but for the longest sequence: checkpoints for every running sequence, too."""
    return WorkerConfig.from_dict(
        {
            "model": Path("none"),
            "name": raw["model_type"],
            "kv_socket": Path("none"),
            "worker_id": "bench",
            "device": "cuda:0" if device.type == "cuda" else "cpu:0",
            "dtype": "bfloat16" if device.type == "cuda" else "float32",
            "max_sequence_tokens": size.num_tokens,
            "prefill_chunk": size.num_tokens,
            "step_time_budget_ms": 0,  # a prompt is there in one step
            "decode_graphs": device.type == "cuda",
            **MODES[mode],
        }
    )


def model_of(raw: dict[str, Any], base: Model, config: WorkerConfig) -> Model:
    """The same weights in another KV mode."""
    geometry = architecture(raw).geometry(config, dtype_name(config.dtype, raw), config.max_sequence_tokens)
    return replace(base, geometry=geometry)


def random_weights(raw: dict[str, Any], device: torch.device, size: Size) -> Model:
    return random_model(config_of(raw, "dense", device, size), raw)


def measure(raw: dict[str, Any], base: Model, mode: str, device: torch.device, size: Size) -> dict[str, Any]:
    config = config_of(raw, mode, device, size)
    model = model_of(raw, base, config)
    total = size.machine_bytes or torch.cuda.get_device_properties(device).total_memory
    machine = Machine(True, total, RESERVED if not size.machine_bytes else 0)
    on_gpu = replace(config, device="cuda:0")  # all of it counts as one memory, as on a card
    most = most_sequences(on_gpu, model.geometry, base.uses, size.num_tokens, machine)
    config = replace(config, max_running=most)
    began = time.perf_counter()
    num_prompt = size.num_tokens - most - size.warm_up - size.steps - 2  # the first decodes while the others are filled
    with BenchEngine(config, model, size.num_tokens) as bench:
        fill(bench, most, num_prompt, size.num_tokens - num_prompt)
        bench.synchronize()
        filled_s = time.perf_counter() - began
        bench.run_until(bench.num_emitted + most * size.warm_up)
        bench.synchronize()
        began, before = time.perf_counter(), bench.num_emitted
        bench.run_until(before + most * size.steps)
        bench.synchronize()
        step_s = (time.perf_counter() - began) / size.steps
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        arenas = {**bench.attachment.arenas, **{f"{k} tails": v for k, v in bench.attachment.tails.items()}}
        held = {name: arena.num_pages * arena.page_bytes for name, arena in arenas.items()}
        running = bench.load().num_running
        facts = {
            "ok": running == most and bench.num_emitted >= most * (1 + size.warm_up + size.steps),
            "sequences": most,
            "tokens": [num_prompt + 1 + size.warm_up + size.steps, num_prompt + most + 1 + size.warm_up + size.steps],
            "kv_bytes": sum(held.values()),
            "kv_bytes_by_arena": held,
            "kv_bytes_in_use": in_use(bench),
            "weights_bytes": sum(use.num_bytes for use in base.uses),
            "card_bytes": total,
            "reserved_bytes": machine.reserved_bytes,
            "free_bytes": free,
            "step_ms": round(step_s * 1e3, 3),
            "tokens_per_s": round(most / step_s, 1),
            "fill_s": round(filled_s, 2),
            "start_s": round(bench.start_s, 2),
            "bytes_a_token": model.geometry.bytes_per_token,
            "prompts": "rows of noise, sealed by the engine; not computed",
        }
        bench.end()
    return facts
