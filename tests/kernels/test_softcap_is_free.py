"""Without softcap the machine code is what it would be had softcap never been written.

A copy of the sources loses every trace of it, as text: blocks under `if constexpr (SOFTCAP)`, the first branch of
`SOFTCAP ? a : b`, the template parameter, the uses of the field. The same instructions are proof enough.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from kernels.archive import find_inspector, list_cubin
from kernels.cells import AttentionVariant, Cell, mqa_cell, packed_cell, rows_cell
from kernels.compiler import SOURCE_DIR, compile_cubin

CELLS = {
    "packed": packed_cell(256, "tq4", AttentionVariant(vectors=4)),
    "rows": rows_cell(256, "dense", AttentionVariant(vectors=8)),
    "mqa": mqa_cell(512, "tq4", AttentionVariant(vectors=8)),
}
_PAIRS = {"(": ")", "[": "]", "{": "}"}


def _end_of(text: str, start: int, stops: str) -> int:
    """Where one of `stops` comes next from `start` on, outside brackets that open behind it."""
    depth = 0
    for at in range(start, len(text)):
        if depth == 0 and text[at] in stops:
            return at
        depth += (text[at] in _PAIRS) - (text[at] in _PAIRS.values())
    raise AssertionError(f"no end: {text[start : start + 80]}")


def _statement(text: str, start: int) -> tuple[str, int]:
    """The block or statement that begins at or behind `start`, and where it ends."""
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    end = _end_of(text, begin + 1, "}") if text[begin] == "{" else _end_of(text, begin, ";")
    return text[begin : end + 1], end + 1


def without_softcap(source: str) -> str:
    """The source as it would be without softcap. Raises AssertionError where a trace is left."""
    text = re.sub(r"//.*", "", source)
    while found := re.search(r"if constexpr \(SOFTCAP\)", text):
        _, end = _statement(text, found.end())
        other = ""
        if re.match(r"\s*else\b", text[end:]):
            other, end = _statement(text, text.index("else", end) + 4)
        text = text[: found.start()] + other + text[end:]
    while found := re.search(r"\bSOFTCAP \?", text):
        colon = _end_of(text, found.end(), ":")
        end = _end_of(text, colon + 1, ",;)}")
        text = text[: found.start()] + text[colon + 1 : end] + text[end:]
    text = re.sub(r",\s*(?:bool\s+|TAILPACK_)?SOFTCAP\b", "", text)
    left = [line for line in text.splitlines() if re.search("softcap", line, re.IGNORECASE)]
    assert [line.split() for line in left] in ([], [["float", "softcap;"]]), left  # the field itself stays
    return text


def machine_code(cell: Cell, arch: str, source_dir: Path, folder: Path) -> dict[str, list[str]]:
    """Instructions and their encodings by kernel."""
    cubin = folder / f"{source_dir.name}.cubin"
    cubin.write_bytes(compile_cubin(cell, arch, source_dir))
    found: dict[str, list[str]] = {}
    name = ""
    for line in list_cubin(cubin, find_inspector()).splitlines():
        if heading := re.match(r"\s*Function : (\w+)", line):
            name = heading[1]
        elif name and "/* 0x" in line:
            found.setdefault(name, []).append(line.strip())
    return found


@pytest.fixture(scope="module")
def stripped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(SOURCE_DIR, tmp_path_factory.mktemp("without") / "csrc_without_softcap"))
    for path in folder.glob("*.cu*"):
        path.write_text(without_softcap(path.read_text()))
    return folder


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_the_machine_code_knows_nothing_of_softcap(cell: Cell, stripped: Path, tmp_path: Path) -> None:
    arch = cell.arches[0] if cell.arches else "sm_90a"
    own, bare = (machine_code(cell, arch, folder, tmp_path) for folder in (SOURCE_DIR, stripped))
    assert set(own) == set(cell.kernels)
    assert all(len(lines) > 100 for lines in own.values())
    assert own == bare


def test_with_softcap_it_is_another_one(stripped: Path, tmp_path: Path) -> None:
    """So the comparison can fail."""
    cell = rows_cell(64, "dense", AttentionVariant(vectors=8, softcap=True))
    own, bare = (machine_code(cell, "sm_90a", folder, tmp_path) for folder in (SOURCE_DIR, stripped))
    (attend,) = cell.tensor_kernels
    assert own[attend] != bare[attend]


def test_the_stripper_leaves_what_is_not_softcaps() -> None:
    source = """
template <int D, bool SOFTCAP> void f() { // softcap
    const float a = SOFTCAP ? g(1, 2) : h(3), b = x * (SOFTCAP ? 1.0f : k);
    if constexpr (SOFTCAP) { if (a) { b = args.softcap; } } else { c(); }
    if constexpr (SOFTCAP) d = args.softcap;
    e<D, SOFTCAP>();
}
"""
    assert "".join(without_softcap(source).split()) == ("template<intD>voidf(){constfloata=h(3),b=x*(k);{c();}e<D>();}")
    with pytest.raises(AssertionError, match="softcap"):
        without_softcap("float y = args.softcap;")
