"""DeepSeek-V4-Flash's decode on a GPU, layer by layer, at its real geometry and with random weights.

    python3 -m tests.bench.bench_deepseek_v4 --records FILE --commit SHA       about three minutes on an H200
    python3 -m tests.bench.bench_deepseek_v4 --only graphs --layers 6          captured steps: right first, then timed
    python3 -m tests.bench.bench_deepseek_v4 --device cpu                      a tiny geometry, nothing is recorded
    python3 -m tests.bench.bench_deepseek_v4 --bytes-only --records FILE       KV bytes a token, without a GPU

The model is as many of Flash's first layers as fit the GPU in bfloat16 (the slice is in every record): 2 of the window
alone, then CSA and HCA in turn. The cache holds random rows for 4,096 or 131,072 tokens a sequence, in shuffled pages;
raw rows are in KV mode window, for no mode changes what decode reads of them. A step decodes one token of each of B
sequences, and completes no block but where the case says so. "eager": from event to event around each layer, the
median over the layers of a kind and the repeats; where the host is slower than the GPU, that is the host's time.
"replayed": one layer of the kind captured into a CUDA graph, which takes the host out. Cases "graphs-" are captured
steps as the engine launches them, with what ends on them decided on the device; "implied" is all 43 layers, each kind
at the time of the one that was measured, in bf16, which no one card holds.

The floor is the bytes of the weights that the step uses (as the checkpoint's bf16 and fp32; of routed experts those
that are chosen, counted in the run) and of the KV that it reads, over the read bandwidth of a kernel that only reads,
measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvstore.arena import Arena, Memory
from kvstore.geometry import CacheGeometry
from tests.bench import deepseek_v4_graphs
from tests.bench.deepseek_v4_graphs import Steps
from worker.batch import Batch, SpanWork, build_batch
from worker.device_memory import DeviceMemory
from worker.gpu import memory_of
from worker.kv_view import KvView, Workspace
from worker.models import deepseek_v4_checkpoint as official
from worker.models import deepseek_v4_moe
from worker.models.deepseek_v4 import DeepseekV4
from worker.models.deepseek_v4_config import CSA_RATIO, DeepseekV4Config
from worker.models.deepseek_v4_geometry import COMPRESSED, RAW, cache_geometry, with_raw_mode
from worker.models.deepseek_v4_kv_rows import KvRows

FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 64,
    "n_routed_experts": 16,
    "moe_intermediate_size": 32,
}
KINDS = {0: "swa", 4: "csa", 128: "hca"}
MODES: dict[str, dict[str, Any]] = {  # of raw rows
    "dense": {"mode": "dense"},
    "fp8": {"mode": "fp8"},
    "turboquant-tq4": {"mode": "turboquant", "preset": "tq4"},
    "turboquant-tq4-checkpoints": {"mode": "turboquant", "preset": "tq4", "retention": "checkpoints"},
    "window": {"mode": "window"},
    "window-compressed-tq4": {"mode": "window", "pack_compressed": "tq4"},
    "turboquant-tq4-compressed-tq4": {"mode": "turboquant", "preset": "tq4", "pack_compressed": "tq4"},
}
SPARE_BYTES = 12 << 30  # of activations, and of what captures keep
REPEATS, WARM_UPS = 12, 3


class RandomWeights:
    """A checkpoint's tensors, made on the device as they are taken."""

    def __init__(self, config: DeepseekV4Config, device: torch.device, seed: int = 1) -> None:
        self._config, self._device = config, device
        self._shapes = official.tensors(config)
        self._generator = torch.Generator(device).manual_seed(seed)

    def pop(self, name: str, default: Any = ..., /) -> Any:
        if name not in self._shapes:
            if default is ...:
                raise KeyError(name)
            return default
        shape = self._shapes.pop(name)
        if official.is_integer(name):
            order = torch.rand(shape[0], self._config.num_experts, generator=self._generator, device=self._device)
            return order.argsort(-1)[:, : shape[1]].contiguous()
        dtype = torch.float32 if official.kept_in_float32(name) else torch.bfloat16
        mean, deviation = _spread(name, shape)
        value = torch.empty(shape, dtype=dtype, device=self._device)
        return value.normal_(mean, deviation, generator=self._generator)


