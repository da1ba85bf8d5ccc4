"""An attachment in this process, for tests of the engine: the store's own device, no gRPC, no second process.

Pages and tails that nobody holds are full of NaN and pages are handed out in a random order, so a row that is read
before it was written, or from another sequence's page, shows in the results.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import TracebackType

import numpy as np

from kvstore.answers import Admitted, Checkpointed, Forked, NewPage, Refused, SealResult, Truncated
from kvstore.client import OpenRequest
from kvstore.geometry import CacheGeometry
from kvstore.local import LocalAttachment
from kvstore.pages import PageState


class FakeAttachment(LocalAttachment):
    """A local attachment that is watched.

    ``calls`` counts the calls by name; ``fail_next`` (an exception by call name) makes the next such call raise.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        num_pages: int,
        max_sequences: int,
        max_sequence_tokens: int,
        checkpoint_slots: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            geometry,
            num_pages=num_pages,
            max_sequences=max_sequences,
            max_sequence_tokens=max_sequence_tokens,
            checkpoint_slots=checkpoint_slots,
        )
        self.table = self.device.table
        for table in self.table.groups.values():
            random.Random(seed).shuffle(table._free)
        for arena in (*self.arenas.values(), *self.tails.values()):
            np.frombuffer(arena.buffer, dtype=np.uint8)[:] = 0xFF  # NaN in every float dtype
        self.calls: dict[str, int] = {}
        self.fail_next: dict[str, BaseException] = {}
        self.opened: list[str] = []

    def open(self, sequences: Sequence[OpenRequest]) -> list[Admitted | Refused]:
        self._called("open")
        answers = super().open(sequences)
        self.opened += [s.request_id for s, a in zip(sequences, answers, strict=True) if isinstance(a, Admitted)]
        return answers

    def reserve(self, wanted: Sequence[tuple[int, int, int]]) -> dict[int, dict[str, list[NewPage]]]:
        self._called("reserve")
        return super().reserve(wanted)

    def seal(
        self, sealed: Sequence[tuple[int, int, int]], checksums: Mapping[tuple[str, int], int] | None = None
    ) -> SealResult:
        self._called("seal")
        return super().seal(sealed, checksums)

    def truncate(self, slot: int, num_tokens: int) -> Truncated:
        self._called("truncate")
        return super().truncate(slot, num_tokens)

    def fork(self, slot: int, request_id: str, max_tokens: int, frozen_request: bytes = b"") -> Forked | Refused:
        self._called("fork")
        return super().fork(slot, request_id, max_tokens, frozen_request)

    def checkpoint(self, slot: int, num_tokens: int, kind: str) -> Checkpointed:
        self._called("checkpoint")
        return super().checkpoint(slot, num_tokens, kind)

    def release(self, slots: Sequence[int], damaged: Mapping[str, Sequence[int]] | None = None) -> int:
        self._called("release")
        freed = super().release(slots, damaged)
        for name, table in self.table.groups.items():
            for page in range(table.num_pages):
                if table.state(page) == PageState.FREE:
                    np.frombuffer(self.arenas[name].page(page), dtype=np.uint8)[:] = 0xFF
        for tails in self.tails.values():
            for slot in slots:
                np.frombuffer(tails.page(slot), dtype=np.uint8)[:] = 0xFF
        return freed

    def close(self) -> None:
        self.check_empty()

    def check_empty(self) -> None:
        """Fails when a sequence, a page or a promise is left over; cached pages are not."""
        self.table.check()
        assert len(self.table) == 0, f"slots {self.table.slots} were not released"
        assert self.control.live_slots() == []
        for table in self.table.groups.values():
            assert (table.num_open, table.num_sealed, table.num_promised) == (0, 0, 0)
            assert table.num_available == table.num_pages

    def __enter__(self) -> FakeAttachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def _called(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if (error := self.fail_next.pop(name, None)) is not None:
            raise error
