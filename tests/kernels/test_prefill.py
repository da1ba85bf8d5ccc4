"""A chunk's attention over pages, tail and itself equals the CPU path of `kernels.attention`, whatever is cut where."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels import prefill
from kernels.attention import PackedRegion, attend_dense, attend_packed, merge
from kernels.errors import ArgumentError, UncompiledWidthError
from kernels.page_codec import RegionRows, arena_planes, pack_pages, row_codec
from kernels.page_layout import FRAGMENTS, ROWS, Region, page_layout
from kernels.prefill import History, KernelRestore, PrefillOptions, Workspace, attend_chunk

PAGE = 128


@pytest.fixture(autouse=True)
def seed() -> int:
    """Fresh inputs each run; printed, so that a failure can be repeated."""
    value = int(torch.seed() % 2**31)
    torch.manual_seed(value)
    print(f"seed {value}")
    return value


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of history, and several matrix products a block, at sizes that a CPU does in no time."""
    monkeypatch.setattr(prefill, "BLOCK_PAGES", 2)
    monkeypatch.setattr(prefill, "_SCORES", 1)


@dataclasses.dataclass
class Sequence:
    """A sequence of one layer: `base` packed tokens in scattered pages, dense rows behind them."""

    history: History | None
    k: torch.Tensor  # [tail + chunk, kv_heads, dim]
    v: torch.Tensor
    q: torch.Tensor  # [chunk, q_heads, dim]
    base: int
    first_position: int

    @classmethod
    def make(
        cls, *, base: int, tail: int, chunk: int, dim: int, kv_heads: int, group: int, codecs: tuple[str, str | None]
    ) -> Sequence:
        own = [torch.randn(tail + chunk, kv_heads, dim) for _ in range(2)]
        k, v = own if codecs[1] else (own[0], own[0])
        history = _history(base, dim, kv_heads, codecs) if base else None
        return cls(history, k, v, torch.randn(chunk, kv_heads * group, dim), base, base + tail)

    def expected(self, options: PrefillOptions) -> torch.Tensor:
        masks = {"sm_scale": options.sm_scale, "window": options.window, "softcap": options.softcap}
        parts = [
            attend_dense(
                self.q,
                self.k,
                self.v,
                first_position=self.first_position,
                first_row=self.base,
                **masks,  # type: ignore[arg-type]
            )
        ]
        if self.history:
            history = self.history
            parts.append(
                attend_packed(
                    self.q,
                    history.keys,
                    history.values,
                    history.page_ids,
                    num_tokens=history.base,
                    first_position=self.first_position,
                    **masks,  # type: ignore[arg-type]
                )
            )
        return merge(parts, options.sinks)

    def attended(self, options: PrefillOptions) -> torch.Tensor:
        workspace = Workspace(self.k.shape[1], self.k.shape[2], self.q.dtype, self.q.device)
        return attend_chunk(
            self.q,
            self.k,
            self.v,
            first_position=self.first_position,
            first_row=self.base,
            history=self.history,
            options=options,
            workspace=workspace,
        )


def _history(base: int, dim: int, kv_heads: int, codecs: tuple[str, str | None]) -> History:
    pages = base // PAGE
    kinds = ("k", "v") if codecs[1] else ("kv",)
    row_codecs = [row_codec(name, dim) for name in codecs if name]
    regions = [
        Region(
            PAGE, kv_heads, codec.code_bytes, codec.scale_bytes, kind, dim, int(codec.name[2:]) if codec.rotated else 0
        )
        for codec, kind in zip(row_codecs, kinds, strict=True)
    ]
    layout = page_layout(regions, FRAGMENTS if codecs[1] else ROWS)
    arena = torch.full((2 * pages, layout.page_bytes), 0xA5, dtype=torch.uint8)
    page_ids = torch.randperm(2 * pages)[:pages]
    packed = []
    for codec, at in zip(row_codecs, layout.regions, strict=True):
        planes = arena_planes(arena, at, kv_heads, PAGE, codec)
        pack_pages(page_ids, [RegionRows(planes, codec, torch.randn(pages, PAGE, kv_heads, dim))])
        packed.append(PackedRegion(planes, codec))
    return History(packed[0], packed[1] if codecs[1] else None, page_ids, base)


