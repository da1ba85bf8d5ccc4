"""The random rotation D H D, and how a width splits into powers of two.

H is the Sylvester Hadamard matrix over sqrt(w), D one diagonal of signs (`tables.signs`), so D H D is symmetric and
orthogonal: one routine rotates and un-rotates. Random signs are not optional: H alone maps a constant vector to a
single coordinate.

Work is done on *columns*, [width, rows]: every butterfly then runs over contiguous memory, and the result of a row does
not depend on how many rows are done together.
"""

from functools import lru_cache

import torch
from torch import Tensor

from kernels.errors import ArgumentError, WidthError
from kernels.record_sizes import parts as parts
from kernels.tables import signs


def padded_width(d: int) -> int:
    """Coordinates that a row of width d has once rotated: d, plus the zero padding of a last part."""
    return sum(parts(d))


@lru_cache
def sign_column(width: int, device: torch.device) -> Tensor:
    """Diagonal of D as f32 [width, 1]."""
    return torch.from_numpy(signs(width)).to(device, torch.float32)[:, None]


def hadamard_columns(columns: Tensor) -> Tensor:
    """Unnormalised Sylvester-Hadamard transform of `columns` [w, n] along dim 0; w a power of two. The input is spent.

    Butterflies with distance 1, 2, 4 and so on; each coordinate is a balanced tree of additions.
    """
    width, n = columns.shape
    spare = torch.empty_like(columns)
    distance = 1
    while distance < width:
        pairs = columns.view(width // (2 * distance), 2, distance, n)
        out = spare.view(pairs.shape)
        torch.add(pairs[:, 0], pairs[:, 1], out=out[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=out[:, 1])
        columns, spare = spare, columns
        distance *= 2
    return columns


def rotate(x: Tensor, widths: tuple[int, ...] | None = None) -> Tensor:
    """D H D along the last dim of x f32 or f64 [..., w], part by part; its own inverse. A new contiguous tensor.

    `widths` are the parts of the rows, by default those of w itself; a row that was padded (width 100, 104 coordinates)
    passes `parts(100)`. Raises ArgumentError (dtype), WidthError (the parts do not add up to w).
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(
            "rotation works in float32 or float64", given=str(x.dtype), allowed="those", action="convert the rows first"
        )
    width = x.shape[-1]
    widths = parts(width) if widths is None else widths
    if sum(widths) != width:
        raise WidthError(
            "the parts of a rotation must add up to the width of its rows",
            given=f"width {width}, parts {widths}",
            allowed=f"rows of {sum(widths)} coordinates",
            action="pad the rows with zeros to padded_width(d) and pass parts(d)",
        )
    columns = x.reshape(-1, width).t()
    out = torch.empty((width, columns.shape[1]), dtype=x.dtype, device=x.device)
    start = 0
    for part in widths:
        sign = sign_column(part, x.device).to(x.dtype)
        turned = hadamard_columns((columns[start : start + part] * sign).contiguous())
        torch.mul(turned, sign * part**-0.5, out=out[start : start + part])
        start += part
    return out.t().contiguous().view(x.shape)
