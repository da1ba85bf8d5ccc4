"""`tailpack codec report`: what the codec loses, against what no codec can beat.

Three tables and one plot. *Distortion*: normalised mean squared error of random unit vectors by width and bits, for
exact Lloyd-Max codebooks and for the stored grids, both with the norm n as scale, and beside them the corrected scale
that is stored; against 4^-b, which no quantizer can beat, and the paper's upper bound sqrt(3) pi / 2 * 4^-b (arXiv
2504.19874). *Special rows*: with and without the signs of the rotation. *Inner products*: the paper's unbiased variant
(one bit less, spent on the signs of a random projection of the residual, QJL) beside ours.
"""

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from kernels import turboquant
from kernels.rotation import hadamard_columns, rotate
from kernels.tables import codebook
from kernels.widths import COMPILED_WIDTHS, PACKED_BITS

ALL_BITS = (1, 2, 3, 4)
TABLE_WIDTH = 80  # columns
PAPER_FACTOR = math.sqrt(3) * math.pi / 2  # paper's upper bound over 4^-b


class Distortion(NamedTuple):
    """Normalised mean squared errors of one width and bits; None where nothing is stored at those bits."""

    width: int
    bits: int
    floor: float  # 4^-b
    paper_bound: float
    expected: float  # width * mse of the exact codebook, by integration
    exact: float  # measured, exact codebook, scale n
    grid: float | None  # measured, stored grid, scale n
    corrected: float | None  # measured, stored grid and stored scale
    cosine: float | None  # mean cosine with the stored record


class SpecialRow(NamedTuple):
    """Mean cosines of one kind of row; None for rows that are stored as zero, which have no direction."""

    name: str
    bits: int
    with_signs: float | None
    without_signs: float | None
    finite: bool
    exact_zero: bool


class InnerProduct(NamedTuple):
    """Estimates of <q, x> for unit keys x: bias, error, and what attention makes of it."""

    method: str
    bits: int
    slope: float  # of the estimate over the truth; 1 is unbiased
    rms_error: float  # times sqrt(width)
    attention_error: float  # relative error of a softmax-weighted sum of exact values, logits of deviation 3


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _unit_rows(rows: int, width: int, seed: int) -> Tensor:
    x = torch.randn(rows, width, generator=_generator(seed))
    return torch.nn.functional.normalize(x, dim=1)


def _nearest(y: Tensor, positive: Tensor) -> Tensor:
    """Each y replaced by the nearest of +-`positive`, ties to the upper cell."""
    levels = torch.cat([-positive.flip(0), positive])
    return levels[torch.bucketize(y, (levels[1:] + levels[:-1]) / 2, right=True)]


def _exact(width: int, bits: int) -> Tensor:
    return torch.from_numpy(codebook(width, bits).centroids).to(torch.float32)


def _error(x: Tensor, back: Tensor) -> float:
    """Mean of ||x - back||^2 / ||x||^2 over rows."""
    x, back = x.double(), back.double()
    return ((x - back).square().sum(1) / x.square().sum(1)).mean().item()


def measure_distortion(width: int, bits: int, rows: int, seed: int) -> Distortion:
    """One line of the distortion table from `rows` random unit vectors."""
    x = _unit_rows(rows, width, seed)
    exact = rotate(_nearest(rotate(x), _exact(width, bits)))
    grid = corrected = cosine = None
    if bits in PACKED_BITS:
        packed = turboquant.pack(x, bits)
        codes = turboquant.unpack_codes(packed, width, bits)
        grid = _error(x, rotate(turboquant.code_values(width, bits)[codes.int()]))
        back = turboquant.unpack(packed, width, bits)
        corrected, cosine = _error(x, back), torch.cosine_similarity(x, back).mean().item()
    floor = 4.0**-bits
    expected = width * codebook(width, bits).mse
    return Distortion(width, bits, floor, PAPER_FACTOR * floor, expected, _error(x, exact), grid, corrected, cosine)


def special_rows(width: int, seed: int) -> dict[str, Tensor]:
    """Kinds of rows that a rotation or a norm can get wrong, f32 [n, width] each."""
    unit = _unit_rows(64, width, seed)
    order = torch.rand(64, width, generator=_generator(seed + 1)).argsort(dim=1)
    return {
        "random": unit,
        "constant": torch.ones(1, width),
        "8-sparse": torch.where(order < 8, unit, 0.0),
        "one-hot": torch.eye(width),
        "norm 1e36": unit * 1e36,
        "norm 1e-9": unit * 1e-9,
        "norm 1e-11": unit * 1e-11,
        "zero": torch.zeros(1, width),
    }


def _without_signs(x: Tensor, bits: int) -> Tensor:
    """Direction that the codec would give back if D were the identity."""
    width = x.shape[1]
    half = len(turboquant.grid(width, bits).magnitudes)
    unit = x.double() / x.double().norm(dim=1, keepdim=True)
    turned = hadamard_columns(unit.t().contiguous()) / math.sqrt(width)
    chosen = _nearest(turned, turboquant.code_values(width, bits)[:half].double())
    return hadamard_columns(chosen).t()


