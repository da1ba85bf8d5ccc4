"""Tokens per second of the engine against transformers on the same weights, threads and prompts, in one run.

    python -m tests.bench.bench_engine [--model FOLDER] [--threads 2] [--tokens 48] [--repeats 5] [--record]

Without --model it makes random weights of SmolLM2-135M's shape. The engine runs over KV pages in this process's memory
(the store's accounting, no process of its own). Cases take turns within each repeat, so a machine that others use too
slows all of them alike; the figures are medians. Prints one JSON line a case (specs: bench, case, value, ...).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.unit.tiny import SMOLLM2_135M, Harness, config_for, request, write_model
from worker.weights import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="append to tests/bench/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or write_model(Path(scratch) / "model", **SMOLLM2_135M)
        records = run(folder, options)
    for record in records:
        print(json.dumps(record))
    if options.record:
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        file = Path("tests/bench/results") / f"cpu{os.cpu_count()}-engine-{date}.jsonl"
        with file.open("a") as out:
            out.writelines(json.dumps(record) + "\n" for record in records)


def run(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(options.threads)
    plain, fixed = (
        Harness.load(folder, threads=options.threads, max_running=8, prefill_chunk=512, deterministic=d)
        for d in (False, True)
    )
    theirs = transformers_decode(folder, options.prompt)
    cases: dict[str, Callable[[], float]] = {
        "transformers_generate_1": lambda: theirs(options.tokens),
        "engine_1": lambda: decode_rate(plain, 1, options),
        "engine_8": lambda: decode_rate(plain, 8, options),
        "engine_deterministic_1": lambda: decode_rate(fixed, 1, options),
        "engine_deterministic_8": lambda: decode_rate(fixed, 8, options),
        "engine_prefill_1": lambda: prefill_rate(plain),
        "engine_deterministic_prefill_1": lambda: prefill_rate(fixed),
    }
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(options.repeats + 1):  # the first warms up
        for name, case in cases.items():
            rate = case()
            if repeat:
                rates[name].append(rate)
        print(f"repeat {repeat}: " + ", ".join(f"{n} {r[-1]:.1f}" for n, r in rates.items() if r), file=sys.stderr)
    rival = statistics.median(rates["transformers_generate_1"])
    ratios = {
        "decode_1_over_transformers": ("engine_1", "transformers_generate_1"),
        "decode_8_over_1": ("engine_8", "engine_1"),
        "deterministic_1_over_plain_1": ("engine_deterministic_1", "engine_1"),
        "deterministic_8_over_plain_8": ("engine_deterministic_8", "engine_8"),
    }
    common = describe(folder, options)
    records = [
        {"bench": "engine", "case": name, "unit": "tokens/s", **spread(values), **common}
        | ({"rival": "transformers generate", "rival_value": rival} if name == "engine_1" else no_rival())
        for name, values in rates.items()
    ]
    for name, (above, below) in ratios.items():
        values = [a / b for a, b in zip(rates[above], rates[below], strict=True)]
        records.append({"bench": "engine", "case": name, "unit": "ratio", **spread(values), **no_rival(), **common})
    return records


def decode_rate(harness: Harness, num_sequences: int, options: argparse.Namespace) -> float:
    """Tokens per second from the step after the prompts are computed to the last token."""
    harness.outputs.clear()
    for i in range(num_sequences):
        ids = [(7 * j + 13 * i + 3) % 1000 for j in range(options.prompt)]
        harness.engine.submit(request(f"r{i}", ids, options.tokens + 1))
    while len(harness.outputs) < num_sequences:
        harness.step()
    done = sum(len(harness.tokens(f"r{i}")) for i in range(num_sequences))
    began = time.perf_counter()
    harness.run()
    tokens: int = num_sequences * (options.tokens + 1) - done
    return tokens / (time.perf_counter() - began)


def prefill_rate(harness: Harness, length: int = 512) -> float:
    harness.outputs.clear()
    began = time.perf_counter()
    harness.run(request("p", [(11 * j + 5) % 1000 for j in range(length)], 1))
    return length / (time.perf_counter() - began)


def transformers_decode(folder: Path, num_prompt: int) -> Callable[[int], float]:
    """Their own generate, greedy: the time of N + 1 tokens less that of one, so the prompt does not count."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[(7 * j + 3) % 1000 for j in range(num_prompt)]])

    def generate(tokens: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        assert out.shape[1] == num_prompt + tokens
        return time.perf_counter() - began

    def rate(tokens: int) -> float:
        return tokens / (generate(tokens + 1) - generate(1))

    return rate


def spread(values: list[float]) -> dict[str, Any]:
    return {
        "value": round(statistics.median(values), 3),
        "spread": [round(min(values), 3), round(max(values), 3)],
        "repeats": len(values),
        "kind": "measured",
    }


def no_rival() -> dict[str, Any]:
    return {"rival": None, "rival_value": None, "rival_why": "a case of our own; transformers is a case beside it"}


def describe(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    import transformers

    model = load_model(config_for(folder))
    rows_bytes = 4 * model.info.num_parameters
    triad = memory_bandwidth()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "floor": round(triad / rows_bytes, 1),
        "floor_by": f"bytes: one pass over {rows_bytes / 1e6:.0f} MB of weights a step at {triad / 1e9:.1f} GB/s read "
        "in this run; tokens/s of one sequence, times 8 for eight",
        "error": None,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {options.threads} threads",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "command": f"python -m tests.bench.bench_engine --tokens {options.tokens} --prompt {options.prompt} "
        f"--threads {options.threads} --repeats {options.repeats}",
    }


def memory_bandwidth() -> float:
    """Bytes per second of summing 512 MB, best of five."""
    data = torch.ones(128 << 20)
    best = min(_timed(lambda: data.sum()) for _ in range(5))
    return data.nbytes / best


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
