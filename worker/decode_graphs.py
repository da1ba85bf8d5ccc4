"""Decode steps from captured CUDA graphs, captured at start: one for each number of rows in ``buckets``, and of tokens
in the layers' ``reaches``.

A step is one graph launch and one event. Its input is there already: the token that the step before drew, one token
more, and what the host has patched (worker/decode_state.py). So steps follow each other without a round trip, and the
host reads what a step drew while the next one runs:

    step = graphs.launch(rows)
    tokens = graphs.tokens(step - 1)

Rows are sequences. A row that has ended (its limit) or left goes on as padding until another enters it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kernels.linear_cuda import MAX_ROWS
from kernels.sample_cuda import NOT_FINITE
from protos.errors import InternalError
from worker.baked import Baked
from worker.decode_layers import DecodeLayers
from worker.decode_state import SLOTS, DecodeState, RowStart
from worker.kv_view import KvView
from worker.models.deepseek_v4 import DeepseekV4
from worker.models.gpu_attention import GpuAttention
from worker.models.llama import Llama
from worker.v4_decode_layers import V4DecodeLayers

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)

Replay = Callable[[], None]
Progress = Callable[[int, int], None]
"""Told how many graphs are captured, and of how many."""


@dataclass(frozen=True)
class GraphMemory:
    """Bytes on the device by owner; ``pool`` is the graphs'."""

    state: int
    buffers: int
    pool: int