def measure_special(name: str, x: Tensor, bits: int) -> SpecialRow:
    """One line of the table of special rows."""
    width = x.shape[1]
    back = turboquant.unpack(turboquant.pack(x, bits), width, bits)
    finite, zero = bool(back.isfinite().all()), not bool(back.any())
    if zero:
        return SpecialRow(name, bits, None, None, finite, zero)
    signed = torch.cosine_similarity(x.double(), back.double(), eps=0).mean().item()
    unsigned = torch.cosine_similarity(x.double(), _without_signs(x, bits), eps=0).mean().item()
    return SpecialRow(name, bits, signed, unsigned, finite, zero)


def measure_inner_products(width: int, bits: int, rows: int, seed: int) -> list[InnerProduct]:
    """Ours (scale n, stored scale) and the paper's unbiased variant at the same bits, on `rows` keys and 64 queries."""
    x = _unit_rows(rows, width, seed)
    queries = torch.randn(64, width, generator=_generator(seed + 1)) * 3
    values = torch.randn(rows, width, generator=_generator(seed + 2))
    packed = turboquant.pack(x, bits)
    codes = turboquant.unpack_codes(packed, width, bits)
    coarse = rotate(_nearest(rotate(x), _exact(width, bits - 1)))
    residual = x - coarse
    projection = torch.randn(width, width, generator=_generator(seed + 3))
    # QJL: E[<S q, sign(S r)>] = sqrt(2 / pi) <q, r> / ||r|| for each row of a Gaussian S.
    qjl = (residual @ projection.t()).sign() @ projection * (math.sqrt(math.pi / 2) / width)
    estimates = {
        "scale n": rotate(turboquant.code_values(width, bits)[codes.int()]),
        "stored scale": turboquant.unpack(packed, width, bits),
        f"{bits - 1} bits + QJL": coarse + qjl * residual.norm(dim=1, keepdim=True),
    }
    # The queries have norms near 3 sqrt(width), so that logits over unit keys have deviation 3.
    truth = queries @ x.t()
    wanted = truth.softmax(1) @ values
    out = []
    for method, key in estimates.items():
        logits = queries @ key.t()
        slope = ((logits * truth).sum() / truth.square().sum()).item()
        rms = (logits - truth).square().mean().sqrt().item() / 3
        got = logits.softmax(1) @ values
        error = ((got - wanted).norm(dim=1) / wanted.norm(dim=1)).mean().item()
        out.append(InnerProduct(method, bits, slope, rms, error))
    return out


def _cell(value: float | None, digits: int = 3) -> str:
    """Three significant digits, or as many as are asked for."""
    return "-" if value is None else f"{value:#.{digits}g}"


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _distortion_table(lines: list[Distortion]) -> Table:
    table = _table(
        "Distortion of random unit vectors (normalised MSE)",
        *("width", "bits", "4^-b", "paper <=", "expected", "exact", "grid", "stored scale", "cosine"),
    )
    for line in lines:
        numbers = line.floor, line.paper_bound, line.expected, line.exact, line.grid, line.corrected, line.cosine
        table.add_row(
            str(line.width), str(line.bits), *map(_cell, numbers), end_section=line.bits == ALL_BITS[-1]
        )  # fmt: skip
    return table


def _special_table(width: int, lines: list[SpecialRow]) -> Table:
    heads = [f"{bits} bits" for bits in PACKED_BITS]
    table = _table(f"Special rows, width {width}: mean cosine (with signs / without)", "row", *heads, "finite")
    table.columns[0].justify = "left"
    for name in dict.fromkeys(line.name for line in lines):
        mine = [line for line in lines if line.name == name]
        cells = [
            "exact zeros" if line.exact_zero else f"{_cell(line.with_signs, 4)} / {_cell(line.without_signs, 4)}"
            for line in mine
        ]
        table.add_row(name, *cells, "yes" if all(line.finite for line in mine) else "NO")
    return table


def _inner_table(width: int, lines: list[InnerProduct]) -> Table:
    table = _table(f"Inner products, width {width}", "bits", "method", "slope", "error", "attention error")
    for line in lines:
        table.add_row(
            str(line.bits), line.method, _cell(line.slope), _cell(line.rms_error), _cell(line.attention_error)
        )
    return table


def _console() -> Console:
    """Never narrower than the tables, and off a terminal always as wide: a number that is cut is another number."""
    console = Console(highlight=False)
    console.width = max(console.width, TABLE_WIDTH) if console.is_terminal else TABLE_WIDTH
    return console


