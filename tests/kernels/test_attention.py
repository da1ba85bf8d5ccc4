"""Attention over packed pages and dense rows against a float64 reference on the dequantised rows.

The reference is written from the definition: one query, one head and one row at a time would be too slow, so it is a
dense score matrix with every mask spelled out per (position, row), and a softmax with the sink as one more column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.attention import PackedRegion, Part, attend_dense, attend_packed, merge
from kernels.errors import ArgumentError, KernelError, LayoutError
from kernels.page_codec import RegionRows, RowCodec, arena_planes, pack_pages, row_codec, unpack_pages
from kernels.page_layout import Region, page_layout

PAGE = 128
SLOW = [HealthCheck.too_slow]  # a loaded machine is no fault of the code
TOLERANCE = 1e-5
KINDS = {
    "tq4": ("tq4", "tq4"),
    "tq4v3": ("tq4", "tq3"),
    "tq3": ("tq3", "tq3"),
    "tq3v2": ("tq3", "tq2"),
    "fp8": ("fp8", "fp8"),
    "dense": ("dense", "dense"),
}


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    first_position: int,
    first_row: int,
    sm_scale: float,
    ratio: int = 1,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 out [T, q_heads, dim] and log-sum-exp [T, q_heads] (sink included); 0 and -inf where nothing is seen."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("thd,nhd->thn", q.double(), k) * sm_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    for t in range(q.shape[0]):
        position = first_position + t
        for i in range(k.shape[0]):
            last_token = (first_row + i + 1) * ratio - 1
            below = window > 0 and last_token <= position - window
            if last_token > position or below:
                scores[t, :, i] = -math.inf
    columns = scores if sinks is None else torch.cat([scores, sinks.double()[None, :, None].expand(len(q), -1, 1)], -1)
    if columns.shape[-1] == 0:
        columns = torch.full((*scores.shape[:2], 1), -math.inf, dtype=torch.float64)
    top = columns.amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = torch.exp(columns - top)
    total = weights.sum(-1, keepdim=True)
    shares = torch.where(total > 0, weights / total, 0.0)[..., : k.shape[0]]
    return torch.einsum("thn,nhd->thd", shares, v), (top + torch.log(total)).squeeze(-1)


def compare(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Positions of NaN and infinities first, then the error relative to the row's norm, with the worst index."""
    assert got.dtype == torch.float32
    assert got.shape == want.shape, what
    for name, where in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        differ = (where(got) != where(want)).nonzero()
        assert len(differ) == 0, f"{what}: {name} differs, first at {differ[0].tolist()}"
    finite = torch.isfinite(want)
    error = torch.where(finite, got.double() - want, 0.0)
    size = torch.where(finite, want, 0.0)
    if what == "out":
        error, size = error.norm(dim=-1), size.norm(dim=-1)
        relative = error / size.clamp(min=1e-30)
        relative[size == 0] = error[size == 0]
    else:
        relative = error.abs() / size.abs().clamp(min=1.0)
    if relative.numel():
        at = [int(i) for i in torch.unravel_index(relative.argmax(), relative.shape)]
        assert relative.max() <= TOLERANCE, f"{what}: error {float(relative.max()):.2e} at {at}"


@dataclass
class Packed:
    """A sequence in an arena whose every other byte is 0xFF: NaN as f32 scale, NaN as e4m3 code, NaN as dense row."""

    keys: PackedRegion
    values: PackedRegion | None
    page_ids: torch.Tensor
    k: torch.Tensor  # dequantised rows [N, kv_heads, dim]
    v: torch.Tensor
    arena: torch.Tensor


