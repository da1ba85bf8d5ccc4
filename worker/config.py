"""The worker's settings: frozen, complete at start, every bad value fatal by name."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.widths import PRESETS
from kvstore.geometry import COMPILED_MODES, DEFAULT_MAX_STEP_TOKENS, ITEM_BYTES
from protos.errors import ConfigError

RETENTIONS = ("all", "checkpoints", "none")
ADMISSIONS = ("worst_case", "recompute")
FP8_BLOCK, BF16 = "fp8_block", "bf16"
WEIGHTS = ("", BF16, FP8_BLOCK)
CHUNK_TOKENS = 256  # of a step's prompts, where nothing is asked for
CAPTURED_CHUNK_TOKENS = 1024
"""The same where decode steps are captured, and the most that is computed beside them, a few layers a step: so many
that products are near the GPU's speed and a long history is seldom gathered, so few that one layer of them is a small
part of a step."""
DEFAULT_PRESET = "tq4"  # of mode turboquant, where none is named

GPU = "cuda:"
_DEVICE = re.compile(r"cpu:\d+|cuda:\d+|cuda:GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_FALSE = {"0", "false", "no", "off", ""}
_TRUE = {"1", "true", "yes", "on"}


@dataclass(frozen=True)
class WorkerConfig:
    """One worker.

    Attributes:
        model: folder in the Hugging Face layout: config.json and *.safetensors.
        name: what callers ask for.
        kv_socket: the kvstore's gRPC socket.
        worker_id: unique in the cluster.
        dtype: of weights, activations and KV; "auto" takes the model's own.
        kv_mode: how KV pages are kept (DESIGN.md 3.1).
        kv_preset: bits of keys and values in mode turboquant; empty takes tq4 there, and must be empty elsewhere.
        kv_retention: what deepseek_v4 keeps of raw rows behind its window: "all", "checkpoints" (every 16th page and
            those of prompt ends) or "none"; empty takes the mode's own, which is none in mode window, else all.
        pack_compressed: a preset that packs deepseek_v4's compressed rows, too; attention then reads packed
            rows, and its results change. Empty leaves them dense.
        dense_layers: how many of the model's first and last layers stay dense, in a mode other than dense.
        arena_bytes: for all KV arenas together, tails and checkpoints included.
        checkpoints: tails kept for exact resumes, at most; each is as large as a sequence's tail. -1: as many as
            max_running. In mode dense only deepseek_v4 has tails; other families resume from their pages there.
        admission: "worst_case" starts a sequence when all that it may ever need is promised; "recompute" when its
            prompt fits, and drops the youngest to compute it again when pages run out.
        max_running: sequences that a step can hold.
        max_waiting: sequences that may queue behind them; more are refused (QUEUE_FULL).
        max_sequence_tokens: prompt and output together; 0 takes the model's.
        prefill_chunk: prompt tokens that one step may compute; 0: 256, and with decode_graphs 1024. In deterministic
            mode it counts in whole spans of 128 tokens, at least one, and does not change any result.
        step_time_budget_ms: how long a step with decode rows may take, so that a long prompt beside them does not stall
            them: its chunk is cut to the time that is left, as measured in the steps before; with decode_graphs, llama
            family, it runs a few layers a step instead. 0: no limit; -1: twice what the decode rows take
            by themselves, with decode_graphs, else no limit.
        deterministic: results of a sequence do not depend on its batch mates (DESIGN.md 3.5).
        decode_graphs: decode rows run from CUDA graphs, sampling included. On a GPU, not with drafts; elsewhere it is
            refused. In deterministic mode they all run from one graph, of max_running rows; llama family only.
        drafts: tokens that the model's MTP block guesses for each step to check, of greedy sequences; 0: none. It
            changes no token.
        device: "cpu:0"; or a GPU, "cuda:0" or "cuda:GPU-<uuid>". By its index it is what CUDA_VISIBLE_DEVICES makes of
            it; the kvstore knows it by its UUID, so the next worker on the same GPU finds its memory.
        threads: of the tensor library; 0 takes one per core.
        kv_reattach_s: how long the worker waits for another kvstore when its own is gone. Then it ends.
        weights: "fp8_block" quantises the products' weights as they are loaded, in blocks of 128 x 128, and keeps
            nothing else of them: half the memory, and what a decode step of few rows reads. Llama family in bfloat16 on
            a GPU, with decode_graphs. Files that hold such blocks already are held as they are, and by default too.
            "bf16" dequantises those as they are loaded. Empty holds them with decode_graphs, else "bf16".
        weights_arena: the kvstore holds the weights, so that the next life of this worker maps them instead of loading
            them, and workers of the same model on one host share them.
        adopt_grace_s: how long a sequence taken over from an earlier life of the worker goes on without its router;
            resumable ones have their own grace time.
    """

    model: Path
    name: str
    kv_socket: Path
    worker_id: str
    dtype: str = "float32"
    kv_mode: str = "dense"
    kv_preset: str = ""
    kv_retention: str = ""
    pack_compressed: str = ""
    dense_layers: tuple[int, int] = (0, 0)
    arena_bytes: int = 1 << 30
    checkpoints: int = -1
    admission: str = "worst_case"
    max_running: int = 16
    max_waiting: int = 1024
    max_sequence_tokens: int = 0
    prefill_chunk: int = 0
    step_time_budget_ms: int = -1
    deterministic: bool = False
    decode_graphs: bool = False
    drafts: int = 0
    device: str = "cpu:0"
    threads: int = 0
    kv_reattach_s: int = 60
    weights: str = ""
    weights_arena: bool = True
    adopt_grace_s: int = 60

    def __post_init__(self) -> None:
        _choice("dtype", self.dtype, ("auto", *ITEM_BYTES))
        _choice("kv_mode", self.kv_mode, COMPILED_MODES)
        _choice("admission", self.admission, ADMISSIONS)
        _choice("kv_retention", self.kv_retention, ("", *RETENTIONS))
        if self.pack_compressed:
            _choice("pack_compressed", self.pack_compressed, tuple(PRESETS))
        if self.kv_preset:
            _choice("kv_preset", self.kv_preset, tuple(PRESETS))
        if self.kv_preset and self.kv_mode != "turboquant":
            raise ConfigError(
                f"kv_preset would do nothing in kv_mode {self.kv_mode}",
                given=self.kv_preset,
                allowed="kv_preset in kv_mode turboquant only",
            )
        if self.kv_mode == "window" and self.checkpoints == 0:
            raise ConfigError(
                "kv_mode window keeps no pages, so without checkpoints it would switch prefix reuse off",
                reason="PREFIX_REUSE_OFF",
                given="checkpoints 0",
                allowed="checkpoints 1 or more",
                hint="leave checkpoints out, or send requests with prefix_reuse none",
            )
        if self.decode_graphs and (not self.on_gpu or self.drafts):
            raise ConfigError(
                "decode_graphs would not engage",
                reason="DECODE_GRAPHS_NOT_ENGAGED",
                given=f"device {self.device}, drafts {self.drafts}",
                allowed="a GPU, without drafts",
                hint="leave decode_graphs out",
            )
        _choice("weights", self.weights, WEIGHTS)
        if self.weights == FP8_BLOCK and not (self.on_gpu and self.decode_graphs):
            raise ConfigError(
                f"weights {self.weights} would not engage",
                reason="WEIGHTS_NOT_ENGAGED",
                given=f"device {self.device}, decode_graphs {self.decode_graphs}",
                allowed="a GPU, with decode_graphs",
                hint="add --decode-graphs, or leave --weights out",
            )
        for name in ("name", "worker_id"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty", given="''", allowed="a name")
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError("device is no device", given=self.device, allowed="cpu:0, cuda:0, cuda:GPU-<uuid>, ...")
        for name, least, most in (
            ("arena_bytes", 1, 1 << 50),
            ("checkpoints", -1, 1 << 16),
            ("max_running", 1, 4096),
            ("max_waiting", 0, 1 << 20),
            ("max_sequence_tokens", 0, 1 << 24),
            ("prefill_chunk", 0, 1 << 20),
            ("step_time_budget_ms", -1, 60_000),
            ("threads", 0, 1024),
            ("kv_reattach_s", 0, 3600),
            ("adopt_grace_s", 0, 3600),
            ("drafts", 0, DEFAULT_MAX_STEP_TOKENS - 1),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name} is out of its range", given=value, allowed=f"{least} to {most}")

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith(GPU)

    @property
    def gpu_uuid(self) -> str:
        """ "GPU-<uuid>" where the device is named so, else empty."""
        name = self.device.removeprefix(GPU)
        return name if self.on_gpu and not name.isdigit() else ""

    @property
    def preset(self) -> str:
        """The preset that kv_mode means; empty but in mode turboquant."""
        return self.kv_preset or (DEFAULT_PRESET if self.kv_mode == "turboquant" else "")

    @property
    def chunk_tokens(self) -> int:
        """What prefill_chunk means: without captured steps a whole chunk stands between two tokens of the others."""
        return self.prefill_chunk or (CAPTURED_CHUNK_TOKENS if self.decode_graphs else CHUNK_TOKENS)

    @property
    def num_checkpoints(self) -> int:
        return self.max_running if self.checkpoints < 0 else self.checkpoints

    @property
    def num_slots(self) -> int:
        """Slots of the store: one for each sequence that runs, and one more, in which a sequence grows (admission
        "recompute"), and whose tails save those of another while they are overwritten.
        """
        return self.max_running + 1

    @property
    def num_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> WorkerConfig:
        """Builds a config from parsed settings; strings are read as the field's type.

        Raises:
            ConfigError: a key is unknown, one is missing, or a value does not read as its type.
        """
        fields = {f.name: f for f in dataclasses.fields(WorkerConfig)}
        unknown = sorted(set(values) - set(fields))
        if unknown:
            raise ConfigError("unknown setting", given=", ".join(unknown), allowed=", ".join(fields))
        missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
        if missing:
            raise ConfigError("a setting is missing", given=", ".join(values), allowed=f"also {', '.join(missing)}")
        return WorkerConfig(**{name: _read(name, str(fields[name].type), value) for name, value in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``from_dict`` takes back."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(self).items()}


def default_dtype(device: str) -> str:
    """Of weights, activations and KV, where nothing is asked for. ``device``: "cpu..." or "cuda..."."""
    return "bfloat16" if device.startswith("cuda") else "float32"


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is not known", given=value, allowed=", ".join(allowed))


def _read(name: str, kind: str, value: Any) -> Any:
    if kind == "Path" and isinstance(value, str | Path) and str(value):
        return Path(value)
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "bool":
        if isinstance(value, bool):
            return value
        text = str(value).strip().lower()
        if text in _FALSE or text in _TRUE:
            return text in _TRUE
    if kind == "tuple[int, int]":
        pair = value.split(",") if isinstance(value, str) else value
        try:
            first, last = (int(number) for number in pair)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{name} does not read as two counts", given=repr(value), allowed="F,L as in 2,2"
            ) from None
        return first, last
    if kind == "int" and not isinstance(value, bool | float):
        try:
            return int(value)
        except (TypeError, ValueError):
            pass
    raise ConfigError(f"{name} does not read as {kind}", given=repr(value), allowed=kind)