def plot(lines: list[Distortion], specials: list[SpecialRow], special_width: int, files: list[Path]) -> None:
    """Draw the report into `files`; the format follows from each name. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
    bits = list(ALL_BITS)
    left.semilogy(bits, [4.0**-b for b in bits], "k--", label="no quantizer can beat: 4^-b")
    left.semilogy(bits, [PAPER_FACTOR * 4.0**-b for b in bits], color="0.5", ls=":", label="paper's upper bound")
    middle.axhline(1, color="k", ls="--", label="no quantizer can beat")
    middle.axhline(PAPER_FACTOR, color="0.5", ls=":", label="paper's upper bound")
    for width, marker in zip(sorted({line.width for line in lines}), "osD^v<>P", strict=False):
        mine = [line for line in lines if line.width == width]
        left.semilogy(bits, [line.exact for line in mine], marker=marker, ms=5, lw=1, label=f"measured, d = {width}")
        points = middle.plot(
            bits, [line.exact / line.floor for line in mine], marker=marker, lw=1, label=f"d = {width}"
        )
        stored = [(line.bits, line.corrected / line.floor) for line in mine if line.corrected is not None]
        middle.plot(*zip(*stored, strict=True), marker=marker, ls="none", mfc="none", color=points[0].get_color())
    middle.plot([], [], marker="o", ls="none", mfc="none", color="k", label="with the stored scale")
    left.set(xlabel="bits a coordinate", ylabel="normalised MSE", title="Distortion, scale n", xticks=bits)
    middle.set(xlabel="bits a coordinate", ylabel="normalised MSE / 4^-b", title="Distance from the bound", xticks=bits)
    middle.set_ylim(0.9, 2.9)

    shown = [
        s for s in specials if s.with_signs is not None and s.name in ("random", "constant", "8-sparse", "one-hot")
    ]
    places = [i + i // len(PACKED_BITS) for i in range(len(shown))]
    right.bar([p - 0.2 for p in places], [s.with_signs for s in shown], 0.4, label="with signs")
    right.bar([p + 0.2 for p in places], [s.without_signs for s in shown], 0.4, label="without")
    right.set_xticks(places, [f"{s.name}, {s.bits} bit" for s in shown], rotation=60, ha="right", fontsize=8)
    right.set(ylabel="mean cosine", title=f"Why the rotation has signs (d = {special_width})", ylim=(0, 1.2))
    right.legend(fontsize=8, ncols=2, loc="upper right")
    left.legend(fontsize=8)
    middle.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.08))
    left.grid(alpha=0.3)
    middle.grid(alpha=0.3)
    for file in files:
        figure.savefig(file, dpi=150)
    pyplot.close(figure)


@click.command("report")
@click.option("--rows", default=8192, show_default=True, type=click.IntRange(min=64), help="Random vectors a width.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random vectors.")
@click.option("--width", default=128, show_default=True, type=click.Choice(COMPILED_WIDTHS), help="For tables 2 and 3.")
@click.option(
    "--out", default=Path("codec-report"), show_default=True, type=click.Path(path_type=Path, file_okay=False)
)
@click.option("--no-plot", is_flag=True, help="Tables only.")
def report(rows: int, seed: int, width: int, out: Path, no_plot: bool) -> None:
    """Measure what the codec loses; print tables.

    Where matplotlib is installed, also write distortion.png and distortion.svg to OUT.
    """
    console = _console()
    kinds = special_rows(width, seed)
    lines: list[Distortion] = []
    specials: list[SpecialRow] = []
    products: list[InnerProduct] = []
    steps: list[Callable[[], None]] = [
        *(
            lambda d=d, b=b: lines.append(measure_distortion(d, b, rows, seed))
            for d in COMPILED_WIDTHS
            for b in ALL_BITS
        ),
        *(lambda n=n, b=b: specials.append(measure_special(n, kinds[n], b)) for n in kinds for b in PACKED_BITS),
        *(lambda b=b: products.extend(measure_inner_products(width, b, rows, seed)) for b in PACKED_BITS),
    ]
    for step in track(steps, "measuring", console=console, transient=True, disable=not console.is_terminal):
        step()
    off = max(abs(m / line.expected - 1) for line in lines for m in (line.exact, line.grid) if m is not None)
    console.print(_distortion_table(lines))
    console.print(f"exact and grid are within {off:.2%} of expected\n")
    console.print(_special_table(width, specials), "", _inner_table(width, products))
    console.print("error: rms * sqrt(width); attention error: at logits of deviation 3\n")
    console.print(f"{rows} random vectors a width, seed {seed}")
    if no_plot:
        return
    if importlib.util.find_spec("matplotlib") is None:
        console.print(f"no plots: they need matplotlib ({_pip()} install matplotlib)", soft_wrap=True)
        return
    out.mkdir(parents=True, exist_ok=True)
    files = [out / "distortion.png", out / "distortion.svg"]
    plot(lines, specials, width, files)
    console.print("wrote " + ", ".join(map(str, files)), soft_wrap=True)


def _pip() -> Path:
    """The pip of this environment, as seen from the current folder."""
    pip = Path(sys.executable).with_name("pip")
    return pip.relative_to(Path.cwd()) if pip.is_relative_to(Path.cwd()) else pip
