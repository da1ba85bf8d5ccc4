"""The tables of the codec: signs of the rotation, Lloyd-Max codebooks and the integer grids that are really stored.

Formulas: TurboQuant (arXiv 2504.19874) quantises each coordinate t of a randomly rotated unit vector in R^d, whose
density is f(t) = (1-t^2)^((d-3)/2) on [-1, 1] up to a constant. With t = sin(a) the mass of a cell is an integral of
cos(a)^(d-2), an entire function, so Gauss-Legendre is exact to rounding; the centroid's numerator is analytic.

`python -m kernels.tables` writes every table that any file holds (kernels/grid_table.py, kernels/csrc/tables.cuh);
with --check it compares instead. The searched grids are checked in because records outlive a process: two machines
whose libm differ in the last bit must not choose different tables.
"""

import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.errors import ArgumentError, WidthError
from kernels.widths import COMPILED_WIDTHS, PACKED_BITS

Floats = NDArray[np.float64]

MIN_WIDTH = 8
MAX_BITS = 8
GRID_WIDTHS = (8, 16, 32, 64, 128, 256, 512, 1024)  # powers of two that a row may be split into
MAX_MAGNITUDE = 127  # T fits int8 as T and as -T

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)
_TAIL = 12.0  # standard deviations after which the density is below rounding


class Codebook(NamedTuple):
    """Positive half of an odd-symmetric codebook for unit vectors of R^d."""

    centroids: Floats  # [2^(b-1)], ascending, > 0
    boundaries: Floats  # [2^(b-1) - 1], midpoints, > 0; the boundary at 0 is not listed
    mse: float  # mean squared error of one coordinate, not times d


class Grid(NamedTuple):
    """A codebook on half-integers: magnitude i decodes to step * (magnitudes[i] - 1/2)."""

    step: float  # s; exactly representable in f32
    magnitudes: tuple[int, ...]  # T, ascending, 1..127


def signs(d: int) -> NDArray[np.int8]:
    """The diagonal of D for width d, int8 [d] of +1 and -1 (xorshift64 seeded with 42 and d)."""
    mask = (1 << 64) - 1
    state = 42 ^ (d * 0x9E3779B97F4A7C15 & mask)
    out = np.empty(d, np.int8)
    for i in range(d):
        state ^= state << 13 & mask
        state ^= state >> 7
        state ^= state << 17 & mask
        out[i] = -1 if state & 1 else 1
    return out


def _masses(d: int, edges: Floats) -> Floats:
    """Integrals of (1-t^2)^((d-3)/2) between neighbours of `edges` [..., n+1] within [0, 1]; [..., n]."""
    angles = np.arcsin(edges)
    lo = angles[..., :-1]
    hi = np.minimum(angles[..., 1:], lo + _TAIL / np.sqrt(d))
    half = (hi - lo) / 2
    nodes = lo[..., None] + half[..., None] * (1 + _NODES)
    mass: Floats = half * (np.cos(nodes) ** (d - 2) @ _WEIGHTS)
    return mass


def _moments(d: int, edges: Floats) -> Floats:
    """Integrals of t (1-t^2)^((d-3)/2) between neighbours of `edges`: -(1-t^2)^((d-1)/2) / (d-1), by expm1."""
    with np.errstate(divide="ignore"):  # log(0) at t = 1 is wanted: exp gives 0
        logs = (d - 1) / 2 * np.log1p(-(edges**2))
    moment: Floats = -np.exp(logs[..., :-1]) * np.expm1(logs[..., 1:] - logs[..., :-1]) / (d - 1)
    return moment


def _edges(levels: Floats) -> Floats:
    """Cell edges on [0, 1] of positive levels [..., n]: 0, the midpoints, 1; [..., n+1]."""
    edge = np.zeros((*levels.shape[:-1], 1))
    return np.concatenate([edge, (levels[..., 1:] + levels[..., :-1]) / 2, edge + 1], axis=-1)


def distortion(d: int, levels: Floats) -> Floats:
    """Mean squared error of one coordinate for positive `levels` [..., n] with nearest-level cells; [...]."""
    edges = _edges(levels)
    total = _masses(d, np.array([0.0, 1.0]))[0]
    error: Floats = ((levels**2 * _masses(d, edges) - 2 * levels * _moments(d, edges)).sum(-1)) / total + 1 / d
    return error


def _check(d: int, bits: int) -> None:
    if d < MIN_WIDTH:
        raise WidthError("no codebook for this width", given=str(d), allowed=f"{MIN_WIDTH} or more", action="pad it")
    if not 1 <= bits <= MAX_BITS:
        raise ArgumentError(
            "no codebook for these bits", given=str(bits), allowed=f"1 to {MAX_BITS}", action="pick one"
        )


