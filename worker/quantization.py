"""``quantization_config`` of config.json: FP8 weights with a scale for each block, as DeepSeek-V3 and Qwen3 have them.

Beside ``X.weight`` in e4m3 lies ``X.weight_scale_inv``, one for each block of 128 x 128: weight = code * scale. What is
not understood is refused by name. Needs no tensor library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protos.errors import ModelError

BLOCK = 128
SCALE = "_scale_inv"  # behind a weight's name
_ALLOWED: Mapping[str, tuple[Any, ...]] = {  # the first is what absence means
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("float", "ue8m0"),
    "dequantize": (False,),
}
_KEPT = ("modules_to_not_convert", "ignored_layers")  # two names for one thing
_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")


@dataclass(frozen=True)
class StoredBlocks:
    """Weights of linear modules are stored in blocks of FP8, but of those that are ``kept``.

    Activations are not rounded to FP8, whatever the scheme says of them: products take them as they are.
    """

    kept: tuple[str, ...] = ()

    def holds(self, module: str) -> bool:
        """Whether ``module`` is stored in blocks. A name in ``kept`` is of a module with all that is in it, or the end
        of a module's name: "model.layers.3", "mlp.down_proj".
        """
        return not any(f"{module}.".startswith(f"{name}.") or f".{module}".endswith(f".{name}") for name in self.kept)


def stored_blocks(config: Mapping[str, Any]) -> StoredBlocks | None:
    """None: the weights are not quantised.

    Raises:
        ModelError: QUANTIZATION_NOT_BUILT, they are in another way.
    """
    asked = config.get("quantization_config")
    if not asked:
        return None
    if not isinstance(asked, Mapping):
        raise _refused("quantization_config", asked, "an object")
    if asked.get("quant_method") != "fp8":
        raise _refused("quant_method", asked.get("quant_method"), "fp8, in blocks; or weights that are not quantised")
    if asked.get("weight_block_size") != [BLOCK, BLOCK]:
        raise _refused("weight_block_size", asked.get("weight_block_size"), f"[{BLOCK}, {BLOCK}]")
    for key, allowed in _ALLOWED.items():
        if (value := asked.get(key)) is not None and value not in allowed:
            raise _refused(key, value, " or ".join(map(str, allowed)))
    kept: list[str] = []
    for key in _KEPT:
        names = asked.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
            raise _refused(key, names, "a list of names of modules")
        kept += names
    known = {"quant_method", "weight_block_size", *_ALLOWED, *_KEPT}
    if unknown := sorted(key for key, value in asked.items() if key not in known and value):
        raise _refused(unknown[0], asked[unknown[0]], f"only {', '.join(sorted(known))}")
    return StoredBlocks(tuple(kept))


def _refused(key: str, value: object, allowed: str) -> ModelError:
    where = key if key == "quantization_config" else f"quantization_config.{key}"
    return ModelError(
        f"config.json: these quantised weights are not built, by {where}",
        reason="QUANTIZATION_NOT_BUILT",
        given=str(value)[:200],
        allowed=allowed,
    )
