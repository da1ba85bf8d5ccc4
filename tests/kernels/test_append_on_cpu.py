"""The kernel that appends rows (csrc/append.cu), run on a CPU lane by lane, and the checks of its wrapper."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.append_cuda import AppendSide, append, append_launch
from kernels.errors import ArgumentError, LayoutError
from tests.kernels.emulator import Emulator, EmulatorError, needs_compiler


@pytest.fixture(scope="module")
def library() -> Emulator:
    return Emulator.build("append.cpp")


def run(library: Emulator, keys: AppendSide, values: AppendSide | None, places: Tensor, rows: Tensor) -> None:
    ctas, arguments = append_launch(keys, values, places, rows)
    library.call("append", ctas, *arguments)


def expect(side: AppendSide, before: Tensor, places: Tensor, rows: Tensor) -> None:
    """The memory holds the new rows where they belong, and is otherwise what it was."""
    want = before.clone()
    for n, (place, row) in enumerate(zip(places.tolist(), rows.tolist(), strict=True)):
        if place >= 0:
            want[..., place, row, :, :] = side.rows[..., n, :, :]
    as_bytes = [x.contiguous().view(torch.uint8) for x in (side.to, want)]
    assert torch.equal(*as_bytes)


@needs_compiler
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("layers", "heads", "dim"), [(0, 1, 8), (0, 8, 128), (3, 2, 64), (2, 3, 512), (1, 5, 40)])
def test_rows_go_where_they_belong_and_nowhere_else(
    library: Emulator, layers: int, heads: int, dim: int, dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    front = (layers,) if layers else ()
    new = [torch.randn(*front, 5, heads + 1, 2 * dim).to(dtype)[..., :heads, dim:] for _ in range(2)]  # strided
    memory = [torch.randn(*front, 7, 9, heads, dim).to(dtype) for _ in range(2)]
    before = [x.clone() for x in memory]
    places = torch.tensor([6, 0, -1, 3, 6], dtype=index_dtype)
    rows = torch.tensor([8, 0, 99, 4, 7], dtype=index_dtype)
    sides = [AppendSide(*pair) for pair in zip(new, memory, strict=True)]
    run(library, sides[0], sides[1], places, rows)
    for side, old in zip(sides, before, strict=True):
        expect(side, old, places, rows)


@needs_compiler
def test_all_layers_of_an_arena_of_dense_pages_are_written_at_once(library: Emulator) -> None:
    """Pages as blobs [layer: keys, values][128 rows][heads][dim]; the views of a side have any strides."""
    layers, heads, dim, pages = 3, 2, 16, 4
    arena = torch.randn(pages, layers, 2, 128, heads, dim).to(torch.bfloat16)
    before = arena.clone()
    new = torch.randn(2, layers, 3, heads, dim).to(torch.bfloat16)
    places, rows = torch.tensor([1, 3, 0]), torch.tensor([127, 0, 64])
    views = [arena[:, :, side].transpose(0, 1) for side in (0, 1)]
    run(library, AppendSide(new[0], views[0]), AppendSide(new[1], views[1]), places, rows)
    for n, (page, row) in enumerate(zip(places.tolist(), rows.tolist(), strict=True)):
        before[page, :, :, row] = new[:, :, n].transpose(0, 1)
    assert torch.equal(arena, before)


@needs_compiler
def test_shared_rows_are_written_once(library: Emulator) -> None:
    side = AppendSide(torch.randn(2, 1, 512), torch.zeros(2, 4, 1, 512))
    before = side.to.clone()
    places, rows = torch.tensor([1, 0]), torch.tensor([3, 2])
    run(library, side, None, places, rows)
    expect(side, before, places, rows)


@needs_compiler
@pytest.mark.parametrize(("place", "row"), [(2, 0), (0, 4), (1, -1)])
def test_a_place_that_does_not_exist_ends_the_kernel(library: Emulator, place: int, row: int) -> None:
    side = AppendSide(torch.ones(1, 1, 8), torch.zeros(2, 4, 1, 8))
    with pytest.raises(EmulatorError, match="trap"):
        run(library, side, None, torch.tensor([place]), torch.tensor([row]))
    assert not side.to.any()


def no_rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


GOOD = AppendSide(no_rows(3, 2, 64), no_rows(4, 16, 2, 64))


@pytest.mark.parametrize(
    ("side", "error", "says"),
    [
        (AppendSide(no_rows(3, 2, 64), no_rows(4, 16, 2, 128)), ArgumentError, "do not fit where they go"),
        (AppendSide(no_rows(3, 2, 64), no_rows(2, 4, 16, 2, 64)), ArgumentError, "do not fit where they go"),
        (AppendSide(no_rows(1, 3, 2, 64), no_rows(2, 4, 16, 2, 64)), ArgumentError, "do not fit where they go"),
        (AppendSide(no_rows(3, 2, 64, dtype=torch.float16), GOOD.to), ArgumentError, "their own dtype"),
        (
            AppendSide(no_rows(3, 2, 64, dtype=torch.int16), no_rows(4, 16, 2, 64, dtype=torch.int16)),
            ArgumentError,
            "dtype",
        ),
        (AppendSide(no_rows(3, 2, 68)[..., 4:], GOOD.to), LayoutError, "rows of keys must hold"),
        (AppendSide(no_rows(3, 64, 2).transpose(1, 2), GOOD.to), LayoutError, "rows of keys must hold"),
        (AppendSide(no_rows(3, 2, 12), no_rows(4, 16, 2, 12)), LayoutError, "rows of keys must hold"),
        (AppendSide(GOOD.rows, no_rows(4, 16, 2, 68)[..., :64]), LayoutError, "memory of keys must hold"),
    ],
)
def test_rows_that_cannot_be_appended_are_refused(side: AppendSide, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        append_launch(side, None, torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("places", "rows"),
    [
        (torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(3), torch.zeros(3)),
        (torch.zeros(6, dtype=torch.int64)[::2], torch.zeros(3, dtype=torch.int64)),
    ],
)
def test_indices_that_do_not_fit_are_refused(places: Tensor, rows: Tensor) -> None:
    with pytest.raises(ArgumentError, match="places and rows name"):
        append_launch(GOOD, None, places, rows)


@pytest.mark.parametrize(
    "values", [AppendSide(no_rows(2, 2, 64), GOOD.to), AppendSide(GOOD.rows, no_rows(4, 17, 2, 64))]
)
def test_values_unlike_the_keys_are_refused(values: AppendSide) -> None:
    with pytest.raises(ArgumentError, match="keys and values differ"):
        append_launch(GOOD, values, torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))


def test_rows_on_a_cpu_are_refused() -> None:
    launch: Callable[..., None] = append
    with pytest.raises(ArgumentError, match="must lie on a GPU"):
        launch(GOOD, None, torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
