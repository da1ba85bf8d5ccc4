"""The kernels of csrc/decode_mqa.cu on a real Hopper GPU. One script, no test framework, none of our launch code:

    python3 tests/kernels/device_mqa.py                    stages, corners, then times: about a minute
    python3 tests/kernels/device_mqa.py --only stages      what attend leaves at each stage, for finding errors
    compute-sanitizer --error-exitcode 9 python3 tests/kernels/device_mqa.py --only corners

One JSON line a check on standard output, and in $OUT/device_mqa.jsonl where OUT is set. Exit status: 0 all passed, 1 a
check failed, 2 this machine cannot run it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from kernels.cells import Cell
from kernels.decode_launch import MQA_SHARED_BYTES
from kernels.errors import KernelError
from kernels.loader import PreparedLaunch
from tests.kernels.mqa_call import THREADS, WIDTH, Call, Case, cell_defines
from tests.kernels.mqa_stages import stages

ERROR = 1e-2  # of the output, the limit
LSE_ERROR = 2e-2
REPEATS = 30
LONG = Case(lengths=(32768,) * 32, tail_tokens=(144,) * 32)  # decode-mqa512
STAGE_CASES = {
    "one block": Case(lengths=(900, 3000)),
    "few vectors": Case(lengths=(900,), group=16, num_queries=3, seed=4),
    "softcap": Case(lengths=(900,), softcap=5.0),
    "uneven rows": Case(lengths=(900,), uneven=6.0, sm_scale=1e-9),
}
CORNERS = {
    "lengths": Case(lengths=(1, 17, 127, 128, 129, 300, 0, 700, 16385)),
    "ratio 16, 3 queries": Case(lengths=(900, 3000), group=16, num_queries=3),
    "ratio 7, window, sinks": Case(lengths=(900, 700), group=7, num_queries=8, window=300, sinks=True),
    "two heads, two blocks, window": Case(lengths=(900, 700), group=32, num_queries=3, kv_heads=2, window=200),
    "references that move": Case(lengths=(900, 5000), drift=20.0),
    "zero rows first": Case(lengths=(400, 900), zero_rows=200),
    "softcap": Case(lengths=(900, 1200), softcap=5.0, drift=1.0),
    "uneven rows": Case(lengths=(900, 1200, 5000), uneven=6.0, sm_scale=1e-9),
    "some tiles uneven": Case(lengths=(900, 1200), uneven=1.3, sm_scale=1e-3),
    "uneven rows, window": Case(lengths=(900, 700), uneven=6.0, sm_scale=1e-9, window=300, num_queries=3, group=16),
    "uneven rows, softcap": Case(lengths=(900, 1200), uneven=3.0, sm_scale=1e-5, softcap=5.0),
    "tiny rows": Case(lengths=(900, 400), norm=1e-8, sm_scale=1e6),
    "f16": Case(lengths=(900, 1200), row_type="f16", drift=1.0),
    "norms of 1e6": Case(lengths=(900, 400), norm=1e6, sm_scale=4e-8),
    "more work than CTAs": Case(lengths=tuple(range(200, 20000, 900))),
}


class Report:
    """Lines of the run; `failed` counts checks."""

    def __init__(self) -> None:
        self.failed = 0
        folder = os.environ.get("OUT")
        self.file = (Path(folder) / "device_mqa.jsonl").open("a") if folder else None

    def write(self, check: str, passed: bool | None = None, **values: Any) -> None:
        self.failed += passed is False
        line = json.dumps({"check": check, **({} if passed is None else {"passed": passed}), **values}, default=str)
        print(line, flush=True)
        if self.file:
            self.file.write(line + "\n")
            self.file.flush()


def cell_of(case: Case, *extra: str) -> Cell:
    """The case's cell, with further defines ("NAME" or "NAME=VALUE")."""
    defines = cell_defines(case.row_type, case.softcap > 0)
    defines |= {name: value or "1" for name, _, value in (text.partition("=") for text in extra)}
    kernels = tuple(defines[f"TAILPACK_KERNEL_{phase.upper()}"] for phase in THREADS)
    variant = "-".join([case.row_type, *(["softcap"] if case.softcap else []), *extra]).lower().replace("=", "")
    return Cell("decode_mqa.cu", WIDTH, "tq4", variant, kernels, tuple(defines.items()), ("sm_90a",), kernels[1:2])


class Launches:
    """The three launches of one call, on torch's current stream."""

    def __init__(self, call: Call, *extra: str, overlap: bool = True) -> None:
        cell, self.sms = cell_of(call.case, *extra), torch.cuda.get_device_properties(0).multi_processor_count
        self.phases = {}
        for phase, kernel in zip(THREADS, cell.kernels, strict=True):
            shared = MQA_SHARED_BYTES if phase == "attend" else 0
            late = overlap and phase != "prepare"
            launch = PreparedLaunch(
                cell, kernel, 0, call.args, threads=THREADS[phase], shared_bytes=shared, overlap=late
            )
            launch.set_ctas(self.sms if phase == "attend" else call.grid(phase))
            self.phases[phase] = launch

    def __call__(self) -> None:
        for launch in self.phases.values():
            launch(torch.cuda.current_stream().cuda_stream)


