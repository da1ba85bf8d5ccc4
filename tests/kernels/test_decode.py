"""What a decode call refuses, what it gives the kernels, how it launches them. Needs no GPU: a stand-in takes launches.

The kernels themselves: test_decode_on_cpu.py, test_rows_on_cpu.py and others lane by lane, bench_kernels on a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch

from kernels import decode, loader
from kernels.attention import PackedRegion
from kernels.cells import Cell
from kernels.declared import DECLARED
from kernels.decode import Batch, DecodeLayer, DecodeOptions
from kernels.decode_args import Counters, DecodeArgs, Item, Plan
from kernels.decode_cells import DecodeShape, decode_cell
from kernels.decode_memory import Pages, Tail
from kernels.decode_workspace import DecodeLimits, new_workspace, packed_splits, page_row_chunks
from kernels.errors import ArgumentError, LayoutError, MixedWidthsError, UncompiledWidthError
from tests.bench import kernel_cases
from tests.bench.kernel_cases import Case
from tests.bench.kernel_checks import run_case
from tests.bench.kernel_inputs import Inputs, make

CPU = torch.device("cpu")
CASES = {
    "packed": Case("packed", "tq4v3", 128, (300, 0, 700), queries=2),
    "dense": Case("dense", "dense", 64, (300, 17), kept=None),
    "dense tail": Case("dense tail", "dense", 64, (300, 17), dtype="f16"),
    "fp8": Case("fp8", "fp8", 256, (300, 17), group=7),
    "shared": Case("shared", "tq4", 512, (300, 17), kv_heads=1, group=64, shared=True),
    "shared, 3 bits": Case("shared, 3 bits", "tq3", 64, (300, 17), shared=True),  # 28 bytes a row
}


def make_layer(inputs: Inputs, **changes: Any) -> DecodeLayer:
    case = inputs.case
    given: dict[str, Any] = {
        "keys": inputs.keys,
        "values": inputs.values,
        "tail": inputs.tail,
        "q_heads": case.kv_heads * case.group,
        "dtype": inputs.dtype,
        "options": inputs.options,
        "limits": DecodeLimits(8, 50),
        "num_queries": case.queries,
        "arch": "sm_90a",
    }
    layer = DecodeLayer(**given | changes)
    layer.use_workspace(new_workspace(layer.workspace_bytes, CPU))
    return layer


# -- which cell ------------------------------------------------------------------------------------------------------

SHAPE = DecodeShape(128, 32, 8, "tq4", "tq4")


@pytest.mark.parametrize(
    ("shape", "arch", "name"),
    [
        (SHAPE, "sm_90a", "decode_packed-w128-tq4-bf16-c4"),
        (replace(SHAPE, q_heads=40), "sm_80", "decode_packed-w128-tq4-bf16-c8"),
        (replace(SHAPE, num_queries=2), "sm_90a", "decode_packed-w128-tq4-bf16-c8"),
        (replace(SHAPE, value_codec="tq3", dim=64), "sm_90a", "decode_packed-w64-tq4v3-bf16-c4"),
        (
            replace(SHAPE, key_codec="tq3", value_codec="tq2", row_type="f16"),
            "sm_89",
            "decode_packed-w128-tq3v2-f16-c4",
        ),
        (replace(SHAPE, dim=256, softcap=True), "sm_90a", "decode_packed-w256-tq4-bf16-c4-softcap"),
        (replace(SHAPE, key_codec="fp8", value_codec="fp8"), "sm_90a", "decode_rows-w128-fp8-bf16-c8"),
        (replace(SHAPE, key_codec="dense", value_codec="dense"), "sm_90a", "decode_rows-w128-dense-bf16-c8"),
        (replace(SHAPE, key_codec="dense", value_codec=None), "sm_90a", "decode_rows-w128-dense-bf16-c8"),
        (DecodeShape(512, 64, 1, "tq4", None), "sm_90a", "decode_mqa-w512-tq4-bf16-c8"),
        (DecodeShape(512, 64, 1, "tq4", None), "sm_100a", "decode_rows-w512-tq4-bf16-c8"),
        (DecodeShape(512, 8, 1, "tq4", None), "sm_90a", "decode_rows-w512-tq4-bf16-c8"),
        (DecodeShape(512, 8, 1, "tq4", None, num_queries=2), "sm_90a", "decode_mqa-w512-tq4-bf16-c8"),
        (DecodeShape(512, 64, 1, "tq3", None), "sm_90a", "decode_rows-w512-tq3-bf16-c8"),
    ],
)
def test_the_cell_follows_from_the_shape(shape: DecodeShape, arch: str, name: str) -> None:
    assert decode_cell(shape, arch).name == name
    assert decode_cell(shape, arch, profile=True).name == f"{name}-profile"


@pytest.mark.parametrize(
    ("shape", "error", "named"),
    [
        (replace(SHAPE, dim=96), UncompiledWidthError, "96.*64, 128, 256, 512"),
        (replace(SHAPE, value_codec="tq2"), ArgumentError, "keys tq4, values tq2.*tq3 with tq2"),
        (replace(SHAPE, value_codec="dense"), ArgumentError, "keys tq4, values dense"),
        (replace(SHAPE, key_codec="v4fp8", value_codec=None, dim=512), ArgumentError, "v4fp8, values shared"),
        (replace(SHAPE, q_heads=30), ArgumentError, "30 query heads, 8 kv heads"),
        (replace(SHAPE, q_heads=65, kv_heads=1), ArgumentError, "65 query heads"),
        (replace(SHAPE, num_queries=9), ArgumentError, r"given 9.*kernels\.prefill"),
        (replace(SHAPE, num_queries=0), ArgumentError, "given 0"),
        (replace(SHAPE, row_type="f32"), ArgumentError, "f32"),
    ],
)
def test_what_is_not_compiled_is_refused_by_name(shape: DecodeShape, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        decode_cell(shape, "sm_90a")


def test_the_families_shapes_are_built_ahead() -> None:
    declared = {cell.name for cell in DECLARED}
    families = [
        *(DecodeShape(64, 9, 3, *codecs) for codecs in (("tq4", "tq4"), ("tq3", "tq2"), ("fp8", "fp8"))),  # SmolLM2
        *(DecodeShape(128, heads, 8, "tq4", "tq3") for heads in (8, 32, 40, 64)),  # llama, mistral, qwen
        *(DecodeShape(256, 16, 8, "tq4", "tq4", softcap=capped) for capped in (True, False)),  # gemma2, gemma3
        DecodeShape(64, 64, 8, "tq3", "tq3"),  # gpt_oss
        DecodeShape(512, 64, 1, "tq4", None),  # deepseek_v4
        *(DecodeShape(dim, 32, 8, "dense", "dense") for dim in (64, 128, 256)),
    ]
    for shape in families:
        for arch in ("sm_90a", "sm_100a"):
            assert decode_cell(shape, arch).name in declared, shape


# -- what the kernels are given --------------------------------------------------------------------------------------


def at(pointer: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The memory at an address, as the kernels would read it."""
    size = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(pointer), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pointers_and_strides_lead_to_every_row(case: Case) -> None:
    """Reads a query, page records and tail rows as csrc/decode_args.cuh tells a kernel to."""
    inputs = make(case, CPU)
    layer = make_layer(inputs)
    layer.set_call(inputs.q, inputs.batch, inputs.out, inputs.lse)
    args, size = layer.arguments, 2
    b, t, head = len(case.lengths) - 1, case.queries - 1, case.kv_heads * case.group - 1
    kv_head = case.kv_heads - 1
    for name, tensor in (("q", inputs.q), ("out", inputs.out)):
        strides = [getattr(args, f"{name}_{axis}_stride") for axis in ("batch", "token", "head")]
        place = getattr(args, name) + size * sum(i * stride for i, stride in zip((b, t, head), strides, strict=True))
        assert place == tensor[b, t, head].data_ptr()
    assert (args.num_sequences, args.num_queries, args.kv_heads, args.group) == (
        len(case.lengths),
        case.queries,
        case.kv_heads,
        case.group,
    )
    assert torch.equal(at(args.bases, b + 1, torch.int32), inputs.batch.bases)
    assert torch.equal(at(args.num_tokens, b + 1, torch.int32), inputs.batch.num_tokens)
    page = int(at(args.page_table, 1, torch.int32))
    assert page == int(inputs.page_ids[0][0])
    sides = [("k", inputs.keys), ("v", inputs.keys if inputs.values is None else inputs.values)]
    for side, pages in sides:
        pointer = getattr(args, f"{side}_pages") + page * args.page_stride
        pointer += kv_head * getattr(args, f"{side}_head_stride")
        row_stride = getattr(args, f"{side}_row_stride")
        if isinstance(pages, torch.Tensor):
            assert pointer + 5 * row_stride == pages[page, 5, kv_head].data_ptr()
        else:
            planes = pages.planes
            assert pointer == planes.heads[page, kv_head].data_ptr()
            assert getattr(args, f"{side}_scales_offset") == planes.scales_offset
            assert row_stride == (0 if planes.fragments else planes.code_bytes)
    if inputs.tail is None:
        assert not args.k_tail and not args.tail_slots
    else:
        slot, ring_row = int(at(args.tail_slots, b + 1, torch.int32)[b]), 7
        for side, tensor in zip("kv", inputs.tail, strict=True):
            pointer = getattr(args, f"{side}_tail") + slot * getattr(args, f"{side}_tail_slot_stride")
            pointer += ring_row * args.tail_row_stride + kv_head * args.tail_head_stride
            assert pointer == tensor[slot, ring_row, kv_head].data_ptr()
        assert args.ring_rows == inputs.tail.keys.shape[1]
    assert (args.window, args.minus_one) == (case.window, 2**32 - 1)
    assert args.sm_scale == pytest.approx(case.dim**-0.5)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("profile", [False, True])
