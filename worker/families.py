"""The model families that are built: for each ``model_type`` of config.json, how it is read, laid out and made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from kernels.page_layout import FRAGMENTS
from kvstore.geometry import CacheGeometry, apply_mode
from protos.errors import ConfigError, ModelError
from worker import model_config
from worker.checkpoint import BLOCK_SCALES, E4M3, FP4, FP8, INTEGERS, SCALES, Expected
from worker.config import WorkerConfig
from worker.gpu_kernels import demand_kernels
from worker.models import deepseek_v4_checkpoint as official
from worker.models.deepseek_v4 import DeepseekV4
from worker.models.deepseek_v4_config import MODEL_TYPE as DEEPSEEK_V4
from worker.models.deepseek_v4_config import DeepseekV4Config
from worker.models.deepseek_v4_geometry import cache_geometry, demand_raw_reach, with_raw_mode
from worker.models.deepseek_v4_quantized import dequantized_fp4, dequantized_fp8
from worker.models.layers import Weights
from worker.models.llama import LAYER_PRODUCTS, MODEL_TYPES, Llama, LlamaConfig
from worker.quantization import BLOCK, SCALE, StoredBlocks, stored_blocks

Network = Llama | DeepseekV4


class Architecture(Protocol):
    """A model by its config.json, without weights."""

    @property
    def model_type(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def stored_blocks(self) -> StoredBlocks | None:
        """Which weights the files hold in blocks of FP8 that can be held as they are; None: there are none."""
        ...

    def tensors(self, *, in_blocks: bool = False) -> dict[str, Expected]:
        """Every tensor that the files must hold. ``in_blocks``: what they hold in ``stored_blocks`` is held so, too."""
        ...

    def ignored(self, names: Iterable[str]) -> set[str]:
        """Those of ``names`` that may be there all the same: harmless leftovers of other writers."""
        ...

    def check_settings(self, config: WorkerConfig) -> None:
        """Raises ConfigError: a setting does nothing or cannot be had with this family. Needs no device."""
        ...

    def geometry(self, config: WorkerConfig, dtype: str, max_sequence_tokens: int) -> CacheGeometry:
        """Raises ConfigError: as ``check_settings``; the KV mode does not go with the model, or a GPU has no kernel for
        it (NO_GPU_KERNEL).
        """
        ...

    def network(self, weights: Weights, max_sequence_tokens: int) -> Network:
        """``weights`` are those of ``tensors``, by the same names; taken out one by one."""
        ...


@dataclass(frozen=True)
class LlamaArchitecture:
    """llama, mistral, qwen2, qwen3."""

    shapes: LlamaConfig
    raw: Mapping[str, Any]
    stored_blocks: StoredBlocks | None = None

    @staticmethod
    def parse(raw: Mapping[str, Any]) -> LlamaArchitecture:
        return LlamaArchitecture(LlamaConfig.parse(raw), raw, stored_blocks(raw))

    @property
    def model_type(self) -> str:
        return self.shapes.model_type

    @property
    def vocab_size(self) -> int:
        return self.shapes.vocab_size

    @property
    def max_positions(self) -> int:
        return self.shapes.max_positions

    def tensors(self, *, in_blocks: bool = False) -> dict[str, Expected]:
        found: dict[str, Expected] = {}
        for name, shape in self.shapes.tensors().items():
            if not self._in_blocks(name):
                found[name] = Expected(shape)
                continue
            rows, columns = shape
            scales = (-(-rows // BLOCK), -(-columns // BLOCK))
            if in_blocks:
                found[name] = Expected(shape, FP8, held=E4M3)
                found[name + SCALE] = Expected(scales, BLOCK_SCALES, held="float32")
            else:
                dequantized = partial(dequantized_fp8, block=(BLOCK, BLOCK))
                found[name] = Expected(shape, FP8, scale=name + SCALE, dequantized=dequantized)
                found[name + SCALE] = Expected(scales, BLOCK_SCALES)
        return found

    def _in_blocks(self, name: str) -> bool:
        """Whether this tensor is stored so: a layer's product; the head never is."""
        module, _, kind = name.rpartition(".")
        product = kind == "weight" and module.endswith(LAYER_PRODUCTS)
        return product and self.stored_blocks is not None and self.stored_blocks.holds(module)

    def ignored(self, names: Iterable[str]) -> set[str]:
        tied = {"lm_head.weight"} if self.shapes.tied else set()
        return {name for name in names if name.endswith("rotary_emb.inv_freq")} | tied

    def check_settings(self, config: WorkerConfig) -> None:
        _demand_drafts(config, 0)
        for name in ("kv_retention", "pack_compressed"):
            if value := getattr(config, name):
                raise ConfigError(
                    f"{name} would do nothing with {self.model_type}", given=value, allowed=f"{name} with {DEEPSEEK_V4}"
                )
        if config.kv_mode == "dense" and config.checkpoints > 0:
            raise ConfigError(
                f"checkpoints would do nothing with {self.model_type} in kv_mode dense, which resumes from its pages",
                given=config.checkpoints,
                allowed="leave checkpoints out",
            )

    def geometry(self, config: WorkerConfig, dtype: str, max_sequence_tokens: int) -> CacheGeometry:
        self.check_settings(config)
        geometry = apply_mode(
            self.shapes.geometry(dtype, max_sequence_tokens),
            config.kv_mode,
            config.preset,
            config.dense_layers,
            compiled_only=config.on_gpu,
        )
        if config.on_gpu:
            demand_kernels(geometry, self.shapes.q_heads)
            geometry = geometry.with_page_layout(FRAGMENTS)  # packed pages in the order of the GPU's kernels
        return geometry

    def network(self, weights: Weights, max_sequence_tokens: int) -> Llama:
        return Llama(self.shapes, self.raw, weights, max_sequence_tokens)


