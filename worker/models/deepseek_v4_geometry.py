"""DeepSeek-V4's KV cache: which rows its layers keep, in two layer groups."""

from __future__ import annotations

from dataclasses import replace

from kvstore.geometry import CacheGeometry, LayerGroup, Region, demand_dense_reach
from protos.errors import ConfigError
from worker.models.deepseek_v4_config import CSA_RATIO, DeepseekV4Config, pending_width

RAW, COMPRESSED = "raw", "compressed"
"""Layer groups: every layer's raw rows, read inside the window only; and what the compressors make of all tokens."""
RAW_ROW, CSA_ROW, HCA_ROW, INDEX_KEY = "raw", "csa", "hca", "index"
CSA_PENDING, HCA_PENDING, INDEX_PENDING = "csa_pending", "hca_pending", "index_pending"
"""Kinds of rows. A pending row has two heads: a token's value and its score, which wait for the rest of their block."""
RETENTION_OF_MODE = {
    "dense": ("all",),
    "fp8": ("all", "checkpoints"),
    "turboquant": ("all", "checkpoints"),
    "window": ("none",),
}
"""What may be kept of raw rows behind the window, by their mode; the first is the default."""
DEFAULT_KEEP_EVERY = 16
"""Retention "checkpoints" keeps one page in 2,048 tokens: 699 B a token of V4-Flash at tq4."""


def cache_geometry(config: DeepseekV4Config, dtype: str, *, drafts: bool = False) -> CacheGeometry:
    """Raw rows of every layer, and what the compressors make; both groups in mode dense.

    Args:
        drafts: with the raw rows of the MTP blocks, whose layers follow the main ones.
    """
    num_layers = config.num_layers + (config.num_draft_layers if drafts else 0)
    raw = tuple(Region(layer, RAW_ROW, 1, config.head_dim, dtype) for layer in range(num_layers))
    compressed: list[Region] = []
    for layer, ratio in enumerate(config.ratios):
        if not ratio:
            continue
        row, pending = (CSA_ROW, CSA_PENDING) if ratio == CSA_RATIO else (HCA_ROW, HCA_PENDING)
        compressed.append(Region(layer, row, 1, config.head_dim, dtype, ratio=ratio))
        compressed.append(_pending(layer, pending, pending_width(ratio, config.head_dim), ratio))
        if ratio == CSA_RATIO:
            compressed.append(Region(layer, INDEX_KEY, 1, config.index_dim, dtype, ratio=ratio))
            compressed.append(_pending(layer, INDEX_PENDING, pending_width(ratio, config.index_dim), ratio))
    groups = [LayerGroup(RAW, raw, window=config.window)]
    if compressed:
        groups.append(LayerGroup(COMPRESSED, tuple(compressed)))
    return CacheGeometry(tuple(groups))


def with_raw_mode(
    geometry: CacheGeometry,
    mode: str,
    preset: str = "",
    *,
    retention: str = "",
    keep_every: int = DEFAULT_KEEP_EVERY,
    pack_compressed: str = "",
) -> CacheGeometry:
    """The geometry with raw rows in ``mode``. Compressed rows and index keys stay dense, unless asked otherwise.

    Args:
        retention: what is kept of raw rows behind the window, one of RETENTION_OF_MODE[mode]: "all" pages,
            "checkpoints" (every ``keep_every``-th page and those of prompt ends) or "none" (mode window).
        pack_compressed: a TurboQuant preset that packs CSA rows, HCA rows and index keys, too. Then attention reads
            packed rows, and its results change. Pending rows are never packed.

    Raises:
        ConfigError: what ``LayerGroup`` raises; mode and retention do not go together (RETENTION_MISMATCH).
    """
    allowed = RETENTION_OF_MODE.get(mode, ("all",))  # an unknown mode is LayerGroup's to refuse
    if retention and retention not in allowed:
        raise ConfigError(
            f"retention {retention!r} of raw rows does not go with their mode {mode}",
            reason="RETENTION_MISMATCH",
            given=retention,
            allowed=" or ".join(allowed),
            hint="mode window keeps nothing behind the window; modes fp8 and turboquant keep all pages or checkpoints",
        )
    groups = []
    for group in geometry.groups:
        if group.name == RAW:
            every = keep_every if retention == "checkpoints" else 1
            group = replace(group, mode=mode, preset=preset, keep_every=every)
        elif pack_compressed:
            group = replace(group, mode="turboquant", preset=pack_compressed)
        groups.append(group)
    return replace(geometry, groups=tuple(groups))


def demand_raw_reach(geometry: CacheGeometry, reach: int) -> None:
    """Refuses an attention that reads raw rows of ``reach`` tokens (0: all) where the mode has packed or dropped them.

    Raises:
        ConfigError: DENSE_REACH_PAST_WINDOW.
    """
    demand_dense_reach(geometry.group(RAW), reach, "raw attention")


def _pending(layer: int, kind: str, width: int, ratio: int) -> Region:
    carry = ratio if ratio == CSA_RATIO else 0  # its blocks overlap: each pools the one before, too
    return Region(layer, kind, 2, width, "float32", block=ratio, carry=carry)
