"""What an archive of cubins really contains, read from the machine code by cuobjdump.

File names are never believed: arch, kernels and resources all come from the inspector's listing. An inspector that is
missing, fails or prints nothing has not answered, and that is never a pass.
"""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kernels.cells import Cell, pairs_of
from kernels.compiler import INSTALL, ToolchainError
from kernels.cubins import cubin_path

INSPECTOR = "cuobjdump"
_DISASSEMBLER = "nvdisasm"  # cuobjdump calls it for machine code
_TIMEOUT_S = 300

_CODE_FOR = re.compile(r"^\s*code for (sm_\w+)")
_FUNCTION = re.compile(r"^\s*Function\s*:?\s+(\w+)\s*:?\s*$")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
# HMMA, IMMA, DMMA, QMMA, ... (mma.sync), HGMMA, ... (wgmma), UTCHMMA, ... (tcgen05)
_TENSOR = re.compile(r"^(?:[A-Z]?G?MMA|UTC[A-Z]*MMA)$")
_LOADS = {"LDG", "LDGSTS", "UBLKCP", "UTMALDG"}
WIDE_LOADS = {"LDG.128", "LDG.256", "LDGSTS.128", "UBLKCP", "UTMALDG"}  # 16 bytes a thread or more, or bulk copies
_WIDTH = re.compile(r"^[US]?(8|16|64|128|256)$")


class Status(enum.Enum):
    """What the inspector could say about one cell and arch."""

    OBSERVED = "observed"
    MISSING = "missing"  # no such cubin
    WRONG = "wrong"  # there, but not what it should be: other arch, a kernel missing, corrupt
    UNANSWERED = "unanswered"  # the inspector failed or printed nothing


@dataclass
class KernelFacts:
    """One kernel as the machine code shows it. Bytes per thread, or per CTA for shared memory; counts are static."""

    name: str
    arch: str
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    local_bytes: int = 0
    instructions: int = 0
    spills: int = 0  # loads from and stores to local memory
    tensor: Counter[str] = field(default_factory=Counter)  # mnemonic -> count
    loads: Counter[str] = field(default_factory=Counter)  # "LDG.128" -> count


@dataclass(frozen=True)
class Finding:
    """What was found for one declared cell and one requested arch."""

    cell: Cell
    arch: str
    status: Status
    reason: str = ""
    kernels: tuple[KernelFacts, ...] = ()


def exit_code(findings: Iterable[Finding]) -> int:
    """0: every cell observed in every arch. 1: something is missing or wrong. 2: the environment could not answer."""
    seen = {finding.status for finding in findings}
    if seen & {Status.MISSING, Status.WRONG}:
        return 1
    return 0 if seen == {Status.OBSERVED} else 2  # nothing asked is nothing answered


def find_inspector() -> Path:
    """cuobjdump of the pip package, else on PATH, else of a toolkit. Raises ToolchainError saying what was tried."""
    tried = []
    for folder in _binary_folders(f"nvidia-cuda-{INSPECTOR}"):
        tried.append(str(folder))
        if os.access(folder / INSPECTOR, os.X_OK):
            return folder / INSPECTOR
    if found := shutil.which(INSPECTOR):
        return Path(found)
    raise ToolchainError(
        f"no {INSPECTOR}", given=", ".join([*tried, "PATH"]), allowed="the pip package or a toolkit", action=INSTALL
    )


def _binary_folders(package: str) -> Iterator[Path]:
    try:
        for file in importlib.metadata.files(package) or []:
            if file.parent.name == "bin":
                yield Path(str(file.locate())).parent
                break
    except importlib.metadata.PackageNotFoundError:
        pass
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        yield from sorted(Path(root).glob("*/bin"))
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            yield Path(home) / "bin"


