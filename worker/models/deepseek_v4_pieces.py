"""Elementwise functions whose bits do not depend on where a row stands among others."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.batch import DECODE_TILE
from worker.models.layers import ONE_THREAD_ELEMENTS

Elementwise = Callable[[torch.Tensor], torch.Tensor]


def by_rows(function: Elementwise, x: torch.Tensor, *, deterministic: bool) -> torch.Tensor:
    """function(x) of x [R, width], elementwise.

    ``deterministic``: in pieces of whole tiles of 8 rows, small enough for one thread. ATen cuts larger tensors between
    threads at any element, and computes what a share leaves over of two vector registers by another exp, cos or log.
    With R a multiple of 8 and width one of 4 nothing is left over.
    """
    fitting = ONE_THREAD_ELEMENTS // x.shape[-1]
    step = fitting // DECODE_TILE * DECODE_TILE or max(1, fitting)
    if not deterministic or len(x) <= step:
        return function(x)
    return torch.cat([function(x[first : first + step]) for first in range(0, len(x), step)])