def _spread(name: str, shape: Sequence[int]) -> tuple[float, float]:
    """Mean and deviation that keep activations of the order of one."""
    if name.endswith("norm.weight"):
        return 1.0, 0.2
    if name.endswith(("attn_sink", "ape")) or name == "embed.weight":
        return 0.0, 1.0
    if name.endswith("gate.bias"):  # larger, it would send all tokens to the same experts
        return 0.0, 0.02
    if name.endswith(("_base", "_scale")):
        return 0.0, 0.3
    return 0.0, float(shape[-1] ** -0.5)


# --- bytes ---


def tensor_bytes(config: DeepseekV4Config, name: str, shape: Sequence[int]) -> int:
    """Of a tensor of the checkpoint in bf16: hyper-connections, places, sinks and biases are float32."""
    wide = (".ape", "attn_sink", "gate.bias")
    return math.prod(shape) * (4 if ".hc_" in name or name.endswith(wide) else 2)


@dataclass(frozen=True)
class LayerBytes:
    """Of one layer: weights that every step reads, and those of one routed expert."""

    always: int
    expert: int

    @staticmethod
    def of(config: DeepseekV4Config, layer: int) -> LayerBytes:
        always = expert = 0
        for name, shape in official.tensors(config).items():
            if not name.startswith(f"layers.{layer}.") or official.is_integer(name):
                continue
            if f"layers.{layer}.ffn.experts." not in name:
                always += tensor_bytes(config, name, shape)
            elif f"layers.{layer}.ffn.experts.0." in name:
                expert += tensor_bytes(config, name, shape)
        return LayerBytes(always, expert)


