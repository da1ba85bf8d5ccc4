"""CacheGeometry: bytes of a page, its digest, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.geometry import ITEM_BYTES, LAYOUT_VERSION, PLANE_ALIGNMENT, CacheGeometry, LayerGroup, Region
from protos.errors import ConfigError


def llama(num_layers: int = 30, heads: int = 3, dim: int = 64, dtype: str = "float32") -> CacheGeometry:
    regions = tuple(Region(layer, kind, heads, dim, dtype) for layer in range(num_layers) for kind in "kv")
    return CacheGeometry((LayerGroup("full", regions),))


@st.composite
def geometries(draw: st.DrawFn) -> CacheGeometry:
    region = st.builds(
        Region,
        layer=st.integers(0, 40),
        kind=st.sampled_from(["k", "v", "index_key"]),
        heads=st.integers(1, 8),
        dim=st.sampled_from([1, 40, 64, 80, 96, 112, 128, 256, 512, 513]),
        dtype=st.sampled_from(sorted(ITEM_BYTES)),
        ratio=st.sampled_from([1, 4, 128]),
    )
    names = draw(st.lists(st.sampled_from(["full", "window", "raw", "csa"]), min_size=1, max_size=3, unique=True))
    return CacheGeometry(
        tuple(
            LayerGroup(
                name,
                tuple(draw(st.lists(region, min_size=1, max_size=6, unique_by=lambda r: (r.layer, r.kind)))),
                window=draw(st.sampled_from([0, 128, 4096])),
            )
            for name in names
        ),
        margin=draw(st.integers(0, 64)),
    )


def test_page_bytes_of_a_plain_model() -> None:
    # 30 layers, K and V, 128 rows of 3 heads of 64 floats: no padding is needed.
    assert llama().groups[0].page_bytes == 30 * 2 * 128 * 3 * 64 * 4
    assert llama(dtype="bfloat16").bytes_per_token == 30 * 2 * 3 * 64 * 2


@given(geometries())
def test_planes_are_aligned_in_order_and_do_not_overlap(geometry: CacheGeometry) -> None:
    for group in geometry.groups:
        end = 0
        for plane, region in zip(group.planes(), group.regions, strict=True):
            assert plane.region == region
            assert plane.offset % PLANE_ALIGNMENT == 0
            assert end <= plane.offset < end + PLANE_ALIGNMENT
            assert plane.shape == (128 // region.ratio, region.heads, region.dim)
            assert plane.num_bytes == 128 // region.ratio * region.heads * region.dim * ITEM_BYTES[region.dtype]
            end = plane.offset + plane.num_bytes
        assert end <= group.page_bytes < end + PLANE_ALIGNMENT
        assert group.page_bytes % PLANE_ALIGNMENT == 0


@given(geometries())
def test_proto_round_trip_keeps_everything(geometry: CacheGeometry) -> None:
    again = CacheGeometry.from_proto(geometry.to_proto())
    assert again == geometry
    assert again.digest() == geometry.digest()


@given(geometries(), geometries())
def test_digests_are_equal_exactly_where_geometries_are(one: CacheGeometry, two: CacheGeometry) -> None:
    assert (one.digest() == two.digest()) == (one == two)


def test_digest_is_frozen() -> None:
    # Workers and stores of different builds compare it; a changed layout needs a new LAYOUT_VERSION.
    assert llama().digest().hex() == "eaa5af92daebb777ec51641dccbff998"


@pytest.mark.parametrize(
    "change",
    [
        {"layer": 1},
        {"kind": "v"},
        {"heads": 2},
        {"dim": 128},
        {"dtype": "bfloat16"},
        {"ratio": 4},
    ],
)
def test_digest_covers_every_field_of_a_region(change: dict[str, object]) -> None:
    region = Region(0, "k", 4, 64, "float16")
    changed = dataclasses.replace(region, **change)  # type: ignore[arg-type]
    assert _digest(region) != _digest(changed)


def test_digest_covers_group_and_geometry_fields() -> None:
    group = LayerGroup("full", (Region(0, "k", 4, 64, "float16"), Region(0, "v", 4, 64, "float16")))
    digests = {
        CacheGeometry((group,)).digest(),
        CacheGeometry((dataclasses.replace(group, name="window"),)).digest(),
        CacheGeometry((dataclasses.replace(group, window=128),)).digest(),
        CacheGeometry((dataclasses.replace(group, regions=group.regions[::-1]),)).digest(),
        CacheGeometry((group,), margin=17).digest(),
        CacheGeometry((group,), layout_version=LAYOUT_VERSION + 1).digest(),
    }
    assert len(digests) == 6


def test_layers_of_different_width_and_k_unlike_v() -> None:
    group = LayerGroup("full", (Region(0, "k", 1, 80, "float32"), Region(0, "v", 2, 33, "bfloat16")))
    k, v = group.planes()
    assert (k.num_bytes, v.offset, v.num_bytes) == (128 * 80 * 4, 128 * 80 * 4, 128 * 2 * 33 * 2)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Region(0, "k", 0, 64, "float32"), "size below 1"),
        (lambda: Region(-1, "k", 1, 64, "float32"), "size below 1"),
        (lambda: Region(0, "k", 1, 64, "int3"), "unknown dtype"),
        (lambda: Region(0, "k", 1, 64, "float32", ratio=3), "does not fill a page"),
        (lambda: Region(0, "k v", 1, 64, "float32"), "region kind is malformed"),
        (lambda: LayerGroup("full", ()), "no regions"),
        (lambda: LayerGroup("", (Region(0, "k", 1, 64, "float32"),)), "name is malformed"),
        (lambda: LayerGroup("a\ngroup b", (Region(0, "k", 1, 64, "float32"),)), "name is malformed"),
        (lambda: LayerGroup("full", (Region(0, "k", 1, 64, "float32"),), mode="turboquant"), "is not built"),
        (lambda: LayerGroup("full", (Region(0, "k", 1, 64, "float32"),), window=-1), "is negative"),
        (lambda: LayerGroup("full", (Region(0, "k", 1, 64, "float32"),) * 2), "names a region twice"),
        (lambda: CacheGeometry(()), "layer groups of different names"),
        (lambda: CacheGeometry(llama().groups * 2), "layer groups of different names"),
        (lambda: CacheGeometry(llama().groups, margin=-1), "margin is negative"),
    ],
)
def test_what_is_refused_by_name(build: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build()  # type: ignore[operator]


def test_summary_and_description_name_the_sizes() -> None:
    assert "30 layers, dense, 5898240 B/page" in llama().summary()
    assert llama(num_layers=1).describe().splitlines() == [
        "layout 1 page 128 margin 16",
        "group full mode dense window 0 page_bytes 196608",
        "  0.k ratio 1 3x64 float32 at 0",
        "  0.v ratio 1 3x64 float32 at 98304",
    ]


def _digest(region: Region) -> bytes:
    return CacheGeometry((LayerGroup("full", (region,)),)).digest()
