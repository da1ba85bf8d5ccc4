"""A step of the llama family on a GPU with fewer launches: norms, residuals, rotary embedding and SwiGLU by the kernels
of captured decode steps (kernels/decode_step_cuda.py), which round where ``Llama.forward`` rounds. A chunk beside
decode rows is mostly launches.

Each of these kernels computes a row, or a head of one, by itself: so in deterministic mode nothing but products depends
on what a step's rows are, as ``Llama.row_parts`` has it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kernels.decode_step_cuda import StepKernels
from kernels.rope_append import AppendTo
from worker.batch import Batch
from worker.kv_view import KvView, Workspace
from worker.models import layers
from worker.models.attention import Attend
from worker.models.llama import Llama


class FusedLlama:
    """Used by one thread.

    Raises (constructor) what StepKernels raises: KernelError, no kernel for the dtype.
    """

    def __init__(self, network: Llama) -> None:
        self._network = network
        self._kernels = StepKernels(network.embed.dtype, network.device)
        self._tables = (network.cos.squeeze(1).contiguous(), network.sin.squeeze(1).contiguous())

    def forward(self, batch: Batch, kv: KvView, workspace: Workspace, attend: Attend) -> torch.Tensor:
        """As ``Llama.forward``."""
        *_, logits = self.by_layers(batch, kv, workspace, attend)
        assert logits is not None
        return logits

    def by_layers(
        self, batch: Batch, kv: KvView, workspace: Workspace, attend: Attend
    ) -> Iterator[torch.Tensor | None]:
        """``forward``, layer by layer: None behind each, then the logits. In between the GPU may be asked for other
        things, on the same stream.
        """
        network, kernels, tiles = self._network, self._kernels, batch.tiles
        c, num_rows = network.config, len(batch.token_ids)
        x = F.embedding(batch.token_ids, network.embed)
        normed, gated = torch.empty_like(x), x.new_empty(num_rows, c.intermediate)
        rows = torch.arange(num_rows, dtype=torch.int32, device=x.device)
        lengths = (batch.positions + 1).to(torch.int32)
        delta: torch.Tensor | None = None  # what the layer before has yet to add
        for index, layer in enumerate(network.layers):
            kernels.add_norm(x, delta, layer.input_norm, c.norm_eps, normed)
            qkv = layers.linear(normed, layer.qkv, layer.qkv_bias, tiles)
            heads = qkv.view(num_rows, 1, c.q_heads + 2 * c.kv_heads, c.head_dim)
            k, v = heads[:, :, c.q_heads : c.q_heads + c.kv_heads], heads[:, :, c.q_heads + c.kv_heads :]
            to = AppendTo(k, v, rows, lengths)  # each row where it is
            kernels.rope_append(qkv, self._tables, (layer.q_norm, layer.k_norm), c.norm_eps, to, c.q_heads)
            k_view, v_view = kv.view(index, "k"), kv.view(index, "v")
            for view, new in ((k_view, k[:, 0]), (v_view, v[:, 0])):
                kv.append(view, new, batch.groups[view.group.name])
                workspace.keep(view, new)
            attended = attend(heads[:, 0, : c.q_heads], k[:, 0], v[:, 0], k_view, v_view, kv, batch)
            delta = layers.linear(attended.reshape(num_rows, -1), layer.o, layer.o_bias, tiles)
            kernels.add_norm(x, delta, layer.post_norm, c.norm_eps, normed)
            kernels.swiglu(layers.linear(normed, layer.gate_up, layer.gate_up_bias, tiles), gated)
            delta = layers.linear(gated, layer.down, layer.down_bias, tiles)
            yield None
        assert delta is not None
        wanted = batch.logit_rows
        yield network.logits(x[wanted] + delta[wanted], batch)[: batch.num_logits]
