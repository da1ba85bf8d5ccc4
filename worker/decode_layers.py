"""One decode step of the llama family as a row of launches over static buffers, ready to be captured.

Few rows (up to eight) go through chains of products of our own, which norm before, and gate, rotate, append or add
after (kernels/linear_cuda.py): a layer is three launches of attention, and one for all that lies between its attention
and the next layer's. Where queries and keys are normed, rotary embedding and append are one more. More rows go through
cuBLAS, with norms and SwiGLU by kernels of our own. Nothing is allocated once the buffers are there, nothing comes back
to the host.
"""

from __future__ import annotations

import torch

from kernels import loader
from kernels.decode_step_cuda import StepKernels
from kernels.linear_cuda import (
    MAX_ROWS,
    ROWS_PER_TILE,
    LinearChain,
    LinearWeight,
    Link,
    LinkCall,
    Rotary,
    most_rows,
)
from kernels.rope_append import AppendTo
from kernels.sample_cuda import SampleKernel
from worker.decode_state import DecodeState
from worker.kv_view import KvView, RegionView
from worker.models.block_weight import BlockWeight, Weight, dense
from worker.models.gpu_attention import GpuAttention
from worker.models.llama import Llama


class DecodeLayers:
    """Weights, kernels and buffers of a decode step of at most ``max_rows`` rows.

    Attributes:
        reaches: tokens that a step of its own is made for, rising; one here, for kernels read lengths on the device.
        logits: [max_rows, vocab_size] of the newest step.

    Args:
        attention: of ``kv``; its kernels are used by turns with the eager step's, on one stream.
        few_rows: up to so many rows go through our own products, or fewer where their width is too much for shared
            memory; 0: none do.

    Raises:
        KernelError: no kernel for a width, a dtype.
    """

    def __init__(
        self,
        network: Llama,
        kv: KvView,
        state: DecodeState,
        attention: GpuAttention,
        *,
        few_rows: int = MAX_ROWS,
    ) -> None:
        self.reaches: tuple[int, ...] = (state.max_tokens,)
        c, rows, like = network.config, state.max_rows, network.embed
        self._network, self._state = network, state
        fp8 = isinstance(network.layers[0].qkv, BlockWeight)
        self._few_rows = few_rows and min(few_rows, most_rows([c.hidden], loader.arch_of(like.device), fp8=fp8))
        self._kernels = StepKernels(like.dtype, like.device)
        self._sample = SampleKernel(like.dtype, like.device)
        self._views = [(kv.view(i, "k"), kv.view(i, "v")) for i in range(c.num_layers)]
        self._attention = [attention.decode_layer(i) for i in range(c.num_layers)]
        self._tables = (network.cos.squeeze(1).contiguous(), network.sin.squeeze(1).contiguous())
        self._rotary = not c.qk_norm and c.head_dim % ROWS_PER_TILE == 0
        self._chains = self._chains_of() if self._few_rows else []
        heads = c.q_heads + 2 * c.kv_heads
        self._x, self._delta, self._normed = (like.new_empty(rows, c.hidden) for _ in range(3))
        self._qkv = like.new_empty(rows, heads * c.head_dim)
        self._attended = like.new_empty(rows, c.q_heads * c.head_dim)
        self._gate_up = like.new_empty(rows, 2 * c.intermediate)
        self._gated = like.new_empty(rows, c.intermediate)
        self.logits = like.new_empty(rows, c.vocab_size)

    @property
    def buffer_bytes(self) -> int:
        buffers = (self._x, self._delta, self._normed, self._qkv, self._attended, self._gate_up, self._gated)
        return sum(x.numel() * x.element_size() for x in (*buffers, self.logits))

    def load(self) -> None:
        """Loads every kernel, compiling what no archive has: seconds, and not allowed inside a capture."""
        for chain in self._chains:
            chain.load()

    def run(self, rows: int, reach: int = 0) -> None:
        """Launches one step of ``rows`` rows: patches, the model, the draw. ``reach``: one of ``reaches``."""
        state, kernels, c = self._state, self._kernels, self._network.config
        kernels.begin(state.words, state.step, state.patches)
        x = self._x[:rows]
        kernels.embed(state.row_words("tokens", rows), self._network.embed, x)
        batches = {view.group.name: state.batch(view.group.name, rows) for view, _ in self._views}
        few = 0 < rows <= self._few_rows
        if few:
            self._chains[0](self._qkv_call(0, rows))
        for index in range(c.num_layers):
            if not few:
                self._many_before(index, rows)
            layer, qkv = self._network.layers[index], self._qkv[:rows]
            if not few or not self._rotary:
                norms = (layer.q_norm, layer.k_norm)
                kernels.rope_append(qkv, self._tables, norms, c.norm_eps, self._append_to(index, rows), c.q_heads)
            q = qkv[:, : c.q_heads * c.head_dim].view(rows, 1, c.q_heads, c.head_dim)
            out = self._attended[:rows].view(rows, 1, c.q_heads, c.head_dim)
            self._attention[index](q, batches[self._views[index][0].group.name], out=out)
            after = self._few_after if few else self._many_after
            after(index, rows)
        logits, normed = self.logits[:rows], self._normed[:rows]
        if not few:
            kernels.add_norm(x, self._delta[:rows], self._network.norm, c.norm_eps, normed)
            _linear(normed, self._network.lm_head, None, logits)
        self._sample(logits, state.sampling(rows))

    def _append_to(self, index: int, rows: int) -> AppendTo:
        """Where a layer's new keys and values go."""
        k_view, v_view = self._views[index]
        places, lengths = self._state.places(k_view.group.name, rows), self._state.row_words("num_tokens", rows)
        return AppendTo(_memory(k_view), _memory(v_view), places, lengths)

    # --- few rows ---

    def _qkv_call(self, index: int, rows: int) -> LinkCall:
        rotary = None
        if self._rotary:
            rotary = Rotary(self._tables, self._append_to(index, rows), self._network.config.q_heads)
        return LinkCall(self._x[:rows], self._qkv[:rows], rotary=rotary)

    def _few_after(self, index: int, rows: int) -> None:
        """A layer's products behind its attention, and the one that comes next: the next layer's, or the logits."""
        x, gated, last = self._x[:rows], self._gated[:rows], index + 1 == self._network.config.num_layers
        calls = [LinkCall(self._attended[:rows], x, x), LinkCall(x, gated), LinkCall(gated, x, x)]
        following = LinkCall(x, self.logits[:rows]) if last else self._qkv_call(index + 1, rows)
        if last and len(self._chains) > index + 2:
            self._chains[index + 1](*calls)
            self._chains[index + 2](following)
        else:
            self._chains[index + 1](*calls, following)

    def _chains_of(self) -> list[LinearChain]:
        """One before the first layer's attention and one behind each; a head of another kind is one more."""
        network, eps, layers = self._network, self._network.config.norm_eps, self._network.layers

        def link(weight: Weight, bias: torch.Tensor | None, norm: torch.Tensor | None, gated: bool = False) -> Link:
            codes, scales = (weight.codes, weight.scales) if isinstance(weight, BlockWeight) else (weight, None)
            return Link(LinearWeight(codes, scales, bias=bias, gated=gated), norm, eps)

        def qkv(index: int) -> Link:
            layer = layers[index]
            return link(layer.qkv, layer.qkv_bias, layer.input_norm)._replace(rotary=self._rotary)

        chains = [[qkv(0)]]
        for index, layer in enumerate(layers):
            chains.append(
                [
                    link(layer.o, layer.o_bias, None),
                    link(layer.gate_up, layer.gate_up_bias, layer.post_norm, gated=True),
                    link(layer.down, layer.down_bias, None),
                ]
            )
            if index + 1 < len(layers):
                chains[-1].append(qkv(index + 1))
        head = link(network.lm_head, None, network.norm)
        if isinstance(network.lm_head, BlockWeight) == isinstance(layers[-1].down, BlockWeight):
            chains[-1].append(head)
        else:
            chains.append([head])
        like, rows = network.embed, min(self._few_rows, self._state.max_rows)
        arrived = torch.zeros(1, dtype=torch.int32, device=like.device)
        return [LinearChain(links, like.dtype, arrived, rows) for links in chains]

    # --- many rows ---

    def _many_before(self, index: int, rows: int) -> None:
        layer, normed = self._network.layers[index], self._normed[:rows]
        delta = self._delta[:rows] if index else None  # what the layer before has yet to add
        self._kernels.add_norm(self._x[:rows], delta, layer.input_norm, self._network.config.norm_eps, normed)
        _linear(normed, layer.qkv, layer.qkv_bias, self._qkv[:rows])

    def _many_after(self, index: int, rows: int) -> None:
        layer, delta, normed = self._network.layers[index], self._delta[:rows], self._normed[:rows]
        _linear(self._attended[:rows], layer.o, layer.o_bias, delta)
        self._kernels.add_norm(self._x[:rows], delta, layer.post_norm, self._network.config.norm_eps, normed)
        _linear(normed, layer.gate_up, layer.gate_up_bias, self._gate_up[:rows])
        self._kernels.swiglu(self._gate_up[:rows], self._gated[:rows])
        _linear(self._gated[:rows], layer.down, layer.down_bias, delta)


def _linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(x, dense(weight).t(), out=out)
    else:
        torch.addmm(bias, x, dense(weight).t(), out=out)


def _memory(view: RegionView) -> torch.Tensor:
    """Where a decode step's rows of a region go."""
    memory = view.tail if view.tail is not None else view.pages
    assert memory is not None
    return memory
