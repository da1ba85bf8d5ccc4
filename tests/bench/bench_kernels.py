"""The attention kernels on a GPU: right first, then fast.

    python3 -m tests.bench.bench_kernels                                everything, in about eight minutes
    python3 -m tests.bench.bench_kernels --list
    python3 -m tests.bench.bench_kernels --only decode-long,seal --records FILE --commit SHA
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
        $(printf -- ' --kernel-name kernel_substring=%s' prepare_ attend_ merge_ seal_ restore_) \\
        python3 -m tests.bench.bench_kernels --corners-small            likewise racecheck, synccheck

Three lists of cases: correctness (every kind of page), corners, performance (kernel_cases.py, kernel_prefill.py,
kernel_pages.py). Inputs are fresh in every run; --seed repeats one. Results are compared with float64 attention over
the rows as the pages have them, NaN and infinities first, then ||out - reference|| / ||reference|| of each sequence.
Times are medians of 30 graph replays between events, with what the call reads flushed from the second-level cache. The
rival is the faster of torch's cuDNN and FlashAttention on bf16 rows of the same shape. It is timed in the same run, and
so are the ceilings: a kernel that only reads, and a square bf16 matrix product.
Every case is one JSON line in --out FILE, or else in $OUT/bench_kernels.jsonl; --records FILE takes those with a time,
as tests/bench/results has them. Exit status: 0 all passed, 1 a case failed, 2 this machine cannot run it, 3 time's up.
Without a GPU (--device cpu) the PyTorch reference runs every case at a small size; nothing is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

from kernels import loader
from kernels.cubins import build, default_folder
from kernels.declared import DECLARED
from kernels.decode_cells import decode_cell
from tests.bench import kernel_cases, kernel_pages, kernel_prefill
from tests.bench.kernel_cases import Case
from tests.bench.kernel_checks import run_case
from tests.bench.kernel_performance import Machine, measure_decode, measure_fixed

SECONDS = 540.0  # by default; a case that begins later is skipped by name


@dataclass(frozen=True)
class Entry:
    """One line of the run. kind: which list it is of. run: returns facts, with "ok" among them."""

    name: str
    kind: str
    run: Callable[[], dict[str, Any]]


@dataclass
class Report:
    """Prints progress, keeps JSON lines."""

    file: TextIO | None = None
    failed: list[str] = field(default_factory=list)
    passed: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, case: str, ok: bool, seconds: float, facts: dict[str, Any]) -> None:
        line = {"kind": kind, "case": case, "ok": ok, "seconds": round(seconds, 2), **facts}
        self.lines.append(line)
        if self.file:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        text = " ".join(f"{name}={_short(value)}" for name, value in facts.items() if name not in ("ok", "record"))
        print(f"{'ok  ' if ok else 'FAIL'} {kind:11} {case:26} {seconds:6.2f} s  {text}"[:1200], flush=True)
        self.passed += ok
        if not ok:
            self.failed.append(f"{kind} {case}")


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def entries(device: torch.device, machine: Machine | None) -> list[Entry]:
    """All cases, in the order in which they run."""
    shrink: Callable[[Case], Case] = kernel_cases.for_cpu if device.type == "cpu" else lambda case: case
    lists = {"correctness": kernel_cases.correctness(), "corners": kernel_cases.corners()}
    found = [
        Entry(case.name, kind, partial(run_case, shrink(case), device))
        for kind, cases in lists.items()
        for case in cases
    ]
    for timed in kernel_cases.performance():
        run: Callable[[], dict[str, Any]]
        if machine is None:
            run = partial(run_case, shrink(timed.case), device)
        else:
            run = partial(measure_fixed if timed.case.name == "decode-fixed" else measure_decode, timed, machine)
        found.append(Entry(timed.case.name, "performance", run))
    for chunk in kernel_prefill.cases():
        if machine is None:
            run = partial(kernel_prefill.run, kernel_prefill.for_cpu(chunk), device)
        else:
            run = partial(kernel_prefill.measure, chunk, machine)
        found.append(Entry(chunk.name, "performance", run))
    for pages in kernel_pages.cases():
        for verb, measure in (("seal", kernel_pages.measure_seal), ("restore", kernel_pages.measure_restore)):
            run = partial(measure, pages, machine) if machine else _needs_a_gpu
            found.append(Entry(f"{verb}-{pages.name}", "performance", run))
    return found


def _needs_a_gpu() -> dict[str, Any]:
    return {"ok": True, "skipped": "the reference is what this is compared with"}


def small_entries(device: torch.device) -> list[Entry]:
    found = [Entry(case.name, "corners", partial(run_case, case, device)) for case in kernel_cases.small_corners()]
    if device.type == "cuda":
        for pages in kernel_pages.small_cases():
            found.append(Entry(f"seal-{pages.name}", "corners", partial(kernel_pages.check_seal, pages, device)))
            found.append(Entry(f"restore-{pages.name}", "corners", partial(kernel_pages.check_restore, pages, device)))
    return found


def run_entries(chosen: Sequence[Entry], report: Report, deadline: float) -> bool:
    """Run each; one that crashes is a failed one, and the rest go on. False: time ran out before the last."""
    for number, entry in enumerate(chosen, 1):
        started = time.monotonic()
        if started > deadline:
            print(f"out of time: {', '.join(e.name for e in chosen[number - 1 :])} not run", flush=True)
            return False
        try:
            facts = entry.run()
        except Exception as error:  # noqa: BLE001 - one crash must not hide the other results
            facts = {
                "ok": False,
                "crashed": f"{type(error).__name__}: {error}"[:600],
                "trace": traceback.format_exc()[-1500:],
            }
        report.add(entry.kind, entry.name, bool(facts["ok"]), time.monotonic() - started, facts)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return True


def records(report: Report, common: dict[str, Any]) -> list[dict[str, Any]]:
    """Lines of tests/bench/results of what was timed."""
    return [
        {"bench": "kernels", **line["record"], **common} for line in report.lines if line["ok"] and "record" in line
    ]


def choose(found: list[Entry], only: str, lists: str) -> list[Entry]:
    """only: names, or beginnings that end in *; lists: kinds; commas between. Raises SystemExit on unknown ones."""
    kinds = {entry.kind for entry in found}
    if unknown := set(filter(None, lists.split(","))) - kinds:
        raise SystemExit(f"no such list: {', '.join(sorted(unknown))}; there are {', '.join(sorted(kinds))}")
    chosen = [entry for entry in found if not lists or entry.kind in lists.split(",")]
    if not only:
        return chosen
    wanted = only.split(",")

    def matches(entry: Entry, pattern: str) -> bool:
        return entry.name.startswith(pattern[:-1]) if pattern.endswith("*") else entry.name == pattern

    if unknown := {pattern for pattern in wanted if not any(matches(entry, pattern) for entry in found)}:
        raise SystemExit(f"no such case: {', '.join(sorted(unknown))}; --list shows them")
    return [entry for entry in chosen if any(matches(entry, pattern) for pattern in wanted)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--only", default="", help="cases, commas between; a* is all that begin so")
    parser.add_argument("--lists", default="", help="of correctness, corners, performance; commas between")
    parser.add_argument("--corners-small", action="store_true", help="a few small corners, for compute-sanitizer")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no case begins after so long")
    parser.add_argument("--seed", type=int, help="repeat a run; by default a fresh one is drawn")
    parser.add_argument("--out", type=Path, help="file for a JSON line a case")
    parser.add_argument("--records", type=Path, help="file for records of what was timed")
    parser.add_argument("--commit", default="unknown", help="what the records say was run")
    options = parser.parse_args(arguments)
    device = torch.device(options.device, *([0] if options.device == "cuda" else []))
    started = time.monotonic()
    if options.list:
        for entry in entries(torch.device("cpu"), None):
            print(f"{entry.kind:12} {entry.name}")
        return 0
    if device.type == "cuda" and not torch.cuda.is_available():
        print("cannot run: torch sees no CUDA device", file=sys.stderr)
        return 2
    if options.seed is None:
        options.seed = int(torch.seed() % 2**31)
    torch.manual_seed(options.seed)
    facts = _facts(device, options.seed, options.commit)
    print(json.dumps(facts), flush=True)
    if device.type == "cuda":
        _build(device, small=options.corners_small)
    machine = None
    needs_machine = device.type == "cuda" and not options.corners_small
    everything = small_entries(device) if options.corners_small else entries(device, None)
    chosen = choose(everything, options.only, options.lists)
    if needs_machine and any(entry.kind == "performance" for entry in chosen):
        machine = Machine.measure(device)
        print(f"ceilings: {machine.text}", flush=True)
        chosen = choose(entries(device, machine), options.only, options.lists)
    path = options.out or (Path(os.environ["OUT"]) / "bench_kernels.jsonl" if "OUT" in os.environ else None)
    with ExitStack() as stack:
        report = Report(stack.enter_context(path.open("a")) if path else None)
        if report.file:
            report.file.write(json.dumps(facts) + "\n")
        whole = run_entries(chosen, report, started + options.seconds)
    if options.records:
        options.records.write_text("".join(json.dumps(line) + "\n" for line in records(report, facts)))
    print(f"{report.passed} passed, {len(report.failed)} failed in {time.monotonic() - started:.0f} s", flush=True)
    for name in report.failed:
        print(f"failed: {name}", flush=True)
    return 1 if report.failed else 0 if whole else 3


def _build(device: torch.device, *, small: bool) -> None:
    """Compile what any case needs, in a process for each CPU of this machine: one by one it would take minutes."""
    arch, cases = loader.arch_of(device), kernel_cases.small_corners()
    if not small:
        timed = [timed.case for timed in kernel_cases.performance()]
        cases = [*kernel_cases.correctness(), *kernel_cases.corners(), *timed]
    cells = dict.fromkeys(decode_cell(case.shape, arch) for case in cases)
    cells |= dict.fromkeys(cell for cell in DECLARED if not cell.tensor_kernels)  # codec and pages
    started = time.monotonic()
    results = build(cells, [arch], default_folder())
    compiled = sum(result.compiled for result in results)
    print(f"{compiled} of {len(results)} cells compiled in {time.monotonic() - started:.1f} s", flush=True)
    for result in results:
        if result.error:
            print(f"{result.cell.name}: {result.error[:2000]}", flush=True)  # its cases fail, the others run


def _facts(device: torch.device, seed: int, commit: str) -> dict[str, Any]:
    """What every record says of the run."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    name = f"{platform.machine()}, {os.cpu_count()} CPUs"
    if device.type == "cuda":
        import cupy

        from kernels.compiler import toolchain

        name = torch.cuda.get_device_name(device)
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        versions |= {"cupy": cupy.__version__, "compiler": toolchain().identity, "cudnn": str(cudnn)}
    return {
        "machine": name,
        "versions": versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        # Without the folders of this machine, which mean nothing elsewhere.
        "command": " ".join(["python3 -m tests.bench.bench_kernels", *(Path(word).name for word in sys.argv[1:])]),
        "seed": seed,
        "kind": "measured",
    }


if __name__ == "__main__":
    sys.exit(main())