class DecodeGraphs:
    """The decode runner of one model over one attachment's memory. Used by the engine thread only.

    Args:
        attention: of ``kv``, on the GPU; None for DeepSeek-V4, which attends by PyTorch.
        max_sequences, max_sequence_tokens: the largest step.
        buckets: numbers of rows to capture, those above ``max_sequences`` left out, that itself added.
        few_rows: see ``DecodeLayers``; of the llama family alone.
    """

    def __init__(
        self,
        network: Llama | DeepseekV4,
        kv: KvView,
        attention: GpuAttention | None,
        *,
        max_sequences: int,
        max_sequence_tokens: int,
        buckets: Sequence[int] = BUCKETS,
        few_rows: int = MAX_ROWS,
    ) -> None:
        self._device = network.device
        self.buckets = tuple(sorted({*(b for b in buckets if b < max_sequences), max_sequences}))
        vocab_size = network.config.vocab_size
        self.state = DecodeState(kv.geometry, vocab_size, max_sequences, max_sequence_tokens, self._device)
        self.layers: DecodeLayers | V4DecodeLayers
        if isinstance(network, DeepseekV4):
            self.layers = V4DecodeLayers(network, kv, self.state)
        else:
            assert attention is not None
            self.layers = DecodeLayers(network, kv, self.state, attention, few_rows=few_rows)
        self._replays: dict[tuple[int, int], Replay] = {}
        self._ahead: dict[int, int] = {}  # by row: by how much its tokens at a step exceed the step's number, at most
        self._rows: dict[int, int] = {}  # of the steps whose tokens are kept
        count = SLOTS if self._device.type == "cuda" else 0
        self._events = [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]
        self._pool_bytes = 0
        self.baked: Baked | None = None
        """What the graphs have the addresses of, once they are captured."""

    def capture(self, progress: Progress | None = None) -> float:
        """Loads kernels and captures every graph, largest first, so that the others fit into its memory; seconds taken.

        No row may have entered. Raises what loading raises; the rows of a step that is captured are padding.
        """
        began = time.monotonic()
        if self.baked is not None:  # captured anew: what the old graphs had is let go of once they are gone
            self._replays.clear()
            self.baked.end()
            self.baked.release()
        self.layers.load()
        on_gpu = self._device.type == "cuda"
        pool = torch.cuda.graph_pool_handle() if on_gpu else None
        if on_gpu:
            torch.cuda.empty_cache()  # as a capture does
        before = torch.cuda.memory_reserved(self._device) if on_gpu else 0
        kinds = [(rows, reach) for rows in reversed(self.buckets) for reach in reversed(self.layers.reaches)]
        for number, kind in enumerate(kinds, 1):
            self._replays[kind] = self._capture(*kind, pool) if on_gpu else partial(self.layers.run, *kind)
            if progress is not None:
                progress(number, len(kinds))
        if on_gpu:
            self._pool_bytes = torch.cuda.memory_reserved(self._device) - before
        self.state.reset()
        self.baked = Baked(layers=vars(self.layers), state=vars(self.state))
        return time.monotonic() - began

    @property
    def memory(self) -> GraphMemory:
        return GraphMemory(self.state.num_bytes, self.layers.buffer_bytes, self._pool_bytes)

    # --- rows ---

    def enter(self, row: int, start: RowStart) -> None:
        """A sequence takes a row, from the next step on. Raises InternalError: BAKED_MOVED, see ``Baked.check``."""
        if self.baked is not None:
            self.baked.check()
        self.state.enter(row, start)
        self._ahead[row] = start.num_tokens - (self.state.num_launched + 1)

    def leave(self, row: int) -> None:
        self.state.leave(row)
        self._ahead.pop(row, None)

    def set_token(self, row: int, token: int, num_tokens: int) -> None:
        self.state.set_token(row, token, num_tokens)

    def set_pages(self, row: int, group: str, first: int, page_ids: Sequence[int]) -> None:
        self.state.set_pages(row, group, first, page_ids)

    def set_base(self, row: int, group: str, base: int) -> None:
        self.state.set_base(row, group, base)

    # --- steps ---

    def launch(self, rows: int) -> int:
        """Launches a step of rows [0, rows); returns its number. Neither waits nor allocates on the device.

        Waits where the step that had its place in the rings, four steps ago, is not complete.
        """
        bucket = self.bucket_of(rows)
        self._wait(self.state.num_launched + 1 - SLOTS)
        step = self.state.next_step()
        self._rows.pop(step - SLOTS, None)
        self._replays[bucket, self._reach_of(step)]()
        if self._events:
            self._events[step % SLOTS].record()
        self._rows[step] = rows
        return step

    def tokens(self, step: int) -> list[int]:
        """What each row of a step drew: a token, or -1 for a row without tokens. Waits for the step.

        Raises:
            InternalError: NOT_FINITE, a row's logits are not finite; or the step is too old to be told.
        """
        if step not in self._rows:
            raise InternalError("this step's tokens are not kept", given=step, allowed=sorted(self._rows))
        self._wait(step)
        drawn = self.state.drawn_by(step, self._rows[step])
        if NOT_FINITE in drawn:
            raise InternalError(
                "the model's logits are not finite", reason="NOT_FINITE", given=f"row {drawn.index(NOT_FINITE)}"
            )
        return drawn

    def bucket_of(self, rows: int) -> int:
        """The smallest graph that serves so many rows."""
        for bucket in self.buckets:
            if rows <= bucket:
                return bucket
        raise InternalError("more rows than any graph has", given=rows, allowed=self.buckets[-1])

    def _reach_of(self, step: int) -> int:
        """The shortest that serves all rows; the longest for those that have ended meanwhile."""
        reaches = self.layers.reaches
        if len(reaches) == 1:
            return reaches[0]
        num_tokens = max(self._ahead.values(), default=0) + step
        return next((reach for reach in reaches if num_tokens <= reach), reaches[-1])

    def _wait(self, step: int) -> None:
        if self._events and step > 0:
            self._events[step % SLOTS].synchronize()

    def _capture(self, rows: int, reach: int, pool: object) -> Replay:
        with torch.cuda.device(self._device), torch.inference_mode():
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.layers.run(rows, reach)  # libraries make their handles and workspaces now
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):  # type: ignore[arg-type]
                self.layers.run(rows, reach)
        replay: Replay = graph.replay
        return replay