@lru_cache
def codebook(d: int, bits: int) -> Codebook:
    """Lloyd-Max codebook of width d and `bits` a coordinate, to 1e-12. The density is log-concave, so it is unique.

    Newton on c_i = centroid(cell i), whose Jacobian is tridiagonal; a step that would not keep the levels ascending and
    bring the residual down is replaced by a Lloyd step, which always does. Raises WidthError, ArgumentError.
    """
    _check(d, bits)
    n = 1 << (bits - 1)
    # Start from the best point density for many levels, f^(1/3): its quantiles.
    grid = np.linspace(0, min(np.pi / 2, _TAIL / np.sqrt(d)), 4096)
    cdf = np.cumsum(np.cos(grid) ** ((d - 3) / 3 + 1))
    levels: Floats = np.sin(np.interp((np.arange(n) + 0.5) / n * cdf[-1], cdf, grid))

    def centroid(c: Floats) -> tuple[Floats, Floats, Floats]:
        edges = _edges(c)
        mass = _masses(d, edges)
        return _moments(d, edges) / mass, mass, edges

    target, mass, edges = centroid(levels)
    for _ in range(200):
        residual = levels - target
        if np.abs(residual).max() < 1e-15:
            break
        density = (1 - edges**2) ** ((d - 3) / 2)
        density[0] = density[-1] = 0  # the outer edges do not move
        up = density[1:] * (edges[1:] - target) / mass / 2
        down = density[:-1] * (target - edges[:-1]) / mass / 2
        jacobian = np.eye(n) - np.diag(up + down) - np.diag(up[:-1], 1) - np.diag(down[1:], -1)
        trial: Floats = levels - np.linalg.solve(jacobian, residual)
        if trial[0] > 0 and trial[-1] < 1 and (np.diff(trial) > 0).all():
            result = centroid(trial)
            if np.abs(trial - result[0]).max() < np.abs(residual).max():
                levels, (target, mass, edges) = trial, result
                continue
        if np.abs(residual).max() < 1e-13:
            break  # rounding: neither step improves any more
        levels = target
        target, mass, edges = centroid(levels)
    else:
        raise AssertionError(f"Lloyd-Max did not settle at d={d}, bits={bits}")
    return Codebook(levels, edges[1:-1], float(distortion(d, levels)))


