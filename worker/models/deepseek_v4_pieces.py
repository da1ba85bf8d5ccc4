"""Elementwise functions whose bits do not depend on where a row stands among others."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.models.layers import ONE_THREAD_ELEMENTS

Elementwise = Callable[[torch.Tensor], torch.Tensor]


def by_rows(function: Elementwise, x: torch.Tensor, *, deterministic: bool) -> torch.Tensor:
    """function(x) of x [R, width], elementwise.

    ``deterministic``: in pieces of whole rows, small enough for one thread. ATen cuts larger tensors between threads at
    any element, and computes what a thread's share leaves over of a vector register by another exp, cos or log.
    """
    step = max(1, ONE_THREAD_ELEMENTS // x.shape[-1])
    if not deterministic or len(x) <= step:
        return function(x)
    return torch.cat([function(x[first : first + step]) for first in range(0, len(x), step)])
