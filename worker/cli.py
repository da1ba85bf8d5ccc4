"""Command lines of this package: ``tailpack up``, ``tailpack demo``, ``tailpack worker serve``."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import click

from kernels.widths import PRESETS
from kvstore.geometry import COMPILED_MODES, ITEM_BYTES
from protos import logs, rpc, tracing
from protos.cli_options import HelpAllCommand, advanced_option
from protos.health import health_option
from protos.metrics import OFF
from protos.tls import ServerCertificate
from protos.tls_options import server_tls, server_tls_options
from worker.config import (
    ADMISSIONS,
    BF16,
    CAPTURED_CHUNK_TOKENS,
    CHUNK_TOKENS,
    DEFAULT_PRESET,
    FP8_BLOCK,
    RETENTIONS,
    default_dtype,
)

# Choices as the help shows them; WorkerConfig refuses any other.
_DTYPES = f"[{'|'.join(('auto', *ITEM_BYTES))}]"
_DTYPE_DEFAULT = "[default: bfloat16 on a GPU, else float32]"
_DEVICES = "[auto|cpu|cuda]"
_KV_MODES = f"[{'|'.join(COMPILED_MODES)}]"
_KV_PRESETS = f"[{'|'.join(PRESETS)}]"
_RETENTIONS = f"[{'|'.join(RETENTIONS)}]"
_ADMISSIONS = f"[{'|'.join(ADMISSIONS)}]"

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MOST_BYTES = 1 << 50
_MOST_SECONDS = 86400


def num_bytes(text: str) -> int:
    """Reads 1048576, 512M, 1.5G, 2GiB. Units are powers of 1024."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{text!r} is no size; examples: 1048576, 512M, 1.5G")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size > _MOST_BYTES:
        raise click.BadParameter(f"{text[:40]!r} is more than {_MOST_BYTES >> 40}T")
    return int(size)


