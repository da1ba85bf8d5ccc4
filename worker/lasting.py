"""An attachment that outlives its store.

The memory is the worker's for as long as the worker lives; only the calls need a store. A call that fails because the
store is gone waits until another store has taken the memory over, and is then found done, by what the control block
says, or made again. So a step that needs nothing of the store does not notice, and one that does goes on where it was.
Used by the engine thread only.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from kvstore.client import (
    Admitted,
    Adopted,
    Arena,
    Attachment,
    Checkpointed,
    ControlBlock,
    Forked,
    NewPage,
    OpenRequest,
    Refused,
    SealResult,
    Truncated,
)
from kvstore.geometry import CacheGeometry
from protos.errors import KvStoreLost

log = structlog.get_logger("engine")

LOOK_S = 0.1  # between looks for a new store, while steps go on without one
MAX_LOSSES = 8  # of stores, within one call: what it asks for may be what ends them

_T = TypeVar("_T")


class KvCalls(Protocol):
    """Memory and calls of an attachment: ``kvstore.client.Attachment`` or one below."""

    @property
    def geometry(self) -> CacheGeometry: ...
    @property
    def arenas(self) -> Mapping[str, Arena]: ...
    @property
    def tails(self) -> Mapping[str, Arena]: ...
    @property
    def control(self) -> ControlBlock: ...
    def open(self, sequences: Sequence[OpenRequest]) -> list[Admitted | Refused]: ...
    def reserve(self, wanted: Sequence[tuple[int, int, int]]) -> dict[int, dict[str, list[NewPage]]]: ...
    def seal(
        self, sealed: Sequence[tuple[int, int, int]], checksums: Mapping[tuple[str, int], int] | None = None
    ) -> SealResult: ...
    def truncate(self, slot: int, num_tokens: int) -> Truncated: ...
    def fork(self, slot: int, request_id: str, max_tokens: int, frozen_request: bytes = b"") -> Forked | Refused: ...
    def checkpoint(self, slot: int, num_tokens: int, kind: str) -> Checkpointed: ...
    def release(self, slots: Sequence[int], damaged: Mapping[str, Sequence[int]] | None = None) -> int: ...


class KvMemory(KvCalls, Protocol):
    """What the engine wants of one: ``LastingAttachment``, or ``kvstore.local.LocalAttachment``."""

    @property
    def adopted(self) -> Sequence[Adopted]: ...
    @property
    def is_away(self) -> bool: ...

    @property
    def void(self) -> Set[int]:
        """Slots of which a new store found rows damaged or missing: to be released, and computed again."""
        ...

    def look_after(self) -> None: ...


class LastingAttachment:
    """``KvMemory`` over an attachment, for as long as a store comes back within ``patience_s``.

    Args:
        kv_socket: where the next store will listen.
        patience_s: for a store to come back. Then, and where a store refuses the memory, calls raise KvStoreLost.
        told: of every change, whether the store is away. Engine thread.
    """

    def __init__(
        self, attachment: Attachment, kv_socket: Path, patience_s: float, told: Callable[[bool], None]
    ) -> None:
        self._attachment = attachment
        self._socket = kv_socket
        self._patience_s = patience_s
        self._told = told
        self._away_since: float | None = None  # clock; None: the store is there, so far as is known
        self._looked = 0.0
        self.geometry = attachment.geometry
        self.arenas = attachment.arenas
        self.tails = attachment.tails
        self.control = attachment.control
        self.adopted: Sequence[Adopted] = attachment.adopted
        self._slots = {held.slot for held in attachment.adopted}  # that the engine knows
        self._unknown: list[int] = []  # of those that a new store adopted
        self.void: set[int] = set()

    @property
    def is_away(self) -> bool:
        """Whether no store answers, so far as is known. Any thread."""
        return self._away_since is not None

    def look_after(self) -> None:
        """Between steps: brings the memory to a new store as soon as one is there. Does not wait for it.

        Raises:
            KvStoreLost: none came in time, or it does not take the memory.
        """
        if self._attachment.lost is None:
            return
        self._notice()
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        if self._left_s() <= 0 or _listens(self._socket):
            self._reattach()
            self._lasting(lambda: None)

    # --- the calls ---

    def open(self, sequences: Sequence[OpenRequest]) -> list[Admitted | Refused]:
        answers = self._lasting(lambda: self._attachment.open(sequences))
        self._slots |= {answer.slot for answer in answers if isinstance(answer, Admitted)}
        return answers

    def reserve(self, wanted: Sequence[tuple[int, int, int]]) -> dict[int, dict[str, list[NewPage]]]:
        return self._lasting(lambda: self._attachment.reserve(wanted))

    def seal(
        self, sealed: Sequence[tuple[int, int, int]], checksums: Mapping[tuple[str, int], int] | None = None
    ) -> SealResult:
        return self._lasting(lambda: self._attachment.seal(sealed, checksums))

    def truncate(self, slot: int, num_tokens: int) -> Truncated:
        """An answer that is lost cannot be had again: KvStoreLost then."""
        return self._attachment.truncate(slot, num_tokens)

    def fork(self, slot: int, request_id: str, max_tokens: int, frozen_request: bytes = b"") -> Forked | Refused:
        answer = self._lasting(lambda: self._attachment.fork(slot, request_id, max_tokens, frozen_request))
        if isinstance(answer, Forked):
            self._slots.add(answer.slot)
            if slot in self.void:
                self.void.add(answer.slot)
        return answer

    def checkpoint(self, slot: int, num_tokens: int, kind: str) -> Checkpointed:
        if slot in self.void:
            return Checkpointed()
        return self._lasting(lambda: self._attachment.checkpoint(slot, num_tokens, kind))

    def release(self, slots: Sequence[int], damaged: Mapping[str, Sequence[int]] | None = None) -> int:
        self._slots -= set(slots)
        control = self.control
        condemned = {name: list(pages) for name, pages in (damaged or {}).items()}
        for slot in self.void & set(slots):  # what it has sealed since then may rest on what was damaged
            for group in self.geometry.groups:
                if group.has_pages:
                    pages = [page for page in control.sequence_pages(slot, group.name) if page >= 0]
                    condemned.setdefault(group.name, []).extend(pages)
        self.void -= set(slots)
        # Where they are still there after a loss, nobody knows of them any more, and they go before the call.
        return self._lasting(
            lambda: self._attachment.release(slots, condemned) if any(map(control.is_live, slots)) else 0
        )

    # --- without a store ---

    def _lasting(self, call: Callable[[], _T]) -> _T:
        for _ in range(MAX_LOSSES):
            try:
                if self._unknown:
                    self._attachment.release(self._unknown)
                    self._unknown = []
                return call()
            except KvStoreLost:
                self._notice()
                self._reattach()
        raise KvStoreLost("one kvstore after the other is lost in the same call", given=f"{MAX_LOSSES} of them")

    def _notice(self) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            log.warning("the kvstore is away", why=self._attachment.lost)
            self._told(True)

    def _left_s(self) -> float:
        assert self._away_since is not None
        return self._patience_s - (time.monotonic() - self._away_since)

    def _reattach(self) -> None:
        """Waits for a store to take the memory over. What a lost answer opened is given back with the next call: nobody
        knows of it.
        """
        self._attachment.reattach(max(0.0, self._left_s()))
        assert self._away_since is not None
        log.info("the kvstore is back", epoch=self._attachment.epoch, away_s=time.monotonic() - self._away_since)
        self._away_since = None
        self._told(False)
        adopted = self._attachment.adopted
        self._unknown = [held.slot for held in adopted if held.slot not in self._slots]
        self.void |= {held.slot for held in adopted if held.slot in self._slots and not held.intact}


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