def test_the_workspace_has_room_for_the_largest_call(case: Case, profile: bool) -> None:
    inputs = make(case, CPU)
    layer = make_layer(inputs, profile=profile, limits=DecodeLimits(3, 37))
    args, limits, shape = layer.arguments, layer.limits, layer.shape
    vectors = shape.kv_heads * shape.num_vectors
    items = args.max_packed_items + args.max_row_items
    ring_items = 0 if inputs.tail is None else -(-args.ring_rows // 256)
    if layer.launch.long_pages:
        assert args.max_packed_items == limits.sequences * packed_splits(limits.pages, layer.launch.long_pages)
        assert args.max_row_items == limits.sequences * ring_items
    else:
        assert args.max_packed_items == 0
        assert args.max_row_items >= limits.sequences * (limits.pages * 128 / layer.launch.page_chunk + ring_items)
    parts = [
        (args.counters, ctypes.sizeof(Counters)),
        (args.plans, limits.sequences * ctypes.sizeof(Plan)),
        (args.items, items * ctypes.sizeof(Item)),
        (args.queries, limits.sequences * layer.launch.query_bytes),
        (args.partial_out, items * vectors * shape.dim * 4),
        (args.partial_ml, items * vectors * 8),
        *([(args.profile, 8 * 8 * layer.launch.attend.ctas(1, 1))] if profile else []),
    ]
    assert bool(args.profile) == profile
    end = args.counters
    for pointer, size in parts:
        assert pointer % 128 == 0 and pointer >= end
        end = pointer + size
    assert end <= args.counters + layer.workspace_bytes < end + 128


@pytest.mark.parametrize("pages", [0, 1, 4, 5, 15, 16, 17, 32, 33, 271, 272, 1024])
@pytest.mark.parametrize("long_pages", [16, 32])
def test_splits_are_counted_as_the_device_cuts_them(pages: int, long_pages: int) -> None:
    short = min(pages, max(16, pages // 16))
    cuts = [*range(0, pages - short, long_pages), *range(pages - short, pages, 4)]
    assert packed_splits(pages, long_pages) == len(cuts)
    chunks = [*range(0, 128 * (pages - short), 512), *range(128 * (pages - short), 128 * pages, 128)]
    assert page_row_chunks(pages, 512) == len(chunks)


# -- refusals --------------------------------------------------------------------------------------------------------


def _misaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values, one element past a multiple of 16 bytes."""
    flat = torch.empty(x.numel() + 1, dtype=x.dtype)[1:]
    return flat.view(x.shape).copy_(x)


def test_a_call_that_does_not_fit_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "load", lambda *_: pytest.fail("something was loaded"))
    inputs = make(CASES["packed"], CPU)
    layer, batch = make_layer(inputs), inputs.batch
    assert batch.tail_slots is not None
    good: dict[str, Any] = {"q": inputs.q, "batch": batch, "out": inputs.out, "lse": inputs.lse}
    layer.set_call(**good)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"q": inputs.q[:, :1]}, r"q does not fit.*\(3, 1, 8, 128\)"),
        ({"q": inputs.q.float()}, "q does not fit.*float32"),
        ({"q": inputs.q.transpose(2, 3).contiguous().transpose(2, 3)}, "last dim contiguous"),
        ({"q": _misaligned(inputs.q)}, "begin at multiples of 16"),
        ({"q": inputs.q[..., :64]}, r"\[B, 2, 8, 128\]"),
        ({"q": torch.empty(3, 2, 8, 132, dtype=inputs.dtype)[..., :128]}, "multiples of 16 bytes"),
        ({"out": inputs.out[:2]}, "out does not fit"),
        ({"out": _misaligned(inputs.out)}, "begin at multiples of 16"),
        ({"lse": inputs.lse.double()}, "lse does not fit.*float64"),
        ({"lse": inputs.lse.transpose(1, 2)}, "lse does not fit"),
        ({"batch": replace(batch, page_table=batch.page_table.long())}, "page table does not fit.*int64"),
        ({"batch": replace(batch, page_table=batch.page_table[:2])}, "page table does not fit"),
        ({"batch": replace(batch, page_table=batch.page_table.new_zeros(3, 51))}, "1 to 50"),
        ({"batch": replace(batch, bases=batch.bases[:2])}, r"bases does not fit.*\(2,\)"),
        ({"batch": replace(batch, num_tokens=batch.num_tokens.long())}, "num_tokens does not fit"),
        ({"batch": replace(batch, tail_slots=None)}, "no tail slots"),
        ({"batch": replace(batch, tail_slots=torch.zeros(6, dtype=torch.int32)[::2])}, "tail_slots does not fit"),
    ]
    for change, named in bad:
        with pytest.raises(ArgumentError, match=named):
            layer(**good | change)
    many = make(replace(CASES["packed"], lengths=(5,) * 9), CPU)
    with pytest.raises(ArgumentError, match=r"9 sequences.*1 to 8"):
        layer(many.q, many.batch, out=many.out)


def _with_scales_apart(pages: Pages) -> PackedRegion:
    """The same planes, said to have 128 bytes more before their scales."""
    assert isinstance(pages, PackedRegion)
    return PackedRegion(replace(pages.planes, scales_offset=pages.planes.scales_offset + 128), pages.codec)


def test_a_layer_that_does_not_fit_together_is_refused() -> None:
    packed, dense, fp8, tailed = (make(CASES[name], CPU) for name in ("packed", "dense", "fp8", "dense tail"))
    narrow = make(replace(CASES["packed"], dim=64), CPU)
    fewer = make(replace(CASES["packed"], kv_heads=1), CPU)
    rows = dense.keys
    assert packed.tail is not None and packed.values is not None and isinstance(rows, torch.Tensor)
    swapped = {"keys": packed.values, "values": packed.keys}
    bad: list[tuple[Inputs, dict[str, Any], type[Exception], str]] = [
        (packed, swapped, LayoutError, "takes pages in another order"),
        (packed, {"values": None}, LayoutError, "kind 'kv' takes pages in another order.*given Fragments"),
        (packed, {"values": narrow.values}, LayoutError, "pages of different shapes"),
        (packed, {"values": fewer.values}, LayoutError, "pages of different shapes"),
        (packed, {"dtype": torch.float32}, ArgumentError, "float32"),
        (packed, {"dtype": torch.float16}, ArgumentError, "tails do not fit.*bfloat16"),
        (packed, {"tail": narrow.tail}, ArgumentError, "tails do not fit"),
        (packed, {"tail": Tail(packed.tail.keys, packed.tail.values[:, :9])}, ArgumentError, "tails do not fit"),
        (dense, {"dtype": torch.float16}, ArgumentError, "float16, pages torch.bfloat16"),
        (dense, {"keys": rows[:, :64], "values": rows[:, :64]}, LayoutError, "no dense pages"),
        (dense, {"keys": rows[..., 1:], "values": rows[..., 1:]}, LayoutError, "multiples of 16"),
        (fp8, {"values": make(CASES["dense"], CPU).values}, ArgumentError, "keys fp8, values dense"),
        (packed, {"keys": _with_scales_apart(packed.keys)}, LayoutError, "right behind.*scales at 8320"),
        (tailed, {"options": DecodeOptions(0.0)}, ArgumentError, "sm_scale 0"),
        (tailed, {"options": DecodeOptions(-1.0)}, ArgumentError, "sm_scale -1"),
        (tailed, {"options": DecodeOptions(float("nan"))}, ArgumentError, "sm_scale nan"),
        (tailed, {"options": DecodeOptions(1.0, window=-1)}, ArgumentError, "window -1"),
        (tailed, {"options": DecodeOptions(1.0, window=2**30 + 1)}, ArgumentError, "up to 1073741824 tokens"),
        (tailed, {"options": DecodeOptions(1.0, sinks=torch.zeros(7))}, ArgumentError, r"sinks are one logit.*\(7,\)"),
        (tailed, {"q_heads": 7}, ArgumentError, "7 query heads"),
    ]
    for inputs, change, error, named in bad:
        with pytest.raises(error, match=named):
            make_layer(inputs, **change)
    layer = make_layer(packed)
    with pytest.raises(ArgumentError, match="workspace does not serve"):
        layer.use_workspace(torch.empty(layer.workspace_bytes - 1, dtype=torch.uint8))
    with pytest.raises(ArgumentError, match="workspace does not serve"):
        layer.use_workspace(torch.empty(layer.workspace_bytes + 1, dtype=torch.uint8)[1:])


def test_a_batch_that_was_checked_cannot_change() -> None:
    batch = make(CASES["packed"], CPU).batch
    with pytest.raises(FrozenInstanceError):
        batch.bases = batch.bases[:2]  # type: ignore[misc]


@pytest.mark.parametrize("name", ["packed", "dense"])
def test_a_layer_keeps_the_memory_that_it_reads(name: str) -> None:
    inputs = make(CASES[name], CPU)
    pages = [
        at if isinstance(at, torch.Tensor) else at.planes.heads for at in (inputs.keys, inputs.values) if at is not None
    ]
    memory = [weakref.ref(x) for x in pages]
    layer = make_layer(inputs)
    del inputs, pages
    gc.collect()
    assert all(x() is not None for x in memory)
    del layer
    gc.collect()
    assert all(x() is None for x in memory)


def test_page_layout_1_is_told_how_to_become_2() -> None:
    shared = make(replace(CASES["shared"], dim=128, kv_heads=2, group=4), CPU)
    with pytest.raises(LayoutError, match=r"rows, page layout 1.*layout version 2 for groups whose memory is on a GPU"):
        make_layer(shared, values=shared.keys)


def test_widths_of_both_sides_are_still_checked_apart() -> None:
    """The list that modes are asked against (kernels/widths.py) names the side."""
    from kernels.widths import require_explicit

    with pytest.raises(UncompiledWidthError, match="value width"):
        require_explicit("tq4", 128, 96)
    with pytest.raises(MixedWidthsError):
        require_explicit("tq4", 128, 64)


# -- launches --------------------------------------------------------------------------------------------------------


class Launched:
    """Stands for loader.PreparedLaunch: records what is launched, with the arguments as they were then."""

    log: list[tuple[str, int, int, int, bool, bytes, int]]

    def __init__(
        self,
        cell: Cell,
        kernel: str,
        device_index: int,
        arguments: DecodeArgs,
        *,
        threads: int,
        shared_bytes: int = 0,
        overlap: bool = False,
    ) -> None:
        self.kernel, self.arguments = kernel, arguments
        self.facts = (threads, shared_bytes, overlap)
        self.ctas = 0

    def set_ctas(self, x: int, y: int = 1) -> None:
        self.ctas = x * y

    def __call__(self, stream: int) -> None:
        threads, shared_bytes, overlap = self.facts
        Launched.log.append((self.kernel, self.ctas, threads, shared_bytes, overlap, bytes(self.arguments), stream))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> type[Launched]:
    Launched.log = []
    monkeypatch.setattr(loader, "PreparedLaunch", Launched)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(decode, "_current_stream", lambda index: 77)
    monkeypatch.setattr(DecodeLayer, "_num_sms", lambda self: 132)
    return Launched


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_call_is_three_launches_sized_for_its_batch(launched: type[Launched], case: Case) -> None:
    inputs = make(case, CPU)
    layer = make_layer(inputs)
    assert layer(inputs.q, inputs.batch, out=inputs.out, lse=inputs.lse) is inputs.out
    few = Batch(*(None if x is None else x[:1] for x in inputs.batch.tensors))  # type: ignore[arg-type]
    layer(inputs.q[:1], few, out=inputs.out[:1])
    kernels = [entry[0] for entry in launched.log]
    assert kernels == [*layer.cell.kernels, *layer.cell.kernels]
    assert [entry[4] for entry in launched.log] == [False, True, True] * 2
    assert {entry[6] for entry in launched.log} == {77}
    shape, passes = layer.shape, -(-layer.shape.num_vectors // int(dict(layer.cell.defines)["TAILPACK_VECTORS"]))
    for batch, (prepare, attend, merge) in ((len(case.lengths), launched.log[:3]), (1, launched.log[3:])):
        assert prepare[1] == batch * shape.kv_heads * passes
        assert attend[1] in (132, 264, 528)
        assert merge[1] == batch * shape.num_queries * shape.q_heads
        arguments = DecodeArgs.from_buffer_copy(merge[5])
        assert arguments.num_sequences == batch
        assert bool(arguments.lse) == (batch > 1)


def test_older_archs_launch_one_after_the_other(launched: type[Launched]) -> None:
    inputs = make(CASES["packed"], CPU)
    layer = make_layer(inputs, arch="sm_89")
    layer(inputs.q, inputs.batch, out=inputs.out)
    assert [entry[4] for entry in launched.log] == [False] * 3
    large = make_layer(inputs).launch.attend.shared_bytes
    assert layer.launch.attend.shared_bytes <= 99 * 1024 < large


def test_a_tensor_on_the_cpu_needs_an_arch_to_be_named() -> None:
    inputs = make(CASES["packed"], CPU)
    with pytest.raises(ArgumentError, match=r"cpu.*kernels\.attention"):
        make_layer(inputs, arch=None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("case", kernel_cases.small_corners(), ids=lambda case: case.name)
def test_small_corners_on_a_gpu(case: Case) -> None:
    facts = run_case(case, torch.device("cuda", torch.cuda.current_device()))
    assert facts["ok"], facts