def seconds(text: str) -> float:
    """Reads 0 to 86400, as 2.5."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MOST_SECONDS:
        raise click.BadParameter(f"{text!r} is not from 0 to {_MOST_SECONDS} seconds")
    return value


def deepseek_v4_options(command: Any) -> Any:
    """What only DeepSeek-V4 can be asked for; other families refuse it by name."""
    for option in (
        advanced_option(
            "--drafts", default=0, help="deepseek_v4: tokens that its MTP block guesses for each step.  [default: 0]"
        ),
        advanced_option(
            "--pack-compressed", default="", metavar=_KV_PRESETS, help="deepseek_v4: pack compressed rows as well."
        ),
        advanced_option(
            "--kv-retention",
            default="",
            metavar=_RETENTIONS,
            help="deepseek_v4: raw rows kept behind the window.  [default: all; in mode window none]",
        ),
    ):
        command = option(command)
    return command


standby_option = advanced_option(
    "--standby/--no-standby",
    default=False,
    show_default=True,
    help="A second, warm process a worker, which takes over when it dies.",
)
prefill_chunk_option = advanced_option(
    "--prefill-chunk",
    default=0,
    help=f"Prompt tokens of a step, at most.  [default: {CHUNK_TOKENS}; {CAPTURED_CHUNK_TOKENS} with --decode-graphs]",
)
step_time_budget_option = advanced_option(
    "--step-time-budget-ms",
    default=-1,
    help="Of a step in which others decode: prompts are cut to it. 0: none.  "
    "[default: twice the decoding with --decode-graphs, else none]",
)
weights_option = advanced_option(
    "--weights",
    default="",
    metavar=f"[{BF16}|{FP8_BLOCK}]",
    help="Llama family: fp8_block quantises them, on GPUs, and is not measured in service yet; bf16 holds FP8 files "
    "dequantised.  [default: as the files have them with --decode-graphs, else dequantised]",
)
weights_arena_option = advanced_option(
    "--weights-arena/--no-weights-arena",
    default=True,
    show_default=True,
    help="The kvstore holds the weights: a worker that is restarted maps them, those of one host share them.",
)


@click.command(cls=HelpAllCommand)
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 64), help="How many workers.")
@click.option(
    "--model",
    default="smollm2",
    show_default=True,
    help="What to serve: smollm2, tiny-v4, a folder in the Hugging Face layout, or a GGUF file.",
)
@click.option("--listen", default="127.0.0.1:7700", show_default=True, help="Where the router listens.")
@click.option(
    "--http",
    metavar="HOST:PORT",
    help="OpenAI-compatible HTTP of the router; or none.  [default: the port behind --listen's]",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar=_DEVICES,
    help="cuda: a GPU a worker; auto: if there are any.",
)
@click.option(
    "--kv-bytes",
    type=num_bytes,
    help="Memory of each worker's KV cache.  [default: what is free, at most 1G; on a GPU 16G]",
)
@click.option("--deterministic", is_flag=True, help="A request's tokens do not depend on what else runs.")
@advanced_option("--decode-graphs", is_flag=True, help="On GPUs: decode from CUDA graphs; not measured in service yet.")
@advanced_option("--name", help="What callers ask for.  [default: the model's]")
@advanced_option("--dtype", metavar=_DTYPES, help=f"Of weights, activations and KV.  {_DTYPE_DEFAULT}")
@click.option("--kv-mode", default="dense", show_default=True, metavar=_KV_MODES, help="How KV pages are kept.")
@advanced_option(
    "--kv-preset", default="", metavar=_KV_PRESETS, help=f"Of mode turboquant.  [default: {DEFAULT_PRESET}]"
)
@deepseek_v4_options
@advanced_option("--dense-layers", default="0,0", show_default=True, help="First and last layers that stay dense: F,L.")
@advanced_option("--checkpoints", default=-1, help="Tails kept for exact resumes.  [default: as many as --max-running]")
@advanced_option(
    "--admission",
    default="worst_case",
    show_default=True,
    metavar=_ADMISSIONS,
    help="worst_case; or recompute: start sooner, drop the youngest and compute it again when memory runs out.",
)
@advanced_option("--max-running", default=16, show_default=True, help="Sequences that a worker's step can hold.")
@advanced_option("--max-waiting", default=1024, show_default=True, help="Sequences that may queue at a worker.")
@advanced_option("--max-sequence-tokens", default=0, help="Prompt and output together.  [default: the model's]")
@prefill_chunk_option
@step_time_budget_option
@advanced_option("--threads", default=0, help="Of each worker.  [default: the cores, divided by the workers]")
@advanced_option(
    "--drain-s", type=seconds, default=10.0, show_default=True, help="How long running answers may go on at the end."
)
@advanced_option(
    "--metrics",
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="Where Prometheus finds /metrics: the kvstore at PORT, workers and router behind; port 0: free ones; or none.",
)
@advanced_option("--otlp-endpoint", metavar="URL", help="Collector that traces go to.  [default: OTEL_* variables]")
@advanced_option("--log-prompts", is_flag=True, help="Log what callers send; without it no log has text of prompts.")
@advanced_option(
    "--tokens",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Demand tokens, as `router serve` does.",
)
@server_tls_options
@standby_option
@weights_option
@weights_arena_option
@advanced_option(
    "--recover-wait",
    "recover_wait_s",
    type=seconds,
    metavar="SECONDS",
    help="How long streams stay open for their lost worker to come back.  [default: the router's]",
)
@advanced_option("--no-restart", is_flag=True, help="End when kvstore or router die, instead of restarting them.")
@advanced_option(
    "--ready-file", type=click.Path(path_type=Path, dir_okay=False), help="Write addresses and pids here when ready."
)
def up(
    model: str,
    listen: str,
    ready_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    **settings: Any,
) -> None:
    """Run a whole cluster on this machine: kvstore, workers under Ray, router.

    Ctrl-C lets running answers end and stops everything; a second Ctrl-C ends everything at once.

    tiny-v4 is a random DeepSeek-V4 of a few megabytes, made on the spot to try that family: what it says means nothing.
    Real ones are loaded from their official folder, FP8 and FP4 weights included, where one device holds them whole.
    """
    from worker import up as supervisor
    from worker.cluster_config import ClusterConfig

    logs.configure("up")
    if ready_file is not None:
        supervisor.check_ready_file(ready_file)
    settings["tls"] = server_tls(tls_cert, tls_key, tls_client_ca)
    sys.exit(supervisor.run(ClusterConfig.of(model=model, listen=listen, **settings), ready_file))


@click.command(cls=HelpAllCommand)
@click.option(
    "--workers", type=click.IntRange(1, 64), help="How many workers.  [default: 2, or 1 where there is one GPU]"
)
@click.option("--model", default="smollm2", show_default=True, help="As for `tailpack up`.")
@click.option("--device", default="auto", show_default=True, metavar=_DEVICES, help="As for `tailpack up`.")
@click.option("--kv-mode", default="dense", show_default=True, metavar=_KV_MODES, help="How KV pages are kept.")
@advanced_option(
    "--kv-preset", default="", metavar=_KV_PRESETS, help=f"Of mode turboquant.  [default: {DEFAULT_PRESET}]"
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="One prompt a line.  [default: those of the package]",
)
@advanced_option("--max-tokens", default=64, show_default=True, type=click.IntRange(1), help="Of each answer.")
@advanced_option(
    "--kv-bytes",
    type=num_bytes,
    help="Each worker's KV cache.  [default: 256M; 1G in other modes than dense, which keep dense tails as well]",
)
def demo(
    workers: int | None,
    model: str,
    device: str,
    kv_mode: str,
    kv_preset: str,
    prompts: Path | None,
    max_tokens: int,
    kv_bytes: int | None,
) -> None:
    """Bring a cluster up, stream answers to some prompts, show what it took, stop it again."""
    from worker import demo as show
    from worker.cluster_config import ClusterConfig, usable_gpus

    logs.configure("demo")
    config = ClusterConfig.of(
        model=model,
        listen="127.0.0.1:0",
        workers=workers or min(2, len(usable_gpus(device)) or 2),
        device=device,
        kv_mode=kv_mode,
        kv_preset=kv_preset,
        kv_bytes=(256 << 20 if kv_mode == "dense" else 1 << 30) if kv_bytes is None else kv_bytes,
        drain_s=1.0,
    )
    sys.exit(show.run(config, prompts, max_tokens))


def one_worker_options(command: Any) -> Any:
    """A worker's settings, for commands that run workers beside a kvstore that is there."""
    options = (
        click.option("--model", required=True, help="As for `tailpack up`."),
        click.option(
            "--kv-socket",
            required=True,
            type=click.Path(path_type=Path, readable=False),  # it may go while it is looked at: its store died
            help="The kvstore's socket.",
        ),
        click.option("--deterministic", is_flag=True, help="A request's tokens do not depend on what else runs."),
        advanced_option("--decode-graphs", is_flag=True, help="As for `tailpack up`."),
        advanced_option("--name", help="What callers ask for.  [default: the model's]"),
        advanced_option("--dtype", metavar=_DTYPES, help=f"Of weights and KV.  {_DTYPE_DEFAULT}"),
        click.option("--kv-mode", default="dense", show_default=True, metavar=_KV_MODES, help="How KV pages are kept."),
        advanced_option(
            "--kv-preset", default="", metavar=_KV_PRESETS, help=f"Of mode turboquant.  [default: {DEFAULT_PRESET}]"
        ),
        deepseek_v4_options,
        advanced_option(
            "--dense-layers", default="0,0", show_default=True, help="First and last layers that stay dense: F,L."
        ),
        advanced_option(
            "--checkpoints", default=-1, help="Tails kept for exact resumes.  [default: as many as --max-running]"
        ),
        advanced_option(
            "--admission", default="worst_case", show_default=True, metavar=_ADMISSIONS, help="As for `tailpack up`."
        ),
        advanced_option(
            "--arena-bytes", type=num_bytes, default="1G", show_default=True, help="Memory of the worker's KV cache."
        ),
        advanced_option("--max-running", default=16, show_default=True, help="Sequences that a step can hold."),
        advanced_option("--max-waiting", default=1024, show_default=True, help="Sequences that may queue."),
        advanced_option("--max-sequence-tokens", default=0, help="Prompt and output together.  [default: the model's]"),
        prefill_chunk_option,
        step_time_budget_option,
        advanced_option("--threads", default=0, help="Of the CPU's products.  [default: one per core]"),
        advanced_option(
            "--kv-reattach-s", default=60, show_default=True, help="How long to wait for another kvstore if it dies."
        ),
        weights_option,
        weights_arena_option,
        advanced_option(
            "--adopt-grace-s",
            default=60,
            show_default=True,
            help="How long what a killed worker left goes on without its router.",
        ),
        advanced_option(
            "--drain-s",
            type=seconds,
            default=30.0,
            show_default=True,
            help="How long running answers may go on at the end.",
        ),
        server_tls_options,
        advanced_option(
            "--otlp-endpoint", metavar="URL", help="Collector that traces go to.  [default: OTEL_* variables]"
        ),
        advanced_option(
            "--log-json/--log-text", default=None, help="Form of the log; default: text at a terminal, else JSON."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group(name="worker")
def worker_group() -> None:
    """Run a worker by itself, or those of a node of a Ray cluster that is there."""


@worker_group.command(cls=HelpAllCommand)
@one_worker_options
@click.option("--listen", default="127.0.0.1:0", show_default=True, help="host:port; port 0 takes a free one.")
@click.option("--worker-id", default="worker-0", show_default=True, help="Its name in answers, logs and metrics.")
@advanced_option("--device", default="cpu:0", show_default=True, help="Or a GPU: cuda:0, cuda:GPU-<uuid>.")
@advanced_option(
    "--metrics", default=OFF, show_default=True, metavar="HOST:PORT", help="Where Prometheus finds /metrics, or none."
)
@advanced_option(
    "--standby",
    is_flag=True,
    help="Of two such processes with one worker id and one port, one is the worker, and the other takes over.",
)
def serve(
    model: str,
    listen: str,
    drain_s: float,
    metrics: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    otlp_endpoint: str | None,
    log_json: bool | None,
    name: str | None,
    standby: bool,
    **settings: Any,
) -> None:
    """Serve one model from this process, without Ray, in the foreground. SIGTERM or Ctrl-C drains it.

    Prints one JSON line on stdout when it is ready.
    """
    from worker import shell
    from worker.cluster_config import resolve_model
    from worker.config import WorkerConfig
    from worker.standby import begin

    logs.configure("worker", log_json)
    tls = server_tls(tls_cert, tls_key, tls_client_ca)
    traces = tracing.configure("worker", tracing.endpoint_of(otlp_endpoint))
    folder, default_name = resolve_model(model)
    settings["dtype"] = settings["dtype"] or default_dtype(settings["device"])
    config = WorkerConfig.from_dict({"model": folder, "name": name or default_name, **settings})

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        begun = await begin(config, stop, listen, metrics) if standby else None
        if standby and begun is None:
            return
        await shell.serve(
            config,
            listen,
            stop,
            on_ready=_print_ready,
            drain_s=drain_s,
            metrics=metrics,
            tls=tls,
            tracing=traces,
            laps=begun.laps if begun else None,
            prepared=begun.prepared if begun else None,
        )

    try:
        rpc.run(main())
    finally:
        if traces is not None:
            traces.stop()


def _print_ready(running: Any) -> None:
    ready = {
        "ready": True,
        "address": running.address,
        "worker_id": running.info.worker_id,
        "metrics": running.metrics,
    }
    print(json.dumps(ready), flush=True)


@worker_group.command(cls=HelpAllCommand)
@one_worker_options
@click.option(
    "--listen", default="0.0.0.0:7730", show_default=True, metavar="HOST:PORT", help="The first worker; others follow."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="cuda: every GPU.")
@click.option(
    "--workers",
    type=click.IntRange(0, 64),
    default=0,
    help="How many.  [default: 1 on the CPU; on GPUs one each, and another number is an error]",
)
@click.option("--ray-address", default="auto", show_default=True, help="Of the Ray cluster that this node is in.")
@standby_option
@advanced_option("--node-name", help="Workers are called NAME-0, NAME-1, ...  [default: the host's]")
@advanced_option(
    "--metrics", default=OFF, show_default=True, metavar="HOST:PORT", help="/metrics of the first worker, or none."
)
@health_option
@advanced_option(
    "--log-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("/run/tailpack/logs"),
    show_default=True,
    help="Workers write here; this process passes it on.",
)
@advanced_option(
    "--drain-file", type=click.Path(path_type=Path, dir_okay=False), help="Drain when it is there, as on SIGTERM."
)
@advanced_option(
    "--drained-file", type=click.Path(path_type=Path, dir_okay=False), help="Made when all workers have ended."
)
def node(
    model: str,
    name: str | None,
    log_json: bool | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    otlp_endpoint: str | None,
    node_name: str | None,
    **options: Any,
) -> None:
    """Have Ray run this node's workers: one a GPU, pinned to it, restarted for ever.

    For a node of a Ray cluster that something else started, as a pod of KubeRay. SIGTERM drains the workers and ends
    them. Prints one JSON line on stdout when all are ready.
    """
    from worker.cluster_config import resolve_model
    from worker.node import Node, NodeConfig

    logs.configure("node", log_json)
    tls = server_tls(tls_cert, tls_key, tls_client_ca)
    if tls is not None:
        ServerCertificate(tls, "workers")  # refused here by name, before Ray restarts workers over it
    folder, default_name = resolve_model(model)
    own = {each.name for each in dataclasses.fields(NodeConfig)}
    settings = {key: options.pop(key) for key in list(options) if key not in own}
    config = NodeConfig(
        settings={"model": folder, "name": name or default_name, **settings},
        node_name=node_name or socket.gethostname(),
        tls=tls,
        otlp_endpoint=tracing.endpoint_of(otlp_endpoint),
        **options,
    )
    rpc.run(Node(config).run())
