"""What ``tailpack up`` is asked to run, checked before anything heavy starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.memory_limit import HEADROOM_BYTES, available_bytes
from protos import rpc
from protos.errors import CapacityError, ConfigError, ModelError
from worker import gguf_model, model_config
from worker.config import WorkerConfig

DEFAULT_ARENA_BYTES = 1 << 30
LEAST_ARENA_BYTES = 16 << 20  # taken where nothing is asked for
LEAST_KV_BYTES = 1 << 20  # that may be asked for


@dataclass(frozen=True)
class ClusterConfig:
    """What to run. ``kv_bytes`` None takes what is free, at most 1 GiB a worker; ``threads`` 0 divides the cores."""

    model: Path
    name: str
    listen: str
    workers: int = 1
    kv_bytes: int | None = None
    deterministic: bool = False
    dtype: str = "float32"
    kv_mode: str = "dense"
    kv_preset: str = ""
    dense_layers: tuple[int, int] | str = (0, 0)
    checkpoints: int = -1
    admission: str = "worst_case"
    max_running: int = 16
    max_waiting: int = 1024
    max_sequence_tokens: int = 0
    prefill_chunk: int = 256
    threads: int = 0
    drain_s: float = 10.0

    @staticmethod
    def of(model: str, listen: str, *, name: str | None = None, **settings: Any) -> ClusterConfig:
        """Checks what can be checked before anything heavy starts, and unpacks a GGUF file once.

        Raises:
            ConfigError: the address is taken or malformed, a worker's setting is bad, or the cache cannot be written.
            ModelError: the model is not there, unreadable, or asks for what is not built.
            CapacityError: NOT_ENOUGH_MEMORY.
        """
        rpc.check_free(listen)
        folder, default_name = resolve_model(model)
        model_config.check_folder(folder, settings.get("max_sequence_tokens", 0))
        config = ClusterConfig(model=folder, name=name or default_name, listen=listen, **settings)
        if config.kv_bytes is not None and config.kv_bytes < LEAST_KV_BYTES:
            raise ConfigError("kv_bytes is too small", given=config.kv_bytes, allowed=f"at least {LEAST_KV_BYTES}")
        config.worker(0, Path("unknown yet"), DEFAULT_ARENA_BYTES)
        arena_bytes_of(config)
        return config

    def worker(self, index: int, kv_socket: Path, arena_bytes: int) -> WorkerConfig:
        cores = len(os.sched_getaffinity(0))
        settings = {
            "model": self.model,
            "name": self.name,
            "kv_socket": kv_socket,
            "worker_id": f"worker-{index}",
            "dtype": self.dtype,
            "kv_mode": self.kv_mode,
            "kv_preset": self.kv_preset,
            "dense_layers": self.dense_layers,
            "checkpoints": self.checkpoints,
            "admission": self.admission,
            "arena_bytes": arena_bytes,
            "max_running": self.max_running,
            "max_waiting": self.max_waiting,
            "max_sequence_tokens": self.max_sequence_tokens,
            "prefill_chunk": self.prefill_chunk,
            "deterministic": self.deterministic,
            "device": f"cpu:{index}",
            "threads": self.threads or max(1, cores // self.workers),
        }
        return WorkerConfig.from_dict(settings)


def resolve_model(model: str) -> tuple[Path, str]:
    """(Hugging Face folder, name) of "smollm2", a folder, or a GGUF file (unpacked into the cache when it is new).

    Raises:
        ModelError: there is no such model, or it is not readable.
    """
    if model == "smollm2":
        return gguf_model.model_folder(gguf_model.demo_gguf()), model
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
            raise ModelError("not a model folder", given=path, allowed="config.json and *.safetensors in it")
        return path.absolute(), path.absolute().name
    if path.suffix == ".gguf":
        return gguf_model.model_folder(path), path.stem
    raise ModelError("no such model", given=model, allowed="smollm2, a model folder, or a .gguf file")


def arena_bytes_of(config: ClusterConfig) -> int:
    """Bytes of each worker's KV arenas.

    Raises:
        CapacityError: NOT_ENOUGH_MEMORY, they do not fit beside the weights.
    """
    available, limited_by = available_bytes()
    weights = sum(path.stat().st_size for path in config.model.glob("*.safetensors"))
    room = (available - HEADROOM_BYTES) // config.workers - weights
    arena_bytes = config.kv_bytes if config.kv_bytes is not None else min(DEFAULT_ARENA_BYTES, room // 2)
    if arena_bytes > room or (config.kv_bytes is None and arena_bytes < LEAST_ARENA_BYTES):
        raise CapacityError(
            "not enough memory for the KV arenas",
            reason="NOT_ENOUGH_MEMORY",
            given=f"{config.workers} workers with {weights >> 20} MiB of weights and "
            f"{max(arena_bytes, LEAST_ARENA_BYTES) >> 20} MiB of arenas each",
            allowed=f"{(available - HEADROOM_BYTES) >> 20} MiB for all of it ({limited_by})",
            hint="fewer workers, or a smaller --kv-bytes",
        )
    return arena_bytes
