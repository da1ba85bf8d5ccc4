"""Signs, codebooks and grids: against published digits, independent integrals, and what is checked in."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels import tables
from kernels.errors import ArgumentError, WidthError
from kernels.grid_table import GRIDS
from kernels.widths import COMPILED_WIDTHS, PACKED_BITS

SIGNS = {  # most significant bit first, 1 = negative
    64: "53c45c506c9de150",
    128: "d6cfb039d777ddf4ecf5101ff1c7f265",
    256: "6ab877a809c6d7fed09a6b7f037c7215a9aae6f6858197a92452cc0efc5a0acf",
    512: "64629e7eeaed4bb52089f7e536af03efb1b0c1b56b5a7e3a9d4ba9650f1e2360"
    "e7cb265861ba306349843290b5c49789088bd77a3d414e3654e8a97848ecb759",
}

# (width, bits): (positive centroids, positive boundaries, width * mse)
CODEBOOKS = {
    (64, 2): (".056514869 .187496849", ".122005859", 0.114526),
    (64, 3): (".030469179 .093832263 .166167859 .263913931", ".062150721 .130000061 .215040895", 0.033391),
    (64, 4): (
        ".015919023 .048089783 .081311769 .116486752 .154925528 .198856141 .252913728 .330796311",
        ".032004403 .064700776 .09889926 .13570614 .176890834 .225884935 .29185502",
        0.009132,
    ),
    (128, 2): (".039991595 .13304152", ".086516558", 0.116000),
    (128, 3): (".021604311 .066585608 .118139767 .188397186", ".044094959 .092362688 .153268476", 0.033966),
    (128, 4): (
        ".011302497 .034151571 .057772299 .082828457 .110288369 .141805197 .180835964 .237663827",
        ".022727034 .045961935 .070300378 .096558413 .126046783 .16132058 .209249895",
        0.009315,
    ),
    (256, 2): (".028288599 .094237782", ".061263191", 0.116740),
    (256, 3): (".015297488 .04716671 .083765457 .13385429", ".031232099 .065466084 .108809873", 0.034256),
    (256, 4): (
        ".008008374 .024200878 .040949197 .058732108 .078249314 .100698008 .128588201 .169410437",
        ".016104626 .032575037 .049840652 .068490711 .089473661 .114643104 .148999319",
        0.009408,
    ),
    (512, 2): (".02000666 .066693908", ".043350284", 0.117111),
    (512, 3): (".010824349 .033381461 .059311967 .09487593", ".022102905 .046346714 .077093949", 0.034402),
    (512, 4): (
        ".005668543 .017131033 .02899017 .04158786 .05542423 .071355941 .091181381 .120276152",
        ".011399788 .023060602 .035289015 .048506045 .063390085 .081268661 .105728766",
        0.009454,
    ),
}

# An earlier, coarser search; ours must not be worse.
EARLIER_GRIDS = {
    (64, 4): (0.00296014596, (6, 17, 28, 40, 53, 68, 86, 112)),
    (128, 4): (0.00209450425, (6, 17, 28, 40, 53, 68, 87, 114)),
    (256, 4): (0.00149051464, (6, 17, 28, 40, 53, 68, 87, 114)),
    (512, 4): (0.00105248201, (6, 17, 28, 40, 53, 68, 87, 115)),
    (64, 3): (0.00226437701, (14, 42, 74, 117)),
    (128, 3): (0.00160409489, (14, 42, 74, 118)),
    (256, 3): (0.00122265439, (13, 39, 69, 110)),
    (512, 3): (0.00086633394, (13, 39, 69, 110)),
    (64, 2): (0.00179422822, (32, 105)),
    (128, 2): (0.00145400569, (28, 92)),
    (256, 2): (0.00077561961, (37, 122)),
    (512, 2): (0.00056284384, (36, 119)),
}


def numbers(text: str) -> NDArray[np.float64]:
    return np.array([float(word) for word in text.split()])


def simpson(values: NDArray[np.float64], step: float) -> float:
    return float(step / 3 * (values[0] + values[-1] + 4 * values[1:-1:2].sum() + 2 * values[2:-1:2].sum()))


def grid_mse(d: int, step: float, magnitudes: tuple[int, ...]) -> float:
    return float(tables.distortion(d, step * (np.array(magnitudes) - 0.5)))


@pytest.mark.parametrize("d", SIGNS)
def test_signs_are_the_published_ones(d: int) -> None:
    bits = bin(int(SIGNS[d], 16))[2:].zfill(d)
    assert tables.signs(d).tolist() == [-1 if bit == "1" else 1 for bit in bits]


@pytest.mark.parametrize(("d", "bits"), CODEBOOKS)
def test_codebooks_equal_the_published_digits(d: int, bits: int) -> None:
    centroids, boundaries, error = CODEBOOKS[d, bits]
    book = tables.codebook(d, bits)
    np.testing.assert_allclose(book.centroids, numbers(centroids), rtol=0, atol=0.51e-9)
    np.testing.assert_allclose(book.boundaries, numbers(boundaries), rtol=0, atol=0.51e-9)
    assert abs(d * book.mse - error) < 0.51e-6


@pytest.mark.parametrize("d", [8, 9, 16, 33, 64, 100, 128, 512, 4096])
@pytest.mark.parametrize("bits", range(1, 9))
def test_codebooks_are_stationary_to_1e_9(d: int, bits: int) -> None:
    """Each centroid is the mean of its cell, by Simpson's rule on the density itself; boundaries are midpoints."""
    book = tables.codebook(d, bits)
    assert (np.diff(book.centroids) > 0).all() and book.centroids[0] > 0 and book.centroids[-1] < 1
    np.testing.assert_array_equal(book.boundaries, (book.centroids[1:] + book.centroids[:-1]) / 2)
    edges = [0.0, *book.boundaries, min(1.0, 14 / d**0.5)]
    for centroid, (low, high) in zip(book.centroids, itertools.pairwise(edges), strict=True):
        # The last cell of a small width ends where the density has a root; t = 1 - u^2 makes it smooth there.
        if high == 1.0:
            u = np.linspace(0, (1 - low) ** 0.5, 20_001)
            t = 1 - u**2
            weight = (1 - t**2) ** ((d - 3) / 2) * 2 * u
        else:
            t = u = np.linspace(low, high, 20_001)
            weight = (1 - t**2) ** ((d - 3) / 2)
        step = float(u[1] - u[0])
        assert abs(simpson(weight * t, step) / simpson(weight, step) - centroid) < 1e-9


