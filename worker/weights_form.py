"""How a model's weights are held, by how its files have them and what is asked for: in blocks of FP8 or as one dtype.

Asked for nothing, a GPU whose decode steps are captured holds FP8 blocks as the files have them: those steps' products
read codes. Others would make each weight anew for each product: there blocks are dequantised as they are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import torch

from protos.errors import ConfigError
from worker.checkpoint import E4M3
from worker.config import BF16, FP8_BLOCK, WorkerConfig
from worker.families import Architecture, LlamaArchitecture, Network
from worker.memory_plan import FROM_FP8, IN_BLOCKS, WEIGHTS
from worker.models.block_weight import DEQUANTIZE
from worker.models.llama import LAYER_PRODUCTS, Llama


@dataclass(frozen=True)
class WeightsForm:
    """``stored``, ``held``: whether products' weights are in FP8 blocks in the files, and in memory."""

    stored: bool = False
    held: bool = False

    @staticmethod
    def of(shapes: Architecture, weights: str, *, captured: bool) -> WeightsForm:
        """``weights``: as ``WorkerConfig.weights``. ``captured``: decode steps are, which is on a GPU."""
        stored = shapes.stored_blocks is not None
        return WeightsForm(stored, weights == FP8_BLOCK or (stored and weights != BF16 and captured))

    @property
    def quantizes(self) -> bool:
        return self.held and not self.stored

    @property
    def dequantizes(self) -> bool:
        return self.stored and not self.held

    @property
    def owner(self) -> str:
        """Of all weights together, where one name is to say it."""
        return IN_BLOCKS if self.held else FROM_FP8 if self.stored else WEIGHTS

    def told(self, asked: str) -> str:
        """For people: what is engaged, where ``WorkerConfig.weights`` is ``asked``."""
        if not self.held:
            return "dequantised from fp8_block" if self.stored else asked or "as stored"
        return f"{FP8_BLOCK}{', as stored' if self.stored else ''}"

    def digest(self, of_files: bytes) -> bytes:
        """Of the weights as they are held: other values, other results."""
        if self.held == self.stored:
            return of_files
        person = b"tp-fp8-block" if self.held else b"tp-dequantised"
        return blake2b(of_files, digest_size=len(of_files), person=person).digest()


AS_STORED = WeightsForm()


def check_weights(config: WorkerConfig, shapes: Architecture, dtype: str) -> WeightsForm:
    """The form that a worker holds its weights in.

    Raises ConfigError: WEIGHTS_NOT_ENGAGED, it is not had with this family or dtype, or not from these files.
    """
    if config.weights and (not isinstance(shapes, LlamaArchitecture) or dtype != "bfloat16"):
        raise ConfigError(
            f"weights {config.weights} would not engage",
            reason="WEIGHTS_NOT_ENGAGED",
            given=f"{shapes.model_type} in {dtype}",
            allowed="the llama family in bfloat16",
            hint="leave weights out",
        )
    form = WeightsForm.of(shapes, config.weights, captured=config.decode_graphs)
    if form.held and form.stored and config.decode_graphs:
        _check_captured(shapes, dtype)
    return form


def _check_captured(shapes: Architecture, dtype: str) -> None:
    """Of what captured decode steps read: rows in bfloat16, and chains of products that are all in blocks."""
    tensors = shapes.tensors(in_blocks=True)
    products = [wanted for name, wanted in tensors.items() if name.removesuffix(".weight").endswith(LAYER_PRODUCTS)]
    in_blocks = sum(wanted.held == E4M3 for wanted in products)
    if dtype != "bfloat16" or in_blocks not in (0, len(products)):
        raise ConfigError(
            "decode_graphs cannot read these weights in FP8 blocks as they are stored",
            reason="WEIGHTS_NOT_ENGAGED",
            given=f"{in_blocks} of {len(products)} products in blocks, in {dtype}",
            allowed="all products of the layers, or none, in bfloat16",
            hint=f"{DEQUANTIZE if dtype == 'bfloat16' else '--dtype bfloat16'}; or leave decode_graphs out",
        )


def quantize(network: Network, *, head: bool = True) -> None:
    """Products' weights to FP8 blocks, in place; ``head``: the output matrix too, where it is one of its own.

    Raises ModelError: NO_BLOCKS, a width does not go into blocks.
    """
    assert isinstance(network, Llama), "checked before anything is loaded"
    with torch.inference_mode():
        network.use_blocks(head=head)
    if network.device.type == "cuda":
        torch.cuda.empty_cache()  # the originals go back to the device, for the arenas
