"""What a model's KV cache looks like, as data: layer groups, regions, modes, and the bytes that follow from them.

A page holds 128 consecutive tokens of one layer group, all its layers, in one contiguous blob; a tail slot holds the
dense rows of one sequence's newest tokens in one group, a ring a region. Both layouts are pure functions of (geometry,
LAYOUT_VERSION); both ends of an attach compare the digest. How packed rows are ordered inside a page is the geometry's
own choice (``page_layout_version``): rows for pages that CPUs read, fragments for those of GPU kernels. No torch, no
numpy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from kernels import page_layout
from kernels.page_layout import PageLayout
from kernels.record_sizes import (
    MAX_WIDTH,
    MIN_WIDTH,
    SCALE_BYTES,
    V4_FP8_CODE_BYTES,
    V4_FP8_SCALE_BYTES,
    V4_WIDTH,
    code_bytes,
    parts,
)
from kernels.widths import COMPILED_WIDTHS, PRESETS
from protos import kvstore_pb2
from protos.errors import ConfigError, PreconditionFailed
from protos.page_hash import PAGE_TOKENS

LAYOUT_VERSION = 3
DEFAULT_MARGIN = 16
DEFAULT_DENSE_WINDOW = 128
MAX_DENSE_MODEL_WINDOW = (
    256  # a model window of at most this stays dense; of a larger one, the newest dense_window tokens
)
DEFAULT_MAX_STEP_TOKENS = 9  # a verify step of 8 drafted tokens
PENDING_RING_ROWS = 8  # rings of pending rows are multiples of it
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
COMPILED_MODES = ("dense", "turboquant", "fp8", "window")
PACKED_MODES = ("turboquant", "fp8")
V4_RAW = ("raw", V4_WIDTH)  # kind and width of the rows that have an fp8 record of their own
MAX_NAME_BYTES = 64
EDGES = "-edges"
_NAME = re.compile(rf"[A-Za-z0-9_.\-]{{1,{MAX_NAME_BYTES}}}\Z")  # no spaces or newlines: describe() stays unambiguous


@dataclass(frozen=True)
class Region:
    """One kind of row in one layer: ``heads`` vectors of ``dim`` values for every ``ratio`` tokens.

    ``block`` above 0 marks pending rows (a compressor's), which wait for the rest of their block of so many tokens: one
    a token, kept in a ring of the tail, never in a page. What completes a block reads ``carry`` tokens before it, too.
    """

    layer: int
    kind: str
    heads: int
    dim: int
    dtype: str
    ratio: int = 1
    block: int = 0
    carry: int = 0

    def __post_init__(self) -> None:
        where = f"region {self.kind!r} of layer {self.layer}"
        _check_name(self.kind, "region kind")
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"{where} has an unknown dtype", given=self.dtype, allowed=", ".join(ITEM_BYTES))
        if min(self.heads, self.dim, self.ratio) < 1 or self.layer < 0:
            raise ConfigError(f"{where} has a size below 1", given=self, allowed="heads, dim, ratio >= 1; layer >= 0")
        if PAGE_TOKENS % self.ratio:
            raise ConfigError(f"{where} does not fill a page", given=self.ratio, allowed=f"divisors of {PAGE_TOKENS}")
        if self.tail_only and self.ratio != 1:
            raise ConfigError(f"{where} is tail_only and so has a row a token", given=self.ratio, allowed="ratio 1")
        if self.block < 0 or (self.block and PAGE_TOKENS % self.block):
            raise ConfigError(
                f"{where} waits for blocks that do not fill a page",
                given=self.block,
                allowed=f"divisors of {PAGE_TOKENS}, or 0: it does not wait",
            )
        if self.carry < 0 or (self.carry and not self.tail_only):
            raise ConfigError(f"{where} carries rows and waits for no block", given=self.carry, allowed="0")

    @property
    def tail_only(self) -> bool:
        """Whether these are pending rows."""
        return self.block > 0

    @property
    def rows_per_page(self) -> int:
        return PAGE_TOKENS // self.ratio

    def first_pending(self, num_tokens: int) -> int:
        """First token whose pending row a sequence of ``num_tokens`` may read again; ``num_tokens``: it reads none."""
        if not self.tail_only or not num_tokens:
            return num_tokens
        return max(0, num_tokens // self.block * self.block - self.carry)

    @property
    def pending_reach(self) -> int:
        """The most tokens before a length whose pending rows that length needs: 7 of V4's CSA, 127 of its HCA."""
        return self.block - 1 + self.carry if self.tail_only else 0

    @property
    def row_bytes(self) -> int:
        """A row as computed, all heads."""
        return self.heads * self.dim * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Plane:
    """Where one plane of a region lies in a page or in a tail slot, at byte ``offset``.

    part "rows": dense rows, ``shape`` (rows, heads, dim) in the region's dtype. Parts "codes" and "scales": ``shape``
    (heads, rows, bytes) of uint8, in the planes of ``kernels.page_layout``; in the order of fragments ``bytes`` is a
    row's share of its group. ``strides`` are in bytes. ``num_bytes`` counts the plane's own bytes, without padding; a
    head's planes of a packed region are ``strides[0]`` apart.
    """

    region: Region
    offset: int
    shape: tuple[int, int, int]
    num_bytes: int
    part: str = "rows"
    strides: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class LayerGroup:
    """Regions that share a window, a retention and a mode.

    Args:
        mode: "dense", "turboquant", "fp8" or "window" (DESIGN.md 3.1).
        preset: bits of keys and values in mode turboquant: "tq4", "tq4v3", "tq3" or "tq3v2"; else empty.
        window: the model's attention window in tokens, the query's own included; 0 means that it attends to everything.
        dense_window: tokens that stay dense where the model has no window, or one above 256.
        page_layout_version: order of packed rows inside pages, of ``kernels.page_layout``: 1 rows, 2 fragments.
        keep_every: pages that are kept of rows that no query reads again: every so many-th, and those of prompt ends;
            1: all of them.

    Raises:
        ConfigError: a value is out of range, or mode, preset, window and widths do not go together.
    """

    name: str
    regions: tuple[Region, ...]
    mode: str = "dense"
    preset: str = ""
    window: int = 0
    dense_window: int = DEFAULT_DENSE_WINDOW
    page_layout_version: int = page_layout.ROWS
    keep_every: int = 1

    def __post_init__(self) -> None:
        _check_name(self.name, "layer group name")
        if self.window < 0:
            raise ConfigError(
                f"window of layer group {self.name!r} is negative", given=self.window, allowed="0 or more"
            )
        if self.dense_window < 1:
            raise ConfigError(
                f"dense_window of layer group {self.name!r} is below 1", given=self.dense_window, allowed="1 or more"
            )
        if self.page_layout_version not in page_layout.VERSIONS:
            raise ConfigError(
                f"page layout version of layer group {self.name!r} is unknown",
                reason="UNKNOWN_PAGE_LAYOUT",
                given=self.page_layout_version,
                allowed=", ".join(map(str, page_layout.VERSIONS)),
                hint="run the same release on both ends",
            )
        if not self.regions:
            raise ConfigError(f"layer group {self.name!r} has no regions")
        keys = [(region.layer, region.kind) for region in self.regions]
        if len(set(keys)) != len(keys):
            raise ConfigError(f"layer group {self.name!r} names a region twice", given=keys)
        if not self.paged_regions:
            raise ConfigError(f"layer group {self.name!r} has tail_only regions alone", given=keys)
        self._check_mode()

    def _check_mode(self) -> None:
        where = f"layer group {self.name!r}"
        if self.mode not in COMPILED_MODES:
            raise ConfigError(f"KV mode of {where} is unknown", given=self.mode, allowed=", ".join(COMPILED_MODES))
        if self.mode == "turboquant" and self.preset not in PRESETS:
            raise ConfigError(
                f"mode turboquant of {where} needs a preset", given=repr(self.preset), allowed=", ".join(PRESETS)
            )
        if self.mode != "turboquant" and self.preset:
            raise ConfigError(
                f"mode {self.mode} of {where} takes no preset",
                given=self.preset,
                allowed="none",
                hint="presets belong to mode turboquant",
            )
        if self.mode == "window" and not self.window:
            raise ConfigError(
                f"mode window of {where} would drop tokens that the model attends to",
                reason="NO_MODEL_WINDOW",
                given="no model window",
                allowed="layer groups with a window",
                hint="use dense, turboquant or fp8 for this group",
            )
        if self.keep_every < 1:
            raise ConfigError(f"keep_every of {where} is below 1", given=self.keep_every, allowed="1 or more")
        if self.keep_every > 1 and not (self.packed and self.window and self.window <= self.effective_window):
            raise ConfigError(
                f"{where} cannot leave out pages",
                reason="PAGES_STILL_READ",
                given=f"keep_every {self.keep_every}, mode {self.mode}, window {self.window}",
                allowed=f"packed groups with a model window of 1 to {MAX_DENSE_MODEL_WINDOW}: it is read from the tail",
                hint="keep all pages (keep_every 1)",
            )
        if self.packed:
            for region in self.paged_regions:
                odd = self.codec(region) == "fp8" and region.dim % 2 == 1  # fp8 rows are read in pairs
                if odd or not MIN_WIDTH <= region.dim <= MAX_WIDTH:
                    raise ConfigError(
                        f"mode {self.mode} has no codec for region {region.kind!r} of layer {region.layer}",
                        reason="NO_CODEC_FOR_WIDTH",
                        given=f"width {region.dim}",
                        allowed=f"{MIN_WIDTH} to {MAX_WIDTH}{', even' if self.mode == 'fp8' else ''}",
                        hint="use mode dense for this layer group",
                    )

    # --- what the mode means ---

    @property
    def packed(self) -> bool:
        return self.mode in PACKED_MODES

    @property
    def effective_window(self) -> int:
        """Tokens that a query reads densely: the model's window where it is at most 256, else dense_window.

        In mode window nothing is packed, so there it is the model's window whatever its size.
        """
        if 0 < self.window <= MAX_DENSE_MODEL_WINDOW or self.mode == "window":
            return self.window
        return self.dense_window

    @property
    def retained_window(self) -> int:
        """The model's window where pages behind it are freed (it is larger than the dense one); 0: pages are kept."""
        return self.window if self.packed and self.window > self.effective_window else 0

    @property
    def retention(self) -> str:
        """What is kept of tokens behind the dense window: "all" of their pages, "checkpoints" (every ``keep_every``-th
        page and prompt ends) or "none"."""
        if self.mode == "window":
            return "none"
        return "all" if self.keep_every == 1 else "checkpoints"

    @property
    def paged_regions(self) -> tuple[Region, ...]:
        """Regions whose rows go into pages (in mode window: would)."""
        return tuple(region for region in self.regions if not region.tail_only)

    @property
    def tail_regions(self) -> tuple[Region, ...]:
        """Regions that have a ring in the tail: all, but in mode dense only those that have no place in a page."""
        return tuple(region for region in self.regions if region.tail_only or self.mode != "dense")

    @property
    def has_pages(self) -> bool:
        return self.mode != "window"

    @property
    def has_tail(self) -> bool:
        return bool(self.tail_regions)

    @property
    def has_pending(self) -> bool:
        """Whether some rows cannot be computed again from pages, so that only kept boundaries can be resumed."""
        return any(region.tail_only for region in self.regions)

    def codec(self, region: Region) -> str:
        """Name of the row codec in ``kernels.page_codec``: keys and shared rows take the preset's key bits."""
        if self.mode == "turboquant":
            preset = PRESETS[self.preset]
            return f"tq{preset.value_bits if region.kind == 'v' else preset.key_bits}"
        if self.mode == "fp8":
            return "v4fp8" if (region.kind, region.dim) == V4_RAW else "fp8"
        return "dense"

    # --- bytes of a page ---

    def record_bytes(self, region: Region) -> tuple[int, int]:
        """(code bytes, scale bytes) of one row of one head in a page."""
        rows = self._rows(region)
        order = page_layout.region_fragments(rows, self.page_layout_version)
        return order.row_bytes if order else rows.code_bytes, rows.scale_bytes

    def layout(self) -> PageLayout:
        """The packed page's layout, in the order of ``paged_regions``; for modes turboquant and fp8."""
        return page_layout.page_layout(map(self._rows, self.paged_regions), self.page_layout_version)

    def _rows(self, region: Region) -> page_layout.Region:
        """The region's rows in a page, as records."""
        codec, place = self.codec(region), (region.rows_per_page, region.heads)
        if codec == "dense":
            return page_layout.Region(*place, region.dim * ITEM_BYTES[region.dtype], 0)
        if codec == "fp8":
            return page_layout.Region(*place, region.dim, SCALE_BYTES)
        if codec == "v4fp8":
            return page_layout.Region(*place, V4_FP8_CODE_BYTES, V4_FP8_SCALE_BYTES)
        bits, scale_bytes = int(codec[2:]), SCALE_BYTES * len(parts(region.dim))
        return page_layout.Region(*place, code_bytes(region.dim, bits), scale_bytes, region.kind, region.dim, bits)

    def planes(self) -> tuple[Plane, ...]:
        """The page's planes, in the order of ``paged_regions``; none in mode window, which has no pages."""
        if not self.has_pages:
            return ()
        if not self.packed:
            return _dense_planes((region, region.rows_per_page) for region in self.paged_regions)
        planes = []
        for region, at in zip(self.paged_regions, self.layout().regions, strict=True):
            for part, offset, size in (
                ("codes", at.offset, at.row_bytes),
                ("scales", at.offset + at.scales_offset, at.region.scale_bytes),
            ):
                shape, rows = (region.heads, region.rows_per_page, size), region.rows_per_page
                planes.append(Plane(region, offset, shape, region.heads * rows * size, part, (at.head_bytes, size, 1)))
        return tuple(planes)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page; 0 in mode window."""
        if not self.has_pages:
            return 0
        return self.layout().page_bytes if self.packed else _end(self.planes())


@dataclass(frozen=True)
class CacheGeometry:
    """A model's whole KV cache. Group names are unique, and all groups have one page layout version.

    Args:
        margin: tokens that a rollback may take back and still be exact.
        max_step_tokens: the most tokens that one decode or verify step adds to a sequence.
    """

    groups: tuple[LayerGroup, ...]
    margin: int = DEFAULT_MARGIN
    max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS
    layout_version: int = field(default=LAYOUT_VERSION)

    def __post_init__(self) -> None:
        if self.margin < 0:
            raise ConfigError("margin is negative", given=self.margin, allowed="0 or more")
        if self.max_step_tokens < 1:
            raise ConfigError("max_step_tokens is below 1", given=self.max_step_tokens, allowed="1 or more")
        names = [group.name for group in self.groups]
        if not names or len(set(names)) != len(names):
            raise ConfigError("a geometry needs layer groups of different names", given=names)
        versions = [group.page_layout_version for group in self.groups]
        if len(set(versions)) != 1:
            raise ConfigError("layer groups of one geometry have one page layout version", given=versions)

    @property
    def page_layout_version(self) -> int:
        """Order of packed rows inside pages, of every group."""
        return self.groups[0].page_layout_version

    def with_page_layout(self, version: int) -> CacheGeometry:
        """The same with pages of another layout version. Raises ConfigError (UNKNOWN_PAGE_LAYOUT)."""
        return replace(self, groups=tuple(replace(group, page_layout_version=version) for group in self.groups))

    def group(self, name: str) -> LayerGroup:
        """The group of that name; KeyError when there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)

    # --- bytes of a tail slot ---

    @property
    def steps_under_way(self) -> int:
        """Tokens that steps may have put into a tail before its length is known: the most of three steps."""
        return 3 * self.max_step_tokens

    def tail_tokens(self, group: LayerGroup) -> int:
        """Tokens that the rings of rows which go to pages hold, a multiple of 128, so that every ratio divides it; 0 in
        mode dense, where such rows have no rings.

        window + margin + 128 + the most tokens a decode step adds + two steps' slack, whatever the sequence's length.
        """
        if group.mode == "dense":
            return 0
        needed = group.effective_window + self.margin + PAGE_TOKENS + self.steps_under_way
        return -(-needed // PAGE_TOKENS) * PAGE_TOKENS

    def ring_rows(self, group: LayerGroup, region: Region) -> int:
        """Rows of a region's ring in a tail slot: row i = t // ratio of token t lies in ring row i % ring_rows.

        A ring of pending rows holds what a length needs (``Region.pending_reach``), after a rollback of ``margin``
        tokens, with the most tokens a decode step adds and two steps' slack.
        """
        if region.tail_only:
            needed = region.pending_reach + self.margin + self.steps_under_way
            return -(-needed // PENDING_RING_ROWS) * PENDING_RING_ROWS
        return self.tail_tokens(group) // region.ratio

    def laps(self, group: LayerGroup, base: int, start: int, end: int) -> bool:
        """Whether rows of tokens [start, end) that are written into the rings go over some that a sequence of ``start``
        tokens, with its group's ``base``, may still read."""
        if end - base > self.tail_tokens(group) > 0:
            return True
        return any(end - r.first_pending(start) > self.ring_rows(group, r) for r in group.regions if r.tail_only)

    def keeps_open_pages(self, group: LayerGroup) -> bool:
        """Whether a checkpoint keeps a copy of the group's open page, beside the tails of other groups."""
        return group.mode == "dense" and any(other.has_tail for other in self.groups)

    def tail_planes(self, group: LayerGroup) -> tuple[Plane, ...]:
        """A ring of ``ring_rows`` rows a region."""
        return _dense_planes((region, self.ring_rows(group, region)) for region in group.tail_regions)

    def tail_slot_bytes(self, group: LayerGroup) -> int:
        """Bytes of one tail slot; 0 without a tail."""
        return _end(self.tail_planes(group)) if group.has_tail else 0

    def pending_ring_bytes(self, group: LayerGroup) -> int:
        """Bytes of a tail slot that pending rows take, without padding."""
        return sum(plane.num_bytes for plane in self.tail_planes(group) if plane.region.tail_only)

    @property
    def tail_bytes(self) -> int:
        """Bytes of one sequence's tails, all groups."""
        return sum(self.tail_slot_bytes(group) for group in self.groups)

    @property
    def bytes_per_token(self) -> float:
        """Page bytes per token, all groups; of groups that leave pages out, a long sequence's."""
        return sum(group.page_bytes / group.keep_every for group in self.groups) / PAGE_TOKENS

    @property
    def modes(self) -> str:
        """The groups' modes for messages: "full turboquant tq4, full-edges dense"."""
        return ", ".join(
            f"{g.name} {g.mode}{' ' + g.preset if g.preset else ''}{f' 1/{g.keep_every}' if g.keep_every > 1 else ''}"
            for g in self.groups
        )

    def digest(self) -> bytes:
        """blake2b-128 of everything that decides a page's bytes; equal in every process and on every machine."""
        return blake2b(self.describe().encode(), digest_size=16, person=b"tailpack-geom-v1").digest()

    def describe(self) -> str:
        """The text that the digest covers, also what a mismatch prints: one line a group, one a plane."""
        lines = [
            f"layout {self.layout_version} planes {self.page_layout_version} page {PAGE_TOKENS} margin {self.margin} "
            f"step {self.max_step_tokens}"
        ]
        for group in self.groups:
            lines.append(
                f"group {group.name} mode {group.mode} preset {group.preset or '-'} window {group.window} "
                f"dense_window {group.dense_window} keep_every {group.keep_every} page_bytes {group.page_bytes} "
                f"tail {self.tail_tokens(group)} tokens {self.tail_slot_bytes(group)} bytes"
            )
            for where, planes in (("page", group.planes()), ("tail", self.tail_planes(group))):
                for plane in planes:
                    r = plane.region
                    pending = f" ring {plane.shape[0]} block {r.block} carry {r.carry}" if r.tail_only else ""
                    lines.append(
                        f"  {where} {r.layer}.{r.kind} {plane.part} ratio {r.ratio} {r.heads}x{r.dim} {r.dtype} "
                        f"{group.codec(r)} at {plane.offset}{pending}"
                    )
        return "\n".join(lines)

    def summary(self) -> str:
        """One line for logs and messages."""
        groups = ", ".join(
            f"{g.name}: {len({r.layer for r in g.regions})} layers, {g.mode}{' ' + g.preset if g.preset else ''}, "
            f"{g.page_bytes} B/page"
            for g in self.groups
        )
        return f"{self.digest().hex()} (layout {self.layout_version}, planes {self.page_layout_version}; {groups})"

    def to_proto(self) -> kvstore_pb2.Geometry:
        return kvstore_pb2.Geometry(
            layout_version=self.layout_version,
            margin=self.margin,
            max_step_tokens=self.max_step_tokens,
            page_layout_version=self.page_layout_version,
            groups=[
                kvstore_pb2.LayerGroup(
                    name=group.name,
                    mode=group.mode,
                    preset=group.preset,
                    window=group.window,
                    dense_window=group.dense_window,
                    keep_every=group.keep_every,
                    regions=[
                        kvstore_pb2.Region(
                            layer=r.layer,
                            kind=r.kind,
                            ratio=r.ratio,
                            heads=r.heads,
                            dim=r.dim,
                            dtype=r.dtype,
                            block=r.block,
                            carry=r.carry,
                        )
                        for r in group.regions
                    ],
                )
                for group in self.groups
            ],
        )

    @staticmethod
    def from_proto(message: kvstore_pb2.Geometry) -> CacheGeometry:
        """Raises ConfigError, as the constructors do, when the message describes no valid geometry."""
        return CacheGeometry(
            groups=tuple(
                LayerGroup(
                    name=group.name,
                    mode=group.mode,
                    preset=group.preset,
                    window=group.window,
                    dense_window=group.dense_window,
                    page_layout_version=message.page_layout_version,
                    keep_every=group.keep_every,
                    regions=tuple(
                        Region(r.layer, r.kind, r.heads, r.dim, r.dtype, r.ratio, r.block, r.carry)
                        for r in group.regions
                    ),
                )
                for group in message.groups
            ),
            margin=message.margin,
            max_step_tokens=message.max_step_tokens,
            layout_version=message.layout_version,
        )


def apply_mode(
    geometry: CacheGeometry,
    mode: str,
    preset: str = "",
    dense_layers: tuple[int, int] = (0, 0),
    *,
    compiled_only: bool = False,
) -> CacheGeometry:
    """The geometry with every group in ``mode``, but for the model's first and last layers, which stay dense.

    Pages keep their layout version; ``CacheGeometry.with_page_layout`` chooses another.

    Args:
        dense_layers: how many of the model's first and last layers are pinned dense. They become groups of their own,
            "<group>-edges".
        compiled_only: refuse widths that no GPU kernel is compiled for (a worker on a GPU asks so).

    Raises:
        ConfigError: the mode does not go with a group (what LayerGroup raises), pins leave nothing for the mode
        (MODE_NOT_ENGAGED), or a width has no kernel (WIDTH_NOT_COMPILED).
    """
    first, last = dense_layers
    layers = sorted({region.layer for group in geometry.groups for region in group.regions})
    if min(first, last) < 0:
        raise ConfigError("dense_layers are negative", given=dense_layers, allowed="0 or more at either end")
    if mode == "dense":
        if first or last:
            raise ConfigError(
                "dense_layers pin nothing in mode dense", given=dense_layers, allowed="0,0", hint="leave them out"
            )
        return replace(geometry, groups=tuple(replace(g, mode=mode, preset=preset) for g in geometry.groups))
    pinned = {*layers[:first], *(layers[-last:] if last else ())}
    if len(pinned) == len(layers):
        raise ConfigError(
            f"dense_layers pin every layer, so mode {mode} would not engage",
            reason="MODE_NOT_ENGAGED",
            given=dense_layers,
            allowed=f"fewer than {len(layers)} layers together",
            hint="ask for mode dense, or pin fewer layers",
        )
    groups: list[LayerGroup] = []
    for group in geometry.groups:
        inner = tuple(region for region in group.regions if region.layer not in pinned)
        edges = tuple(region for region in group.regions if region.layer in pinned)
        if inner:
            groups.append(replace(group, regions=inner, mode=mode, preset=preset))
            if compiled_only:
                _demand_compiled(groups[-1])
        if edges:
            groups.append(replace(group, name=group.name + EDGES, regions=edges, mode="dense", preset=""))
    return replace(geometry, groups=tuple(groups))


def demand_dense_reach(group: LayerGroup, reach: int, reader: str) -> None:
    """Refuses to start a reader of rows that the group's mode would hand it packed, or not at all.

    V4's raw rows are packed or dropped behind its window because no query reads them there; an ablation that does read
    them would be another model without a word.

    Args:
        reach: tokens that a query reads densely, itself included; 0: all of them.
        reader: what reads, for the message.

    Raises:
        ConfigError: DENSE_REACH_PAST_WINDOW.
    """
    if group.mode == "dense" or 0 < reach <= group.effective_window:
        return
    raise ConfigError(
        f"{reader} reads rows of layer group {group.name!r} that mode {group.mode} does not keep dense",
        reason="DENSE_REACH_PAST_WINDOW",
        given=f"{reach or 'all'} tokens",
        allowed=f"1 to {group.effective_window} tokens in mode {group.mode}",
        hint="use mode dense for this layer group",
    )


def demand_same_geometry(held: CacheGeometry, asked: CacheGeometry, what: str) -> None:
    """Refuses to go on with KV of another form: ``what`` is held in ``held`` and was asked for in ``asked``.

    Raises:
        PreconditionFailed: MODE_MISMATCH names both modes; GEOMETRY_MISMATCH names the first line that differs (a head
        count, a width, a window).
    """
    if held.modes != asked.modes:
        raise PreconditionFailed(
            f"{what} is in another KV mode",
            reason="MODE_MISMATCH",
            given=f"{asked.modes} (asked)",
            allowed=f"{held.modes} (held)",
            hint="use the mode that it was written in, or compute it again from its token log",
        )
    pairs = zip(held.describe().splitlines(), asked.describe().splitlines(), strict=False)
    if held != asked:
        one, two = next((pair for pair in pairs if pair[0] != pair[1]), (held.summary(), asked.summary()))
        raise PreconditionFailed(
            f"{what} has another geometry",
            reason="GEOMETRY_MISMATCH",
            given=f"{two.strip()} (asked)",
            allowed=f"{one.strip()} (held)",
            hint="head counts, widths and windows cannot change in the middle of a sequence",
        )


def _demand_compiled(group: LayerGroup) -> None:
    for region in group.paged_regions:
        if group.packed and region.dim not in COMPILED_WIDTHS:
            raise ConfigError(
                f"no GPU kernel of mode {group.mode} is compiled for region {region.kind!r} of layer {region.layer}",
                reason="WIDTH_NOT_COMPILED",
                given=f"width {region.dim}",
                allowed=", ".join(map(str, COMPILED_WIDTHS)),
                hint="use mode dense, or the CPU, which takes any width from 8 up",
            )


def _dense_planes(rows: Iterable[tuple[Region, int]]) -> tuple[Plane, ...]:
    planes, offset = [], 0
    for region, num_rows in rows:
        item = ITEM_BYTES[region.dtype]
        strides = (region.row_bytes, region.dim * item, item)
        num_bytes = num_rows * region.row_bytes
        planes.append(Plane(region, offset, (num_rows, region.heads, region.dim), num_bytes, "rows", strides))
        offset = page_layout.aligned(offset + num_bytes)
    return tuple(planes)


def _end(planes: Sequence[Plane]) -> int:
    return page_layout.aligned(planes[-1].offset + planes[-1].num_bytes)


def _check_name(name: str, what: str) -> None:
    if not _NAME.match(name):
        raise ConfigError(
            f"{what} is malformed", given=repr(name[:80]), allowed=f"1 to {MAX_NAME_BYTES} of A-Z a-z 0-9 _ . -"
        )
