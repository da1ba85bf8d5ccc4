"""CacheGeometry: bytes of a page, its digest, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.page_layout import PLANE_ALIGNMENT
from kernels.widths import PRESETS
from kvstore.geometry import (
    ITEM_BYTES,
    LAYOUT_VERSION,
    CacheGeometry,
    LayerGroup,
    Region,
    apply_mode,
    demand_dense_reach,
    demand_same_geometry,
)
from protos.errors import ConfigError, PreconditionFailed

K = Region(0, "k", 1, 64, "float32")


def llama(num_layers: int = 30, heads: int = 3, dim: int = 64, dtype: str = "float32") -> CacheGeometry:
    regions = tuple(Region(layer, kind, heads, dim, dtype) for layer in range(num_layers) for kind in "kv")
    return CacheGeometry((LayerGroup("full", regions),))


@st.composite
def geometries(draw: st.DrawFn, packed: bool = True) -> CacheGeometry:
    region = st.builds(
        Region,
        layer=st.integers(0, 40),
        kind=st.sampled_from(["k", "v", "kv", "index_key", "raw"]),
        heads=st.integers(1, 8),
        dim=st.sampled_from([8, 40, 64, 80, 96, 100, 112, 128, 256, 512, 513]),
        dtype=st.sampled_from(sorted(ITEM_BYTES)),
        ratio=st.sampled_from([1, 4, 128]),
    )
    modes = ["dense"]
    if packed:
        modes += ["fp8", "window", *(f"turboquant {name}" for name in PRESETS)]
    names = draw(st.lists(st.sampled_from(["full", "window", "raw", "csa"]), min_size=1, max_size=3, unique=True))
    groups = []
    for name in names:
        mode, _, preset = draw(st.sampled_from(modes)).partition(" ")
        regions = tuple(draw(st.lists(region, min_size=1, max_size=6, unique_by=lambda r: (r.layer, r.kind))))
        if mode == "fp8":
            regions = tuple(dataclasses.replace(r, dim=r.dim + r.dim % 2) for r in regions)
        if draw(st.booleans()):
            block, carry = draw(st.sampled_from([(4, 4), (4, 0), (128, 0), (16, 3)]))
            regions += (Region(41, "pending", 1, 64, "float32", block=block, carry=carry),)
        window = draw(st.sampled_from([100, 128, 4096] if mode == "window" else [0, 128, 4096]))
        groups.append(
            LayerGroup(
                name,
                regions,
                mode,
                preset,
                window,
                dense_window=draw(st.sampled_from([64, 128, 256])),
                keep_every=draw(st.sampled_from([1, 2, 16])) if window == 128 and mode in ("fp8", "turboquant") else 1,
            )
        )
    geometry = CacheGeometry(tuple(groups), margin=draw(st.integers(0, 64)), max_step_tokens=draw(st.integers(1, 20)))
    return geometry.with_page_layout(draw(st.sampled_from([1, 2])))


def test_page_bytes_of_a_plain_model() -> None:
    # 30 layers, K and V, 128 rows of 3 heads of 64 floats: no padding is needed.
    assert llama().groups[0].page_bytes == 30 * 2 * 128 * 3 * 64 * 4
    assert llama(dtype="bfloat16").bytes_per_token == 30 * 2 * 3 * 64 * 2


@given(geometries(packed=False))
def test_planes_are_aligned_in_order_and_do_not_overlap(geometry: CacheGeometry) -> None:
    for group in geometry.groups:
        end = 0
        for plane, region in zip(group.planes(), group.paged_regions, strict=True):
            assert plane.region == region
            assert plane.offset % PLANE_ALIGNMENT == 0
            assert end <= plane.offset < end + PLANE_ALIGNMENT
            assert plane.shape == (128 // region.ratio, region.heads, region.dim)
            assert plane.num_bytes == 128 // region.ratio * region.heads * region.dim * ITEM_BYTES[region.dtype]
            assert plane.strides[0] == region.heads * plane.strides[1] == region.heads * region.dim * plane.strides[2]
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
    assert llama().digest().hex() == "44d17f89e29a98c1d6205f9eb74d48d3"


@pytest.mark.parametrize(
    "change",
    [
        {"layer": 1},
        {"kind": "v"},
        {"heads": 2},
        {"dim": 128},
        {"dtype": "bfloat16"},
        {"ratio": 4},
        {"block": 4},
        {"block": 4, "carry": 4},
    ],
)
def test_digest_covers_every_field_of_a_region(change: dict[str, object]) -> None:
    region = Region(0, "k", 4, 64, "float16")
    changed = dataclasses.replace(region, **change)  # type: ignore[arg-type]
    assert _digest(region, other=True) != _digest(changed, other=True)


def test_digest_covers_group_and_geometry_fields() -> None:
    group = LayerGroup("full", (Region(0, "k", 4, 64, "float16"), Region(0, "v", 4, 64, "float16")))
    digests = {
        CacheGeometry((group,)).digest(),
        CacheGeometry((dataclasses.replace(group, name="window"),)).digest(),
        CacheGeometry((dataclasses.replace(group, window=128),)).digest(),
        CacheGeometry((dataclasses.replace(group, mode="fp8", window=128),)).digest(),
        CacheGeometry((dataclasses.replace(group, mode="fp8", window=128, keep_every=2),)).digest(),
        CacheGeometry((dataclasses.replace(group, regions=group.regions[::-1]),)).digest(),
        CacheGeometry((group,), margin=17).digest(),
        CacheGeometry((group,), layout_version=LAYOUT_VERSION + 1).digest(),
        CacheGeometry((group,)).with_page_layout(2).digest(),
    }
    assert len(digests) == 9


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
        (lambda: LayerGroup("full", (Region(0, "k", 1, 64, "float32"),), mode="zip"), "is unknown"),
        (lambda: LayerGroup("full", (Region(0, "k", 1, 64, "float32"),), window=-1), "is negative"),
        (lambda: LayerGroup("full", (Region(0, "k", 1, 64, "float32"),) * 2), "names a region twice"),
        (lambda: CacheGeometry(()), "layer groups of different names"),
        (lambda: CacheGeometry(llama().groups * 2), "layer groups of different names"),
        (lambda: CacheGeometry(llama().groups, margin=-1), "margin is negative"),
        (lambda: llama().with_page_layout(3), "page layout version of .* 'full' is unknown; given: 3; allowed: 1, 2"),
        (lambda: llama().with_page_layout(0), "page layout version of layer group 'full' is unknown"),
        (
            lambda: CacheGeometry((*llama().groups, LayerGroup("b", (K,), page_layout_version=2))),
            "have one page layout version",
        ),
    ],
)
def test_what_is_refused_by_name(build: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build()  # type: ignore[operator]


def test_summary_and_description_name_the_sizes() -> None:
    assert "30 layers, dense, 5898240 B/page" in llama().summary()
    assert llama(num_layers=1).describe().splitlines() == [
        "layout 3 planes 1 page 128 margin 16 step 9",
        "group full mode dense preset - window 0 dense_window 128 keep_every 1 page_bytes 196608 tail 0 tokens 0 bytes",
        "  page 0.k rows ratio 1 3x64 float32 dense at 0",
        "  page 0.v rows ratio 1 3x64 float32 dense at 98304",
    ]


def _digest(region: Region, other: bool = False) -> bytes:
    more = (Region(9, "k", 1, 64, "float32"),) if other else ()
    return CacheGeometry((LayerGroup("full", (region, *more)),)).digest()


# --- modes ---


def v4_raw(mode: str, preset: str = "") -> LayerGroup:
    return LayerGroup("raw", (Region(0, "raw", 1, 512, "bfloat16"),), mode, preset, window=128)


@pytest.mark.parametrize(
    ("mode", "preset", "row_bytes"), [("dense", "", 1024), ("fp8", "", 590), ("turboquant", "tq4", 260)]
)
def test_bytes_of_a_v4_raw_row(mode: str, preset: str, row_bytes: int) -> None:
    assert v4_raw(mode, preset).page_bytes == 128 * row_bytes


def test_bytes_of_a_llama_head_at_tq4() -> None:
    group = LayerGroup("full", tuple(Region(0, kind, 1, 128, "bfloat16") for kind in "kv"), "turboquant", "tq4")
    assert group.page_bytes == 128 * 136
    assert [(p.part, p.offset, p.shape, p.strides) for p in group.planes()] == [
        ("codes", 0, (1, 128, 64), (8704, 64, 1)),
        ("scales", 8192, (1, 128, 4), (8704, 4, 1)),
        ("codes", 8704, (1, 128, 64), (8704, 64, 1)),
        ("scales", 16896, (1, 128, 4), (8704, 4, 1)),
    ]


@pytest.mark.parametrize(
    ("preset", "version", "key", "value", "shared"),
    [
        ("tq4", 1, 64, 64, 64),
        ("tq4v3", 1, 64, 52, 64),
        ("tq3", 1, 52, 52, 52),
        ("tq3v2", 1, 52, 32, 52),
        ("tq4", 2, 64, 64, 64),
        ("tq4v3", 2, 64, 48, 64),
        ("tq3", 2, 48, 48, 52),  # shared rows keep canonical records
        ("tq3v2", 2, 48, 32, 52),
    ],
)
def test_presets_give_keys_and_shared_rows_the_key_bits(
    preset: str, version: int, key: int, value: int, shared: int
) -> None:
    regions = {kind: Region(0, kind, 2, 128, "bfloat16") for kind in ("k", "v", "kv")}
    group = LayerGroup("full", tuple(regions.values()), "turboquant", preset, page_layout_version=version)
    assert {kind: group.record_bytes(region) for kind, region in regions.items()} == {
        "k": (key, 4),
        "v": (value, 4),
        "kv": (shared, 4),
    }
    assert group.page_bytes == 128 * 2 * (key + value + shared + 12)


def test_page_layout_is_the_makers_choice_and_decides_bytes() -> None:
    """Of TurboQuant at 3 bits; other modes take the same bytes in either."""
    rows = apply_mode(llama(2, heads=4, dim=128), "turboquant", "tq3", (1, 0))
    fragments = rows.with_page_layout(2)
    assert (rows.page_layout_version, fragments.page_layout_version) == (1, 2)
    assert rows.group("full").page_bytes == 2 * 4 * 128 * (52 + 4)
    assert fragments.group("full").page_bytes == 2 * 4 * 128 * (48 + 4)
    assert fragments.group("full-edges").page_bytes == rows.group("full-edges").page_bytes
    assert rows.bytes_per_token - fragments.bytes_per_token == 2 * 4 * 4
    assert "planes 2" in fragments.summary() and fragments.describe().startswith("layout 3 planes 2 ")
    message = fragments.to_proto()
    assert message.page_layout_version == 2 and CacheGeometry.from_proto(message) == fragments
    for unknown in (0, 3):  # 0: a peer that does not know the field
        message.page_layout_version = unknown
        with pytest.raises(ConfigError, match="page layout version") as caught:
            CacheGeometry.from_proto(message)
        assert caught.value.reason == "UNKNOWN_PAGE_LAYOUT"
    with pytest.raises(PreconditionFailed, match=r"planes 1 .*planes 2") as refused:
        demand_same_geometry(fragments, rows, "sequence 'r'")
    assert refused.value.reason == "GEOMETRY_MISMATCH"


@given(geometries())
def test_packed_planes_are_aligned_and_fill_the_page(geometry: CacheGeometry) -> None:
    for group in geometry.groups:
        if not group.packed:
            continue
        taken = bytearray(group.page_bytes)
        for plane in group.planes():
            assert plane.offset % PLANE_ALIGNMENT == 0
            heads, rows, size = plane.shape
            assert rows == 128 // plane.region.ratio
            for head in range(heads):
                at = plane.offset + head * plane.strides[0]
                assert not any(taken[at : at + rows * size])
                taken[at : at + rows * size] = b"\1" * (rows * size)
        assert sum(taken) == sum(plane.num_bytes for plane in group.planes())
        padding = len(taken) - sum(taken)
        assert padding < PLANE_ALIGNMENT * sum(2 * region.heads for region in group.paged_regions)


@given(geometries())
def test_a_tail_holds_what_the_bound_says_whatever_the_length(geometry: CacheGeometry) -> None:
    for group in geometry.groups:
        if not group.has_tail:
            assert (geometry.tail_tokens(group), geometry.tail_slot_bytes(group)) == (0, 0)
            continue
        tokens = geometry.tail_tokens(group)
        assert tokens % 128 == 0 and (tokens == 0) == (group.mode == "dense")
        slack = geometry.margin + 3 * geometry.max_step_tokens
        assert group.mode == "dense" or 0 <= tokens - (group.effective_window + 128 + slack) < 128
        end = 0
        for plane in geometry.tail_planes(group):
            region, rows = plane.region, geometry.ring_rows(group, plane.region)
            assert plane.shape == (rows, region.heads, region.dim)
            if region.tail_only:  # any length's need, a rollback of the margin, the steps under way; and little more
                deepest = max(n - region.first_pending(n) for n in range(1, 300))
                assert deepest == region.pending_reach and 0 <= rows - (deepest + slack) < 8
            else:
                assert rows == tokens // region.ratio
            assert end <= plane.offset < end + PLANE_ALIGNMENT
            end = plane.offset + plane.num_bytes
        assert end <= geometry.tail_slot_bytes(group) < end + PLANE_ALIGNMENT


@pytest.mark.parametrize(("block", "carry"), [(4, 4), (128, 0), (16, 0)])
def test_which_pending_rows_a_length_needs(block: int, carry: int) -> None:
    """Those of the block under way and, where blocks overlap, of the one before; at a boundary of blocks only that."""
    pending = Region(0, "pending", 2, 64, "float32", block=block, carry=carry)
    for n in range(600):
        own = n - n % block
        assert pending.first_pending(n) == max(0, own - carry)
        assert n - pending.first_pending(n) <= pending.pending_reach
    assert dataclasses.replace(pending, block=0, carry=0).first_pending(77) == 77


@pytest.mark.parametrize("mode", ["dense", "turboquant"])
def test_what_laps_a_ring(mode: str) -> None:
    regions = (Region(0, "csa", 1, 64, "float32", ratio=4), Region(0, "p", 2, 64, "float32", block=4, carry=4))
    group = LayerGroup("g", regions, mode, "tq4" if mode == "turboquant" else "")
    geometry = CacheGeometry((group,), margin=3, max_step_tokens=1)
    ring = geometry.ring_rows(group, regions[1])  # 7 + 3 + 3, in eights
    assert ring == 16
    for start in (0, 101, 102, 103, 104):
        oldest = regions[1].first_pending(start)
        assert not geometry.laps(group, 0, start, oldest + ring)
        assert geometry.laps(group, 0, start, oldest + ring + 1)
    assert geometry.laps(group, 0, 384, 385) == (mode == "turboquant")  # the ring of rows that go to pages: 384


def test_which_window_stays_dense() -> None:
    def effective(mode: str, window: int) -> tuple[int, int]:
        preset = "tq4" if mode == "turboquant" else ""
        group = LayerGroup("g", (Region(0, "k", 1, 64, "float32"),), mode, preset, window, dense_window=192)
        return group.effective_window, group.retained_window

    assert effective("turboquant", 0) == (192, 0)
    assert effective("turboquant", 128) == (128, 0)
    assert effective("fp8", 256) == (256, 0)
    assert effective("turboquant", 257) == (192, 257)
    assert effective("window", 4096) == (4096, 0)


def test_pending_rows_have_a_ring_and_no_page_even_in_mode_dense() -> None:
    compressed = Region(0, "csa", 1, 64, "float32", ratio=4)
    group = LayerGroup("csa", (compressed, Region(0, "csa_pending", 1, 64, "float32", block=4, carry=4)))
    geometry = CacheGeometry((group,))
    assert group.page_bytes == 32 * 64 * 4
    assert [plane.region.kind for plane in geometry.tail_planes(group)] == ["csa_pending"]
    assert group.has_pending


def test_pinned_edge_layers_become_dense_groups_of_their_own() -> None:
    geometry = apply_mode(llama(6), "turboquant", "tq4v3", (1, 2))
    assert geometry.modes == "full turboquant tq4v3, full-edges dense"
    assert [sorted({r.layer for r in g.regions}) for g in geometry.groups] == [[1, 2, 3], [0, 4, 5]]
    assert sum(len(g.regions) for g in geometry.groups) == 12


def test_a_pinned_layer_of_a_two_group_model_is_pinned_by_its_number() -> None:
    sliding, full = (
        tuple(Region(layer, k, 1, 64, "float32") for layer in layers for k in "kv") for layers in ((0, 2), (1, 3))
    )
    both = CacheGeometry((LayerGroup("sliding", sliding, window=512), LayerGroup("full", full)))
    geometry = apply_mode(both, "fp8", dense_layers=(1, 0))
    assert geometry.modes == "sliding fp8, sliding-edges dense, full fp8"


@pytest.mark.parametrize(
    ("build", "reason", "words"),
    [
        (lambda: LayerGroup("g", (K,), "turboquant"), "BAD_CONFIG", "needs a preset"),
        (lambda: LayerGroup("g", (K,), "turboquant", "tq9"), "BAD_CONFIG", "needs a preset"),
        (lambda: LayerGroup("g", (K,), "dense", "tq4"), "BAD_CONFIG", "takes no preset"),
        (lambda: LayerGroup("g", (K,), "window"), "NO_MODEL_WINDOW", "would drop tokens"),
        (
            lambda: LayerGroup("g", (dataclasses.replace(K, dim=4),), "turboquant", "tq4"),
            "NO_CODEC_FOR_WIDTH",
            "no codec",
        ),
        (lambda: LayerGroup("g", (dataclasses.replace(K, dim=81),), "fp8"), "NO_CODEC_FOR_WIDTH", "8 to 2047, even"),
        (lambda: LayerGroup("g", (dataclasses.replace(K, block=4),)), "BAD_CONFIG", "tail_only regions alone"),
        (lambda: dataclasses.replace(K, block=4, ratio=4), "BAD_CONFIG", "a row a token"),
        (lambda: dataclasses.replace(K, block=3), "BAD_CONFIG", "do not fill a page"),
        (lambda: dataclasses.replace(K, block=-4), "BAD_CONFIG", "do not fill a page"),
        (lambda: dataclasses.replace(K, carry=4), "BAD_CONFIG", "waits for no block"),
        (lambda: dataclasses.replace(K, block=4, carry=-1), "BAD_CONFIG", "waits for no block"),
        (lambda: LayerGroup("g", (K,), "fp8", window=128, keep_every=0), "BAD_CONFIG", "keep_every"),
        *(
            (lambda g=g: LayerGroup("g", (K,), **g, keep_every=2), "PAGES_STILL_READ", "cannot leave out pages")
            for g in (
                {"mode": "fp8"},
                {"mode": "fp8", "window": 257},
                {"mode": "dense", "window": 128},
                {"mode": "window", "window": 128},
            )
        ),
        (lambda: apply_mode(llama(4), "turboquant", "tq4", (2, 2)), "MODE_NOT_ENGAGED", "would not engage"),
        (lambda: apply_mode(llama(4), "dense", "", (1, 0)), "BAD_CONFIG", "pin nothing"),
        (lambda: apply_mode(llama(4), "window"), "NO_MODEL_WINDOW", "would drop tokens"),
        (lambda: apply_mode(llama(4, dim=80), "fp8", compiled_only=True), "WIDTH_NOT_COMPILED", "width 80"),
        (lambda: CacheGeometry(llama().groups, max_step_tokens=0), "BAD_CONFIG", "max_step_tokens"),
    ],
)
def test_modes_that_do_not_fit_are_refused_by_name(build: object, reason: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        build()  # type: ignore[operator]
    assert caught.value.reason == reason


def test_kv_of_another_mode_or_head_count_is_refused_with_both_sides() -> None:
    held = apply_mode(llama(4), "turboquant", "tq4")
    demand_same_geometry(held, apply_mode(llama(4), "turboquant", "tq4"), "sequence 'r'")
    with pytest.raises(PreconditionFailed) as caught:
        demand_same_geometry(held, apply_mode(llama(4), "fp8"), "sequence 'r'")
    assert (caught.value.reason, caught.value.given, caught.value.allowed) == (
        "MODE_MISMATCH",
        "full fp8 (asked)",
        "full turboquant tq4 (held)",
    )
    for changed, words in ((llama(4, heads=2), "2x64"), (llama(4, dim=128), "3x128")):
        with pytest.raises(PreconditionFailed) as caught:
            demand_same_geometry(llama(4), changed, "sequence 'r'")
        assert caught.value.reason == "GEOMETRY_MISMATCH"
        assert words in (caught.value.given or "") or "page_bytes" in (caught.value.given or "")


@pytest.mark.parametrize("mode", ["dense", "fp8", "turboquant", "window"])
def test_a_reader_past_the_dense_window_is_refused_where_rows_behind_it_are_packed(mode: str) -> None:
    """The ablation of V4 that attends to all raw rows: possible in mode dense, another model in any other."""
    group = v4_raw(mode, "tq4" if mode == "turboquant" else "")
    for reach in (1, 127, 128):
        demand_dense_reach(group, reach, "raw attention")
    for reach in (129, 4096, 0):
        if mode == "dense":
            demand_dense_reach(group, reach, "raw attention")
            continue
        with pytest.raises(ConfigError, match=f"raw attention reads rows .*mode {mode} does not keep dense") as caught:
            demand_dense_reach(group, reach, "raw attention")
        assert caught.value.reason == "DENSE_REACH_PAST_WINDOW"


def test_a_group_that_leaves_pages_out_says_so_and_takes_less() -> None:
    every = CacheGeometry((v4_raw("turboquant", "tq4"),))
    some = CacheGeometry((dataclasses.replace(every.groups[0], keep_every=16),))
    assert (every.groups[0].retention, some.groups[0].retention) == ("all", "checkpoints")
    assert v4_raw("window").retention == "none"
    assert (every.bytes_per_token, some.bytes_per_token) == (260, 260 / 16)
    assert some.modes == "raw turboquant tq4 1/16" and "keep_every 16" in some.describe()
    with pytest.raises(PreconditionFailed) as caught:
        demand_same_geometry(every, some, "sequence 'r'")
    assert caught.value.reason == "MODE_MISMATCH"
