"""A model of a real geometry with random weights, made on its device: its speed is measured, never its quality."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from protos import types_pb2
from protos.errors import ModelError
from worker import model_config
from worker.config import WorkerConfig
from worker.families import LlamaArchitecture, architecture
from worker.gpu import torch_device
from worker.kv_view import TORCH_DTYPES
from worker.memory_plan import Use
from worker.models.llama import LlamaConfig
from worker.weights import Model, dtype_name
from worker.weights_form import check_weights, quantize

DIGEST = b"random"


class RandomWeights:
    """``worker.models.layers.Weights`` whose tensors are made when they are taken: no copy of all is ever there.

    spread: of what a row makes of its inputs; larger ones make logits that differ by more than bf16 rounds.
    """

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device, spread: float = 1.0) -> None:
        self._shapes, self._dtype, self._device, self._spread = config.tensors(), dtype, device, spread
        self.num_bytes = 0

    def pop(self, name: str, default: Any = None) -> Any:
        shape = self._shapes.pop(name, None)
        if shape is None:
            return default
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        self.num_bytes += tensor.numel() * tensor.element_size()
        if name.endswith("norm.weight"):
            return tensor.normal_(1.0, 0.1)
        return tensor.normal_(0.0, self._spread * shape[-1] ** -0.5)


def random_model(config: WorkerConfig, raw: Mapping[str, Any], seed: int = 0) -> Model:
    """As ``worker.weights.load_model`` of a folder whose config.json is ``raw``. The llama family; no token ends.

    Raises:
        ModelError: another family. ConfigError: as ``load_model``.
    """
    shapes = architecture(raw)
    if not isinstance(shapes, LlamaArchitecture):
        raise ModelError("random weights are made for the llama family only", given=shapes.model_type)
    model_config.check_length(raw, config.max_sequence_tokens)
    max_sequence_tokens = config.max_sequence_tokens or shapes.max_positions
    dtype = dtype_name(config.dtype, raw)
    form = check_weights(config, shapes, dtype)
    geometry = shapes.geometry(config, dtype, max_sequence_tokens)
    torch.manual_seed(seed)
    weights = RandomWeights(shapes.shapes, TORCH_DTYPES[dtype], torch_device(config.device))
    with torch.inference_mode():
        network = shapes.network(weights, max_sequence_tokens)
    if form.held:
        quantize(network, head=not form.stored)
    return Model(
        network=network,
        info=types_pb2.ModelInfo(
            name=config.name,
            architecture=shapes.model_type,
            vocab_size=shapes.vocab_size,
            max_sequence_tokens=max_sequence_tokens,
            weights_digest=form.digest(DIGEST),
            num_parameters=weights.num_bytes // TORCH_DTYPES[dtype].itemsize,
        ),
        geometry=geometry,
        eos_token_ids=(),
        uses=(Use(form.owner, network.weight_bytes),),
        form=form,
    )
