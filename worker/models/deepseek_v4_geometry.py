"""DeepSeek-V4's KV cache: which rows its layers keep, in two layer groups."""

from __future__ import annotations

from dataclasses import replace

from kvstore.geometry import CacheGeometry, LayerGroup, Region
from worker.models.deepseek_v4_config import CSA_RATIO, DeepseekV4Config, pending_width

RAW, COMPRESSED = "raw", "compressed"
"""Layer groups: every layer's raw rows, read inside the window only; and what the compressors make of all tokens."""
RAW_ROW, CSA_ROW, HCA_ROW, INDEX_KEY = "raw", "csa", "hca", "index"
CSA_PENDING, HCA_PENDING, INDEX_PENDING = "csa_pending", "hca_pending", "index_pending"
"""Kinds of rows. A pending row has two heads: a token's value and its score, which wait for the rest of their block."""


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
        compressed.append(_pending(layer, pending, pending_width(ratio, config.head_dim)))
        if ratio == CSA_RATIO:
            compressed.append(Region(layer, INDEX_KEY, 1, config.index_dim, dtype, ratio=ratio))
            compressed.append(_pending(layer, INDEX_PENDING, pending_width(ratio, config.index_dim)))
    groups = [LayerGroup(RAW, raw, window=config.window)]
    if compressed:
        groups.append(LayerGroup(COMPRESSED, tuple(compressed)))
    return CacheGeometry(tuple(groups))


def with_raw_mode(
    geometry: CacheGeometry, mode: str, preset: str = "", *, pack_compressed: bool = False
) -> CacheGeometry:
    """The geometry with raw rows in ``mode``; compressed rows and index keys stay dense, or are packed alike.

    Raises:
        ConfigError: as ``LayerGroup`` does; mode window with ``pack_compressed`` is one such (NO_MODEL_WINDOW), because
            compressed rows have no window.
    """
    return replace(
        geometry,
        groups=tuple(
            replace(group, mode=mode, preset=preset) if group.name == RAW or pack_compressed else group
            for group in geometry.groups
        ),
    )


def _pending(layer: int, kind: str, width: int) -> Region:
    return Region(layer, kind, 2, width, "float32", tail_only=True)
