"""Tiny models and an engine around them, for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from protos import types_pb2
from tests.unit.fake_kv import FakeAttachment
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.models.llama import LlamaConfig
from worker.sequence import Output, Request, Sampling, StepResult, StopConditions
from worker.tracing import NoSpans
from worker.weights import Model, load_model

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 211,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "bos_token_id": 1,
}

SMOLLM2_135M: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
}
"""Its shape, for ``write_model``."""


def write_model(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A folder with a random model in float32. Weights are large enough that tokens differ in their logits."""
    config = {**TINY, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in LlamaConfig.parse(config).tensors().items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.1 * noise
        else:
            tensors[name] = noise * (0.3 if name.endswith("bias") else 1.5 * shape[-1] ** -0.5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def config_for(folder: Path, **changes: Any) -> WorkerConfig:
    defaults: dict[str, Any] = {"threads": 1, "max_running": 8, "prefill_chunk": 64}
    return WorkerConfig(model=folder, name="tiny", kv_socket=Path("none"), worker_id="w", **{**defaults, **changes})


def request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    emitted: Sequence[int] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = True,
    owner: str = "",
    tenant: str = "",
    traceparent: str = "",
    reuse: types_pb2.PrefixReuse.ValueType = types_pb2.PREFIX_REUSE_DEFAULT,
    **sampling: Any,
) -> Request:
    stop = StopConditions(max_tokens, tuple(stop_token_ids), ignore_eos)
    return Request(
        request_id,
        tenant,
        tuple(prompt),
        Sampling(**sampling),
        stop,
        tuple(emitted),
        owner,
        traceparent=traceparent,
        reuse=reuse,
    )


class Harness:
    """An engine that is stepped by hand over a fake attachment; collects what it says by request id."""

    def __init__(
        self,
        model: Model,
        config: WorkerConfig,
        *,
        num_pages: int = 64,
        seed: int = 0,
        spans: NoSpans | None = None,
    ) -> None:
        self.attachment = FakeAttachment(
            model.geometry,
            num_pages=num_pages,
            max_sequences=config.num_slots,
            max_sequence_tokens=model.info.max_sequence_tokens,
            checkpoint_slots=config.num_checkpoints if model.geometry.tail_bytes else 0,
            seed=seed,
        )
        self.results: list[StepResult] = []
        self.outputs: dict[str, list[Output]] = {}
        self.engine = Engine(config, model, self.attachment, self._take, spans=spans)

    @staticmethod
    def load(folder: Path, **changes: Any) -> Harness:
        config = config_for(folder, **{k: v for k, v in changes.items() if k not in ("num_pages", "seed")})
        return Harness(load_model(config), config, **{k: v for k, v in changes.items() if k in ("num_pages", "seed")})

    def _take(self, result: StepResult) -> None:
        self.results.append(result)
        for output in result.outputs:
            earlier = self.outputs.setdefault(output.request_id, [])
            if earlier and output.error is None:
                assert output.token_offset == earlier[-1].token_offset + len(earlier[-1].token_ids), "a gap"
            earlier.append(output)

    def step(self, count: int = 1) -> None:
        with torch.inference_mode():
            for _ in range(count):
                self.engine.step()

    def run(self, *requests: Request, limit: int = 5000) -> dict[str, list[int]]:
        """Submits, steps until all that was ever submitted has ended; returns the tokens by request id."""
        for r in requests:
            self.engine.submit(r)
        for _ in range(limit):
            self.step()
            load = self.engine.load()
            if not load.num_running and not load.num_waiting:
                self.attachment.check_empty()
                return {r.request_id: self.tokens(r.request_id) for r in requests}
        raise AssertionError("the engine did not come to an end")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def reason(self, request_id: str) -> types_pb2.FinishReason.ValueType:
        return self.outputs[request_id][-1].finish_reason
