"""Checkpoints in FP8 blocks, written by hand: what DeepSeek-V3 and Qwen3-FP8 look like, tiny."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.unit.tiny import write_model

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
SCALE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E8M0": torch.float8_e8m0fnu}


def write_blocks(
    folder: Path,
    *,
    scales: str = "F32",
    kept: tuple[str, ...] = (),
    asked: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A random model whose layers' products are codes and scales, but those whose names end with one of ``kept``.

    asked: config.json's quantization_config; else QUANTIZATION with ``kept``.
    """
    write_model(folder, **{**SHAPE, **changes})
    tensors = {name: value.to(torch.bfloat16) for name, value in load_file(folder / "model.safetensors").items()}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] *= _spread(tensors[name].shape)
        if not name.removesuffix(".weight").endswith(kept or ("none",)):
            codes, by_block = _quantized(tensors[name].float(), SCALE_DTYPES[scales])
            tensors |= {name: codes, f"{name}_scale_inv": by_block}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantization = {**QUANTIZATION, "modules_to_not_convert": ["lm_head", *kept]} if asked is None else asked
    (folder / "config.json").write_text(
        json.dumps({**config, "torch_dtype": "bfloat16", "quantization_config": quantization})
    )
    return folder


def _spread(shape: torch.Size) -> torch.Tensor:
    """Factors of a weight's values, so that no block's scale does for another's."""
    rows, columns = (torch.arange(extent) // 128 for extent in shape)
    return 2.0 ** ((rows[:, None] + 2 * columns) % 5 - 3).to(torch.bfloat16)


def _quantized(weight: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // 128), -(-columns // 128), dtype=torch.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            largest = weight[at].abs().max() / 448
            scale = 2 ** largest.log2().ceil() if scale_dtype == torch.float8_e8m0fnu else largest
            scales[i, j] = scale.to(scale_dtype).float()
            codes[at] = (weight[at] / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scales.to(scale_dtype)


def write_dequantized(folder: Path, source: Path) -> Path:
    """The same model in float32, without blocks."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    plain = {name: value.float() for name, value in tensors.items() if not name.endswith("_scale_inv")}
    for name, value in tensors.items():
        if name.endswith("_scale_inv"):
            weight = plain[name.removesuffix("_scale_inv")]
            for i, row in enumerate(value.float()):
                for j, scale in enumerate(row):
                    weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] *= scale
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    return folder
