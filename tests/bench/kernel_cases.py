"""What bench_kernels runs, as three lists: correctness (every kind of page), corners, performance (the issue's table).

A case is one layer's decode call. Lengths count tokens, the query tokens included; 0 is a padding sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kernels.decode_cells import DecodeShape
from kernels.widths import PRESETS

PAGE = 128
RING = 288  # rows of a tail ring: window 128 + margin 16 + a page + 8 query tokens and two steps' slack


@dataclass(frozen=True)
class Case:
    """One decode call.

    mode: a preset, "fp8" or "dense"; with shared=True keys and values are the same rows ("tq4", "fp8", "dense").
    lengths: num_tokens of each sequence. kept: tokens at a sequence's end that stay in its tail at least; the rest is
    in pages as far as it fills them. None: no tail at all, every token in pages (packed cases then need multiples of
    128). sinks: "", "random", "inf", "-inf". rows: "plain", "zero" (all of them), "huge" (norms of 1e6).
    pool_bytes: at least so much memory for pages, the used ones at its top. extra_items: packed items that the
    workspace has room for beyond need, so that partial results lie behind them. strided: queries and outputs are views.
    """

    name: str
    mode: str
    dim: int
    lengths: tuple[int, ...]
    kv_heads: int = 2
    group: int = 4
    queries: int = 1
    shared: bool = False
    kept: int | None = 144
    window: int = 0
    softcap: float = 0.0
    sinks: str = ""
    dtype: str = "bf16"
    rows: str = "plain"
    strided: bool = False
    pool_bytes: int = 0
    extra_items: int = 0
    checks: tuple[str, ...] = field(default=())  # "graph", "mates": more than one run compared

    @property
    def packed(self) -> bool:
        return self.mode in PRESETS and not self.shared

    @property
    def codecs(self) -> tuple[str, ...]:
        """Codec names: keys, values; or of shared rows alone."""
        if self.mode in PRESETS:
            preset = PRESETS[self.mode]
            return (f"tq{preset.key_bits}",) if self.shared else (f"tq{preset.key_bits}", f"tq{preset.value_bits}")
        return (self.mode,) if self.shared else (self.mode, self.mode)

    @property
    def shape(self) -> DecodeShape:
        """What decides about the cell."""
        keys, values = (*self.codecs, None)[:2]
        assert keys is not None
        heads = self.kv_heads * self.group
        capped = self.softcap > 0
        return DecodeShape(self.dim, heads, self.kv_heads, keys, values, self.dtype, self.queries, capped)

    def base(self, length: int) -> int:
        """Tokens of a sequence that lie in pages."""
        if self.kept is None:
            return length
        return max(0, length - max(self.kept, self.queries)) // PAGE * PAGE


def correctness() -> list[Case]:
    """Every kind of page, width and variant, on a ragged batch."""
    ragged = (1, 17, 127, 128, 129, 700, 0, 4500)
    cases = [
        Case(f"{preset}-d{dim}-g{group}", preset, dim, ragged, group=group)
        for preset in PRESETS
        for dim in (64, 128, 256, 512)
        for group in (4, 8)
    ]
    for mode in ("dense", "fp8"):
        for dim in (64, 128, 256, 512):
            cases.append(Case(f"{mode}-d{dim}", mode, dim, ragged, kept=None, group=4))
            cases.append(Case(f"{mode}-d{dim}-tail", mode, dim, ragged, group=8))
    for mode, group in (("tq4", 64), ("tq4", 8), ("tq3", 16), ("fp8", 64), ("dense", 64)):
        cases.append(Case(f"{mode}-shared-d512-g{group}", mode, 512, ragged, kv_heads=1, group=group, shared=True))
    cases += [
        Case("tq4-d256-softcap", "tq4", 256, ragged, softcap=5.0, group=2),
        Case("tq3-d256-softcap", "tq3", 256, ragged, softcap=5.0, group=2),
        Case("tq4-d128-softcap-g8", "tq4", 128, ragged, softcap=5.0, group=8),
        Case("dense-d256-softcap", "dense", 256, ragged, softcap=5.0, group=2, kept=None),
        Case("tq4-d64-sinks", "tq4", 64, ragged, sinks="random", group=8),
        Case("tq4-d128-f16", "tq4", 128, ragged, dtype="f16"),
        Case("tq3v2-d64-f16", "tq3v2", 64, ragged, dtype="f16"),
        Case("dense-d128-f16", "dense", 128, ragged, dtype="f16", kept=None),
        Case("fp8-d128-f16", "fp8", 128, ragged, dtype="f16"),
    ]
    return cases


def corners() -> list[Case]:
    """Odd sizes, masks, strides, big offsets, poison, graphs."""
    tq4 = Case("", "tq4", 128, (16385, 1, 17, 127, 128, 129), kv_heads=2, group=4)
    ragged = (16385, 0, 300, 2500, 9)
    cases = [replace(tq4, name=f"ratio-{group}", group=group, lengths=(1700, 129, 40)) for group in (1, 2, 4, 7, 8, 64)]
    cases += [replace(tq4, name=f"length-{n}", lengths=(n,)) for n in (1, 17, 127, 128, 129, 16385)]
    cases += [
        replace(tq4, name=f"queries-{t}-g{group}", queries=t, lengths=(16385, t, 400, 0, 1300), group=group)
        for t, group in ((2, 4), (3, 1), (5, 7), (8, 4), (8, 8))
    ]
    for window in (1, 100, 128, 129, 1000, 4096, 10**6):
        for queries in (1, 6):
            cases.append(
                replace(
                    tq4,
                    name=f"window-{window}-t{queries}",
                    window=window,
                    queries=queries,
                    lengths=(16385, 300, 40, 2600),
                )
            )
    cases += [
        replace(tq4, name="window-dense", mode="dense", kept=None, window=1000, queries=2, lengths=ragged),
        replace(tq4, name="window-fp8", mode="fp8", window=1000, queries=2, lengths=ragged),
        replace(tq4, name="window-softcap", window=700, softcap=3.0, dim=256, lengths=ragged),
        replace(tq4, name="sinks-inf", sinks="inf", lengths=(700, 9)),
        replace(tq4, name="sinks-minus-inf", sinks="-inf", lengths=(700, 9)),
        replace(tq4, name="sinks-dense", mode="dense", kept=None, sinks="random", lengths=ragged),
        replace(tq4, name="strided", strided=True, queries=3, lengths=ragged),
        replace(tq4, name="strided-dense", mode="dense", strided=True, kept=None, lengths=ragged),
        replace(tq4, name="padding-only", lengths=(0, 0, 0)),
        replace(tq4, name="tails-only", lengths=(9, 130, 1, 200), kept=1000),
        replace(tq4, name="pages-only", lengths=(1280, 128, 16384), kept=None),
        replace(tq4, name="zero-rows", rows="zero", lengths=(16385, 300)),
        replace(tq4, name="zero-rows-fp8", mode="fp8", rows="zero", lengths=(1400, 300)),
        replace(tq4, name="zero-rows-shared", dim=512, kv_heads=1, group=64, shared=True, rows="zero", lengths=(1400,)),
        replace(tq4, name="huge-rows", rows="huge", lengths=(16385, 300)),
        replace(tq4, name="huge-rows-tq3v2", mode="tq3v2", rows="huge", lengths=(1400, 300)),
        replace(tq4, name="huge-rows-shared", dim=512, kv_heads=1, group=64, shared=True, rows="huge", lengths=(1400,)),
        replace(tq4, name="pool-top", kv_heads=8, pool_bytes=5 << 30, lengths=(16385, 700)),
        replace(
            tq4, name="pool-top-dense", mode="dense", kept=None, kv_heads=8, pool_bytes=5 << 30, lengths=(16385, 700)
        ),
        replace(tq4, name="partials-above-2^31", kv_heads=8, extra_items=600_000, lengths=(16385, 700)),
        replace(tq4, name="many-sequences", lengths=tuple(range(1, 1200, 7)), kv_heads=1),
        replace(tq4, name="mates", lengths=(16385, 1, 300, 2500, 129, 0), checks=("mates",)),
        replace(tq4, name="mates-tq3", mode="tq3", dim=64, group=8, lengths=(16385, 1, 300, 2500), checks=("mates",)),
        replace(tq4, name="mates-dense", mode="dense", kept=None, lengths=(16385, 1, 300, 2500), checks=("mates",)),
        replace(
            tq4,
            name="mates-shared",
            dim=512,
            kv_heads=1,
            group=64,
            shared=True,
            lengths=(9000, 1, 300),
            checks=("mates",),
        ),
        replace(tq4, name="graph", lengths=(100_000, 777, 3), checks=("graph",)),
        replace(tq4, name="graph-dense", mode="dense", kept=None, lengths=(100_000, 777, 3), checks=("graph",)),
        replace(
            tq4,
            name="graph-shared",
            dim=512,
            kv_heads=1,
            group=64,
            shared=True,
            lengths=(100_000, 7),
            checks=("graph",),
        ),
    ]
    return cases


def small_corners() -> list[Case]:
    """The corners at sizes that compute-sanitizer gets through in a minute or two."""
    lengths = (700, 9, 0, 129, 2300)
    tq4 = Case("", "tq4", 128, lengths, kv_heads=1)
    return [
        replace(tq4, name="small-tq4"),
        replace(tq4, name="small-tq4-c8", group=8, queries=2, strided=True),
        replace(tq4, name="small-tq4v3-window", mode="tq4v3", window=200, queries=3),
        replace(tq4, name="small-tq3v2-d64", mode="tq3v2", dim=64, group=7),
        replace(tq4, name="small-tq4-d256-softcap", dim=256, group=2, softcap=4.0),
        replace(tq4, name="small-tq3-d512", mode="tq3", dim=512, group=2, lengths=(300, 40)),
        replace(tq4, name="small-dense", mode="dense", kept=None, sinks="random"),
        replace(tq4, name="small-fp8", mode="fp8", dim=64),
        replace(tq4, name="small-shared", dim=512, group=64, shared=True, lengths=(700, 40)),
        replace(tq4, name="small-shared-rows", dim=512, group=8, shared=True, lengths=(700, 40)),
    ]


@dataclass(frozen=True)
class Timed:
    """A case whose time counts. required_ms, goal_ms: of the issue. Results are checked on `checked` sequences."""

    case: Case
    required_ms: float | None = None
    goal_ms: float | None = None
    checked: int = 3


def performance() -> list[Timed]:
    """The issue's table (one layer), as the study ran it: every token in pages; and as served, with a tail."""
    llama = Case("", "tq4", 128, (), kv_heads=8, group=4, kept=None)
    long = replace(llama, name="decode-long", lengths=(32768,) * 32)
    return [
        Timed(long, 0.30, 0.27),
        Timed(replace(llama, name="decode-mid", lengths=(4096,) * 32), 0.056, 0.045),
        Timed(replace(llama, name="decode-one", lengths=(131072,)), 0.056, 0.045, 1),
        Timed(replace(long, name="decode-d64", dim=64), 0.17, 0.15),
        Timed(replace(llama, name="decode-d256", dim=256, group=2, lengths=(16384,) * 16), 0.20, 0.155),
        Timed(
            replace(llama, name="decode-mqa512", dim=512, kv_heads=1, group=64, shared=True, lengths=(32768,) * 32),
            checked=2,
        ),
        Timed(replace(long, name="decode-long-served", kept=144)),
        *(Timed(replace(long, name=f"decode-long-{mode}", mode=mode)) for mode in ("tq4v3", "tq3", "tq3v2")),
        *(Timed(replace(long, name=f"decode-d64-{mode}", dim=64, mode=mode)) for mode in ("tq4v3", "tq3", "tq3v2")),
        *(
            Timed(replace(llama, name=f"decode-d256-{mode}", dim=256, group=2, lengths=(16384,) * 16, mode=mode))
            for mode in ("tq4v3", "tq3", "tq3v2")
        ),
        Timed(replace(long, name="decode-long-g8", kv_heads=4, group=8)),
        Timed(replace(long, name="decode-long-g7", kv_heads=4, group=7)),
        Timed(replace(long, name="decode-long-t4", queries=4)),
        Timed(replace(llama, name="decode-d256-softcap", dim=256, group=2, softcap=50.0, lengths=(16384,) * 16)),
        Timed(replace(llama, name="decode-gptoss", dim=64, group=8, sinks="random", window=128, lengths=(32768,) * 32)),
        Timed(replace(long, name="decode-long-fp8", mode="fp8")),
        Timed(replace(long, name="decode-long-dense", mode="dense")),
        Timed(replace(llama, name="decode-fixed", lengths=(512,)), checked=1),
    ]


def for_cpu(case: Case) -> Case:
    """The same kind of case at a size that the PyTorch reference does in no time."""
    whole_pages = case.packed and case.kept is None
    lengths = tuple(n if n <= 384 else 384 + (0 if whole_pages else n % PAGE) for n in case.lengths[-3:])
    return replace(
        case, lengths=lengths, kv_heads=min(2, case.kv_heads), group=min(8, case.group), pool_bytes=0, extra_items=0
    )