@dataclass(frozen=True)
class DeepseekV4Architecture:
    """deepseek_v4, in the official checkpoint's names."""

    shapes: DeepseekV4Config

    @staticmethod
    def parse(raw: Mapping[str, Any]) -> DeepseekV4Architecture:
        return DeepseekV4Architecture(DeepseekV4Config.parse(raw))

    @property
    def model_type(self) -> str:
        return DEEPSEEK_V4

    @property
    def vocab_size(self) -> int:
        return self.shapes.vocab_size

    @property
    def max_positions(self) -> int:
        return self.shapes.max_positions

    @property
    def stored_blocks(self) -> None:
        return None

    def tensors(self, *, in_blocks: bool = False) -> dict[str, Expected]:
        shapes = official.tensors(self.shapes)
        return {name: self._expected(name, shapes) for name in shapes}

    def _expected(self, name: str, shapes: official.Shapes) -> Expected:
        shape, scale = shapes[name], name.removesuffix("weight") + "scale"
        if official.is_integer(name):
            return Expected(shape, INTEGERS, held="int64")
        if name.endswith(".scale"):
            return Expected(shape, SCALES)
        if scale not in shapes:
            return Expected(shape, held="float32" if official.kept_in_float32(name) else "")
        if self.shapes.fp4_experts and ".ffn.experts." in name:
            return Expected(shape, FP4, scale=scale, dequantized=dequantized_fp4, packed=2)
        assert self.shapes.weight_block is not None
        return Expected(shape, FP8, scale=scale, dequantized=partial(dequantized_fp8, block=self.shapes.weight_block))

    def ignored(self, names: Iterable[str]) -> set[str]:
        return set()

    def check_settings(self, config: WorkerConfig) -> None:
        self.geometry(config, "float32", self.max_positions)

    def geometry(self, config: WorkerConfig, dtype: str, max_sequence_tokens: int) -> CacheGeometry:
        if config.dense_layers != (0, 0):
            raise ConfigError(f"dense_layers are not built for {DEEPSEEK_V4}", given=config.dense_layers, allowed="0,0")
        if not config.checkpoints:
            raise ConfigError(
                f"{DEEPSEEK_V4} resumes at checkpoints alone, so without them prefix reuse would be switched off",
                reason="PREFIX_REUSE_OFF",
                given="checkpoints 0",
                allowed="checkpoints 1 or more",
                hint="leave checkpoints out, or send requests with prefix_reuse none",
            )
        _demand_drafts(config, self.shapes.num_draft_layers)
        geometry = cache_geometry(self.shapes, dtype, drafts=config.drafts > 0)
        geometry = with_raw_mode(
            geometry,
            config.kv_mode,
            config.preset,
            retention=config.kv_retention,
            pack_compressed=config.pack_compressed,
        )
        demand_raw_reach(geometry, self.shapes.window)
        return geometry

    def network(self, weights: Weights, max_sequence_tokens: int) -> DeepseekV4:
        return DeepseekV4(self.shapes, weights)


def _demand_drafts(config: WorkerConfig, num_draft_layers: int) -> None:
    if config.drafts and not num_draft_layers:
        raise ConfigError(
            "the model has no MTP block to guess with",
            reason="NO_DRAFT_LAYERS",
            given=f"drafts {config.drafts}",
            allowed="0",
            hint="leave drafts out",
        )


FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], Architecture]] = {
    **dict.fromkeys(MODEL_TYPES, LlamaArchitecture.parse),
    DEEPSEEK_V4: DeepseekV4Architecture.parse,
}


def architecture(raw: Mapping[str, Any]) -> Architecture:
    """The model that a config.json describes.

    Raises:
        ModelError: ARCHITECTURE_NOT_BUILT; a value is missing, malformed or out of its range; it asks for what is not
            built (QUANTIZATION_NOT_BUILT, ROPE_NOT_BUILT, ...).
    """
    parse = FAMILIES.get(str(raw.get("model_type")))
    if parse is None:
        raise ModelError(
            "this model architecture is not built",
            reason="ARCHITECTURE_NOT_BUILT",
            given=raw.get("model_type"),
            allowed=", ".join(FAMILIES),
        )
    return parse(model_config.checked(raw))
