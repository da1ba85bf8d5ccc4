"""transformers' LlamaForCausalLM with a static cache, compiled, beside a worker's engine: same geometry, batch and
tokens, random weights on both sides, greedy.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.bench.engine_gpu_capacity import MODES, model_of
from tests.bench.engine_gpu_noise import fill
from worker.bench_engine import BenchEngine
from worker.config import WorkerConfig
from worker.weights import Model

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Side:
    """``rows`` sequences with ``num_tokens`` tokens each before the first step that is timed."""

    rows: int
    num_tokens: int
    warm_up: int = 8
    steps: int = 64

    @property
    def longest(self) -> int:
        return self.num_tokens + self.warm_up + 2 * self.steps + 16


def rival_model(raw: dict[str, Any], device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{k: v for k, v in raw.items() if k != "model_type"}, attn_implementation="sdpa")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def _full_cache(model: Any, side: Side, device: torch.device) -> Any:
    """A static cache whose first ``num_tokens`` rows are noise."""
    from transformers import StaticCache

    config = model.config
    cache = StaticCache(config=config, max_cache_len=side.longest)
    shape = {"batch_size": side.rows, "num_heads": config.num_key_value_heads, "head_dim": config.head_dim}
    cache.early_initialization(**shape, dtype=model.dtype, device=device)
    for layer in cache.layers:
        layer.keys[:, :, : side.num_tokens].normal_()
        layer.values[:, :, : side.num_tokens].normal_()
        if hasattr(layer, "cumulative_length"):
            with torch.no_grad():
                layer.cumulative_length.fill_(side.num_tokens)
    return cache


def _decoder(model: Any, cache: Any, side: Side, device: torch.device) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """(one greedy step, its inputs: the tokens, their positions), all in place."""
    token = torch.zeros(side.rows, 1, dtype=torch.int64, device=device)
    position = torch.full((1,), side.num_tokens, dtype=torch.int64, device=device)
    takes_position = "cache_position" in inspect.signature(type(model.model).forward).parameters

    def step(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        where = {"cache_position": position} if takes_position else {}
        out = model(
            input_ids=token,
            position_ids=position.unsqueeze(0).expand(token.shape[0], 1),
            past_key_values=cache,
            use_cache=True,
            **where,
        )
        chosen: torch.Tensor = out.logits[:, -1].argmax(-1, keepdim=True)
        return chosen

    return step, [token, position]


def compiled(model: Any, side: Side, device: torch.device) -> dict[str, Any]:
    """As transformers' own guide has it: a static cache, the step compiled whole, mode reduce-overhead."""
    cache = _full_cache(model, side, device)
    step, (token, position) = _decoder(model, cache, side, device)
    mode = "reduce-overhead" if device.type == "cuda" else "default"
    torch._dynamo.reset()
    fast = torch.compile(step, mode=mode, fullgraph=True)
    began = time.perf_counter()

    def one() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        token.copy_(fast(token, position))
        position.add_(1)
        return token

    with torch.no_grad():
        for _ in range(3):  # compiles, records, replays
            one()
        _synchronize(device)
        ready_s = time.perf_counter() - began
        return {"how": f"torch.compile, {mode}, fullgraph", "ready_s": round(ready_s, 1), **_timed(one, side, device)}


def captured(model: Any, side: Side, device: torch.device) -> dict[str, Any]:
    """Not compiled: the eager step in a CUDA graph made by hand; what is left where the other cannot be had."""
    cache = _full_cache(model, side, device)
    step, (token, position) = _decoder(model, cache, side, device)

    def one() -> torch.Tensor:
        token.copy_(step(token, position))
        position.add_(1)
        return token

    with torch.no_grad():
        if device.type != "cuda":
            return {"how": "eager", **_timed(one, side, device)}
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            one()
            one()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one()

        def replay() -> torch.Tensor:
            graph.replay()
            return token

        return {"how": "eager step in a CUDA graph", **_timed(replay, side, device)}


def _timed(one: Step, side: Side, device: torch.device) -> dict[str, Any]:
    for _ in range(side.warm_up):
        one()
    halves = []
    for _ in range(2):
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(side.steps // 2):
            token = one()
        _synchronize(device)
        halves.append((time.perf_counter() - began) / (side.steps // 2))
    step_s = statistics.median(halves)
    return {
        "ok": int(token.min()) >= 0,
        "step_ms": round(step_s * 1e3, 3),
        "step_ms_spread": [round(min(halves) * 1e3, 3), round(max(halves) * 1e3, 3)],
        "tokens_per_s": round(side.rows / step_s, 1),
    }


def ours(raw: dict[str, Any], base: Model, mode: str, side: Side, device: torch.device) -> dict[str, Any]:
    """The worker's engine from captured steps, prompts not computed."""
    on_gpu = device.type == "cuda"
    config = WorkerConfig.from_dict(
        {
            "model": Path("none"),
            "name": "rival",
            "kv_socket": Path("none"),
            "worker_id": "bench",
            "device": "cuda:0" if on_gpu else "cpu:0",
            "dtype": "bfloat16" if on_gpu else "float32",
            "max_running": side.rows,
            "max_sequence_tokens": side.longest + side.rows,
            "prefill_chunk": side.longest + side.rows,
            "step_time_budget_ms": 0,  # a prompt is there in one step
            "decode_graphs": on_gpu,
            **MODES[mode],
        }
    )
    model = model_of(raw, base, config)
    model = replace(model, info=_longest(model, config.max_sequence_tokens))
    with BenchEngine(config, model, side.longest + side.rows) as bench:
        fill(bench, side.rows, side.num_tokens, side.longest + side.rows - side.num_tokens)
        bench.run_until(bench.num_emitted + side.rows * side.warm_up)
        times = []
        for _ in range(2):
            began = time.perf_counter()
            bench.run_until(bench.num_emitted + side.rows * side.steps // 2)
            bench.synchronize()
            times.append((time.perf_counter() - began) / (side.steps // 2))
        held = [*bench.attachment.arenas.values(), *bench.attachment.tails.values()]
        bench.end()
    step_s = statistics.median(times)
    return {
        "ok": True,
        "how": f"engine, {mode}, captured steps" if on_gpu else f"engine, {mode}",
        "step_ms": round(step_s * 1e3, 3),
        "step_ms_spread": [round(min(times) * 1e3, 3), round(max(times) * 1e3, 3)],
        "tokens_per_s": round(side.rows / step_s, 1),
        "kv_bytes": sum(arena.num_pages * arena.page_bytes for arena in held),
        "tokens_each": side.num_tokens,
    }


def _longest(model: Model, num_tokens: int) -> Any:
    info = type(model.info)()
    info.CopyFrom(model.info)
    info.max_sequence_tokens = num_tokens
    return info


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
