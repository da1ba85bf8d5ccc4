"""What a model's KV cache looks like, as data: layer groups, regions, modes, and the bytes that follow from them.

A page holds 128 consecutive tokens of one layer group, all its layers, in one contiguous blob. Its layout is a pure
function of (geometry, LAYOUT_VERSION); both ends of an attach compare the digest. No torch, no numpy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import blake2b

from protos import kvstore_pb2
from protos.errors import ConfigError
from protos.page_hash import PAGE_TOKENS

LAYOUT_VERSION = 1
DEFAULT_MARGIN = 16
PLANE_ALIGNMENT = 128  # bytes; every region's plane starts at a multiple of it
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
COMPILED_MODES = ("dense",)
MAX_NAME_BYTES = 64
_NAME = re.compile(rf"[A-Za-z0-9_.\-]{{1,{MAX_NAME_BYTES}}}\Z")  # no spaces or newlines: describe() stays unambiguous


@dataclass(frozen=True)
class Region:
    """One kind of row in one layer: ``heads`` vectors of ``dim`` values for every ``ratio`` tokens."""

    layer: int
    kind: str
    heads: int
    dim: int
    dtype: str
    ratio: int = 1

    def __post_init__(self) -> None:
        where = f"region {self.kind!r} of layer {self.layer}"
        _check_name(self.kind, "region kind")
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"{where} has an unknown dtype", given=self.dtype, allowed=", ".join(ITEM_BYTES))
        if min(self.heads, self.dim, self.ratio) < 1 or self.layer < 0:
            raise ConfigError(f"{where} has a size below 1", given=self, allowed="heads, dim, ratio >= 1; layer >= 0")
        if PAGE_TOKENS % self.ratio:
            raise ConfigError(f"{where} does not fill a page", given=self.ratio, allowed=f"divisors of {PAGE_TOKENS}")

    @property
    def rows_per_page(self) -> int:
        return PAGE_TOKENS // self.ratio


@dataclass(frozen=True)
class Plane:
    """Where a region lies in a page: ``shape`` = (rows, heads, dim), C order, at byte ``offset``."""

    region: Region
    offset: int
    shape: tuple[int, int, int]
    num_bytes: int


@dataclass(frozen=True)
class LayerGroup:
    """Regions that share a window, a retention and a mode. ``window`` 0 means the model attends to everything."""

    name: str
    regions: tuple[Region, ...]
    mode: str = "dense"
    window: int = 0

    def __post_init__(self) -> None:
        _check_name(self.name, "layer group name")
        if self.window < 0:
            raise ConfigError(
                f"window of layer group {self.name!r} is negative", given=self.window, allowed="0 or more"
            )
        if not self.regions:
            raise ConfigError(f"layer group {self.name!r} has no regions")
        if self.mode not in COMPILED_MODES:
            raise ConfigError(
                f"KV mode of layer group {self.name!r} is not built", given=self.mode, allowed=", ".join(COMPILED_MODES)
            )
        keys = [(region.layer, region.kind) for region in self.regions]
        if len(set(keys)) != len(keys):
            raise ConfigError(f"layer group {self.name!r} names a region twice", given=keys)

    def planes(self) -> tuple[Plane, ...]:
        """The page's layout, in the order of ``regions``."""
        planes, offset = [], 0
        for region in self.regions:
            shape = (region.rows_per_page, region.heads, region.dim)
            num_bytes = shape[0] * shape[1] * shape[2] * ITEM_BYTES[region.dtype]
            planes.append(Plane(region, offset, shape, num_bytes))
            offset = _align(offset + num_bytes)
        return tuple(planes)

    @property
    def page_bytes(self) -> int:
        last = self.planes()[-1]
        return _align(last.offset + last.num_bytes)


@dataclass(frozen=True)
class CacheGeometry:
    """A model's whole KV cache. Group names are unique."""

    groups: tuple[LayerGroup, ...]
    margin: int = DEFAULT_MARGIN
    layout_version: int = field(default=LAYOUT_VERSION)

    def __post_init__(self) -> None:
        if self.margin < 0:
            raise ConfigError("margin is negative", given=self.margin, allowed="0 or more")
        names = [group.name for group in self.groups]
        if not names or len(set(names)) != len(names):
            raise ConfigError("a geometry needs layer groups of different names", given=names)

    def group(self, name: str) -> LayerGroup:
        """The group of that name; KeyError when there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)

    @property
    def bytes_per_token(self) -> float:
        """Page bytes per token, all groups."""
        return sum(group.page_bytes for group in self.groups) / PAGE_TOKENS

    def digest(self) -> bytes:
        """blake2b-128 of everything that decides a page's bytes; equal in every process and on every machine."""
        return blake2b(self.describe().encode(), digest_size=16, person=b"tailpack-geom-v1").digest()

    def describe(self) -> str:
        """The text that the digest covers, also what a mismatch prints: one line a group, one a plane."""
        lines = [f"layout {self.layout_version} page {PAGE_TOKENS} margin {self.margin}"]
        for group in self.groups:
            lines.append(f"group {group.name} mode {group.mode} window {group.window} page_bytes {group.page_bytes}")
            for plane in group.planes():
                r = plane.region
                lines.append(f"  {r.layer}.{r.kind} ratio {r.ratio} {r.heads}x{r.dim} {r.dtype} at {plane.offset}")
        return "\n".join(lines)

    def summary(self) -> str:
        """One line for logs and messages."""
        groups = ", ".join(
            f"{g.name}: {len({r.layer for r in g.regions})} layers, {g.mode}, {g.page_bytes} B/page"
            for g in self.groups
        )
        return f"{self.digest().hex()} (layout {self.layout_version}; {groups})"

    def to_proto(self) -> kvstore_pb2.Geometry:
        return kvstore_pb2.Geometry(
            layout_version=self.layout_version,
            margin=self.margin,
            groups=[
                kvstore_pb2.LayerGroup(
                    name=group.name,
                    mode=group.mode,
                    window=group.window,
                    regions=[
                        kvstore_pb2.Region(
                            layer=r.layer, kind=r.kind, ratio=r.ratio, heads=r.heads, dim=r.dim, dtype=r.dtype
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
                    window=group.window,
                    regions=tuple(
                        Region(layer=r.layer, kind=r.kind, ratio=r.ratio, heads=r.heads, dim=r.dim, dtype=r.dtype)
                        for r in group.regions
                    ),
                )
                for group in message.groups
            ),
            margin=message.margin,
            layout_version=message.layout_version,
        )


def _check_name(name: str, what: str) -> None:
    if not _NAME.match(name):
        raise ConfigError(
            f"{what} is malformed", given=repr(name[:80]), allowed=f"1 to {MAX_NAME_BYTES} of A-Z a-z 0-9 _ . -"
        )


def _align(offset: int) -> int:
    return -(-offset // PLANE_ALIGNMENT) * PLANE_ALIGNMENT
