"""Loads a model from a folder in the Hugging Face layout: config.json and one or several safetensors files.

Everything that does not belong together is refused here, by name, before the worker reports ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import structlog
import torch

from kvstore.geometry import CacheGeometry
from kvstore.memory_limit import available_bytes
from protos import types_pb2
from protos.errors import ModelError
from worker import memory_plan, model_config
from worker.checkpoint import INDEX_FILE, Expected, Progress, Shapes, Stored, Tensors, demand_match, headers, naming
from worker.config import WorkerConfig
from worker.families import Architecture, Network, architecture
from worker.gpu import torch_device
from worker.kv_view import TORCH_DTYPES
from worker.memory_plan import IN_BLOCKS
from worker.models.llama import Llama
from worker.weights_form import AS_STORED, WeightsForm, check_weights, quantize

__all__ = ["INDEX_FILE", "Model", "load_model", "planned_uses"]

log = structlog.get_logger("worker")


@dataclass(frozen=True)
class Model:
    """A loaded model. ``network`` computes; the rest describes it.

    ``form``: how its weights are held.
    ``uses``: what its weights take of this process's memory, by owner; nothing where the store holds them.
    ``tiles_checked``: ``model_runner.check_tiles`` has passed in this process, with the config's threads.
    """

    network: Network
    info: types_pb2.ModelInfo
    geometry: CacheGeometry
    eos_token_ids: tuple[int, ...]
    uses: tuple[memory_plan.Use, ...]
    form: WeightsForm = AS_STORED
    tiles_checked: bool = False


@dataclass(frozen=True)
class Plan:
    """A model that can be loaded: its config and its files' headers are checked and fit together.

    Attributes:
        expected, found: tensors as the model wants them, and as the files' headers have them.
        dtype: of weights, activations and KV.
        uses: what the weights take once they are loaded, by owner; the last is what reading them takes meanwhile.
    """

    config: WorkerConfig
    shapes: Architecture
    geometry: CacheGeometry
    eos_token_ids: tuple[int, ...]
    max_sequence_tokens: int
    dtype: str
    device: torch.device
    form: WeightsForm
    expected: Mapping[str, Expected]
    found: Mapping[str, Stored]
    uses: tuple[memory_plan.Use, ...]

    @staticmethod
    def of(config: WorkerConfig) -> Plan:
        """Raises what ``load_model`` does before any weight is read, but for MODEL_TOO_LARGE."""
        raw = model_config.read_json(config.model / "config.json")
        shapes = architecture(raw)
        eos_token_ids = model_config.eos_token_ids(config.model, raw)
        model_config.check_length(raw, config.max_sequence_tokens)
        max_sequence_tokens = config.max_sequence_tokens or shapes.max_positions
        dtype = dtype_name(config.dtype, raw)
        form = check_weights(config, shapes, dtype)
        device = torch_device(config.device)
        geometry = shapes.geometry(config, dtype, max_sequence_tokens)
        expected, found = _matched(shapes, config.model, form)
        plan = Plan(
            config=config,
            shapes=shapes,
            geometry=geometry,
            eos_token_ids=eos_token_ids,
            max_sequence_tokens=max_sequence_tokens,
            dtype=dtype,
            device=device,
            form=form,
            expected=expected,
            found=found,
            uses=memory_plan.weight_uses(expected, found, dtype),
        )
        if form.held:
            plan.without_weights()  # what does not go into blocks
        return plan

    def load(self, progress: Progress | None = None) -> tuple[Network, bytes]:
        """Reads the weights. Returns the network and the weights' digest. Raises MODEL_TOO_LARGE, ModelError."""
        uses = self.uses
        told = self.form.told(self.config.weights)
        log.info("memory of the model", weights=told, uses=memory_plan.table(uses), arenas=self.config.arena_bytes)
        memory_plan.demand_fit(uses, *_room(self.device))  # arenas apart: the store may hold them already
        with Tensors(self.expected, self.found, TORCH_DTYPES[self.dtype], self.device, progress) as weights:
            network = self.shapes.network(weights, self.max_sequence_tokens)
            digest = weights.digest()
        if self.form.quantizes:
            quantize(network)
        return network, self.form.digest(digest)

    def without_weights(self) -> Network:
        """The network on torch's device "meta": shapes and dtypes of all its tensors, and no values."""
        network = self.shapes.network(Shapes(self.expected, TORCH_DTYPES[self.dtype]), self.max_sequence_tokens)
        if self.form.quantizes:
            quantize(network)
        return network

    def model(self, network: Network, digest: bytes, uses: tuple[memory_plan.Use, ...]) -> Model:
        return Model(
            network=network,
            info=types_pb2.ModelInfo(
                name=self.config.name,
                architecture=self.shapes.model_type,
                vocab_size=self.shapes.vocab_size,
                max_sequence_tokens=self.max_sequence_tokens,
                eos_token_ids=self.eos_token_ids,
                weights_digest=digest,
                tokenizer_digest=_tokenizer_digest(self.config.model),
                num_parameters=sum(wanted.num_values for wanted in self.expected.values() if not wanted.is_scale),
            ),
            geometry=self.geometry,
            eos_token_ids=self.eos_token_ids,
            uses=uses,
            form=self.form,
        )


