"""One decode step of the llama family as a row of launches over static buffers, ready to be captured.

Up to eight rows go through products of our own, which gate or add after (kernels/linear_cuda.py): four launches a
layer, two of norms, one of rotary embedding and append, three of attention. More rows go through cuBLAS, with SwiGLU by
a kernel of our own. Nothing is allocated once the buffers are there, nothing comes back to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.decode_step_cuda import AppendTo, StepKernels
from kernels.linear_cuda import MAX_ROWS, FewLinear, LinearWeight, quantized
from kernels.sample_cuda import SampleKernel
from protos.errors import ConfigError
from worker.decode_state import DecodeState
from worker.kv_view import KvView, RegionView
from worker.models.gpu_attention import GpuAttention
from worker.models.llama import Llama


@dataclass(frozen=True)
class _Products:
    """A layer's four, for few rows."""

    qkv: FewLinear
    o: FewLinear
    gate_up: FewLinear
    down: FewLinear


class DecodeLayers:
    """Weights, kernels and buffers of a decode step of at most ``max_rows`` rows.

    Attributes:
        reaches: tokens that a step of its own is made for, rising; one here, for kernels read lengths on the device.
        logits: [max_rows, vocab_size] of the newest step.

    Args:
        attention: of ``kv``; its kernels are used by turns with the eager step's, on one stream.
        few_rows: up to so many rows go through our own products; 0: none do.
        prefetch_tokens: where the sequences of a step have so many tokens together or fewer, a layer's attention
            leaves the memory idle, and the weight behind it is brought nearer meanwhile; 0: never.
        fp8: our own products read weights of their own, quantised here to FP8 in blocks of 128 x 128; then ``max_rows``
            is at most 8.

    Raises:
        ConfigError: FP8_ROWS, more rows than FP8 products take. KernelError: no kernel for a width, a dtype.
    """

    def __init__(
        self,
        network: Llama,
        kv: KvView,
        state: DecodeState,
        attention: GpuAttention,
        *,
        few_rows: int = MAX_ROWS,
        prefetch_tokens: int = 0,
        fp8: bool = False,
    ) -> None:
        if fp8 and state.max_rows > min(few_rows, MAX_ROWS):
            raise ConfigError(
                "FP8 weights serve few sequences",
                reason="FP8_ROWS",
                given=f"{state.max_rows} sequences",
                allowed=f"at most {min(few_rows, MAX_ROWS)}",
                hint="run more sequences with bf16 weights",
            )
        self.reaches: tuple[int, ...] = (state.max_tokens,)
        self._network, self._state, self._few_rows = network, state, min(few_rows, MAX_ROWS)
        c, rows, like = network.config, state.max_rows, network.embed
        self._kernels = StepKernels(like.dtype, like.device)
        self._sample = SampleKernel(like.dtype, like.device)
        self._views = [(kv.view(i, "k"), kv.view(i, "v")) for i in range(c.num_layers)]
        self._attention = [attention.decode_layer(i) for i in range(c.num_layers)]
        self._tables = (network.cos.squeeze(1).contiguous(), network.sin.squeeze(1).contiguous())
        self.weight_bytes, self.fp8 = 0, fp8
        self._products = [self._few(layer, fp8) for layer in network.layers] if self._few_rows else []
        self._lm_head = self._one(network.lm_head, fp8=fp8) if self._few_rows else None
        if prefetch_tokens:
            for products in self._products:
                lengths = state.row_words("num_tokens", rows)
                products.qkv.prefetch(products.o.linear.weight, lengths, prefetch_tokens)
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
        for product in (p for layer in self._products for p in (layer.qkv, layer.o, layer.gate_up, layer.down)):
            product.load()
        if self._lm_head is not None:
            self._lm_head.load()

    def run(self, rows: int, reach: int = 0) -> None:
        """Launches one step of ``rows`` rows: patches, the model, the draw. ``reach``: one of ``reaches``."""
        state, kernels, c = self._state, self._kernels, self._network.config
        kernels.begin(state.words, state.step, state.patches)
        x = self._x[:rows]
        kernels.embed(state.row_words("tokens", rows), self._network.embed, x)
        batches = {view.group.name: state.batch(view.group.name, rows) for view, _ in self._views}
        few = 0 < rows <= self._few_rows
        for index in range(c.num_layers):
            before = self._few_before if few else self._many_before
            before(index, rows)
            k_view, v_view = self._views[index]
            layer, qkv, group = self._network.layers[index], self._qkv[:rows], k_view.group.name
            to = AppendTo(
                _memory(k_view), _memory(v_view), state.places(group, rows), state.row_words("num_tokens", rows)
            )
            kernels.rope_append(qkv, self._tables, (layer.q_norm, layer.k_norm), c.norm_eps, to, c.q_heads)
            q = qkv[:, : c.q_heads * c.head_dim].view(rows, 1, c.q_heads, c.head_dim)
            out = self._attended[:rows].view(rows, 1, c.q_heads, c.head_dim)
            self._attention[index](q, batches[group], out=out)
            after = self._few_after if few else self._many_after
            after(index, rows)
        logits, normed = self.logits[:rows], self._normed[:rows]
        if few:
            assert self._lm_head is not None
            kernels.add_norm(x, None, self._network.norm, c.norm_eps, normed)
            self._lm_head(normed, logits)
        else:
            kernels.add_norm(x, self._delta[:rows], self._network.norm, c.norm_eps, normed)
            torch.mm(normed, self._network.lm_head.t(), out=logits)
        self._sample(logits, state.sampling(rows))

    # --- few rows ---

    def _few_before(self, index: int, rows: int) -> None:
        normed, eps = self._normed[:rows], self._network.config.norm_eps
        self._kernels.add_norm(self._x[:rows], None, self._network.layers[index].input_norm, eps, normed)
        self._products[index].qkv(normed, self._qkv[:rows])

    def _few_after(self, index: int, rows: int) -> None:
        products, x, gated = self._products[index], self._x[:rows], self._gated[:rows]
        products.o(self._attended[:rows], x, residual=x)
        normed, eps = self._normed[:rows], self._network.config.norm_eps
        self._kernels.add_norm(x, None, self._network.layers[index].post_norm, eps, normed)
        products.gate_up(normed, gated)
        products.down(gated, x, residual=x)

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

    def _few(self, layer: object, fp8: bool) -> _Products:
        def of(name: str) -> torch.Tensor:
            weight = getattr(layer, name)
            assert isinstance(weight, torch.Tensor)
            return weight

        def bias(name: str) -> torch.Tensor | None:
            found = getattr(layer, f"{name}_bias")
            assert found is None or isinstance(found, torch.Tensor)
            return found

        return _Products(
            self._one(of("qkv"), bias("qkv"), fp8=fp8),
            self._one(of("o"), bias("o"), fp8=fp8),
            self._one(of("gate_up"), bias("gate_up"), gated=True, fp8=fp8),
            self._one(of("down"), bias("down"), fp8=fp8),
        )

    def _one(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        gated: bool = False,
        fp8: bool,
    ) -> FewLinear:
        scales = None
        if fp8:
            weight, scales = quantized(weight)
        linear = LinearWeight(weight, scales, bias=bias, gated=gated)
        self.weight_bytes += linear.num_bytes
        return FewLinear(linear, self._network.embed.dtype, min(self._few_rows, self._state.max_rows))


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _memory(view: RegionView) -> torch.Tensor:
    """Where a decode step's rows of a region go."""
    memory = view.tail if view.tail is not None else view.pages
    assert memory is not None
    return memory
