"""The codec's CUDA kernels on a real GPU against the PyTorch reference. One script, no test framework:

    python3 tests/kernels/device_check.py                     everything, about a minute
    python3 tests/kernels/device_check.py --skip-timing
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 \\
        python3 tests/kernels/device_check.py --sanitize-list

Every check is one JSON line in --out FILE, or else in $OUT/device_check.jsonl; text goes to standard output.
Exit status: 0 all passed, 1 a check failed, 2 this machine cannot run it (no device, no CuPy, no compiler).
tests/kernels/test_cuda_turboquant.py runs the same checks under pytest.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from kernels import loader, turboquant, turboquant_cuda
from kernels.archive import Status, verify
from kernels.cells import ROW_TYPES, codec_cell
from kernels.compiler import ToolchainError, toolchain
from kernels.cubins import build, default_folder
from kernels.declared import DECLARED
from kernels.errors import ArgumentError, KernelError, NonFiniteRowError, NormTooLargeError, UncompiledWidthError
from kernels.rotation import rotate
from kernels.turboquant import PackedRows
from kernels.widths import COMPILED_WIDTHS, PACKED_BITS

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
ROW_COUNTS = (1, 17, 127, 128, 129, 1000, 16385)
SMALL_ROW_COUNTS = (1, 17, 129)
POISON = 0xA5
GUARD = 16  # values or bytes around an output that must stay as they were
MAX_SCALE_ULPS = 2
TIE = 1e-6  # |y - boundary| below TIE * boundary counts as equidistant within rounding


REPEATS = 20

QUIET = {"pack", "unpack", "bad rows", "refusal", "graph", "graph flag"}  # many of each: the summary counts them


@dataclass
class Report:
    """Collects results: a JSON line each into `file`; on standard output what failed and what is worth reading."""

    file: TextIO | None = None
    failed: list[str] = field(default_factory=list)
    passed: Counter[str] = field(default_factory=Counter)
    codes_compared: int = 0
    codes_differ: int = 0
    scale_ulps: int = 0
    figures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, check: str, ok: bool, **facts: Any) -> None:
        line = json.dumps({"check": check, "ok": ok, **facts})
        if self.file:
            self.file.write(line + "\n")
            self.file.flush()
        if not ok or check not in QUIET:
            text = " ".join(f"{name}={value}" for name, value in facts.items())
            print(f"{'ok  ' if ok else 'FAIL'} {check} {text}"[:1500], flush=True)
        self.passed[check] += ok
        if not ok:
            self.failed.append(line)


def random_rows(n: int, d: int, dtype: torch.dtype, seed: int) -> Tensor:
    """CPU rows [n, d]: Gaussian with norms over five decades, then zero, one-hot, constant, tiny and huge rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, d, generator=generator) * torch.exp(2 * torch.randn(n, 1, generator=generator))
    unit = torch.nn.functional.normalize(torch.randn(4, d, generator=generator), dim=1)
    special = [torch.zeros(d), torch.eye(d)[d // 3], torch.full((d,), -0.75), torch.full((d,), -0.0), unit[0] * 1e-12]
    special.append(torch.eye(d)[1] - torch.eye(d)[d - 1])  # half of its rotated coordinates are zeros of both signs
    if dtype == torch.float16:
        special += [torch.full((d,), 65000.0)]  # comes back longer than f16 holds, so it saturates
        rows.clamp_(-65000, 65000)
    else:
        special += [unit[1] * 1e6, unit[2] * 1e30, unit[3] * 0.99e37]
    for i, row in enumerate(special[: n - 1]):
        rows[i + 1] = row
    return rows.to(dtype)


def views(rows: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same CUDA rows as a contiguous tensor, as every other row of a wide one, and in the middle of wide rows."""
    n, d = rows.shape
    yield "contiguous", rows
    strided = torch.full((n, 2, d), float("nan"), dtype=rows.dtype, device=rows.device)
    strided[:, 1] = rows
    yield "strided", strided[:, 1]
    offset = torch.full((n + 1, d + 24), float("nan"), dtype=rows.dtype, device=rows.device)
    offset[1:, 8 : 8 + d] = rows
    yield "offset", offset[1:, 8 : 8 + d]


def poisoned_records(n: int, size: int) -> tuple[Tensor, PackedRows]:
    """Poisoned canonical records u8 [n + 2, size + 4] on the device, and the output of rows 1..n in them."""
    records = torch.full((n + 2, size + 4), POISON, dtype=torch.uint8, device="cuda")
    return records, PackedRows(records[1:-1, :size], records.view(torch.float32)[1:-1, size // 4 :])


def bits_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16).cpu()


def compare_packed(rows: Tensor, got: PackedRows, expected: PackedRows, bits: int) -> dict[str, Any]:
    """Codes and scales of the device against the reference, all on the CPU; what differs is weighed.

    A code may differ only where the coordinate lies within TIE of a boundary; a scale is then judged against the norm
    of the codes that were stored.
    """
    d = rows.shape[1]
    facts: dict[str, Any] = {"codes_differ": 0, "codes_wrong": 0, "scale_ulps": 0}
    ulps = (got.scales.view(torch.int32) - expected.scales.view(torch.int32)).abs().flatten()
    same_row = (got.codes == expected.codes).all(1)
    facts["scale_ulps"] = int(ulps[same_row].max()) if bool(same_row.any()) else 0
    for i in (~same_row).nonzero().flatten().tolist():
        one = turboquant.unpack_codes(PackedRows(got.codes[i : i + 1], got.scales[i : i + 1]), d, bits)[0]
        two = turboquant.unpack_codes(PackedRows(expected.codes[i : i + 1], expected.scales[i : i + 1]), d, bits)[0]
        y = rotate(rows[i].double() / rows[i].double().norm())
        grid = turboquant.code_values(d, bits).double()
        differ = one != two
        distance = ((y - grid[one.long()]).abs() - (y - grid[two.long()]).abs()).abs()
        facts["codes_differ"] += int(differ.sum())
        facts["codes_wrong"] += int((differ & (distance > TIE * y.abs().clamp_min(grid.abs().min()))).sum())
        scale = rows[i].double().norm() / grid[one.long()].norm()
        ulp = abs(float(got.scales[i, 0]) - float(scale)) / max(float(scale) * 2**-23, 1e-45)
        facts["scale_ulps"] = max(facts["scale_ulps"], int(ulp + 0.5))
    return facts


def check_equal(report: Report, width: int, bits: int, name: str, n: int, seed: int) -> None:
    """Pack and unpack of every view equal the reference; outputs are poisoned before and guarded around."""
    dtype = DTYPES[name]
    rows = random_rows(n, width, dtype, seed)
    expected = turboquant.pack(rows, bits)
    wanted = turboquant.unpack(expected, width, bits, dtype)
    size = turboquant.code_bytes(width, bits)
    device_rows = rows.cuda()
    where = {"width": width, "bits": bits, "dtype": name, "rows": n, "seed": seed}
    for view, given in views(device_rows):
        records, out = poisoned_records(n, size)
        turboquant_cuda.pack(given, bits, out=out, checked=True)
        got = PackedRows(out.codes.cpu().contiguous(), out.scales.cpu().contiguous())
        facts = compare_packed(rows, got, expected, bits)
        report.codes_compared += rows.numel()
        report.codes_differ += facts["codes_differ"]
        report.scale_ulps = max(report.scale_ulps, facts["scale_ulps"])
        guards = bool((records[0] == POISON).all() and (records[-1] == POISON).all())
        ok = facts["codes_wrong"] == 0 and facts["scale_ulps"] <= MAX_SCALE_ULPS and guards
        report.add("pack", ok, **where, view=view, **facts, guards=guards)

        wide = torch.full((n + 2, width + 2 * GUARD), float("nan"), dtype=dtype, device="cuda")
        target = wide[1:-1, GUARD:-GUARD]
        device_packed = PackedRows(expected.codes.cuda(), expected.scales.cuda())
        turboquant_cuda.unpack(device_packed, width, bits, dtype, out=target)
        differ = bits_of(target) != bits_of(wanted)
        error = (target.cpu().double() - wanted.double()).norm(dim=1) / wanted.double().norm(dim=1).clamp_min(1e-300)
        outside = int((~wide.isnan()).sum()) - target.numel()
        ok = not bool(differ.any()) and outside == 0
        worst = float(error.nan_to_num(nan=float("inf")).max())
        report.add("unpack", ok, **where, view=view, values_differ=int(differ.sum()), worst=worst, outside=outside)


def check_bad_rows(report: Report, width: int) -> None:
    """NaN, infinities and norms above the limit: refused by name when checked, flagged when not, never silent."""
    n = 300
    for what, value in (("nan", float("nan")), ("inf", float("inf")), ("-inf", -float("inf")), ("norm 3e37", 3e37)):
        rows = torch.randn(n, width)
        rows[211, width - 1] = rows[77, 0] = value
        error_type = NormTooLargeError if what.startswith("norm") else NonFiniteRowError
        raised = ""
        try:
            turboquant_cuda.pack(rows.cuda(), 4, checked=True)
        except error_type as error:
            raised = str(error)
        flag = turboquant_cuda.new_bad_row_flag(torch.device("cuda", torch.cuda.current_device()))
        packed = turboquant_cuda.pack(rows.cuda(), 4, first_bad_row=flag)
        bad = packed.scales.isnan().flatten().nonzero().flatten().tolist()
        good = [i for i in range(n) if i not in (77, 211)]
        others = torch.equal(packed.codes.cpu()[good], turboquant.pack(rows[good], 4).codes)
        ok = "row 77" in raised and int(flag) == 77 and bad == [77, 211] and others
        report.add("bad rows", ok, width=width, what=what, flag=int(flag), nan_scales=bad, others=others, raised=raised)


def check_refusals(report: Report) -> None:
    """What the kernels do not take raises before anything runs: the outputs keep their poison."""
    rows = torch.randn(8, 128, device="cuda", dtype=torch.bfloat16)
    _, out = poisoned_records(8, 64)
    wide = torch.randn(8, 160, device="cuda", dtype=torch.bfloat16)
    packed = turboquant_cuda.pack(rows, 4)
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    few = PackedRows(out.codes[:7], out.scales[:7])
    shifted = PackedRows(torch.empty(8 * 64 + 1, dtype=torch.uint8, device="cuda")[1:].view(8, 64), out.scales)
    expanded = PackedRows(torch.empty((1, 64), dtype=torch.uint8, device="cuda").expand(8, 64), out.scales)
    refusals: list[tuple[str, type[KernelError], Callable[[], object]]] = [
        ("width 96", UncompiledWidthError, lambda: turboquant_cuda.pack(wide[:, :96], 4, out=out)),
        ("5 bits", ArgumentError, lambda: turboquant_cuda.pack(rows, 5, out=out)),
        ("float64", ArgumentError, lambda: turboquant_cuda.pack(rows.double(), 4, out=out)),
        ("on the CPU", ArgumentError, lambda: turboquant_cuda.pack(rows.cpu(), 4, out=out)),
        ("three dims", ArgumentError, lambda: turboquant_cuda.pack(rows.view(2, 4, 128), 4, out=out)),
        ("column stride", ArgumentError, lambda: turboquant_cuda.pack(rows.t().contiguous().t(), 4, out=out)),
        ("address 2 past 16", ArgumentError, lambda: turboquant_cuda.pack(wide[:, 1:129], 4, out=out)),
        ("row stride", ArgumentError, lambda: turboquant_cuda.pack(wide.as_strided((8, 128), (132, 1)), 4, out=out)),
        ("codes of 3 bits", ArgumentError, lambda: turboquant_cuda.pack(rows, 3, out=out)),
        ("codes too few", ArgumentError, lambda: turboquant_cuda.pack(rows, 4, out=few)),
        ("codes unaligned", ArgumentError, lambda: turboquant_cuda.pack(rows, 4, out=shifted)),
        ("codes overlap", ArgumentError, lambda: turboquant_cuda.pack(rows, 4, out=expanded)),
        ("flag dtype", ArgumentError, lambda: turboquant_cuda.pack(rows, 4, out=out, first_bad_row=flag)),
        ("unpack dtype", ArgumentError, lambda: turboquant_cuda.unpack(packed, 128, 4, torch.float64)),
        ("unpack width", ArgumentError, lambda: turboquant_cuda.unpack(packed, 256, 4)),
        ("unpack out", ArgumentError, lambda: turboquant_cuda.unpack(packed, 128, 4, out=wide[:, :64])),
    ]
    for what, error_type, call in refusals:
        try:
            call()
            raised = "nothing"
        except error_type as error:
            raised = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - the wrong error is a failed check, not a crash of the script
            raised = f"the wrong error, {type(error).__name__}: {error}"
        untouched = bool((out.codes == POISON).all())
        report.add("refusal", not raised.startswith(("nothing", "the wrong")) and untouched, what=what, raised=raised)


def check_graph(report: Report, width: int, bits: int) -> None:
    """Pack and unpack captured by torch into one CUDA graph, replayed on fresh rows and on a bad one."""
    n = 1000
    rows = torch.zeros(n, width, dtype=torch.bfloat16, device="cuda")
    back = torch.empty_like(rows)
    flag = turboquant_cuda.new_bad_row_flag(rows.device)
    packed = turboquant_cuda.pack(rows, bits)  # loads the kernels: not allowed inside a capture
    turboquant_cuda.unpack(packed, width, bits, out=back)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turboquant_cuda.pack(rows, bits, out=packed, first_bad_row=flag)
        turboquant_cuda.unpack(packed, width, bits, out=back)
    for replay in range(3):
        fresh = random_rows(n, width, torch.bfloat16, seed=1000 + replay)
        rows.copy_(fresh)
        packed.codes.fill_(POISON)
        packed.scales.fill_(float("nan"))
        graph.replay()
        expected = turboquant.pack(fresh, bits)
        same = torch.equal(packed.codes.cpu(), expected.codes) and torch.equal(packed.scales.cpu(), expected.scales)
        wanted = turboquant.unpack(expected, width, bits, torch.bfloat16)
        same_rows = torch.equal(bits_of(back), bits_of(wanted))
        ok = same and same_rows and int(flag) == turboquant_cuda.NO_BAD_ROW
        report.add("graph", ok, width=width, bits=bits, replay=replay, packed=same, rows=same_rows)
    rows[5, 3] = float("inf")
    graph.replay()
    report.add("graph flag", int(flag) == 5, width=width, bits=bits, flag=int(flag))


def check_stream(report: Report) -> None:
    """A launch follows what torch queued before it on the same side stream, and nothing waits for the device."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    rows = torch.zeros(4096, 128, dtype=torch.bfloat16, device="cuda")
    fresh = random_rows(4096, 128, torch.bfloat16, seed=7)
    device_fresh = fresh.cuda()
    out = turboquant_cuda.pack(rows, 4)
    torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call] # some 0.2 s of device time
        rows.copy_(device_fresh)
        turboquant_cuda.pack(rows, 4, out=out)
    queued_ms = (time.perf_counter() - started) * 1e3
    busy = not stream.query()
    stream.synchronize()
    same = torch.equal(out.codes.cpu(), turboquant.pack(fresh, 4).codes)
    report.add("stream", same and busy, queued_ms=round(queued_ms, 3), device_still_busy=busy, same=same)


def check_large_offsets(report: Report) -> None:
    """Rows and codes more than 2^31 values apart: offsets are 64-bit."""
    n, d, gap = 5, 128, 2**30 + 64
    space = torch.empty((n - 1) * gap + d, dtype=torch.bfloat16, device="cuda")
    rows = space.as_strided((n, d), (gap, 1))
    fresh = random_rows(n, d, torch.bfloat16, seed=11)
    rows.copy_(fresh)
    code_space = torch.empty((n - 1) * gap + 64, dtype=torch.uint8, device="cuda")
    codes = code_space.as_strided((n, 64), (gap, 1))
    packed = PackedRows(codes, torch.empty((n, 1), device="cuda"))
    turboquant_cuda.pack(rows, 4, out=packed, checked=True)
    expected = turboquant.pack(fresh, 4)
    same = torch.equal(codes.cpu(), expected.codes) and torch.equal(packed.scales.cpu(), expected.scales)
    rows.zero_()
    turboquant_cuda.unpack(packed, d, 4, out=rows)
    back = torch.equal(bits_of(rows), bits_of(turboquant.unpack(expected, d, 4, torch.bfloat16)))
    report.add("large offsets", same and back, gib=round(space.numel() * 2 / 2**30, 1), pack=same, unpack=back)


def check_archive(report: Report, arch: str) -> None:
    """Build the declared cells for this GPU (timed), inspect them, and show what the driver says of each kernel."""
    started = time.perf_counter()
    results = build(DECLARED, [arch], default_folder())
    seconds = round(time.perf_counter() - started, 1)
    errors = [result.error for result in results if result.error]
    report.add("build", not errors, arch=arch, cells=len(results), seconds=seconds, errors=errors[:3])
    try:
        findings = verify(DECLARED, [arch], default_folder())
    except ToolchainError as error:
        report.add("verify", True, skipped=str(error))
    else:
        bad = [f"{f.cell.name}: {f.reason}" for f in findings if f.status is not Status.OBSERVED]
        report.add("verify", not bad, arch=arch, cells=len(findings), bad=bad[:3])
    index = torch.cuda.current_device()
    for width in COMPILED_WIDTHS:
        for bits in PACKED_BITS:
            for name, kernel in loader.load(codec_cell(width, bits, "bf16"), index).items():
                local = int(kernel.local_size_bytes)
                report.add("resources", local == 0, kernel=name, registers=int(kernel.num_regs), local_bytes=local)


def seconds_of(call: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Device seconds of each of `repeats` calls, after three that are not counted."""
    for _ in range(3):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]  # type: ignore[no-untyped-call]
    pairs = list(zip(events[::2], events[1::2], strict=True))
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def time_kernels(report: Report, read_bytes: int = 2**30) -> None:
    """Pack and unpack of 1 GiB of bf16 rows, as bytes read plus written a second, beside a plain copy in the same run.

    The first figure has no claim: it only says how far these simple kernels are from the memory's speed.
    """
    source = torch.randn(read_bytes // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    seconds = statistics.median(seconds_of(lambda: target.copy_(source)))
    copy = 2 * read_bytes / seconds / 1e12
    report.add("time copy", True, tb_s=round(copy, 3), us=round(seconds * 1e6, 1), mib=read_bytes >> 20)
    for width in COMPILED_WIDTHS:
        rows, back = source.view(-1, width), target.view(-1, width)
        for bits in PACKED_BITS:
            packed = turboquant_cuda.pack(rows, bits, checked=True)
            flag = turboquant_cuda.new_bad_row_flag(rows.device)
            moved = read_bytes + packed.codes.numel() + 4 * packed.scales.numel()
            for verb, call in (
                ("pack", lambda: turboquant_cuda.pack(rows, bits, out=packed, first_bad_row=flag)),  # noqa: B023
                ("unpack", lambda: turboquant_cuda.unpack(packed, width, bits, out=back)),  # noqa: B023
            ):
                rates = [moved / each / 1e12 for each in seconds_of(call)]
                rate = statistics.median(rates)
                facts = {"tb_s": round(rate, 3), "us": round(moved / rate / 1e6, 1), "of_copy": round(rate / copy, 3)}
                report.add(f"time {verb}", True, width=width, bits=bits, rows=rows.shape[0], **facts)
                report.figures.append(
                    {
                        "case": f"{verb}-d{width}-b{bits}",
                        "value": round(rate, 3),
                        "unit": "TB/s in+out",
                        "spread": [round(min(rates), 3), round(max(rates), 3)],
                        "repeats": REPEATS,
                        "floor": round(copy, 3),
                        "floor_by": "bytes; torch's device-to-device copy of 1 GiB in the same run",
                        "rival": None,
                        "rival_why": "no public packer of these records runs on this machine",
                    }
                )
    few = source.view(-1, 128)[:128]
    packed = turboquant_cuda.pack(few, 4)
    flag = turboquant_cuda.new_bad_row_flag(few.device)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(1000):
        turboquant_cuda.pack(few, 4, out=packed, first_bad_row=flag)
    queued = (time.perf_counter() - started) * 1e3
    torch.cuda.synchronize()
    report.add("time launch", True, host_us=round(queued, 2), rows=128, width=128, bits=4)


def run_all(report: Report, *, small: bool, timing: bool, seed: int) -> None:
    """Every check; a check that crashes is a failed one, and the rest go on."""

    def guarded(check: Callable[..., None], *arguments: Any) -> None:
        try:
            check(report, *arguments)
        except Exception as error:  # noqa: BLE001 - one crash must not hide the other results
            report.add(
                check.__name__, False, arguments=str(arguments), crashed=repr(error), trace=traceback.format_exc()
            )

    torch.manual_seed(seed)
    arch = loader.arch_of(torch.device("cuda", torch.cuda.current_device()))
    guarded(check_archive, arch)
    for width in COMPILED_WIDTHS:
        for bits in PACKED_BITS:
            for name in ROW_TYPES:
                for n in SMALL_ROW_COUNTS if small else ROW_COUNTS:
                    guarded(check_equal, width, bits, name, n, seed + n)
        guarded(check_bad_rows, width)
    guarded(check_refusals)
    if not small:
        for width in COMPILED_WIDTHS:
            for bits in PACKED_BITS:
                guarded(check_graph, width, bits)
        guarded(check_stream)
        guarded(check_large_offsets)
    if timing:
        guarded(time_kernels)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the JSON lines")
    parser.add_argument("--seed", type=int, help="repeat a run; by default a fresh one is drawn")
    parser.add_argument("--records", type=Path, help="also write the timings as records (tests/bench/results)")
    parser.add_argument("--commit", default="unknown", help="what the records say was run")
    parser.add_argument("--skip-timing", action="store_true")
    parser.add_argument("--sanitize-list", action="store_true", help="small sizes only, for compute-sanitizer")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    if not torch.cuda.is_available():
        print("cannot run: torch sees no CUDA device", file=sys.stderr)
        return 2
    try:
        identity = toolchain().identity
        import cupy
    except (ImportError, ToolchainError) as error:
        print(f"cannot run: {error}", file=sys.stderr)
        return 2
    seed = int(torch.seed() % 2**31) if options.seed is None else options.seed
    path = options.out or (Path(os.environ["OUT"]) / "device_check.jsonl" if "OUT" in os.environ else None)
    started = time.perf_counter()
    began = datetime.now(UTC).isoformat(timespec="seconds")
    with path.open("a") if path else open(os.devnull, "w") as file:  # noqa: PTH123
        report = Report(file)
        machine = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cupy": cupy.__version__,
            "python": platform.python_version(),
            "compiler": identity,
            "include": [str(folder) for folder in toolchain().include_dirs],
            "command": " ".join(sys.argv),
        }
        report.add("machine", True, **machine, seed=seed)
        small = options.sanitize_list
        run_all(report, small=small, timing=not (small or options.skip_timing), seed=seed)
        seconds = round(time.perf_counter() - started, 1)
        report.add(
            "summary",
            not report.failed,
            passed=dict(report.passed),
            failed=len(report.failed),
            codes_compared=report.codes_compared,
            codes_differ=report.codes_differ,
            scale_ulps=report.scale_ulps,
            seconds=seconds,
        )
    if options.records and not report.failed:
        share = report.codes_differ / max(1, report.codes_compared)
        shared = {
            "error": f"{report.codes_differ} of {report.codes_compared} codes differ ({share:.1e}), scales by at most "
            f"{report.scale_ulps} ulp, from the PyTorch reference on fresh random rows of the same run",
            "machine": machine["gpu"],
            "versions": {key: machine[key] for key in ("torch", "cupy", "python", "compiler")},
            "date": began,
            "commit": options.commit,
            "command": machine["command"],
            "kind": "measured",
        }
        lines = [json.dumps({"bench": "codec_device", **figure, **shared}) + "\n" for figure in report.figures]
        options.records.write_text("".join(lines))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
