"""An attachment without a store process: a device of this process alone, for measuring and for tests.

The tables, the control block and the arenas are those of the store; what is missing is the other process. So nothing
outlives this one, nobody else can attach, and there is no session that could be lost.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType

from kvstore.answers import Admitted, Adopted, Checkpointed, Forked, NewPage, Refused, SealResult, Truncated
from kvstore.arena import Arena, StoreArena, bytes_for_pages
from kvstore.client import OpenRequest
from kvstore.device import Device, DeviceSpec, NewSequence
from kvstore.geometry import CacheGeometry
from kvstore.session import DeviceMemory


class LocalAttachment:
    """The calls of ``kvstore.client.Attachment`` over ``num_pages`` pages in each group. A context manager.

    Args:
        device, device_memory: a GPU as the kvstore calls it, and what makes its memory; else host memory.

    Raises:
        CapacityError: NOT_ENOUGH_MEMORY.
        ConfigError: a number is out of its range.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        num_pages: int,
        max_sequences: int,
        max_sequence_tokens: int,
        checkpoint_slots: int = 0,
        device: str = "cpu:0",
        device_memory: DeviceMemory | None = None,
    ) -> None:
        spec = DeviceSpec(
            device=device,
            geometry=geometry,
            arena_bytes=bytes_for_pages(geometry, num_pages, max_sequences + checkpoint_slots, checkpoint_slots),
            max_sequences=max_sequences,
            max_sequence_tokens=max_sequence_tokens,
            weights_digest=b"local",
            checkpoint_slots=checkpoint_slots,
            memory_granularity=device_memory.granularity if device_memory else 0,
        )
        sizes = [size for chunks in spec.plan()[1] for size in chunks]
        self.device = Device.allocate(spec, device_memory.create(sizes) if device_memory else ())
        self._end = weakref.finalize(self, self.device.close)
        self.device.control.epoch = self.epoch = 1
        self.geometry = geometry
        self.adopted: tuple[Adopted, ...] = ()
        self.is_away = False  # no store that could be
        self.void: set[int] = set()
        self.control = self.device.control
        self.arenas = {name: _mapped(arena, device) for name, arena in self.device.arenas.pages.items()}
        self.tails = {name: _mapped(arena, device) for name, arena in self.device.arenas.tails.items()}
        self.revoked = False

    def look_after(self) -> None:
        """There is no store that would need it."""

    def open(self, sequences: Sequence[OpenRequest]) -> list[Admitted | Refused]:
        return self.device.open(
            NewSequence(
                s.request_id,
                s.tenant_salt,
                s.prompt_token_ids,
                s.max_tokens,
                s.frozen_request,
                s.reuse,
                s.exact_only,
            )
            for s in sequences
        )

    def reserve(self, wanted: Sequence[tuple[int, int, int]]) -> dict[int, dict[str, list[NewPage]]]:
        return self.device.reserve(wanted)

    def seal(
        self, sealed: Sequence[tuple[int, int, int]], checksums: Mapping[tuple[str, int], int] | None = None
    ) -> SealResult:
        return self.device.seal(sealed, checksums)

    def truncate(self, slot: int, num_tokens: int) -> Truncated:
        return self.device.truncate(slot, num_tokens)

    def fork(self, slot: int, request_id: str, max_tokens: int, frozen_request: bytes = b"") -> Forked | Refused:
        return self.device.fork(slot, request_id, max_tokens, frozen_request)

    def checkpoint(self, slot: int, num_tokens: int, kind: str) -> Checkpointed:
        return self.device.checkpoint(slot, num_tokens, kind)

    def release(self, slots: Sequence[int], damaged: Mapping[str, Sequence[int]] | None = None) -> int:
        condemned = [(name, page) for name, page_ids in (damaged or {}).items() for page in page_ids]
        return self.device.release(slots, condemned)

    def reattach(self, timeout_s: float) -> None:
        """There is no store that could go away."""

    def verify(self) -> list[str]:
        return [*self.device.verifier.tables(), *self.device.verifier.checksums()[0]]

    def close(self) -> None:
        """Gives up the memory; it goes when the last view of it does."""
        for arena in (*self.arenas.values(), *self.tails.values()):
            arena.close()
        del self.control
        self._end()

    def __enter__(self) -> LocalAttachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _mapped(arena: StoreArena, device: str) -> Arena:
    memory = arena.memory
    # Descriptors of its own: an arena closes those that it has.
    mapped = memory.map() if memory.readable else replace(memory, fds=tuple(map(os.dup, memory.fds)))
    return Arena(arena.group, arena.num_pages, arena.page_bytes, mapped, device)
