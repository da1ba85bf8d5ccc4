"""Command line of the kernels: build archives, prove what is in them, profile attention, measure the codec.

python -m kernels.cli build --arch sm_90a        the same as: tailpack kernels build --arch sm_90a
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from kernels.archive import Finding, Status, exit_code, find_inspector, verify
from kernels.cells import ARCHES, pairs_of
from kernels.compiler import ToolchainError, toolchain
from kernels.cubins import BuildResult, build, default_folder
from kernels.declared import DECLARED
from kernels.errors import ArgumentError, MachineError

CANNOT_ANSWER = 2  # the environment is at fault, not the code: no compiler, no inspector

_arch_option = click.option(
    "--arch", "arches", multiple=True, type=click.Choice([*ARCHES, "all"]), help="Repeat for several. Default: all."
)
_dir_option = click.option(
    "--dir", "folder", type=click.Path(file_okay=False, path_type=Path), help="The archive. Default: the cache."
)


@click.group("kernels")
def kernels_group() -> None:
    """Build and verify GPU kernels; only `profile` needs a GPU."""


@kernels_group.command("build")
@_arch_option
@_dir_option
@click.option("--jobs", type=click.IntRange(min=1), help="Processes. Default: one per CPU.")
def build_command(arches: Sequence[str], folder: Path | None, jobs: int | None) -> None:
    """Compile every declared cell for every arch, each once.

    Exit status: 0 all built, 1 something does not compile, 2 no compiler here.
    """
    wanted, target = _arches(arches), folder or default_folder()
    started = time.monotonic()
    try:
        versions = json.loads(toolchain().identity)
        with _progress(len(pairs_of(DECLARED, wanted))) as on_result:
            results = build(DECLARED, wanted, target, jobs=jobs, on_result=on_result)
    except ToolchainError as error:
        _cannot_answer(error)
    failed = [result for result in results if result.error]
    for result in failed:
        click.echo(f"{result.cell.name} {result.arch}: {result.error}", err=True)
    compiled = sum(result.compiled for result in results)
    click.echo(
        f"{compiled} compiled, {len(results) - compiled - len(failed)} there already, {len(failed)} failed "
        f"({len(DECLARED)} cells, {len(wanted)} archs, {time.monotonic() - started:.1f} s)"
    )
    click.echo(f"compiler  {', '.join(f'{name} {version}' for name, version in versions.items())}")
    click.echo(f"archive   {target}")
    sys.exit(1 if failed else 0)


@kernels_group.command("verify")
@_arch_option
@_dir_option
@click.option("--inspector", type=click.Path(path_type=Path), help="cuobjdump. Default: the pip package's, or on PATH.")
@click.option("--detail", is_flag=True, help="One line a kernel.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line a kernel instead of tables.")
def verify_command(
    arches: Sequence[str], folder: Path | None, inspector: Path | None, detail: bool, as_json: bool
) -> None:
    """Inspect the machine code of every declared cell and arch.

    Exit status: 0 every cell observed in every arch; 1 something is missing, corrupt or not what it should be; 2 the
    environment could not answer (no compiler, no inspector, an empty listing).
    """
    wanted, target = _arches(arches), folder or default_folder()
    of_arch: list[Finding] = []

    def print_when_whole(finding: Finding) -> None:
        of_arch.append(finding)
        if len(of_arch) == len(pairs_of(DECLARED, [finding.arch])):
            if not as_json:
                _print_arch(finding.arch, of_arch, detail)
            of_arch.clear()

    try:
        tool = inspector or find_inspector()
        findings = verify(DECLARED, wanted, target, inspector=tool, on_finding=print_when_whole)
    except ToolchainError as error:
        _cannot_answer(error)
    if as_json:
        for finding in findings:
            for facts in finding.kernels:
                click.echo(json.dumps({"cell": finding.cell.name, "status": finding.status.value, **vars(facts)}))
    for finding in findings:
        if finding.status is not Status.OBSERVED:
            click.echo(f"{finding.status.value}: {finding.cell.name} {finding.arch}: {finding.reason}", err=True)
    code = exit_code(findings)
    answer = {0: "pass: every cell observed in every arch", 1: f"FAIL: see above; {_remedy(findings)}"}
    click.echo(f"{answer.get(code, 'no answer: the inspector could not tell')} ({target})", err=code != 0)
    sys.exit(code)


def _remedy(findings: Sequence[Finding]) -> str:
    """What to do about what is not OBSERVED. `build` keeps any file that is there, so a wrong one must go first."""
    wrong = any(finding.status is Status.WRONG for finding in findings)
    return ("remove what is wrong, then run" if wrong else "run") + " `tailpack kernels build`"


@kernels_group.command("profile")
@click.option("--mode", default="tq4", show_default=True, help="A preset, fp8 or dense.")
@click.option("--width", default=128, show_default=True)
@click.option("--kv-heads", default=8, show_default=True)
@click.option("--group", default=4, show_default=True, help="Query heads on a kv head.")
@click.option("--batch", default=32, show_default=True, help="Sequences.")
@click.option("--tokens", default=32768, show_default=True, help="Of each.")
@click.option("--queries", default=1, show_default=True, help="Query tokens of each.")
@click.option("--softcap", default=0.0, help="0: none.")
@click.option("--shared", is_flag=True, help="Keys and values are the same rows.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
def profile_command(as_json: bool, **shape: Any) -> None:
    """Where the time goes inside the attention kernel, on this machine's GPU.

    Exit status: 0 measured, 1 no such kernel, 2 no GPU, or nothing here that compiles or loads kernels.
    """
    import torch

    from kernels.phase_profile import ProfileShape, profile

    if not torch.cuda.is_available():
        click.echo("could not answer: torch sees no CUDA device; phases are timed on a GPU only", err=True)
        sys.exit(CANNOT_ANSWER)
    try:
        answer = profile(ProfileShape(**shape), torch.device("cuda", torch.cuda.current_device()))
    except ArgumentError as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    except MachineError as error:
        _cannot_answer(error)
    click.echo(json.dumps(answer) if as_json else "\n".join(_profile_lines(answer)))


def _profile_lines(answer: dict[str, Any]) -> list[str]:
    lines = [f"{answer['cell']} on {answer['device']}: {answer['ms'] * 1e3:.1f} us a call, {answer['ctas']} CTAs"]
    lines.append(f"  {'phase':<14}{'median':>10}{'least':>10}{'most':>10}")
    units = {"mark": "us from the first CTA's start", "sum": "us in all", "count": ""}
    for phase in answer["phases"]:
        numbers = "".join(f"{phase[key]:>10.1f}" for key in ("median", "least", "most"))
        lines.append(f"  {phase['name']:<14}{numbers}  {units[phase['kind']]}".rstrip())
    return lines


def _print_arch(arch: str, findings: Sequence[Finding], detail: bool) -> None:
    kernels = [facts for finding in findings for facts in finding.kernels if facts.arch == arch]
    observed = sum(finding.status is Status.OBSERVED for finding in findings)
    loads: Counter[str] = sum((facts.loads for facts in kernels), Counter())
    tensor: Counter[str] = sum((facts.tensor for facts in kernels), Counter())
    click.echo(
        f"{arch}: {observed}/{len(findings)} cells, {len(kernels)} kernels; registers up to "
        f"{max((facts.registers for facts in kernels), default=0)}, shared up to "
        f"{max((facts.shared_bytes for facts in kernels), default=0)} B, "
        f"{sum(facts.spills for facts in kernels)} spills, tensor cores {_counts(tensor)}, loads {_counts(loads)}"
    )
    if detail:
        click.echo(f"  {'kernel':<28}{'regs':>5}{'shared':>7}{'stack':>6}{'spills':>7}{'instr':>7}  tensor; loads")
        for facts in kernels:
            click.echo(
                f"  {facts.name:<28}{facts.registers:>5}{facts.shared_bytes:>7}{facts.stack_bytes:>6}"
                f"{facts.spills:>7}{facts.instructions:>7}  {_counts(facts.tensor)}; {_counts(facts.loads)}"
            )


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items())) or "none"


def _arches(chosen: Sequence[str]) -> tuple[str, ...]:
    return ARCHES if not chosen or "all" in chosen else tuple(arch for arch in ARCHES if arch in chosen)


def _cannot_answer(error: MachineError) -> NoReturn:
    click.echo(f"could not answer: {error}", err=True)
    sys.exit(CANNOT_ANSWER)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[BuildResult], None]]:
    """A bar where there is a terminal and rich; else one line a cell."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield _print_result
        return
    if not sys.stderr.isatty():
        yield _print_result
        return
    from rich.console import Console

    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("compiling", total=total)
        yield lambda result: bar.update(task, advance=1, description=f"{result.cell.name} {result.arch}")


def _print_result(result: BuildResult) -> None:
    if result.compiled or result.error:  # how many are there already is told once, at the end
        what = "FAILED" if result.error else f"{result.seconds:.1f} s"
        click.echo(f"{result.arch} {result.cell.name}: {what}", err=True)


class _CodecGroup(click.Group):
    """Imports its command when it is used: the report needs torch, and matplotlib for its plot."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return ["report"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name != "report":
            return None
        command: click.Command = importlib.import_module("kernels.codec_report").report
        return command


codec_group = _CodecGroup("codec", help="Measure the KV codec.")


if __name__ == "__main__":
    kernels_group(prog_name="python -m kernels.cli")