def sequence(
    kind: str | None,
    dim: int,
    kv_heads: int,
    num_rows: int,
    *,
    page_rows: int = PAGE,
    seed: int = 0,
    codecs: tuple[str, str] | None = None,
    shared: bool = False,
    rows: torch.Tensor | None = None,
    company: int = 3,
    version: int = 1,
) -> Packed:
    names = codecs or KINDS[kind or ""]
    pair: list[RowCodec] = [row_codec(name, dim, torch.float32) for name in names[: 1 if shared else 2]]
    layout = page_layout(
        [
            Region(page_rows, kv_heads, c.code_bytes, c.scale_bytes, kind, dim, int(c.name[2:]) if c.rotated else 0)
            for c, kind in zip(pair, ("kv",) if shared else ("k", "v"), strict=True)
        ],
        version,
    )
    num_pages = -(-num_rows // page_rows)
    arena = torch.full((num_pages + company, layout.page_bytes), 0xFF, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    page_ids = torch.randperm(num_pages + company, generator=generator)[:num_pages]
    planes = [arena_planes(arena, layout.regions[i], kv_heads, page_rows, c) for i, c in enumerate(pair)]
    out = []
    for i, (p, codec) in enumerate(zip(planes, pair, strict=True)):
        fresh = torch.randn(num_rows, kv_heads, dim, generator=generator) if rows is None or i else rows
        for page, page_id in enumerate(page_ids.tolist()):
            mine = fresh[page * page_rows : (page + 1) * page_rows]
            pack_pages(torch.tensor([page_id]), [RegionRows(p, codec, mine[None])])
        whole = unpack_pages(page_ids, p, codec, torch.float32).reshape(-1, kv_heads, dim)
        out.append(whole[:num_rows])
    regions = [PackedRegion(p, c) for p, c in zip(planes, pair, strict=True)]
    return Packed(regions[0], None if shared else regions[1], page_ids, out[0], out[-1], arena)


def check(seq: Packed, q: torch.Tensor, *, num_tokens: int, first_position: int, **options: float) -> Part:
    scale = float(options.pop("sm_scale", q.shape[2] ** -0.5))
    numbers = {name: int(value) for name, value in options.items() if name != "softcap"}
    softcap = float(options.get("softcap", 0.0))
    got = attend_packed(
        q,
        seq.keys,
        seq.values,
        seq.page_ids,
        num_tokens=num_tokens,
        first_position=first_position,
        sm_scale=scale,
        softcap=softcap,
        **numbers,
    )
    out, lse = reference(
        q,
        seq.k,
        seq.v,
        first_position=first_position,
        first_row=0,
        sm_scale=scale,
        softcap=softcap,
        ratio=numbers.get("ratio", 1),
        window=numbers.get("window", 0),
    )
    compare(got.lse, lse, "lse")
    compare(got.out, out, "out")
    return got


def queries(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


@settings(max_examples=80, deadline=None, suppress_health_check=SLOW)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    dim=st.sampled_from([64, 128, 256, 512]),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 7, 8]),
    num_queries=st.integers(1, 9),
    pages=st.integers(0, 5),
    partial=st.integers(0, 127),
    back=st.integers(-10, 700),
    window=st.sampled_from([0, 0, 1, 100, 128, 300]),
    softcap=st.sampled_from([0.0, 0.0, 2.0, 50.0]),
    shared=st.booleans(),
    version=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
)
def test_packed_pages_against_the_reference(
    kind: str,
    dim: int,
    kv_heads: int,
    group: int,
    num_queries: int,
    pages: int,
    partial: int,
    back: int,
    window: int,
    softcap: float,
    shared: bool,
    version: int,
    seed: int,
) -> None:
    """Queries behind, at and inside the packed rows, which end inside a page as often as not."""
    tokens = max(0, pages * PAGE - partial)
    seq = sequence(kind, dim, kv_heads, tokens, seed=seed, shared=shared, version=version)
    q = queries(seed, num_queries, kv_heads * group, dim)
    check(seq, q, num_tokens=tokens, first_position=max(0, tokens - back), window=window, softcap=softcap)


@pytest.mark.parametrize("kind", ["tq4", "tq4v3", "tq3", "tq3v2"])
def test_pages_of_fragments_read_as_pages_of_rows(kind: str) -> None:
    """The same rows in either order of a page: attention is equal to the last bit."""
    rows, fragments = (sequence(kind, 128, 2, 300, version=version) for version in (1, 2))
    assert rows.keys.planes.fragments is None and fragments.keys.planes.fragments is not None
    got = [
        attend_packed(
            queries(3, 2, 6, 128), s.keys, s.values, s.page_ids, num_tokens=300, first_position=310, sm_scale=0.1
        )
        for s in (rows, fragments)
    ]
    assert torch.equal(got[0].out, got[1].out) and torch.equal(got[0].lse, got[1].lse)


