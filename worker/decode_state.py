"""What a captured decode step reads and writes apart from weights and KV: one row a sequence, in device memory.

All of it is one tensor of 32-bit words, so that the host changes any of it by patches (word, value) that it leaves in
pinned memory before it launches a step: the step's first kernel applies them. Tokens come back the same way, a step
late.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels.decode_batch import Batch as DecodeBatch
from kernels.sample_cuda import SampleState
from kvstore.geometry import CacheGeometry
from protos.errors import InternalError
from protos.page_hash import PAGE_TOKENS
from worker.sequence import Sampling

SLOTS = 4
"""Steps whose patches and tokens are kept apart. The host reads the tokens of a step before it launches the second one
after it, so at most two are under way."""

MAX_PATCHES = 4096
STOPS = 8
"""Token ids that end a row on the device, at most. Of a sequence that has more, the host alone knows the rest: it drops
the row that is computed once too often."""

_FLOATS = ("temperature", "top_p", "min_p", "penalty")
_WORDS = ("tokens", "num_tokens", "limit", "top_k", *_FLOATS)


@dataclass(frozen=True)
class RowStart:
    """A sequence as it enters: its newest token is computed by the next step.

    Attributes:
        token: the newest token. num_tokens: all, with it.
        limit: the row ends once it has computed that many tokens.
        stops: and with any of these, STOPS at most.
        pages, bases, tail_slots: by layer group, as ``worker.batch.SpanWork`` has them.
        seen: token ids so far, needed where there is a repetition penalty.
    """

    token: int
    num_tokens: int
    limit: int
    sampling: Sampling
    pages: Mapping[str, Sequence[int]]
    bases: Mapping[str, int]
    tail_slots: Mapping[str, int]
    seen: Sequence[int] = ()
    stops: Sequence[int] = ()


class DecodeState:
    """Words of up to ``max_rows`` rows, and the rings between host and device. Used by one thread.

    Args:
        max_tokens: of a sequence; it decides the width of page tables.
    """

    def __init__(
        self, geometry: CacheGeometry, vocab_size: int, max_rows: int, max_tokens: int, device: torch.device
    ) -> None:
        self.max_rows, self.max_tokens, self.pages = max_rows, max_tokens, -(-max_tokens // PAGE_TOKENS)
        self._groups = {group.name: group for group in geometry.groups}
        self._at: dict[str, int] = {}
        size = 0
        for name in (*_WORDS, *(f"{kind} {group}" for group in self._groups for kind in ("base", "slot"))):
            self._at[name], size = size, size + max_rows
        self._at["seed"], size = size, size + 2 * max_rows
        self._at["stops"], size = size, size + STOPS * max_rows
        for group in self._groups:
            self._at[f"table {group}"], size = size, size + max_rows * self.pages
        pinned = device.type == "cuda"
        self.words = torch.zeros(size, dtype=torch.int32, device=device)
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.seen = torch.zeros(max_rows, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self.patches = torch.zeros(SLOTS, 1 + 2 * MAX_PATCHES, dtype=torch.int32, pin_memory=pinned)
        self.drawn = torch.zeros(SLOTS, max_rows, dtype=torch.int32, pin_memory=pinned)
        self._pending: list[tuple[int, int]] = []
        self.num_launched = 0
        self.reset()

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return sum(x.numel() * x.element_size() for x in (self.words, self.step, self.seen))

    def reset(self) -> None:
        """No row has tokens; the next step is the first. Waits for the device."""
        self.words.zero_()
        self.words[self._at["stops"] : self._at["stops"] + STOPS * self.max_rows] = -1
        for group in self._groups:
            at = self._at[f"table {group}"]
            self.words[at : at + self.max_rows * self.pages] = -1
        self.step.zero_()
        self._pending.clear()
        self.patches[:, 0] = 0
        self.num_launched = 0
        if self.words.is_cuda:
            torch.cuda.synchronize(self.words.device)

    # --- what the kernels take ---

    def row_words(self, name: str, rows: int) -> torch.Tensor:
        at = self._at[name]
        return self.words[at : at + rows]

    def table(self, group: str, rows: int) -> torch.Tensor:
        at = self._at[f"table {group}"]
        return self.words[at : at + rows * self.pages].view(rows, self.pages)

    def places(self, group: str, rows: int) -> torch.Tensor:
        """Where a step's rows go: tail slots, or page tables."""
        return self.row_words(f"slot {group}", rows) if self._groups[group].has_tail else self.table(group, rows)

    def batch(self, group: str, rows: int) -> DecodeBatch:
        """As attention reads them. In dense groups, which have no tail, all tokens are in pages."""
        num_tokens = self.row_words("num_tokens", rows)
        if not self._groups[group].has_tail:
            return DecodeBatch(self.table(group, rows), num_tokens, num_tokens, None)
        bases, slots = (self.row_words(f"{kind} {group}", rows) for kind in ("base", "slot"))
        return DecodeBatch(self.table(group, rows), bases, num_tokens, slots)

    def sampling(self, rows: int) -> SampleState:
        floats = {name: self.row_words(name, rows).view(torch.float32) for name in _FLOATS}
        ints = {name: self.row_words(name, rows) for name in ("top_k", "limit", "tokens", "num_tokens")}
        seed, stops = self._at["seed"], self._at["stops"]
        return SampleState(
            seed=self.words[seed : seed + 2 * rows].view(rows, 2),
            stops=self.words[stops : stops + STOPS * rows].view(rows, STOPS),
            seen=self.seen[:rows],
            step=self.step,
            out=self.drawn,
            **floats,
            **ints,
        )

    # --- what the host changes ---

    def enter(self, row: int, start: RowStart) -> None:
        """Fill a row; from the next step on it is computed."""
        sampling = start.sampling
        seed = sampling.seed or 0
        values = {
            "tokens": start.token,
            "num_tokens": start.num_tokens,
            "limit": start.limit,
            "top_k": sampling.top_k,
            "temperature": _bits(sampling.temperature),
            "top_p": _bits(sampling.top_p),
            "min_p": _bits(sampling.min_p),
            "penalty": _bits(sampling.repetition_penalty),
        }
        for group in self._groups:
            values[f"base {group}"] = start.bases.get(group, 0)
            values[f"slot {group}"] = start.tail_slots.get(group, -1)
        for name, value in values.items():
            self._patch(name, row, value)
        self._pending += [(self._at["seed"] + 2 * row + i, seed >> 32 * i & 0xFFFFFFFF) for i in (0, 1)]
        stops = [*start.stops, *[-1] * (STOPS - len(start.stops))]
        self._pending += [(self._at["stops"] + STOPS * row + i, stop) for i, stop in enumerate(stops)]
        for group in self._groups:
            self.set_pages(row, group, 0, start.pages.get(group, ()))
        if sampling.repetition_penalty != 1.0:
            self._set_seen(row, start.seen)

    def leave(self, row: int) -> None:
        """The row is padding from the next step on."""
        self._patch("num_tokens", row, 0)

    def set_token(self, row: int, token: int, num_tokens: int) -> None:
        """What the row computes next, as its ``num_tokens``-th, in place of what it drew; also where that ended it."""
        self._patch("tokens", row, token)
        self._patch("num_tokens", row, num_tokens)

    def set_pages(self, row: int, group: str, first: int, page_ids: Sequence[int]) -> None:
        """Pages ``first`` and on of a sequence."""
        if first + len(page_ids) > self.pages:
            raise InternalError(
                "more pages than a row's table holds", given=first + len(page_ids), allowed=f"at most {self.pages}"
            )
        at = self._at[f"table {group}"] + row * self.pages + first
        self._pending += [(at + i, page_id) for i, page_id in enumerate(page_ids)]

    def set_base(self, row: int, group: str, base: int) -> None:
        """How many tokens lie in pages: what was sealed on the device's stream before the next step."""
        self._patch(f"base {group}", row, base)

    def next_step(self) -> int:
        """Leaves the patches for the next step, and returns its number. The step before the last must be complete."""
        self.num_launched += 1
        pending = dict(self._pending)  # the newest of a word
        self._pending.clear()
        if len(pending) > MAX_PATCHES:  # rare: several long sequences enter at once
            late = list(pending.items())[MAX_PATCHES:]
            self._write_now(late)
            pending = dict(list(pending.items())[:MAX_PATCHES])
        slot = self.patches[self.num_launched % SLOTS]
        if pending:
            pairs = torch.tensor(list(pending.items()), dtype=torch.int64)
            slot[1 : 1 + 2 * len(pending)] = _signed(pairs).view(-1)
        slot[0] = len(pending)
        return self.num_launched

    def drawn_by(self, step: int, rows: int) -> list[int]:
        """Tokens of a complete step."""
        tokens: list[int] = self.drawn[step % SLOTS, :rows].tolist()
        return tokens

    def _patch(self, name: str, row: int, value: int) -> None:
        self._pending.append((self._at[name] + row, value))

    def _write_now(self, values: Sequence[tuple[int, int]]) -> None:
        at, words = torch.tensor(values, dtype=torch.int64).t().to(self.words.device)
        self.words.scatter_(0, at, _signed(words))

    def _set_seen(self, row: int, token_ids: Sequence[int]) -> None:
        bits = torch.zeros(32 * self.seen.shape[1], dtype=torch.int64)
        bits[torch.tensor(token_ids, dtype=torch.int64)] = 1
        words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
        self.seen[row] = _signed(words).to(self.seen.device)


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


def _signed(words: torch.Tensor) -> torch.Tensor:
    """int64 of 32 bits as int32 with the same bits."""
    return ((words + 2**31) % 2**32 - 2**31).to(torch.int32)