def _fit_step(d: int, magnitudes: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Best steps [k] and their distortions [k] for half-integer tables [k, n]: Lloyd's rule for one scale."""
    tau = magnitudes - 0.5
    step: Floats = codebook(d, tau.shape[1].bit_length()).centroids[-1] / tau[:, -1]

    def refit(s: Floats) -> Floats:
        edges = _edges(tau * s[:, None])
        best: Floats = (tau * _moments(d, edges)).sum(-1) / (tau**2 * _masses(d, edges)).sum(-1)
        return best

    for _ in range(8):  # Steffensen: Lloyd's rule alone converges only linearly
        once = refit(step)
        twice = refit(once)
        curvature = twice - 2 * once + step
        settled = np.abs(curvature) < 1e-14 * step
        step = np.where(settled, twice, step - (once - step) ** 2 / np.where(settled, 1, curvature))
    return step, distortion(d, tau * step[:, None])


@lru_cache
def search_grid(d: int, bits: int) -> Grid:
    """The half-integer grid of least distortion found for width d and 2 to 4 bits; deterministic.

    For a fixed step the nearest half-integers are best to second order, so a fine sweep of the step gives candidates;
    the 48 best are refitted exactly, and the winner moves one or two magnitudes by one for as long as that helps.
    """
    book = codebook(d, bits)
    edges = _edges(book.centroids)
    mass = _masses(d, edges)
    steps = book.centroids[-1] / np.linspace(8 << (bits - 2), MAX_MAGNITUDE - 0.5, 20_000)
    tables = np.rint(book.centroids / steps[:, None] + 0.5).astype(np.int64)
    tables, first = np.unique(tables, axis=0, return_index=True)
    penalty = (mass * (steps[first, None] * (tables - 0.5) - book.centroids) ** 2).sum(-1)
    tables = tables[np.argsort(penalty, kind="stable")[:48]]
    _, errors = _fit_step(d, tables)
    best, best_error = tables[errors.argmin()], errors.min()
    n = best.size
    moves = np.array([m for m in np.ndindex(*(3,) * n) if 0 < sum(x != 1 for x in m) <= 2], np.int64) - 1
    while True:
        near = best + moves
        near = near[(near[:, 0] >= 1) & (near[:, -1] <= MAX_MAGNITUDE) & (np.diff(near, axis=1) > 0).all(1)]
        step, errors = _fit_step(d, near)
        if errors.min() >= best_error * (1 - 1e-12):
            break
        best, best_error = near[errors.argmin()], errors.min()
    step, _ = _fit_step(d, best[None])
    return Grid(float(np.float32(step[0])), tuple(int(m) for m in best))


def grid_boundaries(grid: Grid) -> tuple[float, ...]:
    """Positive encode boundaries: midpoints of neighbouring grid values, each rounded once to f32.

    They live where the rotated unit coordinate y lives. The whole list is {-b} + {0} + {+b}, and y on a boundary
    belongs to the upper cell. In sign-magnitude form that reads: the sign is 1 only for y < 0 (0.0 and -0.0 are
    positive); a positive y counts the boundaries b <= y, a negative one counts b < |y|, so -b keeps the smaller
    magnitude.
    """
    pairs = zip(grid.magnitudes[:-1], grid.magnitudes[1:], strict=True)
    return tuple(float(np.float32(grid.step * (lower + upper - 1) / 2)) for lower, upper in pairs)


def grid_table_source() -> str:
    """Text of kernels/grid_table.py."""
    lines = [
        '"""Half-integer grids, (width, bits): (step, magnitudes); written by `python -m kernels.tables`."""',
        "",
        "GRIDS: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {",
    ]
    for d in GRID_WIDTHS:
        for bits in PACKED_BITS:
            step, magnitudes = search_grid(d, bits)
            lines.append(f"    ({d}, {bits}): ({step:.9g}, {magnitudes}),")
    return "\n".join([*lines, "}", ""])


def sign_words(d: int) -> tuple[int, ...]:
    """Signs of D as u32 words: bit j of word w is 1 where element 32 w + j is negative. d is a multiple of 32."""
    bits = (signs(d) < 0).reshape(-1, 32)
    return tuple(sum(1 << j for j in range(32) if row[j]) for row in bits)


def cuda_source() -> str:
    """Text of kernels/csrc/tables.cuh. Constants are functions: they fold where the index is known when compiling."""
    out = [
        "// Written by `python -m kernels.tables` from kernels/widths.py and kernels/tables.py; do not edit.",
        "// Signs<D>::word(w): bit j is 1 where the diagonal D of the rotation is negative at element 32 w + j.",
        "// Grid<D, BITS>: code = sign << (BITS - 1) | i; sign 1 is negative; magnitude i is step() * (T(i) - 1/2).",
        "// boundary(i), i < kLevels - 1: between magnitudes i and i + 1, in units of the rotated unit coordinate y.",
        "// A tie goes to the upper cell: y >= 0 counts b <= y, y < 0 counts b < -y, and 0.0 and -0.0 have sign 0.",
        "#pragma once",
        "",
        "#define TAILPACK_WIDTHS(X) " + " ".join(f"X({d})" for d in COMPILED_WIDTHS),
        "#define TAILPACK_BITS(X) " + " ".join(f"X({b})" for b in PACKED_BITS),
        "",
        "namespace tailpack {",
        "",
        "template <int D> struct Signs;",
        "template <int D, int BITS> struct Grid;",
    ]

    def function(kind: str, name: str, values: list[str]) -> list[str]:
        if len(values) == 1:
            return [f"    static __host__ __device__ constexpr {kind} {name}(int) {{ return {values[0]}; }}"]
        cases = [f"            case {i}: return {value};" for i, value in enumerate(values[:-1])]
        head = f"    static __host__ __device__ constexpr {kind} {name}(int i) {{"
        return [
            head,
            "        switch (i) {",
            *cases,
            f"            default: return {values[-1]};",
            "        }",
            "    }",
        ]

    for d in COMPILED_WIDTHS:
        out += ["", f"template <> struct Signs<{d}> {{"]
        out += [*function("unsigned", "word", [f"0x{word:08x}u" for word in sign_words(d)]), "};"]
        for bits in PACKED_BITS:
            grid = search_grid(d, bits)
            out += ["", f"template <> struct Grid<{d}, {bits}> {{"]
            out += [f"    static constexpr int kLevels = {len(grid.magnitudes)};"]
            out += [f"    static __host__ __device__ constexpr float step() {{ return {grid.step:.9g}f; }}"]
            out += function("signed char", "T", [str(m) for m in grid.magnitudes])
            out += [*function("float", "boundary", [f"{b:.9g}f" for b in grid_boundaries(grid)]), "};"]
    return "\n".join([*out, "", "}  // namespace tailpack", ""])


def generated_files() -> dict[Path, str]:
    """Every generated file of this package with the text it must have."""
    here = Path(__file__).parent
    return {here / "grid_table.py": grid_table_source(), here / "csrc" / "tables.cuh": cuda_source()}


def main(arguments: list[str]) -> int:
    """Write the generated files, or with --check list those that differ and return 1."""
    status = 0
    for path, text in generated_files().items():
        if "--check" not in arguments:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{path} differs from its generator; run python -m kernels.tables")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