def kv_bytes_read(config: DeepseekV4Config, ratio: int, num_tokens: int) -> int:
    """What a decode step of one sequence of ``num_tokens`` reads in a layer, bf16: its window; all HCA rows, or all
    index keys and the chosen CSA rows."""
    num_rows = min(config.window, num_tokens)
    keys = 0
    if ratio == CSA_RATIO:
        keys = num_tokens // ratio if num_tokens // ratio > config.index_topk else 0
        num_rows += min(config.index_topk, num_tokens // ratio)
    elif ratio:
        num_rows += num_tokens // ratio
    return 2 * (num_rows * config.head_dim + keys * config.index_dim)


def bytes_per_token(config: DeepseekV4Config) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each mode's KV bytes a token of a long sequence, padding of pages included, by group; and what is constant."""
    for name, mode in MODES.items():
        geometry = with_raw_mode(cache_geometry(config, "bfloat16"), **mode)
        by_group = {group.name: group.page_bytes / 128 / group.keep_every for group in geometry.groups}
        tails = {group.name: geometry.tail_slot_bytes(group) for group in geometry.groups if group.has_tail}
        yield name, {"value": round(sum(by_group.values()), 2), "by_group": by_group, "tail_bytes": tails}


# --- the model and its cache ---


def fitting_layers(config: DeepseekV4Config, num_tokens: int, room: int) -> int:
    """How many of the first layers fit ``room`` bytes with the cache of ``num_tokens`` in all."""
    shapes = official.tensors(config)
    apart = sum(tensor_bytes(config, name, shape) for name, shape in shapes.items() if not name.startswith("layers."))
    fit, left = 0, room - apart - SPARE_BYTES
    for layer in range(config.num_layers):
        weights = LayerBytes.of(config, layer)
        left -= weights.always + config.num_experts * weights.expert
        left -= num_tokens * cache_bytes(config, layer)
        if left < 0:
            break
        fit += 1
    return fit


def cache_bytes(config: DeepseekV4Config, layer: int) -> int:
    """Compressed rows a token."""
    ratio = config.ratios[layer]
    if not ratio:
        return 0
    width = config.head_dim + (config.index_dim if ratio == CSA_RATIO else 0)
    return -(-2 * width // ratio)


def arenas(geometry: CacheGeometry, counts: Mapping[str, int], slots: int, device: str) -> KvView:
    """Views of fresh memory: ``counts`` pages by group, and tail slots."""

    def arena(name: str, num_pages: int, page_bytes: int) -> Arena:
        num_bytes = num_pages * page_bytes
        if device == "cpu":
            return Arena(name, num_pages, page_bytes, Memory.allocate(name, num_bytes).map())
        driver = memory_of(device)
        size = -(-num_bytes // driver.granularity) * driver.granularity
        fds = DeviceMemory(driver).create([size])
        return Arena(name, num_pages, page_bytes, Memory(tuple(fds), num_bytes, (size,)), device)

    pages = {g.name: arena(g.name, counts[g.name], g.page_bytes) for g in geometry.groups if g.has_pages}
    tails = {g.name: arena(g.name, slots, geometry.tail_slot_bytes(g)) for g in geometry.groups if g.has_tail}
    return KvView(geometry, pages, tails)


def fill(kv: KvView) -> None:
    """Random rows everywhere."""
    for view in kv.regions.values():
        for rows in (view.pages, view.tail):
            if rows is not None:
                rows.normal_()


@dataclass
class Cache:
    """A cache for ``max_sequences`` sequences of ``max_tokens``."""

    kv: KvView
    pages: list[int]
    max_tokens: int

    def batch(self, num_sequences: int, num_tokens: int, device: torch.device, vocab_size: int) -> Batch:
        """One decode step: the last of ``num_tokens`` tokens of each."""
        rng = random.Random(num_sequences * num_tokens)
        token_ids = [rng.randrange(vocab_size) for _ in range(num_sequences)]
        return self.step(token_ids, [num_tokens] * num_sequences, device)

    def step(
        self, token_ids: Sequence[int], lengths: Sequence[int], device: torch.device, rows: Sequence[int] = ()
    ) -> Batch:
        """One decode step: the last of so many tokens of each of ``rows``, by default of the first."""
        rows = rows or range(len(token_ids))
        groups = [group.name for group in self.kv.geometry.groups]
        work = [
            SpanWork(
                token_ids=[token],
                start=length - 1,
                pages={COMPRESSED: self.pages_of(at)[: -(-length // 128)]},
                is_prompt=False,
                wants_logits=True,
                bases={},
                tail_slots=dict.fromkeys(groups, at),
            )
            for at, token, length in zip(rows, token_ids, lengths, strict=True)
        ]
        return build_batch(work, self.kv.geometry, deterministic=False).to(device)

    def pages_of(self, sequence: int) -> list[int]:
        per_sequence = -(-self.max_tokens // 128)
        return self.pages[sequence * per_sequence : (sequence + 1) * per_sequence]


# --- times ---


class Clock:
    """Marks on the device's own time line; on a CPU, on the host's."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def ms(self, first: Any, second: Any) -> float:
        """After ``settle``."""
        return float(first.elapsed_time(second)) if self._on_gpu else (second - first) * 1e3


@dataclass
class Point:
    """One batch and length: milliseconds of each layer in each repeat, of the rest of a step, and of whole steps."""

    layers: list[list[float]]
    ends: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    experts: list[int] = field(default_factory=list)


@dataclass
class Bench:
    network: DeepseekV4
    cache: Cache
    read: float  # bytes a second
    seconds: float
    finite: bool = True  # whether all logits so far were
    began: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> torch.device:
        return self.network.device

    def point(self, num_sequences: int, num_tokens: int) -> Point:
        network, clock = self.network, Clock(self.network.device)
        config = network.config
        batch = self.cache.batch(num_sequences, num_tokens, self.device, config.vocab_size)
        found = Point([[] for _ in range(config.num_layers)])
        with counted_experts(found.experts):
            self._step(batch, clock)
        for repeat in range(WARM_UPS + REPEATS):
            clock.settle()
            began = time.perf_counter()
            marks = self._step(batch, clock)
            clock.settle()
            wall = (time.perf_counter() - began) * 1e3
            if repeat < WARM_UPS:
                continue
            for layer in range(config.num_layers):
                found.layers[layer].append(clock.ms(marks[layer + 1], marks[layer + 2]))
            found.ends.append(clock.ms(marks[0], marks[1]) + clock.ms(marks[-2], marks[-1]))
            found.steps.append(clock.ms(marks[0], marks[-1]))
            found.wall.append(wall)
        return found

    def _step(self, batch: Batch, clock: Clock) -> list[Any]:
        """Marks: the start, ahead of each layer, behind the last, behind the logits."""
        network = self.network
        marks = [clock.mark()]
        rows = KvRows(self.cache.kv, Workspace(batch), batch)
        streams, ropes = network.stem(batch), network.ropes(batch)
        for layer in range(network.config.num_layers):
            marks.append(clock.mark())
            streams = network.layer(layer, streams, batch, ropes, rows)
        marks.append(clock.mark())
        logits = network.logits(streams, batch)
        marks.append(clock.mark())
        self.finite &= bool(torch.isfinite(logits).all())
        return marks

    def replayed(self, layer: int, num_sequences: int, num_tokens: int) -> list[float]:
        """Milliseconds of one layer's graph."""
        from tests.bench.kernel_timing import capture

        network = self.network
        batch = self.cache.batch(num_sequences, num_tokens, self.device, network.config.vocab_size)
        rows = KvRows(self.cache.kv, Workspace(batch), batch)
        ropes = network.ropes(batch)
        streams = network.stem(batch).contiguous()
        graph = capture(lambda: network.layer(layer, streams, batch, ropes, rows))
        clock = Clock(self.device)
        marks = []
        for _ in range(WARM_UPS + REPEATS):
            first = clock.mark()
            graph.replay()
            marks.append((first, clock.mark()))
        clock.settle()
        return [clock.ms(*pair) for pair in marks[WARM_UPS:]]

    def profile(self, layer: int, num_sequences: int, num_tokens: int, rows_shown: int = 16) -> list[str]:
        """The kernels of one layer that take longest: "microseconds x calls name"."""
        from torch.profiler import ProfilerActivity, profile

        network = self.network
        batch = self.cache.batch(num_sequences, num_tokens, self.device, network.config.vocab_size)
        rows, ropes = KvRows(self.cache.kv, Workspace(batch), batch), network.ropes(batch)
        streams = network.stem(batch).contiguous()
        for _ in range(2):
            network.layer(layer, streams, batch, ropes, rows)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            network.layer(layer, streams, batch, ropes, rows)
            torch.cuda.synchronize()
        kernels = sorted(seen.key_averages(), key=lambda each: -each.self_device_time_total)
        total = sum(each.self_device_time_total for each in kernels)
        calls = sum(each.count for each in kernels)
        return [f"{total:.0f} us in {calls} kernels"] + [
            f"{each.self_device_time_total:.0f} us x {each.count} {each.key[:90]}" for each in kernels[:rows_shown]
        ]

    @property
    def late(self) -> bool:
        return time.monotonic() - self.began > self.seconds

    def attempt(self, report: Report, what: str, do: Callable[[], None]) -> None:
        """A failure is said with its traceback, and stops nothing else; what would begin late is left out by name."""
        if self.late:
            print(json.dumps({"left_out": what, "why": "time is up"}), flush=True)
            return
        try:
            do()
        except Exception as error:  # noqa: BLE001 -- reported like any other finding
            report.failed += 1
            found = {"failed": what, "error": f"{type(error).__name__}: {error}"[-1500:]}
            print(json.dumps({**found, "traceback": traceback.format_exc().splitlines()[-16:]}), flush=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


@contextmanager
def counted_experts(found: list[int]) -> Iterator[None]:
    """Appends how many experts each layer of a step chooses."""
    reals = {name: getattr(deepseek_v4_moe, name) for name in ("route", "routed")}

    def counting(real: Callable[..., Any], *arguments: Any) -> Any:
        chosen = real(*arguments)
        found.append(int((chosen[0].flatten().bincount() > 0).sum()))
        return chosen

    for name, real in reals.items():
        setattr(deepseek_v4_moe, name, partial(counting, real))
    try:
        yield
    finally:
        for name, real in reals.items():
            setattr(deepseek_v4_moe, name, real)


# --- what is said ---


@dataclass
class Report:
    machine: str
    versions: dict[str, str]
    commit: str
    command: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    failed: int = 0

    def record(self, case: str, value: float, unit: str, kind: str, **facts: Any) -> None:
        line = {
            "bench": "deepseek_v4",
            "case": case,
            "value": value,
            "unit": unit,
            **facts,
            "machine": self.machine,
            "versions": self.versions,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": self.commit,
            "command": self.command,
            "kind": kind,
        }
        self.lines.append(line)
        shown = {key: line[key] for key in ("case", "value", "unit", *facts)}
        print(json.dumps(shown), flush=True)


def say_bytes(report: Report, config: DeepseekV4Config) -> None:
    for name, found in bytes_per_token(config):
        report.record(
            f"kv-bytes-{name}",
            found.pop("value"),
            "bytes/token",
            "implied",
            spread=None,
            repeats=0,
            floor=None,
            floor_by="the geometry's pages of 128 tokens, padding included; tails are constant, a sequence",
            rival=None,
            rival_why="other engines' layouts: bytes by the specs, not run here",
            layers=config.num_layers,
            **found,
        )


def size(num_tokens: int) -> str:
    return f"{num_tokens // 1024}k" if num_tokens >= 1024 else str(num_tokens)


def say_point(report: Report, bench: Bench, num_sequences: int, num_tokens: int, note: str = "") -> None:
    config = bench.network.config
    found = bench.point(num_sequences, num_tokens)
    at = f"b{num_sequences}-{size(-(-num_tokens // 128) * 128)}{note}"
    slice_ = f"layers 0 to {config.num_layers - 1} of {FLASH['num_hidden_layers']}"
    common = {"repeats": REPEATS, "rival": None, "rival_why": "no public engine ran here", "slice": slice_}
    floors = []
    for layer, ratio in enumerate(config.ratios):
        weights = LayerBytes.of(config, layer)
        used = weights.always + found.experts[layer] * weights.expert
        kv = num_sequences * kv_bytes_read(config, ratio, num_tokens)
        floors.append((used, kv, (used + kv) / bench.read * 1e3))
    for ratio, kind in KINDS.items():
        of_kind = [layer for layer, each in enumerate(config.ratios) if each == ratio]
        if not of_kind:
            continue
        times = [ms for layer in of_kind for ms in found.layers[layer]]
        last = of_kind[-1]
        used, kv, floor = floors[last]
        replayed: dict[str, Any] = {}
        if bench.device.type == "cuda" and not bench.late:
            try:
                ms = bench.replayed(last, num_sequences, num_tokens)
                replayed = {"replayed": round(statistics.median(ms), 4)}
            except Exception as error:  # noqa: BLE001 -- the eager time stands without it
                replayed = {"replayed_error": f"{type(error).__name__}: {error}"[:600]}
        report.record(
            f"decode-{kind}-{at}",
            round(statistics.median(times), 4),
            "ms/layer",
            "measured",
            spread=[round(min(times), 4), round(max(times), 4)],
            floor=round(floor, 4),
            floor_by=f"bytes: {used / 1e6:.0f} MB of weights ({found.experts[last]} experts) and {kv / 1e6:.1f} MB of "
            f"KV at {bench.read / 1e12:.2f} TB/s",
            **replayed,
            **common,
        )
    report.record(
        f"decode-step-{at}",
        round(statistics.median(found.steps), 3),
        "ms/step of the slice",
        "measured",
        spread=[round(min(found.steps), 3), round(max(found.steps), 3)],
        floor=round(sum(floor for _, _, floor in floors), 3),
        floor_by="the layers' floors; the head is not counted",
        wall_ms=round(statistics.median(found.wall), 3),
        stem_and_head_ms=round(statistics.median(found.ends), 3),
        finite=bench.finite,
        **common,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", choices=["eager", "graphs"], help="of the cases; both otherwise")
    parser.add_argument("--layers", type=int, default=0, help="of the slice; 0: as many as fit")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--tokens", default="", help="of each sequence; 4096,131072 on a GPU")
    parser.add_argument("--seconds", type=float, default=230.0, help="what would begin later is left out, by name")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--bytes-only", action="store_true", help="KV bytes a token alone, without a GPU")
    parser.add_argument("--records", type=Path)
    parser.add_argument("--commit", default="")
    asked = parser.parse_args()
    report = Report(
        torch.cuda.get_device_name() if torch.cuda.is_available() else "any: computed from the geometry",
        {"python": sys.version.split()[0], "torch": torch.__version__},
        asked.commit,
        " ".join(["python3 -m tests.bench.bench_deepseek_v4", *sys.argv[1:]]),
    )
    if asked.only != "graphs":
        say_bytes(report, DeepseekV4Config.parse(FLASH))
    if not asked.bytes_only:
        with torch.inference_mode(), ExitStack() as stack:
            if asked.device == "cpu":
                launch_on_cpu(stack)
            run(report, asked)
    if asked.records:
        asked.records.write_text("".join(json.dumps(line) + "\n" for line in report.lines))
    print(f"{report.failed} failed", flush=True)
    sys.exit(report.failed > 0)


def launch_on_cpu(stack: ExitStack) -> None:
    """Captured steps' own kernels, as g++ makes them."""
    import pytest

    from tests.unit.emulated_step import EmulatedStep

    EmulatedStep(stack.enter_context(pytest.MonkeyPatch.context()))


def run(report: Report, asked: argparse.Namespace) -> None:
    began = time.monotonic()
    on_gpu = asked.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    batches = [int(each) for each in asked.batches.split(",")]
    lengths = [int(each) for each in (asked.tokens or ("4096,131072" if on_gpu else "512,1024")).split(",")]
    whole = DeepseekV4Config.parse(FLASH if on_gpu else {**FLASH, **TINY})
    longest = max(lengths) + 128  # captured steps go on
    most = max(batches) * longest
    read = 1e10
    if on_gpu:
        from tests.bench.kernel_timing import Timer, ceilings

        timer = Timer(device)
        rates = ceilings(timer, device)
        del timer
        torch.cuda.empty_cache()
        read = rates.read
        print(json.dumps({"read_TB_s": read / 1e12, "copy_TB_s": rates.copy / 1e12, "TFLOP_s": rates.flops / 1e12}))
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else 1 << 40
    num_layers = asked.layers or (fitting_layers(whole, most, free) if on_gpu else 6)
    raw = {**FLASH, **({} if on_gpu else TINY)}
    raw |= {"num_hidden_layers": num_layers, "compress_ratios": FLASH["compress_ratios"][:num_layers]}
    config = DeepseekV4Config.parse(raw)
    network = DeepseekV4(config, RandomWeights(config, device))
    geometry = with_raw_mode(cache_geometry(config, "bfloat16"), "window")
    pages = list(range(most // 128))
    random.Random(1).shuffle(pages)
    kv = arenas(geometry, {COMPRESSED: len(pages), RAW: 0}, max(batches), "cuda:0" if on_gpu else "cpu")
    fill(kv)
    made = {"layers": num_layers, "free_GB": round(free / 1e9, 1), "made_s": round(time.monotonic() - began, 1)}
    if on_gpu:
        torch.cuda.synchronize()
        made["left_GB"] = round(torch.cuda.mem_get_info(device)[0] / 1e9, 1)
    print(json.dumps(made), flush=True)
    bench = Bench(network, Cache(kv, pages, longest), read, asked.seconds, began=began)
    points = [(count, length) for length in sorted(lengths) for count in batches]
    if asked.only != "eager":
        say_graphs(report, bench, points, profiled=on_gpu and not asked.no_profile)
    if asked.only == "graphs":
        return
    for count, length in points:
        # Two tokens short of whole blocks: no compressor has anything to do, as in three steps of four.
        bench.attempt(report, f"b{count}-{size(length)}", partial(say_point, report, bench, count, length - 2))
    count, length = points[-1]
    bench.attempt(report, "blocks-end", partial(say_point, report, bench, count, length, "-blocks-end"))
    for count, length in (points[0], points[-1]) if on_gpu and not asked.no_profile else ():
        for kind in KINDS.values():
            bench.attempt(report, f"profile-{kind}", partial(say_profile, bench, kind, count, length - 2))


def say_graphs(report: Report, bench: Bench, points: Sequence[tuple[int, int]], *, profiled: bool) -> None:
    """Captured steps: compared with eager ones at each point, then timed."""
    kinds = {
        kind: max(at for at, r in enumerate(bench.network.config.ratios) if r == ratio) for ratio, kind in KINDS.items()
    }
    if bench.network.kernels is not None:
        bench.attempt(report, "graphs-kernels", partial(say_kernels, report, bench))
    for count, length in points:
        bench.attempt(report, f"graphs-equal-b{count}-{size(length)}", partial(say_equal, report, bench, count, length))
    for count, length in points:
        bench.attempt(
            report, f"graphs-b{count}-{size(length)}", partial(say_captured, report, bench, count, length, kinds)
        )
    for count, length in (points[0], points[-1]) if profiled else ():
        for kind, layer in kinds.items():

            def show(count: int = count, length: int = length, kind: str = kind, layer: int = layer) -> None:
                steps = captured_steps(bench, [length - 70] * count)
                steps.capture()
                steps.enter()
                steps.run(1)
                kernels = deepseek_v4_graphs.profile(steps, layer, 28)
                print(json.dumps({"graph_profile": f"{kind}-b{count}-{size(length)}", "kernels": kernels}), flush=True)

            bench.attempt(report, f"graph-profile-{kind}-b{count}", show)


def say_kernels(report: Report, bench: Bench) -> None:
    """The kernels between the matrix products beside PyTorch, at Flash's widths."""
    from tests.kernels.v4_step_checks import FLASH as WIDTHS
    from tests.kernels.v4_step_checks import checks

    assert bench.network.kernels is not None
    for rows in (1, 64, 300):
        errors = dict(checks(bench.network.kernels, rows, WIDTHS, bench.device))
        passed = all(error < 5e-3 for error in errors.values())
        report.failed += not passed
        print(json.dumps({"case": f"graphs-kernels-{rows}", "passed": passed, "errors": errors}), flush=True)
    for rows in (1, 8, 64):
        ms, mb = deepseek_v4_graphs.expert_times(bench.network, rows)
        rates = {name: round(mb / each / 1e3, 2) for name, each in ms.items()}
        print(json.dumps({"case": f"graphs-experts-{rows}", "ms": ms, "MB": round(mb), "TB_s": rates}), flush=True)


def captured_steps(bench: Bench, lengths: list[int]) -> Steps:
    rng = random.Random(len(lengths))
    tokens = [rng.randrange(bench.network.config.vocab_size) for _ in lengths]
    pages = [bench.cache.pages_of(at) for at in range(len(lengths))]
    longest = max(lengths) + deepseek_v4_graphs.AHEAD
    pages = [each[: -(-longest // 128)] for each in pages]
    return Steps(bench.network, bench.cache.kv, pages, lengths, tokens, longest)


def say_equal(report: Report, bench: Bench, count: int, length: int) -> None:
    """Sequences of several lengths, of which some end blocks of 4 and 128 tokens and pages on the way."""
    steps = captured_steps(bench, [max(5, length - 6 - 37 * at % (length // 2)) for at in range(count)])

    def eager(tokens: list[int], lengths: list[int], rows: list[int]) -> torch.Tensor:
        batch = bench.cache.step(tokens, lengths, bench.device, rows)
        return deepseek_v4_graphs.eager_logits(bench.network, bench.cache.kv, batch)

    try:
        found = deepseek_v4_graphs.compare(steps, eager)
    except Exception:
        print(json.dumps({"probe": deepseek_v4_graphs.probe(steps)}), flush=True)
        raise
    report.failed += not found["passed"]
    print(json.dumps({"case": f"graphs-equal-b{count}-{size(length)}", **found}), flush=True)


def say_captured(report: Report, bench: Bench, count: int, length: int, kinds: Mapping[str, int]) -> None:
    config = bench.network.config
    steps = captured_steps(bench, [length - 70] * count)
    found = deepseek_v4_graphs.times(steps, dict(kinds))
    print(json.dumps({"case": f"graphs-b{count}-{size(length)}", **found}), flush=True)
    if "step_ms" not in found:
        return
    slice_ = f"layers 0 to {config.num_layers - 1} of {FLASH['num_hidden_layers']}"
    common = {"repeats": deepseek_v4_graphs.REPLAYS, "rival": None, "rival_why": "no public engine ran here"}
    at, whole = f"b{count}-{size(length)}", DeepseekV4Config.parse(FLASH)
    layer_ms: dict[str, float] = found["layer_ms"]
    floors: dict[str, float] = {}
    for kind, layer in kinds.items():
        weights = LayerBytes.of(config, layer)
        used = weights.always + found["experts"][layer] * weights.expert
        kv = count * kv_bytes_read(config, config.ratios[layer], length)
        floors[kind] = (used + kv) / bench.read * 1e3
        report.record(
            f"graphs-{kind}-{at}",
            layer_ms[kind],
            "ms/layer",
            "measured",
            spread=None,
            floor=round(floors[kind], 4),
            floor_by=f"bytes: {used / 1e6:.0f} MB of weights ({found['experts'][layer]} experts) and {kv / 1e6:.1f} MB "
            f"of KV at {bench.read / 1e12:.2f} TB/s",
            slice=slice_,
            **common,
        )
    head = 2 * config.vocab_size * config.hidden_size / bench.read * 1e3
    own = [KINDS[ratio] for ratio in config.ratios]
    rest = found["ends_ms"]
    report.record(
        f"graphs-step-{at}",
        found["step_ms"],
        "ms/step of the slice",
        "measured",
        spread=None,
        floor=round(sum(floors[kind] for kind in own) + head, 4),
        floor_by="the layers' floors and the head's bytes",
        slice=slice_,
        beside_layers_ms=round(rest, 4),
        seen_by_host_ms=found["loop_ms"],
        **common,
    )
    every = [KINDS[ratio] for ratio in whole.ratios]
    implied = sum(layer_ms[kind] for kind in every) + rest
    floor = sum(floors[kind] for kind in every) + head
    report.record(
        f"graphs-implied-43-{at}",
        round(implied, 3),
        "ms/step of the whole model",
        "implied",
        spread=None,
        floor=round(floor, 3),
        floor_by="implied: each kind's floor times its layers, and the head's",
        implied_by=f"{', '.join(f'{every.count(kind)} {kind} at {layer_ms[kind]} ms' for kind in kinds)}, the rest of "
        f"a step {rest:.3f} ms; bf16 weights, which no one card holds",
        tokens_per_s=round(count / implied * 1e3, 1),
        of_floor=round(floor / implied, 3),
        **common,
    )


def say_profile(bench: Bench, kind: str, num_sequences: int, num_tokens: int) -> None:
    layer = max(at for at, ratio in enumerate(bench.network.config.ratios) if KINDS[ratio] == kind)
    kernels = bench.profile(layer, num_sequences, num_tokens)
    print(json.dumps({"profile": f"{kind}-b{num_sequences}-{num_tokens}", "kernels": kernels}), flush=True)


if __name__ == "__main__":
    main()
