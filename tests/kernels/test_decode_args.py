"""The Python mirror of csrc/decode_args.cuh against the header itself, as a C++ compiler lays it out."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess

import pytest

from kernels import decode_args
from kernels.compiler import SOURCE_DIR

HEADER = SOURCE_DIR / "decode_args.cuh"
STRUCTS: tuple[type[ctypes.Structure], ...] = (
    decode_args.Item,
    decode_args.Plan,
    decode_args.Counters,
    decode_args.DecodeArgs,
)
CONSTANTS = {"kPageTokens": decode_args.PAGE_TOKENS, "kRowChunk": decode_args.ROW_CHUNK}
# All that the header needs of ptx.cuh.
TYPES = "#include <cstddef>\n#include <cstdint>\nnamespace tailpack { using namespace std; }\n"


def fields_of_header(struct: str) -> list[str]:
    """Names of the members in the header's own words, in order."""
    text = re.sub(r"//.*", "", HEADER.read_text())
    body = re.search(rf"struct {struct} {{(.*?)}};", text, re.DOTALL)
    assert body, struct
    names = []
    for declaration in body[1].split(";"):
        if declaration.strip():
            first, *others = (part.strip() for part in declaration.split(","))
            names += [re.split(r"[\s*]+", first)[-1], *others]
    return [name.partition("[")[0].lstrip("*") for name in names]


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Offsets, sizes and constants as g++ sees them."""
    folder = tmp_path_factory.mktemp("decode_args")
    shutil.copy(HEADER, folder)
    (folder / "ptx.cuh").write_text(f"#pragma once\n{TYPES}")
    facts = [f'{{"constants", "{name}", (long)tailpack::{name}}}' for name in CONSTANTS]
    for struct in STRUCTS:
        name = struct.__name__
        facts.append(f'{{"{name}", "sizeof", (long)sizeof(tailpack::{name})}}')
        for field in fields_of_header(name):
            facts.append(f'{{"{name}", "{field}", (long)offsetof(tailpack::{name}, {field})}}')
            facts.append(f'{{"{name}", "{field} size", (long)sizeof(tailpack::{name}::{field})}}')
    program = f"""
#include <cstdio>
#include "decode_args.cuh"
struct Fact {{ const char *group, *name; long value; }};
static const Fact facts[] = {{ {", ".join(facts)} }};
int main() {{ for (const Fact& f : facts) std::printf("[\\"%s\\", \\"%s\\", %ld]\\n", f.group, f.name, f.value); }}
"""
    (folder / "facts.cpp").write_text(program)
    binary = folder / "facts"
    subprocess.run(["g++", "-std=c++17", "-o", binary, folder / "facts.cpp"], check=True, timeout=120)
    lines = subprocess.run([binary], capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    found: dict[str, dict[str, int]] = {}
    for group, name, value in map(json.loads, lines):
        found.setdefault(group, {})[name] = value
    return found


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_field_lies_where_the_header_has_it(
    header: dict[str, dict[str, int]], struct: type[ctypes.Structure]
) -> None:
    facts = header[struct.__name__]
    assert [field[0] for field in struct._fields_] == fields_of_header(struct.__name__)
    assert ctypes.sizeof(struct) == facts["sizeof"]
    for name, *_ in struct._fields_:
        mirrored = getattr(struct, name)
        assert (mirrored.offset, mirrored.size) == (facts[name], facts[f"{name} size"]), name


def test_the_constants_are_the_headers(header: dict[str, dict[str, int]]) -> None:
    assert header["constants"] == CONSTANTS


def test_the_arguments_fit_a_kernels_parameters() -> None:
    assert ctypes.sizeof(decode_args.DecodeArgs) <= 4096
