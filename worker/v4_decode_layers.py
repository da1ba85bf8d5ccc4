"""One decode step of DeepSeek-V4 as a row of launches, ready to be captured: the model's own operators over rows that
are found on the device (worker/models/deepseek_v4_step_rows.py).

Intermediate results lie in the graphs' memory. How many blocks a sequence has decides on shapes: so there is a step for
each of a few bounds, ``reaches``, and who launches it takes the smallest that serves all rows. MTP blocks, which would
guess behind a step, are left out.
"""

from __future__ import annotations

import torch

from kernels import loader
from kernels.decode_step_cuda import StepKernels
from kernels.page_cells import APPEND_CELL
from kernels.sample_cuda import SampleKernel
from protos.page_hash import PAGE_TOKENS
from worker.batch import Batch
from worker.decode_state import DecodeState
from worker.kv_view import KvView
from worker.models.deepseek_v4 import DeepseekV4
from worker.models.deepseek_v4_config import CSA_RATIO, DeepseekV4Config
from worker.models.deepseek_v4_step_rows import StepReads

GROWTH = 4  # from a reach to the next: what lies behind a sequence is read for nothing


class V4DecodeLayers:
    """Kernels and buffers of a decode step of at most ``max_rows`` rows, beside the network's own.

    Attributes:
        reaches: tokens that a step is made for, rising; multiples of a page's, the last no less than any sequence has.
        logits: [max_rows, vocab_size] float32 of the newest step.
    """

    def __init__(self, network: DeepseekV4, kv: KvView, state: DecodeState) -> None:
        self._network, self._kv, self._state = network, kv, state
        self.reaches = reaches(network.config, state.max_tokens)
        self.kernels = StepKernels(torch.bfloat16, network.device)  # none of those used here sees rows
        self._sample = SampleKernel(torch.float32, network.device)
        self.logits = torch.zeros(state.max_rows, network.config.vocab_size, device=network.device)
        self._all = torch.arange(state.max_rows, device=network.device)

    @property
    def buffer_bytes(self) -> int:
        return self.logits.numel() * self.logits.element_size()

    def load(self) -> None:
        """Loads what the first step would not load before it is captured."""
        if self._network.device.type == "cuda":
            loader.load(APPEND_CELL, self._network.device.index or 0)

    def run(self, rows: int, reach: int) -> None:
        """Launches one step of ``rows`` rows of at most ``reach`` tokens: patches, the model, the draw."""
        state, network = self._state, self._network
        self.kernels.begin(state.words, state.step, state.patches)
        reads = StepReads(self._kv, state, rows, reach)
        batch = self.batch(rows, reads.positions)
        self.draw(network.streams(batch, reads), batch)

    def draw(self, streams: torch.Tensor, batch: Batch) -> None:
        """Each row's next token from what the last layer leaves; the state is the next step's then."""
        logits = self.logits[: batch.num_logits]
        logits.copy_(self._network.logits(streams, batch))
        self._sample(logits, self._state.sampling(batch.num_logits))

    def batch(self, rows: int, positions: torch.Tensor) -> Batch:
        """Of a step; no span of it is attended by itself."""
        tiles = ((0, rows),)
        return Batch(
            token_ids=self._state.row_words("tokens", rows).long(),
            positions=positions,
            tiles=tiles,
            spans=(),
            padded=False,
            groups={},
            workspace_rows=self._all[:0],
            workspace_of_work=(),
            first_row_of_work=(),
            logit_rows=self._all[:rows],
            logit_tiles=tiles,
            num_logits=rows,
        )


def reaches(config: DeepseekV4Config, max_tokens: int) -> tuple[int, ...]:
    """The first is the longest for which CSA layers read all rows and choose none."""
    most = -(-max_tokens // PAGE_TOKENS) * PAGE_TOKENS
    reach = max(PAGE_TOKENS, CSA_RATIO * config.index_topk // PAGE_TOKENS * PAGE_TOKENS)
    found = []
    while reach < most:
        found.append(reach)
        reach *= GROWTH
    return (*found, most)