@settings(max_examples=30, deadline=None, suppress_health_check=SLOW)
@given(
    ratio=st.sampled_from([2, 4, 32, 128]),
    tokens=st.integers(0, 700),
    num_queries=st.integers(1, 9),
    first_position=st.integers(0, 800),
    seed=st.integers(0, 2**31),
)
def test_compressed_rows_are_seen_from_their_last_token_on(
    ratio: int, tokens: int, num_queries: int, first_position: int, seed: int
) -> None:
    """V4's compressed rows: one head, keys and values the same rows, many queries a head."""
    seq = sequence(None, 128, 1, tokens // ratio, page_rows=PAGE // ratio, codecs=("tq4", ""), shared=True, seed=seed)
    q = queries(seed, num_queries, 8, 128)
    check(seq, q, num_tokens=tokens, first_position=first_position, ratio=ratio)
    dense = attend_dense(q, seq.k, seq.v, first_position=first_position, first_row=0, sm_scale=128**-0.5, ratio=ratio)
    out, lse = reference(q, seq.k, seq.v, first_position=first_position, first_row=0, sm_scale=128**-0.5, ratio=ratio)
    compare(dense.lse, lse, "lse")
    compare(dense.out, out, "out")


@pytest.mark.parametrize("codecs", [("v4fp8", ""), ("tq4", "")])
def test_v4_raw_rows(codecs: tuple[str, str]) -> None:
    seq = sequence(None, 512, 1, 300, codecs=codecs, shared=True)
    check(seq, queries(1, 2, 64, 512), num_tokens=300, first_position=310, window=128)


@pytest.mark.parametrize("dim", [8, 40, 80, 96, 100, 112, 192])
@pytest.mark.parametrize("kind", ["tq4", "tq3v2", "fp8"])
def test_widths_that_are_no_power_of_two(kind: str, dim: int) -> None:
    seq = sequence(kind, dim, 2, 300)
    check(seq, queries(1, 3, 6, dim), num_tokens=300, first_position=299)


@settings(max_examples=80, deadline=None, suppress_health_check=SLOW)
@given(
    dim=st.sampled_from([64, 128]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 8]),
    num_queries=st.integers(1, 40),
    history=st.integers(-5, 300),
    first_row=st.integers(5, 1000),
    own=st.booleans(),
    window=st.sampled_from([0, 0, 0, 1, 37, 128]),
    softcap=st.sampled_from([0.0, 0.0, 5.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_dense_rows_against_the_reference(
    dim: int,
    kv_heads: int,
    group: int,
    num_queries: int,
    history: int,
    first_row: int,
    own: bool,
    window: int,
    softcap: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """A tail, a tail with the queries' own rows behind it, and rows that begin behind the first query."""
    num_rows = max(0, history + num_queries * own)
    k = queries(seed, num_rows, kv_heads, dim).to(dtype)
    v = queries(seed + 1, num_rows, kv_heads, dim).to(dtype)
    q = queries(seed + 2, num_queries, kv_heads * group, dim).to(dtype)
    first = first_row + history
    got = attend_dense(
        q, k, v, sm_scale=dim**-0.5, softcap=softcap, first_position=first, first_row=first_row, window=window
    )
    out, lse = reference(
        q, k, v, sm_scale=dim**-0.5, softcap=softcap, first_position=first, first_row=first_row, window=window
    )
    compare(got.lse, lse, "lse")
    compare(got.out, out, "out")


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(
    base=st.sampled_from([0, 128, 256, 512]),
    tail=st.integers(0, 200),
    num_queries=st.integers(1, 9),
    window=st.sampled_from([0, 100, 300]),
    sink=st.sampled_from([None, 0.0, 3.0, -math.inf, math.inf, 1e30, -1e30]),
    seed=st.integers(0, 2**31),
)
def test_pages_tail_and_sinks_merge_to_one_attention(
    base: int, tail: int, num_queries: int, window: int, sink: float | None, seed: int
) -> None:
    seq = sequence("tq4", 64, 2, base, seed=seed)
    k = torch.cat([seq.k, queries(seed, tail + num_queries, 2, 64)])
    v = torch.cat([seq.v, queries(seed + 1, tail + num_queries, 2, 64)])
    q = queries(seed + 2, num_queries, 6, 64)
    sinks = None if sink is None else torch.tensor([sink, 0.5, sink, -1.0, sink, 2.0])
    first = base + tail
    packed = attend_packed(
        q,
        seq.keys,
        seq.values,
        seq.page_ids,
        num_tokens=base,
        first_position=first,
        sm_scale=0.125,
        window=window,
    )
    # The tail as a ring that wraps: two pieces, the later one first.
    cut = tail // 3
    pieces = [
        attend_dense(
            q,
            k[base + cut :],
            v[base + cut :],
            first_position=first,
            first_row=base + cut,
            sm_scale=0.125,
            window=window,
        ),
        attend_dense(
            q,
            k[base : base + cut],
            v[base : base + cut],
            first_position=first,
            first_row=base,
            sm_scale=0.125,
            window=window,
        ),
    ]
    got = merge([*pieces, packed], sinks)
    want, _ = reference(q, k, v, first_position=first, first_row=0, sm_scale=0.125, window=window, sinks=sinks)
    compare(got, want, "out")
    if sink == math.inf:
        assert not got[:, 0].any(), "an infinite sink takes everything"


@pytest.mark.parametrize("late", [1, 3, 8])
def test_queries_before_the_first_row_see_nothing(late: int) -> None:
    k, v, q = queries(1, 9 - late, 2, 64), queries(2, 9 - late, 2, 64), queries(3, 9, 6, 64)
    got = attend_dense(q, k, v, first_position=100, first_row=100 + late, sm_scale=0.125)
    out, lse = reference(q, k, v, first_position=100, first_row=100 + late, sm_scale=0.125)
    compare(got.lse, lse, "lse")
    compare(got.out, out, "out")
    assert (got.lse[:late] == -math.inf).all()


def test_nothing_visible_gives_minus_infinity_and_zero() -> None:
    seq = sequence("tq4", 64, 2, 256)
    q = queries(0, 3, 6, 64)

    def packed(first_position: int, num_tokens: int, window: int = 0, ratio: int = 1) -> Part:
        return attend_packed(
            q,
            seq.keys,
            seq.values,
            seq.page_ids,
            num_tokens=num_tokens,
            first_position=first_position,
            sm_scale=1.0,
            window=window,
            ratio=ratio,
        )

    none = torch.zeros(0, 2, 64)
    parts = [
        packed(500, 0),
        packed(1000, 256, window=100),
        packed(0, 256, ratio=8),
        attend_dense(q, none, none, first_position=9, first_row=4, sm_scale=1.0),
        attend_dense(q, seq.k, seq.v, first_position=9, first_row=50, sm_scale=1.0),
        attend_dense(q, seq.k, seq.v, first_position=900, first_row=50, sm_scale=1.0, window=128),
    ]
    for part in parts:
        assert part.out.shape == (3, 6, 64)
        assert (part.lse == -math.inf).all()
        assert not part.out.any()
    assert not merge(parts).any()
    for sink in (-math.inf, 0.0, math.inf):
        assert not merge(parts, torch.full((6,), sink)).any()
    seen = packed(256, 256)
    assert torch.equal(merge([*parts, seen]), merge([seen]))


def test_zero_rows_score_exactly_zero() -> None:
    """Zero keys: every score is 0 whatever the query, so the output is the plain mean and lse = log(n)."""
    for kind in ("tq4", "tq3v2", "fp8"):
        seq = sequence(kind, 64, 1, 256, rows=torch.zeros(256, 1, 64))
        assert not seq.k.any()
        got = check(seq, queries(3, 2, 4, 64) * 1e15, num_tokens=256, first_position=300, sm_scale=1.0)
        assert torch.equal(got.lse, torch.full((2, 4), 256.0).log())
        mean = seq.v.double().mean(0)
        assert (got.out.double() - mean).abs().max() < 1e-6


def test_huge_scores_and_rows_stay_finite() -> None:
    """Keys with norms above 65,504 and V entries below -65,504 exist; scores of thousands leave one row with it all."""
    rows = queries(5, 256, 1, 128)
    rows[100] *= 7000
    rows[200] = -7e4
    seq = sequence("tq4", 128, 1, 256, rows=rows)
    check(seq, queries(6, 2, 4, 128), num_tokens=256, first_position=300)
    check(seq, queries(6, 2, 4, 128), num_tokens=256, first_position=300, softcap=30.0)


def test_every_length_across_a_page_boundary() -> None:
    seq = sequence("tq4v3", 64, 1, 300)
    q = queries(1, 1, 3, 64)
    for tokens in [*range(120, 141), *range(250, 301)]:
        part = Packed(seq.keys, seq.values, seq.page_ids, seq.k[:tokens], seq.v[:tokens], seq.arena)
        check(part, q, num_tokens=tokens, first_position=tokens)
        check(part, q, num_tokens=tokens, first_position=tokens - 1, window=128)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_more_pages_than_a_block_and_a_long_chunk(kind: str) -> None:
    """Several blocks, with and without masks in the middle of them."""
    tokens = 128 * 41 - 5
    seq = sequence(kind, 512, 2, tokens)
    q = queries(2, 1, 4, 512)
    check(seq, q, num_tokens=tokens, first_position=tokens)
    check(seq, q, num_tokens=tokens, first_position=tokens - 3000)
    check(seq, q, num_tokens=tokens, first_position=tokens + 10, window=4096)
    many = sequence(kind, 64, 1, 1000)
    check(many, queries(2, 300, 2, 64), num_tokens=1000, first_position=600, window=500)


def test_what_no_query_sees_is_not_read() -> None:
    """Every byte that is not a visible row is NaN in one plane or another, and page ids below the window are freed."""
    for kind in sorted(KINDS):
        seq = sequence(kind, 64, 2, 128 * 6)
        q = queries(1, 2, 4, 64)
        # Rows behind num_tokens in the last page, and rows of pages that lie wholly below the window.
        for planes in (seq.keys.planes, *(() if seq.values is None else (seq.values.planes,))):
            last = int(seq.page_ids[5])
            planes.codes[last, :, 40:] = 0xFF
            planes.scales[last, :, 40:] = 0xFF
            for page in seq.page_ids[:3].tolist():
                planes.heads[page] = 0xFF
        tokens = 128 * 5 + 40
        seq.k, seq.v = seq.k[:tokens], seq.v[:tokens]
        seq.page_ids = torch.cat([torch.tensor([-1, 1 << 40, -1]), seq.page_ids[3:]])
        before = seq.arena.clone()
        check(seq, q, num_tokens=tokens, first_position=tokens + 100, window=tokens + 100 - 384 + 1)
        assert torch.equal(seq.arena, before)


def test_the_same_bits_alone_and_in_any_company() -> None:
    """Other page ids, another arena, garbage beside it, a longer page table: not a bit of the result moves."""
    for kind in sorted(KINDS):
        generator = torch.Generator().manual_seed(4)
        rows = torch.randn(128 * 9, 2, 64, generator=generator)
        results = []
        for company in (0, 5, 11):
            seq = sequence(kind, 64, 2, 128 * 9, rows=rows, seed=company, company=company)
            assert seq.values is not None
            values = seq.keys  # the same rows in every run
            q = queries(9, 3, 6, 64)
            table = torch.cat([seq.page_ids, torch.full((company,), -1)])
            results.append(
                attend_packed(q, seq.keys, values, table, num_tokens=128 * 9 - 7, first_position=1200, sm_scale=0.125)
            )
        for other in results[1:]:
            assert torch.equal(other.out, results[0].out)
            assert torch.equal(other.lse, results[0].lse)


def test_the_visible_rows_alone_decide_about_dense_attention() -> None:
    """A tail that begins earlier gives the same bits: what lies below the window is not part of any product."""
    k, v = queries(1, 500, 2, 64), queries(2, 500, 2, 64)
    for num_queries in (1, 2, 9):
        q = queries(3, num_queries, 6, 64)
        runs = [
            attend_dense(q, k[a:], v[a:], first_position=499 - num_queries + 1, first_row=a, sm_scale=0.125, window=128)
            for a in (0, 100, 363 - num_queries + 1)
        ]
        for other in runs[1:]:
            assert torch.equal(other.out, runs[0].out)
            assert torch.equal(other.lse, runs[0].lse)


def test_strides_of_queries_and_rows_are_honoured() -> None:
    seq = sequence("tq4", 64, 2, 256)
    wide = queries(1, 3, 6, 80)
    check(seq, wide[..., 8:72], num_tokens=256, first_position=300)
    check(seq, queries(1, 6, 3, 64).transpose(0, 1), num_tokens=256, first_position=300)
    ring = torch.randn(2, 300, 64)
    a = attend_dense(
        wide[..., :64], ring.transpose(0, 1), ring.transpose(0, 1), first_position=299, first_row=0, sm_scale=1
    )
    copy = ring.transpose(0, 1).contiguous()
    b = attend_dense(wide[..., :64].contiguous(), copy, copy, first_position=299, first_row=0, sm_scale=1)
    assert (a.out - b.out).abs().max() < 1e-6


def test_arguments_are_not_written() -> None:
    seq = sequence("tq4", 64, 2, 256)
    q, sinks = queries(1, 3, 6, 64), torch.ones(6)
    copy = q.clone()
    part = check(seq, q, num_tokens=256, first_position=300, softcap=20.0)
    out, lse = part.out.clone(), part.lse.clone()
    merge([part, part], sinks)
    assert torch.equal(q, copy)
    assert torch.equal(part.out, out)
    assert torch.equal(part.lse, lse)
    assert torch.equal(sinks, torch.ones(6))


def test_refusals_name_what_is_wrong() -> None:
    seq = sequence("tq4", 64, 2, 256)
    other = sequence("tq4", 64, 3, 256)
    assert seq.values is not None
    q = queries(1, 1, 6, 64)
    rows = queries(1, 10, 2, 64)

    def packed(q: torch.Tensor = q, ids: torch.Tensor = seq.page_ids, **changes: int) -> Part:
        options = {"num_tokens": 256, "first_position": 300} | changes
        return attend_packed(q, seq.keys, seq.values, ids, sm_scale=1.0, **options)

    def dense(q: torch.Tensor = q, k: torch.Tensor = rows, v: torch.Tensor = rows, first_row: int = 0) -> Part:
        return attend_dense(q, k, v, first_position=20, first_row=first_row, sm_scale=1.0)

    good = packed()
    cases: Sequence[tuple[type[KernelError], str, Callable[[], object]]] = [
        (ArgumentError, "queries do not fit", lambda: packed(q=q[0])),
        (ArgumentError, "queries do not fit", lambda: packed(q=q.double())),
        (ArgumentError, "queries do not fit", lambda: packed(q=q[:, :5])),
        (ArgumentError, "queries do not fit", lambda: packed(q=q[..., :32])),
        (ArgumentError, "does not cover", lambda: packed(num_tokens=257)),
        (ArgumentError, "does not cover", lambda: packed(ids=seq.page_ids.int())),
        (ArgumentError, "num_tokens -1", lambda: packed(num_tokens=-1)),
        (ArgumentError, "not in the arena", lambda: packed(ids=torch.tensor([0, -1]))),
        (ArgumentError, "not in the arena", lambda: packed(ids=torch.tensor([99, 1]))),
        (ArgumentError, "ratio", lambda: packed(ratio=0)),
        (ArgumentError, "window -1", lambda: packed(window=-1)),
        (ArgumentError, "first_position -1", lambda: packed(first_position=-1)),
        (
            LayoutError,
            "different shapes",
            lambda: attend_packed(
                q, seq.keys, other.values, seq.page_ids, num_tokens=256, first_position=300, sm_scale=1.0
            ),
        ),
        (
            LayoutError,
            "codec tq3",
            lambda: attend_packed(
                q,
                seq.keys._replace(codec=row_codec("tq3", 64)),
                seq.values,
                seq.page_ids,
                num_tokens=256,
                first_position=300,
                sm_scale=1.0,
            ),
        ),
        (
            ArgumentError,
            "softcap",
            lambda: attend_dense(q, rows, rows, first_position=20, first_row=0, sm_scale=1, softcap=-1),
        ),
        (ArgumentError, "same heads", lambda: dense(v=rows[:5])),
        (ArgumentError, "same heads", lambda: dense(k=rows.double())),
        (ArgumentError, "queries do not fit", lambda: dense(q=q[:, :3])),
        (ArgumentError, "first_row -1", lambda: dense(first_row=-1)),
        (ArgumentError, "agree in shape", lambda: merge([])),
        (ArgumentError, "agree in shape", lambda: merge([good, dense(q=torch.cat([q, q]))])),
        (ArgumentError, "one logit a query head", lambda: merge([good], torch.zeros(5))),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
