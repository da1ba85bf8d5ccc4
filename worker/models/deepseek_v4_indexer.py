"""The lightning indexer: which compressed rows a query of a CSA layer reads.

score(t, b) = sum over heads of w_h relu(q_h . key_b). A query reads the ``index_topk`` best of the rows that it may
see; of equal scores the lowest row. While there are no more rows than that, all are read and nothing is scored.
"""

from __future__ import annotations

import torch

_SCORES = 1 << 22  # products computed together: 16 MiB


def index_scores(queries: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """queries [T, heads, dim] rotated, head_weights [T, heads] scaled, keys [N, dim] -> [T, N] float32."""
    num_queries, heads, _ = queries.shape
    wide = keys.float().t()
    scores = queries.new_empty((num_queries, len(keys)), dtype=torch.float32)
    step = max(1, _SCORES // max(1, heads * len(keys)))
    for first in range(0, num_queries, step):
        at = slice(first, min(num_queries, first + step))
        products = (queries[at].float().flatten(0, 1) @ wide).relu_().view(-1, heads, len(keys))
        scores[at] = (head_weights[at].float().unsqueeze(-1) * products).sum(1)
    return scores


def choose(scores: torch.Tensor, num_visible: torch.Tensor, topk: int) -> torch.Tensor:
    """The ``topk`` best of each query's rows [0, num_visible), or all where there are no more: [T, topk] int64, rising.

    Args:
        scores: [T, N] float32, N at least topk. NaN among a query's visible rows (a broken model's) makes it
            choose fewer.
        num_visible: [T] integers.

    Returns:
        Row numbers; -1 behind them where a query sees or chooses fewer than topk rows.
    """
    hidden = torch.arange(scores.shape[1], device=scores.device) >= num_visible.unsqueeze(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    last = scores.topk(topk, dim=1).values[:, -1:]  # values only: which of equal ones topk takes is anyone's guess
    better, equal = scores > last, scores == last
    room = topk - better.sum(1, keepdim=True)
    taken = better | (equal & (equal.cumsum(1) <= room))  # topk a query, the first hidden rows among them at need
    # Each row to its place among those taken, the others behind them all: without asking how many there are.
    places = torch.where(taken, taken.cumsum(1) - 1, topk)
    numbers = torch.arange(scores.shape[1], device=scores.device).expand_as(places)
    rows = places.new_full((len(scores), topk + 1), -1).scatter_(1, places, numbers)[:, :topk]
    return rows.masked_fill(rows >= num_visible.unsqueeze(1), -1)
