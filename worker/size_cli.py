"""``tailpack size``: what a model, a KV mode and so many sequences take of a GPU and its host, and whether it fits."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kernels.widths import PRESETS
from kvstore.geometry import COMPILED_MODES, ITEM_BYTES, CacheGeometry
from kvstore.memory_limit import HEADROOM_BYTES, available_bytes
from protos.cli_options import HelpAllCommand, advanced_option
from protos.errors import ConfigError
from worker import model_config
from worker.checkpoint import BLOCK_SCALES, FLOATS, FP4, FP8, INTEGERS, Expected, Stored
from worker.cli import deepseek_v4_options, num_bytes
from worker.cluster_config import GPU_HEADROOM_BYTES, resolve_model
from worker.config import ADMISSIONS, DEFAULT_PRESET, WorkerConfig, default_dtype
from worker.families import Architecture, architecture
from worker.memory_plan import Use, total, weight_uses
from worker.sizing import Machine, Need, most_sequences, need
from worker.weights import dtype_name, planned_uses
from worker.weights_form import WeightsForm

GPUS = {
    "a100-40": 39,
    "a100-80": 79,
    "l4": 22,
    "l40s": 44,
    "rtx4090": 23,
    "rtx-pro-6000": 94,
    "h100": 79,
    "h200": 139,
    "b200": 178,
    "b300": 267,
}
"""GiB that CUDA has on one, rounded down. What yours has, `nvidia-smi --query-gpu=memory.total --format=csv` says."""
DEFAULT_TOKENS = 4096
_FILE_DTYPES = {FLOATS: "", FP8: "F8_E4M3", FP4: "U8", INTEGERS: "I64", BLOCK_SCALES: "F32"}
_SAFETENSORS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@click.command(cls=HelpAllCommand)
@click.option("--model", required=True, help="As for `tailpack up`; or a config.json alone.")
@click.option("--gpu", metavar="NAME", help=f"What it is to run on: {', '.join(GPUS)}.")
@click.option("--gpu-bytes", type=num_bytes, help="Or a GPU with so much memory: 80G.")
@click.option("--host-bytes", type=num_bytes, help="Or no GPU, and so much memory.  [default: what is free here]")
@click.option("--sequences", default=16, show_default=True, type=click.IntRange(1, 4096), help="At one time.")
@click.option(
    "--tokens",
    type=click.IntRange(1),
    help=f"Of each, prompt and output.  [default: the model's longest, at most {DEFAULT_TOKENS}]",
)
@click.option("--kv-mode", default="dense", show_default=True, metavar=f"[{'|'.join(COMPILED_MODES)}]")
@advanced_option(
    "--kv-preset",
    default="",
    metavar=f"[{'|'.join(PRESETS)}]",
    help=f"Of mode turboquant.  [default: {DEFAULT_PRESET}]",
)
@deepseek_v4_options
@advanced_option("--dtype", metavar=f"[{'|'.join(('auto', *ITEM_BYTES))}]", help="Of weights, activations and KV.")
@advanced_option("--dense-layers", default="0,0", show_default=True, help="First and last layers that stay dense: F,L.")
@advanced_option("--checkpoints", default=-1, help="Tails kept for exact resumes.  [default: as many as --sequences]")
@advanced_option("--admission", default="worst_case", show_default=True, metavar=f"[{'|'.join(ADMISSIONS)}]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def size(
    model: str,
    gpu: str | None,
    gpu_bytes: int | None,
    host_bytes: int | None,
    sequences: int,
    tokens: int | None,
    as_json: bool,
    dtype: str | None,
    **settings: Any,
) -> None:
    """Show what one worker takes, and whether it fits: weights, KV pages, tails, checkpoints, workspaces, host memory.

    Sequences are counted as if none shared a page with another; where prompts begin alike, more fit.
    Exit status: 0 it fits, 1 it does not, or cannot be had at all.
    """
    machine = _machine(gpu, gpu_bytes, host_bytes)
    raw, folder = _model(model)
    shapes = architecture(raw)
    tokens = tokens or min(DEFAULT_TOKENS, shapes.max_positions)
    model_config.check_length(raw, tokens)
    config = WorkerConfig.from_dict(
        {
            "model": folder or Path(model),
            "name": "size",
            "kv_socket": "none",
            "worker_id": "size",
            "device": "cuda:0" if machine.on_gpu else "cpu:0",
            "dtype": dtype or default_dtype("cuda" if machine.on_gpu else "cpu"),
            "max_running": sequences,
            "max_sequence_tokens": tokens,
            **settings,
        }
    )
    geometry = shapes.geometry(config, dtype_name(config.dtype, raw), tokens)
    weights = planned_uses(folder, config.dtype) if folder else _uses_by_config(shapes, raw, config.dtype)
    needed = need(config, geometry, weights, tokens, machine)
    most = most_sequences(config, geometry, weights, tokens, machine)
    (print_json if as_json else print_tables)(config, geometry, needed, most, machine, weights_seen=folder is not None)
    if needed.limiting_bytes > machine.num_bytes:
        sys.exit(1)


def _machine(gpu: str | None, gpu_bytes: int | None, host_bytes: int | None) -> Machine:
    """Raises ConfigError: more than one is named; UNKNOWN_GPU."""
    given = {"--gpu": gpu, "--gpu-bytes": gpu_bytes, "--host-bytes": host_bytes}
    named = [f"{name} {value}" for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError("say once what it is to run on", given=", ".join(named), allowed="one of them")
    if gpu is not None:
        if gpu.lower() not in GPUS:
            raise ConfigError(
                "this GPU's memory is not known here",
                reason="UNKNOWN_GPU",
                given=gpu,
                allowed=", ".join(GPUS),
                hint="say how much it has: --gpu-bytes 80G",
            )
        gpu_bytes = GPUS[gpu.lower()] << 30
    if gpu_bytes is not None:
        return Machine(True, gpu_bytes, GPU_HEADROOM_BYTES)
    return Machine(False, available_bytes()[0] if host_bytes is None else host_bytes, HEADROOM_BYTES)


def _model(model: str) -> tuple[Mapping[str, Any], Path | None]:
    """config.json, and the folder with the weights where there is one. Raises ModelError."""
    path = Path(model)
    if path.suffix == ".json":
        return model_config.read_json(path), None
    if (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        return model_config.read_json(path / "config.json"), None
    folder, _ = resolve_model(model)
    return model_config.read_json(folder / "config.json"), folder


def _uses_by_config(shapes: Architecture, raw: Mapping[str, Any], dtype: str) -> tuple[Use, ...]:
    """As ``planned_uses``, of files that are not here: stored as config.json says."""
    own = _SAFETENSORS[dtype_name("auto", raw)]

    def stored(wanted: Expected) -> Stored:
        return Stored(Path("none"), _FILE_DTYPES.get(wanted.dtypes, "F8_E8M0") or own, wanted.shape)

    expected = shapes.tensors(in_blocks=WeightsForm.of(shapes, "", captured=False).held)
    found = {name: stored(wanted) for name, wanted in expected.items()}
    return weight_uses(expected, found, dtype_name(dtype, raw))


def _parts(needed: Need, machine: Machine) -> dict[str, tuple[Use, ...]]:
    parts = {"GPU": needed.device} if machine.on_gpu else {}
    return {**parts, "host, worker": needed.worker, "host, kvstore": needed.kvstore}


def print_json(
    config: WorkerConfig, geometry: CacheGeometry, needed: Need, most: int, machine: Machine, *, weights_seen: bool
) -> None:
    click.echo(
        json.dumps(
            {
                "fits": needed.limiting_bytes <= machine.num_bytes,
                "sequences": config.max_running,
                "tokens": config.max_sequence_tokens,
                "most_sequences": most,
                "on_gpu": machine.on_gpu,
                "needed_bytes": needed.limiting_bytes,
                "available_bytes": machine.num_bytes,
                "weights_seen": weights_seen,
                "kv_modes": geometry.modes,
                "dtype": config.dtype,
                "bytes_per_token": geometry.bytes_per_token,
                "tail_bytes_per_sequence": geometry.tail_bytes,
                "geometry_digest": geometry.digest().hex(),
                "arena_bytes": needed.arena_bytes,
                "pages": needed.num_pages,
                "totals": {memory: total(uses) for memory, uses in _parts(needed, machine).items()},
                "uses": [
                    {"memory": memory, "owner": use.owner, "num_bytes": use.num_bytes}
                    for memory, uses in _parts(needed, machine).items()
                    for use in uses
                ],
            }
        )
    )


def print_tables(
    config: WorkerConfig, geometry: CacheGeometry, needed: Need, most: int, machine: Machine, *, weights_seen: bool
) -> None:
    console = Console(highlight=False)
    for memory, uses in _parts(needed, machine).items():
        table = Table("owner", box=None, title=memory, title_justify="left")
        table.add_column("MiB", justify="right")
        for use in uses:
            table.add_row(use.owner, _mib(use.num_bytes))
        table.add_row("together", _mib(total(uses)))
        console.print(table)
        console.print()
    where = "the GPU" if machine.on_gpu else "the host"
    verdict = "fits" if needed.limiting_bytes <= machine.num_bytes else "DOES NOT FIT"
    console.print(
        f"{config.max_running} sequences of {config.max_sequence_tokens:,} tokens: {verdict}; "
        f"{_mib(needed.limiting_bytes)} of {_mib(machine.num_bytes)} MiB of {where}. "
        f"At most {most} of that length fit.",
        soft_wrap=True,
    )
    console.print(
        f"KV: {geometry.modes}; {geometry.bytes_per_token:,.0f} B a token in pages, "
        f"{geometry.tail_bytes:,} B a sequence in tails",
        soft_wrap=True,
    )
    if not weights_seen:
        console.print("Weights are counted by config.json; their files were not seen.")
    if needed.limiting_bytes > machine.num_bytes:
        say = f"See what fits with: --sequences {most}" if most else "Ask for fewer --tokens, or another --kv-mode."
        console.print(say)
        return
    flags = f"--max-running {config.max_running} --max-sequence-tokens {config.max_sequence_tokens}"
    console.print(f"Ask for it with: --kv-bytes {needed.arena_bytes} {flags}", soft_wrap=True)
    kv_mib = -(-needed.arena_bytes // (1 << 20))
    chart = f"kvMiB: {kv_mib}, maxRunning: {config.max_running}, maxSequenceTokens: {config.max_sequence_tokens}"
    console.print(f"In a worker group of the chart: {chart}", soft_wrap=True)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"