SHAPES = [
    {"base": 0, "tail": 0, "chunk": 7, "dim": 64, "kv_heads": 1, "group": 1, "codecs": ("tq4", "tq4")},
    {"base": 0, "tail": 40, "chunk": 1, "dim": 64, "kv_heads": 2, "group": 3, "codecs": ("tq4", "tq4")},
    {"base": 128, "tail": 0, "chunk": 33, "dim": 128, "kv_heads": 2, "group": 2, "codecs": ("tq4", "tq3")},
    {"base": 640, "tail": 150, "chunk": 64, "dim": 64, "kv_heads": 2, "group": 4, "codecs": ("tq3", "tq2")},
    {"base": 384, "tail": 5, "chunk": 130, "dim": 64, "kv_heads": 1, "group": 7, "codecs": ("fp8", "fp8")},
    {"base": 256, "tail": 17, "chunk": 20, "dim": 512, "kv_heads": 1, "group": 8, "codecs": ("tq4", None)},
]
OPTIONS = {
    "plain": PrefillOptions(0.1),
    "window": PrefillOptions(0.1, window=100),
    "wide window": PrefillOptions(0.1, window=300),
    "softcap": PrefillOptions(0.5, softcap=2.0),
    "both": PrefillOptions(0.5, window=140, softcap=2.0),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape['base']}+{shape['tail']}+{shape['chunk']}")
