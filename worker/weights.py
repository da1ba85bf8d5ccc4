"""Loads a model from a folder in the Hugging Face layout: config.json and one or several safetensors files.

Everything that does not belong together is refused here, by name, before the worker reports ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kernels.page_layout import FRAGMENTS
from kvstore.geometry import CacheGeometry, apply_mode
from protos import types_pb2
from protos.errors import ModelError
from worker import model_config
from worker.config import WorkerConfig
from worker.gpu import torch_device
from worker.gpu_kernels import demand_kernels
from worker.kv_view import TORCH_DTYPES
from worker.models.llama import MODEL_TYPES, Llama, LlamaConfig

INDEX_FILE = "model.safetensors.index.json"

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all) after each tensor."""


@dataclass(frozen=True)
class Model:
    """A loaded model. ``network`` computes; the rest describes it."""

    network: Llama
    info: types_pb2.ModelInfo
    geometry: CacheGeometry
    eos_token_ids: tuple[int, ...]


def load_model(config: WorkerConfig, progress: Progress | None = None) -> Model:
    """Reads config and weights, checks both, converts to the config's dtype, on the config's device.

    The weights digest is blake2b-128 over name, dtype, shape and bytes of every tensor as stored, in order of names.

    Raises:
        ModelError: a file is missing, unreadable or corrupt; a tensor is missing, unexpected or of the wrong shape; the
            model asks for something that is not built.
        ConfigError: ``max_sequence_tokens`` is more than the model's; or the KV mode does not go with the model (what
            ``apply_mode`` raises), or a GPU has no kernel for it (NO_GPU_KERNEL), before any weight is read.
    """
    raw = model_config.read_json(config.model / "config.json")
    if raw.get("model_type") not in MODEL_TYPES:
        raise ModelError(
            "this model architecture is not built",
            reason="ARCHITECTURE_NOT_BUILT",
            given=raw.get("model_type"),
            allowed=", ".join(MODEL_TYPES),
        )
    raw = model_config.checked(raw)
    shapes = LlamaConfig.parse(raw)
    eos_token_ids = model_config.eos_token_ids(config.model, raw)
    model_config.check_length(raw, config.max_sequence_tokens)
    max_sequence_tokens = config.max_sequence_tokens or shapes.max_positions
    dtype = _dtype_name(config, raw)
    device = torch_device(config.device)
    geometry = apply_mode(
        shapes.geometry(dtype, max_sequence_tokens),
        config.kv_mode,
        config.preset,
        config.dense_layers,
        compiled_only=config.on_gpu,
    )
    if config.on_gpu:
        demand_kernels(geometry, shapes.q_heads)
        geometry = geometry.with_page_layout(FRAGMENTS)  # packed pages in the order of the GPU's kernels
    weights, digest = _load_tensors(config.model, shapes, TORCH_DTYPES[dtype], device, progress)
    num_parameters = sum(tensor.numel() for tensor in weights.values())
    return Model(
        network=Llama(shapes, raw, weights, max_sequence_tokens),
        info=types_pb2.ModelInfo(
            name=config.name,
            architecture=shapes.model_type,
            vocab_size=shapes.vocab_size,
            max_sequence_tokens=max_sequence_tokens,
            eos_token_ids=eos_token_ids,
            weights_digest=digest,
            tokenizer_digest=_tokenizer_digest(config.model),
            num_parameters=num_parameters,
        ),
        geometry=geometry,
        eos_token_ids=eos_token_ids,
    )


def _load_tensors(
    folder: Path, shapes: LlamaConfig, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> tuple[dict[str, torch.Tensor], bytes]:
    expected, where = shapes.tensors(), _locate_tensors(folder)
    _compare_names(set(expected), set(where), shapes.tied, folder)
    weights: dict[str, torch.Tensor] = {}
    digest = blake2b(digest_size=16, person=b"tailpack-wts-v1")
    files = sorted({where[name] for name in expected})
    total, done = sum(file.stat().st_size for file in files), 0
    handles: dict[Path, Any] = {}
    for file in files:
        with _naming(file):
            handles[file] = safe_open(file, framework="pt")
    for name in sorted(expected):
        with _naming(where[name]):
            stored: torch.Tensor = handles[where[name]].get_tensor(name)
        if tuple(stored.shape) != expected[name] or not stored.is_floating_point():
            raise ModelError(
                f"tensor {name} does not fit config.json",
                reason="BAD_TENSOR",
                given=f"{tuple(stored.shape)} {stored.dtype} in {where[name].name}",
                allowed=f"{expected[name]}, floating point",
            )
        digest.update(f"{name} {stored.dtype} {tuple(stored.shape)}\n".encode())
        digest.update(stored.contiguous().view(-1).view(torch.uint8).numpy().data)
        done += stored.nbytes
        # A copy of its own: what safetensors hands out may lie in the mapped file, which can change under us.
        weights[name] = stored.to(device, dtype, copy=True)
        if not torch.isfinite(weights[name]).all():
            raise ModelError(
                f"tensor {name} holds NaN or infinity",
                reason="BAD_TENSOR",
                given=f"{stored.dtype} in {where[name].name}, read as {dtype}",
                allowed="finite values",
            )
        if progress is not None:
            progress(done, total)
    return weights, digest.digest()


def _locate_tensors(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    if (folder / INDEX_FILE).exists():
        weight_map = model_config.read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise ModelError(
                "the index has no weight_map", given=folder / INDEX_FILE, allowed="tensor name -> file name"
            )
        files = sorted({folder / name for name in weight_map.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError("the model folder holds no weights", given=folder, allowed="*.safetensors")
    where: dict[str, Path] = {}
    for file in files:
        with _naming(file), safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 -- not a dict
                if name in where:
                    raise ModelError(f"tensor {name} is in two files", given=f"{where[name].name}, {file.name}")
                where[name] = file
    return where


def _compare_names(expected: set[str], found: set[str], tied: bool, folder: Path) -> None:
    # Harmless leftovers of other writers: tables that are computed, and the copy of a tied output matrix.
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq")} | ({"lm_head.weight"} if tied else set())
    for what, names in (("missing", expected - found), ("unexpected", found - expected - ignored)):
        if names:
            shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ModelError(
                f"{len(names)} tensors are {what} in {folder}", reason=f"{what.upper()}_TENSOR", given=shown
            )


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turns what reading ``file`` raises into a ModelError that names it."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, UnicodeDecodeError) as error:
        raise ModelError(
            f"cannot read {file.name}: {error}",
            reason="UNREADABLE_WEIGHTS",
            given=file,
            allowed="a readable, whole file",
        ) from error


def _dtype_name(config: WorkerConfig, raw: Mapping[str, Any]) -> str:
    if config.dtype != "auto":
        return config.dtype
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if name not in TORCH_DTYPES:
        raise ModelError("the model's dtype is not built", given=name, allowed=", ".join(TORCH_DTYPES))
    return name


def _tokenizer_digest(folder: Path) -> bytes:
    file = folder / "tokenizer.json"
    if not file.exists():
        return b""
    with _naming(file):
        return blake2b(file.read_bytes(), digest_size=16).digest()
