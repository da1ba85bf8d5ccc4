"""Which cell serves a layer's decode attention. Pure: no torch, no device."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.cells import MODEL_TYPES, AttentionVariant, Cell, mqa_cell, packed_cell, rows_cell
from kernels.errors import ArgumentError
from kernels.widths import PRESETS, require_compiled

MAX_QUERIES = 8  # tokens of one sequence in a call: speculation
MAX_GROUP = 64  # query heads on one kv head
MQA_VECTORS = 16  # from here on whole warpgroup tiles of queries pay
_MQA_ARCH, _MQA_WIDTH, _MQA_CODEC = "sm_90a", 512, "tq4"
_SHARED_CODECS = ("tq2", "tq3", "tq4")
_ROW_CODECS = ("dense", "fp8")


@dataclass(frozen=True)
class DecodeShape:
    """What decides about the kernels of a layer.

    key_codec, value_codec: names as in `page_codec`; value_codec None: the keys are the values too.
    row_type: "bf16" or "f16", of queries, tails and outputs. num_queries: tokens of a sequence in one call.
    """

    dim: int
    q_heads: int
    kv_heads: int
    key_codec: str
    value_codec: str | None
    row_type: str = "bf16"
    num_queries: int = 1
    softcap: bool = False

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def num_vectors(self) -> int:
        """Query vectors of a kv head."""
        return self.num_queries * self.group

    @property
    def packed(self) -> bool:
        """Whether pages are read in whole splits by the integer reader, not as rows."""
        return self.value_codec is not None and self.key_codec in _SHARED_CODECS


def decode_cell(shape: DecodeShape, arch: str, *, profile: bool = False) -> Cell:
    """The cell for `shape` on `arch`.

    Raises ArgumentError (heads, queries, dtype, a pair of codecs without a kernel), UncompiledWidthError.
    """
    _check_shape(shape)
    num_vectors = shape.num_vectors
    keys, values = shape.key_codec, shape.value_codec
    variant = AttentionVariant(shape.row_type, 8, shape.softcap, profile)
    if shape.packed:
        for preset in PRESETS.values():
            if (keys, values) == (f"tq{preset.key_bits}", f"tq{preset.value_bits}"):
                few = AttentionVariant(shape.row_type, 4, shape.softcap, profile)
                return packed_cell(shape.dim, preset.name, few if num_vectors <= 4 else variant)
    elif keys in _ROW_CODECS and values in (keys, None):
        return rows_cell(shape.dim, keys, variant)
    elif values is None and keys in _SHARED_CODECS:
        if (arch, shape.dim, keys) == (_MQA_ARCH, _MQA_WIDTH, _MQA_CODEC) and num_vectors >= MQA_VECTORS:
            return mqa_cell(shape.dim, keys, variant)
        return rows_cell(shape.dim, keys, variant)
    presets = ", ".join(f"tq{preset.key_bits} with tq{preset.value_bits}" for preset in PRESETS.values())
    raise ArgumentError(
        "no attention kernel reads these keys and values",
        given=f"keys {keys}, values {values or 'shared with the keys'}",
        allowed=f"{presets}; dense or fp8 for both; {', '.join((*_SHARED_CODECS, *_ROW_CODECS))} shared",
        action="use another mode or preset for this layer group",
    )


def _check_shape(shape: DecodeShape) -> None:
    require_compiled(shape.dim, "key")
    if shape.kv_heads < 1 or shape.q_heads % shape.kv_heads or not 1 <= shape.group <= MAX_GROUP:
        raise ArgumentError(
            "query heads do not fit the kv heads",
            given=f"{shape.q_heads} query heads, {shape.kv_heads} kv heads",
            allowed=f"1 to {MAX_GROUP} query heads a kv head, as many for each",
            action="pass the layer's own head counts",
        )
    if not 1 <= shape.num_queries <= MAX_QUERIES:
        raise ArgumentError(
            "decode takes few tokens of a sequence",
            given=str(shape.num_queries),
            allowed=f"1 to {MAX_QUERIES}",
            action="use kernels.prefill for a chunk",
        )
    if shape.row_type not in MODEL_TYPES:
        raise ArgumentError(
            "no attention kernel takes rows of this dtype",
            given=shape.row_type,
            allowed=", ".join(MODEL_TYPES),
            action="run the model in bfloat16",
        )
