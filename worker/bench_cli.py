"""``tailpack bench engine``: one worker's engine by itself, in this process, and two configurations of it compared."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from kernels.widths import PRESETS
from protos.cli_options import HelpAllCommand, advanced_option
from protos.errors import ConfigError
from worker import model_config
from worker.bench_report import records, show
from worker.bench_run import LEAST_TOKENS, Load, Source, run
from worker.cluster_config import resolve_model, usable_gpus
from worker.config import WorkerConfig, default_dtype

KV_MODES = ("dense", "fp8", "window", *PRESETS)
_SETTINGS = "KEY=VALUE[,...]"
_DECIDED = ("max_running", "max_sequence_tokens", "prefill_chunk", "arena_bytes", "kv_socket", "device", "model")


@click.command(cls=HelpAllCommand)
@click.option(
    "--model",
    default="smollm2",
    show_default=True,
    help="As for `tailpack up`; or a config.json alone: then weights are random, and records say so.",
)
@click.option("--kv", default="dense", show_default=True, metavar="MODE", help=f"One of {', '.join(KV_MODES)}.")
@click.option("--set", "settings", default="", metavar=_SETTINGS, help="Other settings of the worker's.")
@click.option("--against", metavar=f"MODE|{_SETTINGS}", help="A second configuration: what is other than in the first.")
@click.option("--sequences", default=1, show_default=True, type=click.IntRange(1, 4096), help="In every step.")
@click.option("--prompt-tokens", default=128, show_default=True, type=click.IntRange(1), help="Of each of them.")
@click.option("--tokens", default=LEAST_TOKENS, show_default=True, type=click.IntRange(1), help="Of each, in a window.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1, 100), help="Windows, by turns.")
@click.option("--warm-up", default=32, show_default=True, type=click.IntRange(1), help="Tokens of each before.")
@click.option("--device", default="auto", show_default=True, metavar="[auto|cpu|cuda]", help="Where.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write records."
)
@advanced_option("--dtype", help="Of weights, activations and KV.  [default: bfloat16 on a GPU, else float32]")
@advanced_option("--chunk", default=512, show_default=True, type=click.IntRange(1), help="Prompt tokens of a step.")
@advanced_option("--commit", default="unknown", help="What the records say was run.")
@advanced_option("--seed", default=0, show_default=True, help="Of prompts.")
def engine(
    model: str,
    kv: str,
    settings: str,
    against: str | None,
    sequences: int,
    prompt_tokens: int,
    tokens: int,
    repeats: int,
    warm_up: int,
    device: str,
    json_file: Path | None,
    dtype: str | None,
    chunk: int,
    commit: str,
    seed: int,
) -> None:
    """Measure a worker's engine in steady decode, without a cluster: tokens/s, and where a step's time goes.

    \b
    tailpack bench engine                                   SmolLM2, one sequence
    tailpack bench engine --kv dense --against tq4          two KV modes in one run
    tailpack bench engine --sequences 32 --prompt-tokens 16384 --set decode-graphs=on --against decode-graphs=off
    tailpack bench engine --model config.json --set decode-graphs=on,weights=fp8_block

    It is the engine that a worker runs, over KV memory in this process. Prompts are computed, --warm-up tokens drawn,
    then windows of --tokens tokens of every sequence are timed; two configurations take turns, so that what slows the
    machine slows both. The verdict is by pairs of windows; one within their spread is none. Memory is told by owner at
    the start and at the end. At last some steps run under torch's profiler: on a GPU launch calls, round trips that the
    host waits for, allocations, and the time in which a kernel runs; on a CPU operators and allocations.

    Settings are those of a worker, as decode-graphs=on, deterministic=on, weights=fp8_block; a bare word is a KV mode.

    Exit status: 0 measured, 1 error, 2 wrong usage.
    """
    source = _source(model)
    gpus = usable_gpus(device)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError("its folder is not there", reason="BAD_PATH", given=json_file, hint="make it first")
    where = gpus[0].device if gpus else "cpu:0"
    common = {
        "model": source.folder or Path(model),
        "name": "bench",
        "kv_socket": "none",
        "worker_id": "bench",
        "device": where,
        "dtype": dtype or default_dtype("cuda" if gpus else "cpu"),
        "weights_arena": False,
        "step_time_budget_ms": 0,  # prompts are not what is measured
    }
    first = {**_settings(kv), **_settings(settings)}
    chosen = {"first": first} if against is None else {"first": first, "second": {**first, **_settings(against)}}
    if against is not None and chosen["second"] == first:
        raise click.UsageError("--against is the same configuration")
    configs = {name: WorkerConfig.from_dict({**common, **own}) for name, own in chosen.items()}
    names = _names(chosen)
    load = Load(sequences, prompt_tokens, tokens, chunk, warm_up, repeats, seed)
    told = Console(stderr=True, highlight=False)
    torch.set_num_threads(configs["first"].num_threads)
    measured = run({names[key]: config for key, config in configs.items()}, source, load, lambda text: told.print(text))
    show(measured, Console(highlight=False))
    if source.folder is None:
        click.echo("Weights are random: of the model's speed, not of its answers.")
    if json_file is not None:
        words = ["tailpack bench engine", *(Path(word).name if os.sep in word else word for word in _given())]
        lines = records(measured, " ".join(words), commit, source.folder is None)
        json_file.write_text("".join(json.dumps(line, default=str, allow_nan=False) + "\n" for line in lines))


def _given() -> list[str]:
    words = sys.argv[1:]
    return [shlex.quote(word) for word in (words[2:] if words[:2] == ["bench", "engine"] else words)]


def _source(model: str) -> Source:
    """Raises ModelError."""
    path = Path(model)
    if path.suffix == ".json":
        return Source(model_config.read_json(path), None)
    folder, _ = resolve_model(model)
    return Source(model_config.read_json(folder / "config.json"), folder)


def _settings(text: str) -> dict[str, Any]:
    """Of a worker, out of "tq4", "kv=tq4,decode-graphs=on"."""
    found: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, given, value = item.partition("=")
        if not given:
            key, value = "kv", item
        name = key.strip().replace("-", "_")
        if name == "kv":
            found |= _kv(value)
        elif name in _DECIDED:
            raise ConfigError(f"{key} is decided by the benchmark", given=item, hint="see its own options")
        else:
            found[name] = value
    return found


def _kv(mode: str) -> dict[str, str]:
    if mode not in KV_MODES:
        raise ConfigError("this is no KV mode", given=mode, allowed=", ".join(KV_MODES))
    kind, preset = ("turboquant", mode) if mode in PRESETS else (mode, "")
    return {"kv_mode": kind, "kv_preset": preset}


def _names(chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What the sides are called: the KV mode, and the settings that one of them does not share with the other."""
    names = {}
    for key, own in chosen.items():
        words = [own["kv_preset"] or own["kv_mode"]]
        others = [other for name, other in chosen.items() if name != key] or [{}]
        for setting, value in own.items():
            if setting not in ("kv_mode", "kv_preset") and any(other.get(setting) != value for other in others):
                words.append(f"{setting.replace('_', '-')}={value}")
        names[key] = " ".join(words)
    if len(set(names.values())) < len(names):
        return {key: f"{name} ({key})" for key, name in names.items()}
    return names