def list_cubin(cubin: Path, inspector: Path) -> str:
    """The inspector's listing: resource usage and machine code. Raises ToolchainError where it fails; may be empty."""
    folders = [str(inspector.parent), *map(str, _binary_folders(f"nvidia-cuda-{_DISASSEMBLER}"))]
    environment = {**os.environ, "LC_ALL": "C", "PATH": os.pathsep.join([*folders, os.environ.get("PATH", "")])}
    command = [str(inspector), "-res-usage", "-sass", str(cubin)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(
            f"{INSPECTOR} does not run", given=str(error), allowed="a listing", action=INSTALL
        ) from error
    if done.returncode != 0:
        raise ToolchainError(
            f"{INSPECTOR} failed on {cubin.name}",
            given=f"exit {done.returncode}: {done.stderr.strip()[-500:]}",
            allowed="a listing",
            action="build the archive again, or repair the inspector",
        )
    return done.stdout


def parse_listing(text: str) -> tuple[KernelFacts, ...]:
    """Kernels of a listing by cuobjdump -res-usage -sass. The arch is read from the machine code's heading alone,
    the only place that shows the suffix "a"; a kernel without machine code is not there."""
    resources: dict[str, tuple[int, ...]] = {}
    found: dict[str, KernelFacts] = {}
    arch, name, current = "", "", None
    for line in text.splitlines():
        if heading := _CODE_FOR.match(line):
            arch, current = heading[1], None
        elif function := _FUNCTION.match(line):
            name = function[1]
            current = KernelFacts(name, arch) if arch else None
        elif usage := _RESOURCES.search(line):
            resources[name] = tuple(map(int, usage.groups()))
        elif current and (instruction := _INSTRUCTION.match(line)):
            found.setdefault(current.name, current)
            _count(current, instruction[1])
    for facts in found.values():
        if facts.name in resources:
            facts.registers, facts.stack_bytes, facts.shared_bytes, facts.local_bytes = resources[facts.name]
    return tuple(found.values())


def _count(facts: KernelFacts, opcode: str) -> None:
    mnemonic, *modifiers = opcode.split(".")
    facts.instructions += 1
    facts.spills += mnemonic in ("LDL", "STL")
    if _TENSOR.match(mnemonic):
        facts.tensor[mnemonic] += 1
    if mnemonic in _LOADS:
        width = next((match[1] for match in map(_WIDTH.match, modifiers) if match), "32")
        facts.loads[f"{mnemonic}.{width}" if mnemonic.startswith("LDG") else mnemonic] += 1


def verify(
    cells: Iterable[Cell],
    arches: Iterable[str],
    folder: Path,
    *,
    inspector: Path | None = None,
    jobs: int | None = None,
    on_finding: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """Inspect the cubin of every cell and arch that today's sources and compiler would make.

    ``on_finding`` hears of each, arch by arch, as soon as it is inspected. What could not be read then is UNANSWERED:
    whether the cubin is at fault shows at the end.

    Raises ToolchainError where there is no inspector or no compiler (whose version is part of a cubin's name).
    """
    tool = inspector or find_inspector()
    pairs = [(cell, arch, cubin_path(cell, arch, folder)) for cell, arch in pairs_of(cells, arches)]
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        findings = []
        for finding in pool.map(lambda pair: _inspect(pair[0], pair[1], pair[2], tool), pairs):
            findings.append(finding)
            on_finding(finding)
    # An inspector that answers for other cubins is well: then a cubin it cannot read is at fault. Where it answers for
    # none there is no telling, unless the file is visibly no cubin.
    answered = any(finding.kernels for finding in findings)
    return [_blame(finding, path, answered) for finding, (_, _, path) in zip(findings, pairs, strict=True)]


def _inspect(cell: Cell, arch: str, path: Path, inspector: Path) -> Finding:
    if not path.exists():
        return Finding(cell, arch, Status.MISSING, f"no {path.name}")
    try:
        kernels = parse_listing(list_cubin(path, inspector))
    except ToolchainError as error:
        return Finding(cell, arch, Status.UNANSWERED, str(error))
    if not kernels:
        return Finding(cell, arch, Status.UNANSWERED, f"{INSPECTOR} printed no kernel for {path.name}")
    others = sorted({facts.arch for facts in kernels} - {arch})
    absent = sorted(set(cell.kernels) - {facts.name for facts in kernels})
    unsized = sorted(facts.name for facts in kernels if not facts.registers)
    wrong = [f"holds {', '.join(others)} instead"] * bool(others) + [f"lacks {', '.join(absent)}"] * bool(absent)
    for facts in kernels:
        if facts.name in cell.tensor_kernels:
            wrong += [f"{facts.name} has no tensor-core instruction"] * (not facts.tensor)
            wrong += [f"{facts.name} loads less than 16 bytes at a time"] * (not WIDE_LOADS & set(facts.loads))
    if wrong:
        return Finding(cell, arch, Status.WRONG, "; ".join(wrong), kernels)
    if unsized:
        return Finding(cell, arch, Status.UNANSWERED, f"no resource usage for {', '.join(unsized)}", kernels)
    return Finding(cell, arch, Status.OBSERVED, "", kernels)


def _blame(finding: Finding, path: Path, answered: bool) -> Finding:
    if finding.status is not Status.UNANSWERED or finding.kernels:
        return finding
    if not _looks_like_elf(path):
        return Finding(finding.cell, finding.arch, Status.WRONG, f"{path.name} is corrupt: no whole ELF file")
    if answered and "failed on" in finding.reason:
        return Finding(finding.cell, finding.arch, Status.WRONG, finding.reason)
    return finding


def _looks_like_elf(path: Path) -> bool:
    """ELF64 magic, and a section table that ends within the file: catches text, empty and truncated files."""
    content = path.read_bytes()
    if len(content) < 64 or content[:5] != b"\x7fELF\x02":
        return False
    table = int.from_bytes(content[40:48], "little")
    entry, count = int.from_bytes(content[58:60], "little"), int.from_bytes(content[60:62], "little")
    return table > 0 and table + entry * count <= len(content)
