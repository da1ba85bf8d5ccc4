"""Which tokens a sequence has seen, kept from draw to draw: a long prompt is not gone through again for every token."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Seen:
    """The distinct tokens of one growing list of token ids. Nothing is held before the first ``mask``."""

    def __init__(self) -> None:
        self._of: Sequence[int] | None = None
        self._count = 0  # tokens of _of that the mask knows
        self._last = -1  # the newest of them
        self._mask = torch.empty(0, dtype=torch.bool)

    def mask(self, token_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        """[vocab_size] bool: which ids occur in ``token_ids``. Valid until the next call; not to be changed.

        Cheap when ``token_ids`` is the list of the call before and has only grown since. Anything else (another list,
        one that was cut back) is gone through from its start.
        """
        grown = self._of is token_ids and self._count <= len(token_ids) and len(self._mask) == vocab_size
        if not grown or (self._count and token_ids[self._count - 1] != self._last):
            self._of, self._count = token_ids, 0
            self._mask = torch.zeros(vocab_size, dtype=torch.bool)
        if self._count < len(token_ids):
            self._mask[torch.tensor(token_ids[self._count :])] = True
            self._count, self._last = len(token_ids), token_ids[-1]
        return self._mask
