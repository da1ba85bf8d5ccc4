"""What ``tailpack up`` is asked to run, checked before anything heavy starts."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvstore.memory_limit import HEADROOM_BYTES, available_bytes
from protos import rpc
from protos.errors import CapacityError, ConfigError, ModelError
from protos.metrics import OFF
from protos.tls import ServerCertificate, ServerTls
from protos.tracing import endpoint_of
from worker import gguf_model, model_config, tiny_v4
from worker.config import WorkerConfig, default_dtype
from worker.families import architecture
from worker.gpu import Gpu, free_bytes, visible_gpus
from worker.memory_plan import Use, demand_fit, total
from worker.weights import dtype_name, planned_uses
from worker.weights_form import check_weights

DEVICES = ("auto", "cpu", "cuda")
DEFAULT_ARENA_BYTES = 1 << 30
DEFAULT_GPU_ARENA_BYTES = 16 << 30
GPU_HEADROOM_BYTES = 2 << 30  # of each GPU, for CUDA's context, workspaces and activations
LEAST_ARENA_BYTES = 16 << 20  # taken where nothing is asked for
LEAST_KV_BYTES = 1 << 20  # that may be asked for


@dataclass(frozen=True)
class ClusterConfig:
    """What to run. ``kv_bytes`` None takes what is free, at most 1 GiB a worker (16 GiB on a GPU); ``threads`` 0
    divides the cores. ``gpus``: of each worker; none: all are on the CPU. ``metrics``: host:port of the kvstore's page
    for Prometheus, the workers' and the router's follow; port 0: free ones; or OFF. ``http``: of the router's HTTP
    door; None: the router's default; or OFF. ``otlp_endpoint``: where spans go; None: nowhere. ``tokens``, ``tls``: of
    the router's doors; all else is on this machine's loopback and unix sockets. ``no_restart``: end with the kvstore or
    the router, instead of starting it again. ``standby``: a second process a worker, which takes over when it dies.
    ``recover_wait_s``: how long streams wait for a lost worker; None: the router's default.
    """

    model: Path
    name: str
    listen: str
    workers: int = 1
    kv_bytes: int | None = None
    deterministic: bool = False
    decode_graphs: bool = False
    dtype: str = "float32"
    kv_mode: str = "dense"
    kv_preset: str = ""
    kv_retention: str = ""
    pack_compressed: str = ""
    drafts: int = 0
    dense_layers: tuple[int, int] | str = (0, 0)
    checkpoints: int = -1
    admission: str = "worst_case"
    max_running: int = 16
    max_waiting: int = 1024
    max_sequence_tokens: int = 0
    prefill_chunk: int = 0
    step_time_budget_ms: int = -1
    threads: int = 0
    drain_s: float = 10.0
    gpus: tuple[Gpu, ...] = ()
    metrics: str = OFF
    http: str | None = None
    otlp_endpoint: str | None = None
    log_prompts: bool = False
    tokens: Path | None = None
    tls: ServerTls | None = None
    no_restart: bool = False
    weights: str = ""
    weights_arena: bool = True
    standby: bool = False
    recover_wait_s: float | None = None

    @staticmethod
    def of(
        model: str,
        listen: str,
        *,
        name: str | None = None,
        device: str = "auto",
        dtype: str | None = None,
        **settings: Any,
    ) -> ClusterConfig:
        """Checks what can be checked before anything heavy starts, and unpacks a GGUF file once.

        Args:
            device: "cpu"; "cuda", a GPU for each worker; "auto", which is cuda where torch has one.
            dtype: None: bfloat16 on GPUs, else float32.

        Raises:
            ConfigError: an address is taken or malformed, a worker's setting is bad, or the cache cannot be written;
                NO_GPU, NOT_ENOUGH_GPUS; TLS_*: see protos/tls.py.
            ModelError: the model is not there, unreadable, or asks for what is not built.
            CapacityError: MODEL_TOO_LARGE, NOT_ENOUGH_MEMORY.
        """
        _check_doors(
            [listen],
            _ports(settings.get("http") or _behind(listen), 1),
            _ports(settings.get("metrics") or OFF, 2 + settings.get("workers", 1)),
        )
        if (tls := settings.get("tls")) is not None:
            ServerCertificate(tls, "router")
        settings["otlp_endpoint"] = endpoint_of(settings.get("otlp_endpoint"))
        folder, default_name = resolve_model(model)
        model_config.check_folder(folder, settings.get("max_sequence_tokens", 0))
        gpus = usable_gpus(device)
        workers = settings.get("workers", 1)
        if gpus and workers > len(gpus):
            raise ConfigError(
                "there are more workers than GPUs",
                reason="NOT_ENOUGH_GPUS",
                given=f"{workers} workers",
                allowed=f"{len(gpus)} ({', '.join(gpu.name for gpu in gpus)})",
                hint="lower --workers, or use --device cpu",
            )
        config = ClusterConfig(
            model=folder,
            name=name or default_name,
            listen=listen,
            dtype=dtype or default_dtype("cuda" if gpus else "cpu"),
            gpus=gpus[:workers],
            **settings,
        )
        if config.kv_bytes is not None and config.kv_bytes < LEAST_KV_BYTES:
            raise ConfigError("kv_bytes is too small", given=config.kv_bytes, allowed=f"at least {LEAST_KV_BYTES}")
        worker = config.worker(0, Path("unknown yet"), DEFAULT_ARENA_BYTES)
        raw = model_config.read_json(folder / "config.json")
        shapes = architecture(raw)
        shapes.check_settings(worker)
        check_weights(worker, shapes, dtype_name(worker.dtype, raw))
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
            "kv_retention": self.kv_retention,
            "pack_compressed": self.pack_compressed,
            "drafts": self.drafts,
            "dense_layers": self.dense_layers,
            "checkpoints": self.checkpoints,
            "admission": self.admission,
            "arena_bytes": arena_bytes,
            "max_running": self.max_running,
            "max_waiting": self.max_waiting,
            "max_sequence_tokens": self.max_sequence_tokens,
            "prefill_chunk": self.prefill_chunk,
            "step_time_budget_ms": self.step_time_budget_ms,
            "deterministic": self.deterministic,
            "decode_graphs": self.decode_graphs,
            "weights": self.weights,
            "weights_arena": self.weights_arena,
            "device": self.gpus[index].device if self.gpus else f"cpu:{index}",
            "threads": self.threads or max(1, cores // self.workers),
        }
        return WorkerConfig.from_dict(settings)


def usable_gpus(device: str) -> tuple[Gpu, ...]:
    """The GPUs that "auto", "cpu" or "cuda" means here; none: the CPU.

    Raises:
        ConfigError: there is no such choice; NO_GPU, "cuda" where torch or CUDA has none.
    """
    if device not in DEVICES:
        raise ConfigError("device is not known", given=device, allowed=", ".join(DEVICES))
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return ()
    gpus = visible_gpus()
    if not gpus or not torch.cuda.is_available():
        raise ConfigError(
            "there is no GPU to use",
            reason="NO_GPU",
            given=f"{len(gpus)} GPUs visible; torch {torch.__version__}, CUDA {torch.version.cuda or 'not built in'}",
            allowed="a GPU, its driver and a torch with CUDA",
            hint="use --device cpu",
        )
    return gpus


def resolve_model(model: str) -> tuple[Path, str]:
    """(Hugging Face folder, name) of "smollm2", "tiny-v4", a folder, or a GGUF file; made in the cache when it is new.

    Raises:
        ModelError: there is no such model, or it is not readable.
    """
    if model == "smollm2":
        return gguf_model.model_folder(gguf_model.demo_gguf()), model
    if model == tiny_v4.NAME:
        return tiny_v4.model_folder(), model
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
            raise ModelError("not a model folder", given=path, allowed="config.json and *.safetensors in it")
        return path.absolute(), path.absolute().name
    if path.suffix == ".gguf":
        return gguf_model.model_folder(path), path.stem
    raise ModelError("no such model", given=model, allowed="smollm2, tiny-v4, a model folder, or a .gguf file")


def arena_bytes_of(config: ClusterConfig) -> int:
    """Bytes of each worker's KV arenas.

    Raises:
        CapacityError: MODEL_TOO_LARGE, the weights alone do not fit, with what they take by owner; NOT_ENOUGH_MEMORY,
            the arenas do not fit beside them.
    """
    uses = planned_uses(config.model, config.dtype, config.weights, captured=config.decode_graphs)
    weights = total(uses)
    if config.gpus:
        return _gpu_arena_bytes(config, uses)
    available, limited_by = available_bytes()
    each = (available - HEADROOM_BYTES) // config.workers
    demand_fit(uses, each, f"for each of {config.workers} workers ({limited_by})")
    room = each - weights
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


def memory_table(config: ClusterConfig, arena_bytes: int) -> tuple[Use, ...]:
    """What each worker will take of its device, by owner."""
    workspaces = GPU_HEADROOM_BYTES if config.gpus else HEADROOM_BYTES // config.workers
    return (
        *planned_uses(config.model, config.dtype, config.weights, captured=config.decode_graphs),
        Use("KV arenas", arena_bytes),
        Use("workspaces, at most", workspaces),
    )


def _gpu_arena_bytes(config: ClusterConfig, uses: tuple[Use, ...]) -> int:
    free, fullest = min((free_bytes(gpu), gpu.uuid) for gpu in config.gpus)
    weights = total(uses)
    demand_fit(uses, free - GPU_HEADROOM_BYTES, f"({free >> 20} MiB are free on {fullest})")
    room = free - GPU_HEADROOM_BYTES - weights
    arena_bytes = config.kv_bytes if config.kv_bytes is not None else min(DEFAULT_GPU_ARENA_BYTES, room * 3 // 4)
    if arena_bytes > room or (config.kv_bytes is None and arena_bytes < LEAST_ARENA_BYTES):
        raise CapacityError(
            "not enough GPU memory for the KV arenas",
            reason="NOT_ENOUGH_MEMORY",
            given=f"{weights >> 20} MiB of weights and {max(arena_bytes, LEAST_ARENA_BYTES) >> 20} MiB of arenas",
            allowed=f"{(free - GPU_HEADROOM_BYTES) >> 20} MiB for both ({free >> 20} MiB are free on {fullest}, "
            f"{GPU_HEADROOM_BYTES >> 20} MiB stay free)",
            hint="a smaller --kv-bytes, or end what else uses this GPU",
        )
    return arena_bytes


def _behind(listen: str) -> str:
    """Where the router's HTTP door is by default: the port behind ``listen``'s, or a free one."""
    host, _, port = listen.rpartition(":")
    return f"{host}:{int(port) + 1}" if port.isdecimal() and int(port) else OFF


def _ports(first: str, count: int) -> list[str]:
    """``first`` and the addresses behind it, as far as they are known before they are listened on."""
    if first == OFF:
        return []
    host, _, port = first.rpartition(":")
    if not port.isdecimal() or not int(port):
        return [first]
    return [f"{host}:{int(port) + index}" for index in range(count)]


def _check_doors(*doors: list[str]) -> None:
    """Raises ConfigError where one is taken or malformed, or two are the same."""
    seen: set[str] = set()
    for address in itertools.chain(*doors):
        rpc.check_free(address)
        if address in seen:
            raise ConfigError(
                f"two doors of this cluster are at {address}",
                reason="PORT_IN_USE",
                given=address,
                hint="choose another port for --http or --metrics (port 0 takes a free one)",
            )
        if not address.endswith(":0"):
            seen.add(address)
