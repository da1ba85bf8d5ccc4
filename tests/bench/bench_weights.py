"""A model's weights in a worker's memory: read from files, or mapped from what the kvstore holds.

    python3 -m tests.bench.bench_weights --device cuda --gib 8 --records FILE --commit SHA

Each opening is a fresh process that is killed (SIGKILL) while it holds the model; its words are summed, tensor by
tensor, and all openings must give the same. Cases: "loaded" without an arena; "made", the first with one; "mapped", the
others. Then two processes at once, and what the GPU's memory is while both map, when both are gone, and when the store
is gone too. One JSON line each; exit status 1 where a sum or the memory is not as it must be. Files are in the page
cache: what a cold disk adds is not measured. --weights fp8_block: the same, quantised as they are loaded.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 180.0
SLACK_MIB = 8
"""Of a GPU's used memory, by which it may differ from what it was."""


# --- the opening process ---


def role(folder: Path, socket: Path, device: str, weights: str, arena: bool) -> None:
    started = time.monotonic()
    imports_ms = _age_ms()
    import torch

    from protos import logs
    from worker import weights_arena
    from worker.config import FP8_BLOCK, WorkerConfig
    from worker.weights import Plan, load_model
    from worker.weights_layout import Layout, tensors

    logs.configure("bench")
    told: dict[str, float] = {"python_ms": imports_ms, "imports_ms": _ms(started)}
    started = time.monotonic()
    if device != "cpu":
        torch.zeros(1, device="cuda").item()
    told["context_ms"] = _ms(started)

    def timed(name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        since = time.monotonic()
        try:
            return function(*arguments, **named)
        finally:
            if device != "cpu":
                torch.cuda.synchronize()
            told[f"{name}_ms"] = told.get(f"{name}_ms", 0.0) + _ms(since)

    config = WorkerConfig(
        model=folder,
        name="bench",
        kv_socket=socket,
        worker_id=f"w{os.getpid()}",
        dtype="bfloat16",
        device="cuda:0" if device != "cpu" else "cpu:0",
        weights=weights,
        decode_graphs=weights == FP8_BLOCK,
    )
    for name in ("mapped", "damaged", "fill", "use_weights"):
        setattr(weights_arena, name, partial(timed, name, getattr(weights_arena, name)))
    Plan.load = partialmethod_timed(timed, Plan.load)  # type: ignore[method-assign]
    Plan.without_weights = partialmethod_timed(timed, Plan.without_weights)  # type: ignore[method-assign]
    started = time.monotonic()
    model = weights_arena.open_model(config)[0] if arena else load_model(config)
    if device != "cpu":
        torch.cuda.synchronize()
    told["open_ms"] = _ms(started)
    sums, seen = 0, set[str]()
    layout = Layout.of(model.network)
    for path, tensor in tensors(model.network):
        if (place := layout.by_path[path]).name not in seen:
            seen.add(place.name)
            words = tensor.contiguous().view(-1).view(torch.int16).sum(dtype=torch.int64)
            sums = (sums * 31 + int(words)) % (1 << 61)
    peak = torch.cuda.max_memory_allocated() >> 20 if device != "cpu" else 0
    print(
        json.dumps({**told, "sum": sums, "bytes": layout.num_bytes, "torch_peak_mib": peak, "pid": os.getpid()}),
        flush=True,
    )
    sys.stdin.read()


def partialmethod_timed(timed: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda plan, *arguments: timed(function.__name__, function, plan, *arguments)


def _age_ms() -> float:
    import psutil

    return round((time.time() - psutil.Process().create_time()) * 1e3, 1)


def _ms(since: float) -> float:
    return round((time.monotonic() - since) * 1e3, 1)


# --- this process ---


def write_model(folder: Path, gib: float) -> int:
    """A random llama of about so many GiB in bf16. Returns the bytes of its weights."""
    import torch
    from safetensors.torch import save_file

    from worker.models.llama import LlamaConfig

    wide = gib >= 1
    raw: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 4096 if wide else 512,
        "intermediate_size": 14336 if wide else 1536,
        "num_attention_heads": 32 if wide else 8,
        "num_key_value_heads": 8 if wide else 2,
        "head_dim": 128 if wide else 64,
        "vocab_size": 32000 if wide else 4096,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 1,
    }
    layer_bytes = 2 * sum(
        torch.Size(shape).numel() for name, shape in LlamaConfig.parse(raw).tensors().items() if ".layers." in name
    )
    raw["num_hidden_layers"] = max(1, round(gib * 2**30 / layer_bytes))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    total, shard, number = 0, dict[str, torch.Tensor](), 0
    for name, shape in LlamaConfig.parse(raw).tensors().items():
        shard[name] = (torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02).cpu()
        total += shard[name].numel() * 2
        if sum(tensor.numel() * 2 for tensor in shard.values()) > 2 << 30:
            save_file(shard, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
            shard, number = {}, number + 1
    if shard:
        save_file(shard, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
    if device == "cuda":
        torch.cuda.empty_cache()
    return total


class Opening:
    """A process that holds the model until it is killed."""

    def __init__(self, folder: Path, socket: Path, device: str, weights: str, *, arena: bool) -> None:
        command = [sys.executable, "-m", "tests.bench.bench_weights", "--role", "--device", device]
        command += ["--folder", str(folder), "--socket", str(socket), "--arena" if arena else "--no-arena"]
        command += ["--weights", weights]
        began = time.monotonic()
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the opening process ended with {self.process.wait(10)}")
        self.told: dict[str, Any] = {**json.loads(line), "all_ms": _ms(began)}
        click.echo(json.dumps({"arena": arena, **self.told}), err=True)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


def used_mib(device: str) -> int | None:
    if device == "cpu":
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


def settled_mib(device: str, wanted: int | None) -> int | None:
    """Once it is what is wanted, or after five seconds."""
    deadline = time.monotonic() + 5
    while (now := used_mib(device)) is not None and wanted is not None and abs(now - wanted) > SLACK_MIB:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return now


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--gib", default=0.25, show_default=True)
@click.option("--weights", default="", help="As for `tailpack up`.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--records", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--commit", default="")
@click.option("--seconds", default=240.0, show_default=True, help="After so long no further opening is begun.")
@click.option("--role", "be_role", is_flag=True, hidden=True)
@click.option("--folder", type=click.Path(path_type=Path), hidden=True)
@click.option("--socket", type=click.Path(path_type=Path), hidden=True)
@click.option("--arena/--no-arena", default=True, hidden=True)
def main(
    device: str,
    gib: float,
    weights: str,
    repeats: int,
    records: Path | None,
    commit: str,
    seconds: float,
    be_role: bool,
    folder: Path | None,
    socket: Path | None,
    arena: bool,
) -> None:
    if be_role:
        assert folder is not None and socket is not None
        role(folder, socket, device, weights, arena)
        return
    ends = time.monotonic() + seconds
    wrong: list[str] = []
    lines: list[dict[str, Any]] = []
    form = f" --weights {weights}" if weights else ""
    where = {
        "machine": _machine(device),
        "versions": _versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": f"python3 -m tests.bench.bench_weights --device {device} --gib {gib:g} --repeats {repeats}{form}",
        "kind": "measured",
    }

    def tell(case: str, rounds: list[dict[str, Any]], **more: Any) -> None:
        times = [each["open_ms"] for each in rounds]
        split = {key: statistics.median(r[key] for r in rounds) for key in rounds[0] if key.endswith("_ms")}
        line = {
            "bench": "weights",
            "case": f"{case}, {gib:g} GiB{f', {weights}' if weights else ''}, {device}",
            "value": statistics.median(times),
            "unit": "ms",
            "spread": [min(times), max(times)],
            "repeats": len(times),
            "split_ms": split,
            "bytes": rounds[0]["bytes"],
            "torch_peak_mib": max(r["torch_peak_mib"] for r in rounds),
            **more,
            **where,
        }
        lines.append(line)
        click.echo(json.dumps(line))

    with tempfile.TemporaryDirectory() as top:
        started = time.monotonic()
        model = Path(top) / "model"
        num_bytes = write_model(model, gib)
        click.echo(f"model of {num_bytes} bytes written in {_ms(started):.0f} ms", err=True)
        command = [sys.executable, "-m", "kvstore.cli", "serve", "--socket-dir", f"{top}/kv"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as store:
            try:
                assert store.stdout is not None
                store.stdout.readline()
                at = Path(top) / "kv" / "kvstore.sock"
                before = used_mib(device)
                opened: dict[str, list[dict[str, Any]]] = {"loaded": [], "made": [], "mapped": []}
                for case in ["loaded"] * min(2, repeats) + ["made"] + ["mapped"] * repeats:
                    if time.monotonic() > ends and opened["mapped"]:
                        break
                    one = Opening(model, at, device, weights, arena=case != "loaded")
                    opened[case].append(one.told)
                    one.kill()
                for case, rounds in opened.items():
                    tell(case, rounds)
                if len(sums := {each["sum"] for rounds in opened.values() for each in rounds}) != 1:
                    wrong.append(f"sums differ: {sums}")
                weights_mib = opened["made"][0]["bytes"] >> 20
                idle = settled_mib(device, before + weights_mib if before is not None else None)
                pair = [Opening(model, at, device, weights, arena=True) for _ in range(2)]
                both = used_mib(device)
                for one in pair:
                    one.kill()
                gone = settled_mib(device, idle)
            finally:
                store.kill()
                store.wait(10)
        end = settled_mib(device, before)
    memory = {"before": before, "no_worker": idle, "two_workers": both, "both_gone": gone, "store_gone": end}
    click.echo(json.dumps({"used_mib": memory, "weights_mib": weights_mib}))
    if before is not None and end is not None and idle is not None and gone is not None:
        if abs(end - before) > SLACK_MIB:
            wrong.append(f"memory is left: {end} MiB where there were {before}")
        if abs(gone - before - weights_mib) > SLACK_MIB + 2:
            wrong.append(f"with the store alone {gone} MiB, where weights take {weights_mib} above {before}")
        lines[-1]["used_mib"] = memory
    if records is not None:
        with records.open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)
    for each in wrong:
        click.echo(f"WRONG: {each}")
    sys.exit(1 if wrong else 0)


def _machine(device: str) -> str:
    if device == "cpu":
        return f"{os.cpu_count()} cores; load average {os.getloadavg()[0]:.1f}"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def _versions() -> dict[str, str]:
    import grpc
    import torch

    return {"python": sys.version.split()[0], "torch": torch.__version__, "grpcio": grpc.__version__}


if __name__ == "__main__":
    main()
