"""Whether a GPU has kernels for a model, and what their errors are called here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kernels.cells import ARCHES
from kernels.decode_cells import DecodeShape, decode_cell
from kernels.decode_memory import ROW_TYPES
from kernels.errors import ArgumentError, KernelError
from kernels.widths import COMPILED_WIDTHS
from kvstore.geometry import CacheGeometry, LayerGroup
from protos.errors import ConfigError, PreconditionFailed
from worker.kv_view import TORCH_DTYPES


def demand_kernels(geometry: CacheGeometry, q_heads: int) -> None:
    """Refuses what no decode kernel reads, before weights are loaded: a dtype, a width, a number of heads.

    Args:
        geometry: regions "k" and "v" of each layer. q_heads: of every layer.

    Raises:
        ConfigError: NO_GPU_KERNEL.
    """
    for group in geometry.groups:
        by_kind = {region.kind: region for region in group.paged_regions}  # the same in every layer of a group
        k, v = by_kind["k"], by_kind["v"]
        row_type = ROW_TYPES.get(TORCH_DTYPES[k.dtype], k.dtype)
        with naming_kernels(f"layer group {group.name!r}"):
            decode_cell(DecodeShape(k.dim, q_heads, k.heads, group.codec(k), group.codec(v), row_type), ARCHES[0])


def attention_kernels(geometry: CacheGeometry) -> bool:
    """Whether attention over this cache is the kernels': of keys and values apart. DeepSeek-V4's is PyTorch's."""
    return all({region.kind for region in group.regions} == {"k", "v"} for group in geometry.groups)


def page_kernels(group: LayerGroup) -> bool:
    """Whether kernels pack and unpack this packed group's pages: TurboQuant rows of a compiled width, or fp8 rows, one
    width a group. Without: V4's fp8 rows of 590 bytes, rows of other widths, groups of several widths (V4's compressed
    rows with their index keys).
    """
    codecs, dims = ({f(region) for region in group.paged_regions} for f in (group.codec, lambda region: region.dim))
    if len(dims) > 1:
        return False
    (dim,) = dims
    if codecs == {"fp8"}:
        return dim % 8 == 0
    return all(codec.startswith("tq") for codec in codecs) and dim in COMPILED_WIDTHS


@contextmanager
def naming_kernels(what: str) -> Iterator[None]:
    """Turns what ``kernels`` raises about ``what`` into our errors.

    Raises:
        ConfigError: NO_GPU_KERNEL, none takes it. PreconditionFailed: GPU_KERNELS_NOT_READY, this machine cannot load
        or compile them.
    """
    try:
        yield
    except KernelError as error:
        found, reason = (
            (ConfigError, "NO_GPU_KERNEL")
            if isinstance(error, ArgumentError)
            else (PreconditionFailed, "GPU_KERNELS_NOT_READY")
        )
        raise found(
            f"{what} cannot run on this GPU: {error.reason}",
            reason=reason,
            given=error.given,
            allowed=error.allowed,
            hint=f"{error.action}; or use device cpu",
        ) from error