def check_stages(report: Report, extra: list[str]) -> None:
    for name, case in STAGE_CASES.items():
        call = Call(case, "cuda")
        Launches(call, "TAILPACK_MQA_DUMP", *extra)()
        torch.cuda.synchronize()
        for stage in stages(call):
            report.write(
                f"stage {stage.name}", stage.passed, case=name, what=stage.what, error=stage.error, limit=stage.limit
            )
        check_output(report, "stage output", name, call)


def check_output(report: Report, check: str, name: str, call: Call, sequences: list[int] | None = None) -> None:
    errors = []
    for i in range(len(call.case.lengths)) if sequences is None else sequences:
        if call.case.lengths[i]:
            errors.append((*call.errors(i), i))
        else:
            empty = bool((call.out[i] == 0).all()) and bool((call.lse[i] == -torch.inf).all())
            errors.append((0.0 if empty else float("inf"), 0.0, i))
    error, _, worst = max(errors)
    lse = max(e[1] for e in errors)
    report.write(
        check, error <= ERROR and lse <= LSE_ERROR, case=name, error=error, lse_error=lse, worst_sequence=worst
    )


def check_corners(report: Report, extra: list[str]) -> None:
    for name, case in CORNERS.items():
        call = Call(replace(case, seed=torch.seed() % 2**31), "cuda")
        launches = Launches(call, *extra)
        outs = []
        for _ in range(3):
            call.out.fill_(float("nan"))
            call.partial_out.fill_(float("nan"))
            call.partial_ml.fill_(float("nan"))
            launches()
            torch.cuda.synchronize()
            outs.append((call.out.clone(), call.lse.clone()))
        check_output(report, "corner", f"{name}, seed {call.case.seed}", call)
        same = all(torch.equal(a, b) for other in outs[1:] for a, b in zip(outs[0], other, strict=True))
        report.write("same bits in three runs", same, case=name)


def milliseconds(work: Callable[[], object]) -> dict[str, float]:
    """Of one run of `work`, from a graph: median, least and most of REPEATS after 5 warm-ups."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for turn in range(REPEATS + 5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn >= 5:
            times.append(begin.elapsed_time(end))
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def check_times(report: Report, extra: list[str]) -> None:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192**3 / milliseconds(lambda: torch.mm(a, b))["median"] / 1e9
    report.write("bf16 matmul of 8192", tflops=rate)
    call = Call(LONG, "cuda")
    launches = Launches(call, *extra)
    flop = 4 * sum(LONG.lengths) * LONG.group * WIDTH
    floor = flop / rate / 1e9
    whole = milliseconds(launches)
    check_output(report, "decode-mqa512 output", "", call, [0, 17, 31])
    median = whole["median"]
    tflops = flop / median / 1e9
    report.write("decode-mqa512", ms=whole, floor_ms=floor, share_of_floor=floor / median, tflops=tflops)
    for skipped in (("attend", "merge"), ("merge",)):  # attend alone would find an empty queue
        some = Launches(call, *extra)
        for phase in skipped:
            del some.phases[phase]
        report.write("decode-mqa512 without " + " and ".join(skipped), ms=milliseconds(some))
    profile_waits(report, call, extra)


def profile_waits(report: Report, call: Call, extra: list[str]) -> None:
    """Where roles wait (csrc/mqa_shared.cuh, MqaProfileSlot): microseconds, mean over the CTAs."""
    call.dump.zero_()
    Launches(call, "TAILPACK_PROFILE=1", *extra)()
    torch.cuda.synchronize()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    slots = call.dump.view(torch.int64)[: 8 * sms].view(sms, 8).double().cpu()
    names = ("tile", "row", "score", "weight", "out")  # what the producer and side 0 wait for
    means = {name: round(float(slots[:, 1 + i].mean()) / 1e3, 1) for i, name in enumerate(names)}
    ends = (slots[:, 6] - slots[:, 0].min()) / 1e3
    items = sorted(slots[:, 7].int().tolist())
    report.write(
        "waits", us=means, ends=[round(float(ends.min()), 1), round(float(ends.max()), 1)], items=items[:: sms - 1]
    )


CHECKS = {"stages": check_stages, "corners": check_corners, "times": check_times}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CHECKS, help="one part of it")
    parser.add_argument(
        "--define", action="append", default=[], metavar="NAME[=VALUE]", help="a further define of the cell"
    )
    options = parser.parse_args()
    report = Report()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        report.write("machine", False, what="no GPU of compute capability 9.0")
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    report.write(
        "machine", device=torch.cuda.get_device_name(), torch=torch.__version__, at=datetime.now(UTC).isoformat()
    )
    try:
        for name in [options.only] if options.only else CHECKS:
            CHECKS[name](report, options.define)
    except KernelError as error:
        report.write("kernel error", False, what=str(error))
    except RuntimeError as error:  # torch's own: a fault of a kernel shows at the next call
        report.write("runtime error", False, what=str(error)[:2000])
    report.write("all", report.failed == 0, failed=report.failed)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
