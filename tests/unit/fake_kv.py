"""An attachment in memory, for tests of the engine: the store's own accounting, no process, no gRPC.

Pages that nobody holds are full of NaN and are handed out in a random order, so a row that is read before it was
written, or from another sequence's page, shows in the results.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from types import TracebackType

import numpy as np

from kvstore.client import Admitted, OpenRequest, PageCopy, Refused
from kvstore.control import ControlBlock, ControlShape
from kvstore.geometry import CacheGeometry
from kvstore.pages import PageTable
from kvstore.sequences import SequenceTable


class FakeArena:
    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.bytes = np.full(num_pages * page_bytes, 0xFF, dtype=np.uint8)  # NaN in every float dtype
        self.buffer = memoryview(self.bytes)  # type: ignore[arg-type]

    def poison(self, page: int) -> None:
        self.bytes[page * self.page_bytes : (page + 1) * self.page_bytes] = 0xFF


class FakeAttachment:
    """The interface of ``kvstore.client.Attachment`` over ``num_pages`` pages in each group.

    ``calls`` counts the calls by name; ``fail_next`` (an exception by call name) makes the next such call raise.
    """

    def __init__(
        self, geometry: CacheGeometry, *, num_pages: int, max_sequences: int, max_sequence_tokens: int, seed: int = 0
    ) -> None:
        self.epoch = 1
        self.geometry = geometry
        self.arenas = {g.name: FakeArena(num_pages, g.page_bytes) for g in geometry.groups}
        self.tables = [PageTable(g.name, num_pages) for g in geometry.groups]
        for table in self.tables:
            random.Random(seed).shuffle(table._free)
        self.table = SequenceTable(
            self.tables,
            max_sequences=max_sequences,
            max_sequence_tokens=max_sequence_tokens,
            weights_digest=b"w" * 16,
            geometry_digest=geometry.digest(),
        )
        shape = ControlShape(tuple(num_pages for _ in geometry.groups), max_sequences, max_sequence_tokens)
        self._memory = bytearray(shape.num_bytes)
        self.control = ControlBlock.format(
            memoryview(self._memory),  # type: ignore[arg-type]
            shape,
            device="cpu:0",
            geometry_digest=geometry.digest(),
            weights_digest=b"w" * 16,
            groups={g.name: g.page_bytes for g in geometry.groups},
        )
        self.calls: dict[str, int] = {}
        self.fail_next: dict[str, BaseException] = {}
        self.opened: list[str] = []

    def open(self, sequences: Sequence[OpenRequest]) -> list[Admitted | Refused]:
        self._called("open")
        answers = []
        for s in sequences:
            answer = self.table.open(s.request_id, s.tenant_salt, len(s.prompt_token_ids), s.max_tokens)
            if isinstance(answer, Admitted):
                self.opened.append(s.request_id)
                self.control.open_slot(
                    answer.slot,
                    epoch=1,
                    request_id=s.request_id.encode(),
                    salt=s.tenant_salt.encode(),
                    frozen=s.frozen_request,
                    max_tokens=s.max_tokens,
                    prompt=list(s.prompt_token_ids),
                )
            answers.append(answer)
        return answers

    def reserve(self, wanted: Sequence[tuple[int, int]]) -> dict[int, dict[str, list[int]]]:
        self._called("reserve")
        return self.table.reserve(wanted)

    def seal(self, sealed: Sequence[tuple[int, int]]) -> int:
        self._called("seal")
        count = 0
        for slot, num_tokens in sealed:
            assert num_tokens <= self.control.committed(slot), "sealed before it was committed"
            count += len(self.table.seal(slot, num_tokens, partial(self.control.tokens, slot)))
        return count

    def truncate(self, slot: int, num_tokens: int) -> list[PageCopy]:
        raise NotImplementedError("the engine does not truncate yet")

    def release(self, slots: Sequence[int]) -> int:
        self._called("release")
        freed = 0
        for groups in self.table.release(slots).values():
            for group, pages in groups.items():
                freed += len(pages)
                for page in pages:
                    self.arenas[group].poison(page)
        for slot in slots:
            self.control.close_slot(slot)
        return freed

    def close(self) -> None:
        self.check_empty()

    def check_empty(self) -> None:
        """Fails when a sequence, a page or a promise is left over."""
        self.table.check()
        assert len(self.table) == 0, f"slots {self.table.slots} were not released"
        assert self.control.live_slots() == []
        for table in self.tables:
            assert (table.num_open, table.num_sealed, table.num_promised) == (0, 0, 0)
            assert table.num_free == table.num_pages

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