def load_model(config: WorkerConfig, progress: Progress | None = None) -> Model:
    """Reads config and weights, checks both, converts to the config's dtype, on the config's device.

    Weights are read one by one, quantised ones dequantised as they come, so that loading takes little more than the
    model does. ``worker.weights_arena`` finds them in the store's memory instead.

    Raises:
        ModelError: a file is missing, unreadable or corrupt; a tensor is missing, unexpected or of the wrong shape; the
            model asks for something that is not built.
        ConfigError: ``max_sequence_tokens`` is more than the model's; or the KV mode does not go with the model (what
            ``apply_mode`` raises), or a GPU has no kernel for it (NO_GPU_KERNEL), before any weight is read.
        CapacityError: MODEL_TOO_LARGE, with what would be taken by owner, before any weight is read.
    """
    plan = Plan.of(config)
    network, digest = plan.load(progress)
    uses = plan.uses[:-1]  # what reading takes is given back
    if plan.form.quantizes and isinstance(network, Llama):
        uses = (memory_plan.Use(IN_BLOCKS, network.weight_bytes, memory_plan.total(uses)),)
    return plan.model(network, digest, uses)


def planned_uses(folder: Path, dtype: str, weights: str = "", *, captured: bool = False) -> tuple[memory_plan.Use, ...]:
    """What a model's weights will take, by owner; config.json and the files' headers are checked, nothing is loaded.

    Args:
        dtype, weights: as in ``WorkerConfig``. captured: its decode_graphs.

    Raises:
        ModelError: as ``load_model`` does for anything that shows without reading weights.
    """
    raw = model_config.read_json(folder / "config.json")
    shapes = architecture(raw)
    form = WeightsForm.of(shapes, weights, captured=captured)
    return memory_plan.weight_uses(*_matched(shapes, folder, form), dtype_name(dtype, raw))


def _matched(shapes: Architecture, folder: Path, form: WeightsForm) -> tuple[dict[str, Expected], dict[str, Stored]]:
    expected, found = shapes.tensors(in_blocks=form.held), headers(folder)
    demand_match(expected, found, shapes.ignored(found), folder)
    return expected, found


def _room(device: torch.device) -> tuple[int, str]:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free, f"free on {device}"
    return available_bytes()


def dtype_name(asked: str, raw: Mapping[str, Any]) -> str:
    """The dtype of weights, activations and KV: what is asked for, or what config.json says where that is "auto".

    Raises:
        ModelError: config.json's is not built.
    """
    if asked != "auto":
        return asked
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if name not in TORCH_DTYPES:
        raise ModelError("the model's dtype is not built", given=name, allowed=", ".join(TORCH_DTYPES))
    return name


def _tokenizer_digest(folder: Path) -> bytes:
    file = folder / "tokenizer.json"
    if not file.exists():
        return b""
    with naming(file):
        return blake2b(file.read_bytes(), digest_size=16).digest()
