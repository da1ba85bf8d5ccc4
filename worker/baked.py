"""What captured CUDA graphs have baked in: addresses. None of that memory may be freed or moved while a graph lives."""

from __future__ import annotations

import torch

from protos.errors import InternalError
from worker.held import Held, held


class Baked:
    """Every tensor that is reached from ``roots`` now: graphs captured over them have their addresses. It keeps their
    memory, so nobody else's letting go of it frees it; that somebody did is what ``check`` finds.
    """

    def __init__(self, **roots: object) -> None:
        self._held = held(roots)
        self._addresses = [each.what.data_ptr() if isinstance(each.what, torch.Tensor) else 0 for each in self._held]
        self._live = True

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """(where it was found, itself)."""
        return [(each.name, each.what) for each in self._held if isinstance(each.what, torch.Tensor)]

    def check(self) -> None:
        """Quick: no walk, only what was found then is looked at.

        Raises:
            InternalError: BAKED_MOVED, a tensor, or what leads to it, is another one now, elsewhere, or gone. Graphs
            would go on with memory that nobody else means.
        """
        for each, address in zip(self._held, self._addresses, strict=True):
            if each.holder is not None and not _is_there(each):
                raise _moved(each.name, "another, or none", "what was there when graphs were captured")
            if address and each.what.data_ptr() != address:
                raise _moved(each.name, hex(each.what.data_ptr()), hex(address))

    def end(self) -> None:
        """No graph lives any more."""
        self._live = False

    def release(self) -> None:
        """Lets go of the memory.

        Raises:
            InternalError: BAKED_IN_USE, graphs live that have its addresses.
        """
        if self._live:
            raise InternalError(
                "memory that captured graphs have baked in is about to be released",
                reason="BAKED_IN_USE",
                given=f"{len(self._held)} tensors and holders of tensors",
                allowed="none while a graph lives",
            )
        self._held, self._addresses = [], []


def _is_there(each: Held) -> bool:
    if isinstance(each.holder, list):
        return each.key < len(each.holder) and each.holder[each.key] is each.what
    return each.holder.get(each.key) is each.what


def _moved(name: str, given: str, allowed: str) -> InternalError:
    return InternalError(
        "memory that captured graphs have baked in is freed or moved",
        reason="BAKED_MOVED",
        given=f"{name}: {given}",
        allowed=allowed,
    )