@pytest.mark.parametrize("d", COMPILED_WIDTHS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_codebooks_fit_random_vectors_and_no_other_exponent(d: int, bits: int) -> None:
    """For the right density the centroid rule gives E<y, c> = E||c||^2; a codebook for (d-1)/2 misses it by 1/d.

    Vectors are drawn from normals, so nothing here shares the integrals under test.
    """
    rng = np.random.default_rng(20250425 + d)
    y = rng.standard_normal((max(4096, 64 * d), d))
    y /= np.linalg.norm(y, axis=1, keepdims=True)
    book = tables.codebook(d, bits)
    chosen = book.centroids[np.searchsorted(book.boundaries, np.abs(y))]
    products, squares = (np.abs(y) * chosen).sum(1), (chosen**2).sum(1)
    ratio = products.sum() / squares.sum()
    deviation = (products - ratio * squares).std() / squares.mean() / len(y) ** 0.5
    assert 6 * deviation < 1 / d, "the sample is too small to tell the exponents apart"
    assert abs(ratio - 1) < 4.5 * deviation


def test_distortion_is_the_error_of_nearest_levels() -> None:
    levels = np.array([0.03, 0.11, 0.25])
    t = np.linspace(-1, 1, 2_000_001)
    weight = (1 - t**2) ** ((48 - 3) / 2)
    nearest = np.abs(np.abs(t)[:, None] - levels).min(1) ** 2
    assert float(tables.distortion(48, levels)) == pytest.approx((weight * nearest).sum() / weight.sum(), rel=1e-9)


@pytest.mark.parametrize(("d", "bits"), GRIDS)
def test_grids_are_near_the_best_codebook_and_fit_int8(d: int, bits: int) -> None:
    step, magnitudes = GRIDS[d, bits]
    assert len(magnitudes) == 2 ** (bits - 1)
    assert list(magnitudes) == sorted(set(magnitudes)) and magnitudes[0] >= 1 and magnitudes[-1] <= 127
    assert grid_mse(d, step, magnitudes) <= tables.codebook(d, bits).mse * 1.001


@pytest.mark.parametrize(("d", "bits"), EARLIER_GRIDS)
def test_grids_are_no_worse_than_an_earlier_search(d: int, bits: int) -> None:
    assert grid_mse(d, *GRIDS[d, bits]) <= grid_mse(d, *EARLIER_GRIDS[d, bits]) * (1 + 1e-12)


@pytest.mark.parametrize("d", COMPILED_WIDTHS)
def test_two_bit_grids_are_the_best_there_are(d: int) -> None:
    """All pairs, each with its best step."""
    pairs = np.array([(a, b) for a in range(1, 128) for b in range(a + 1, 128) if 2.5 < (b - 0.5) / (a - 0.5) < 4.5])
    _, errors = tables._fit_step(d, pairs)
    assert grid_mse(d, *GRIDS[d, 2]) <= errors.min() * (1 + 1e-12)


def test_everything_checked_in_is_what_the_generator_writes() -> None:
    """Searches every grid again; covers kernels/grid_table.py and kernels/csrc/tables.cuh."""
    assert set(GRIDS) == {(d, bits) for d in tables.GRID_WIDTHS for bits in PACKED_BITS}
    for path, text in tables.generated_files().items():
        assert path.read_text() == text, f"{path.name}: run python -m kernels.tables"


def test_check_mode_tells_a_changed_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tables.main(["--check"]) == 0
    path = next(iter(tables.generated_files()))
    monkeypatch.setattr(tables, "generated_files", lambda: {path: "something else"})
    assert tables.main(["--check"]) == 1


@pytest.mark.parametrize("d", COMPILED_WIDTHS)
def test_header_holds_the_signs_and_grids(d: int) -> None:
    """Read back from the text, so the words' bit order and the digits' precision are checked, not the formatter."""
    text = tables.cuda_source()
    block = text.split(f"struct Signs<{d}> {{")[1].split("};")[0]
    words = [int(word, 16) for word in re.findall(r"0x([0-9a-f]{8})u", block)]
    assert [-1 if words[i // 32] >> i % 32 & 1 else 1 for i in range(d)] == tables.signs(d).tolist()
    for bits in PACKED_BITS:
        block = text.split(f"struct Grid<{d}, {bits}> {{")[1].split("};")[0]
        floats = [np.float32(value) for value in re.findall(r"return ([0-9.e-]+)f;", block)]
        step, magnitudes = GRIDS[d, bits]
        middle = [np.float32(float(np.float32(step)) * (a + b - 1) / 2) for a, b in itertools.pairwise(magnitudes)]
        assert floats == [np.float32(step), *middle]


@pytest.mark.parametrize(("d", "bits", "error"), [(7, 4, WidthError), (64, 0, ArgumentError), (64, 9, ArgumentError)])
def test_refusals(d: int, bits: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        tables.codebook(d, bits)