def test_it_equals_the_cpu_path(shape: dict[str, object], options: PrefillOptions) -> None:
    sequence = Sequence.make(**shape)  # type: ignore[arg-type]
    got, want = sequence.attended(options), sequence.expected(options)
    assert got.dtype == sequence.q.dtype and got.shape == sequence.q.shape
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("sink", [-torch.inf, torch.inf, 1.5, -2.0])
def test_sinks_count_in_the_denominator_alone(sink: float) -> None:
    sequence = Sequence.make(base=256, tail=20, chunk=5, dim=64, kv_heads=2, group=2, codecs=("tq4", "tq4"))
    options = PrefillOptions(0.1, sinks=torch.tensor([sink, 0.0, sink, 3.0]))
    got, want = sequence.attended(options), sequence.expected(options)
    assert bool(got.isfinite().all())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    if sink == torch.inf:
        assert bool((got[:, 0] == 0).all())


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shape", SHAPES[:5], ids=lambda shape: f"{shape['base']}+{shape['tail']}+{shape['chunk']}")
@pytest.mark.parametrize("window", [0, 1, 2, 65, 100, 128, 129, 300, 100_000])
def test_the_library_kernels_masks_are_asked_for_rightly(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, object], window: int
) -> None:
    """With a stand-in that does to the letter what the kernel's documentation says of causal and window masks."""

    def stand_in(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, left: int | None, sm_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, num_rows, group = len(q), len(k), q.shape[1] // k.shape[1]
        assert left is None or left >= 0
        beside = torch.arange(count).view(-1, 1) + num_rows - count
        rows = torch.arange(num_rows)
        hidden = torch.zeros(count, num_rows, dtype=torch.bool)
        if is_causal:
            hidden |= rows > beside
        if left is not None:
            hidden |= rows < beside - left
        assert not bool(hidden.all(1).any()), "the kernel returns another log-sum-exp for a query that sees nothing"
        s = torch.einsum("thd,nhd->htn", q, k.repeat_interleave(group, 1)) * sm_scale
        s = s.masked_fill(hidden, -torch.inf)
        return torch.einsum("htn,nhd->thd", s.softmax(-1), v.repeat_interleave(group, 1)), s.logsumexp(-1).t()

    monkeypatch.setattr(prefill, "_flash_forward", stand_in)
    monkeypatch.setattr(prefill, "_has_flash", lambda q, options: True)
    sequence = Sequence.make(**shape)  # type: ignore[arg-type]
    options = PrefillOptions(0.1, window=window)
    torch.testing.assert_close(sequence.attended(options), sequence.expected(options), rtol=1e-4, atol=1e-4)


def test_pages_below_the_window_are_not_touched() -> None:
    sequence = Sequence.make(base=1280, tail=3, chunk=4, dim=64, kv_heads=1, group=2, codecs=("tq4", "tq4"))
    assert sequence.history
    options = PrefillOptions(0.1, window=200)
    want = sequence.expected(options)
    sequence.history.page_ids[:8] = -(2**40)
    torch.testing.assert_close(sequence.attended(options), want, rtol=1e-4, atol=1e-4)


def test_a_tail_may_begin_where_the_window_does() -> None:
    sequence = Sequence.make(base=0, tail=300, chunk=8, dim=64, kv_heads=1, group=2, codecs=("tq4", "tq4"))
    options = PrefillOptions(0.1, window=64)
    want = sequence.expected(options)
    sequence.k, sequence.v, sequence.base = sequence.k[237:], sequence.v[237:], 237
    torch.testing.assert_close(sequence.attended(options), want, rtol=1e-4, atol=1e-4)
    sequence.k, sequence.v, sequence.base = sequence.k[1:], sequence.v[1:], 238
    with pytest.raises(ArgumentError, match=r"rows \[238, 308\)"):
        sequence.attended(options)


def test_the_workspace_holds_one_block_whatever_the_length() -> None:
    workspace = Workspace(2, 64, torch.bfloat16, torch.device("cpu"))
    assert workspace.num_bytes == 2 * 32768 * 2 * 64 * 2
    assert workspace.block(1, 256, 2, 64).shape == (256, 128, 2, 64)
    with pytest.raises(ArgumentError, match="too small for this layer"):
        workspace.block(0, 256, 4, 64)


@pytest.mark.parametrize("codecs", [("tq4", "tq3"), ("fp8", "fp8"), ("tq4", None)])
def test_the_restore_kernel_is_told_where_the_layers_planes_are(codecs: tuple[str, str | None]) -> None:
    history = _history(256, 64, 2, codecs)
    workspace = Workspace(2, 64, torch.bfloat16, torch.device("cpu"))
    restore = KernelRestore(history.keys, history.values, workspace)
    group = restore._group
    sides = [history.keys] if history.values is None else [history.keys, history.values]
    for side, (region, source) in enumerate(zip(sides, group.sources, strict=True)):
        planes, heads = source.planes, region.planes.heads
        for page, head in ((0, 0), (3, 1)):
            start = group.arena[page].data_ptr() + planes.offset + head * planes.head_bytes
            assert start == heads[page, head].data_ptr()
        assert (planes.scales_offset, planes.fragments) == (region.planes.scales_offset, region.planes.fragments)
        assert source.rows.data_ptr() == workspace.rows[side].data_ptr()
        assert source.rows.shape == (prefill.BLOCK_PAGES * PAGE, 2, 64)
    table = restore._pages.tolist()
    assert table[5][1:] == [0, 0, 0, 5 * PAGE, 0, PAGE, 0]
    with pytest.raises(ArgumentError, match=r"kernels run on a GPU.*kernels\.page_codec"):
        restore(history.page_ids)
    assert restore._pages[:2, 0].tolist() == history.page_ids.tolist()


def test_a_width_without_a_restore_kernel_is_refused_by_name() -> None:
    history = _history(128, 32, 2, ("tq4", "tq4"))
    with pytest.raises(UncompiledWidthError, match="width 32"):
        KernelRestore(history.keys, history.values, Workspace(2, 32, torch.bfloat16, torch.device("cpu")))


def test_what_does_not_fit_is_refused_by_name() -> None:
    sequence = Sequence.make(base=128, tail=3, chunk=4, dim=64, kv_heads=2, group=2, codecs=("tq4", "tq4"))
    for change, named in (
        ({"q": sequence.q[:, :3]}, "q_heads a multiple"),
        ({"q": sequence.q.double()}, "float64"),
        ({"k": sequence.k[1:]}, r"\(6, 2, 64\)"),
        ({"first_position": 130}, r"queries at \[130, 134\)"),
        ({"base": 0}, r"rows \[0, 7\), 128 packed"),
    ):
        with pytest.raises(ArgumentError, match=named):
            dataclasses.replace(sequence, **change).attended(PrefillOptions(0.1))


def test_dense_pages_are_gathered_block_by_block() -> None:
    """With a part of a page behind them, as one call over all rows."""
    generator = torch.Generator().manual_seed(3)
    pages = [torch.randn(9, PAGE, 2, 64, generator=generator, dtype=torch.bfloat16) for _ in range(2)]
    page_ids = torch.tensor([7, 2, 5, 0, 8])
    base, tail, chunk = 5 * PAGE, 40, 24
    rows = [torch.randn(tail + chunk, 2, 64, generator=generator, dtype=torch.bfloat16) for _ in range(2)]
    q = torch.randn(chunk, 4, 64, generator=generator, dtype=torch.bfloat16)
    workspace = Workspace(2, 64, torch.bfloat16, torch.device("cpu"))
    for window in (0, 300, 30):
        options = PrefillOptions(64**-0.5, window)
        position = base + tail
        first = max(base, position - window + 1) if window else base
        got = attend_chunk(
            q,
            *(x[first - base :] for x in rows),
            first_position=position,
            first_row=first,
            history=prefill.DenseHistory(page_ids, base) if first == base else None,
            options=options,
            workspace=workspace,
            restore=prefill.GatherRestore(pages[0], pages[1], workspace),
        )
        k, v = (torch.cat((p[page_ids].flatten(0, 1), own)) for p, own in zip(pages, rows, strict=True))
        want = attend_dense(q, k, v, first_position=position, first_row=0, sm_scale=64**-0.5, window=window)
        assert (got - merge([want])).norm() <= 1e-2 * merge([want]).norm()
