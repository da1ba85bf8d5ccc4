"""Time to first token of a prompt whose long prefix is cached, against the same prompt computed whole, in one run.

    python -m tests.bench.bench_prefix [--model smollm2] [--prefix 4000] [--own 32] [--modes dense,turboquant]
                                       [--threads 2] [--repeats 3] [--out FILE.jsonl]

An engine over KV pages in this process's memory (the store's tables, no process of its own), stepped by hand. Every
repeat has a prompt of its own: PREFIX tokens that all share, then OWN tokens. It is answered three times: "shared"
finds what other prompts left of the prefix, "cold" may reuse nothing, "again" finds the very prompt. In mode turboquant
a shared prefix resumes from packed pages (inexact, and said so) until its junction has a checkpoint; "again" resumes
from the checkpoint at the prompt's end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvstore.local import LocalAttachment
from protos import types_pb2
from tests.unit.tiny import config_for, request
from worker.cluster_config import resolve_model
from worker.engine import Engine
from worker.sequence import Output, StepResult
from worker.weights import Model, load_model

REUSE = {"shared": types_pb2.PREFIX_REUSE_ANY, "cold": types_pb2.PREFIX_REUSE_NONE, "again": types_pb2.PREFIX_REUSE_ANY}
SEED = 20261


@dataclass
class Answers:
    """Of one mode, by case: a value a repeat. ``error``: the largest difference of a first token's logprobs to cold."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {case: [] for case in REUSE})
    cached: dict[str, list[int]] = field(default_factory=lambda: {case: [] for case in REUSE})
    exact: dict[str, list[bool]] = field(default_factory=lambda: {case: [] for case in REUSE})
    error: dict[str, float] = field(default_factory=lambda: dict.fromkeys(REUSE, 0.0))


class Served:
    """One engine over one local attachment; a request at a time."""

    def __init__(self, folder: Path, mode: str, options: argparse.Namespace) -> None:
        tails = {} if mode == "dense" else {"checkpoints": 16}
        config = config_for(folder, kv_mode=mode, threads=options.threads, max_running=2, prefill_chunk=256, **tails)
        self.model: Model = load_model(config)
        pages = -(-(options.prefix + options.own + 1) // 128) * 3
        self.attachment = LocalAttachment(
            self.model.geometry,
            num_pages=pages,
            max_sequences=config.num_slots,
            max_sequence_tokens=self.model.info.max_sequence_tokens,
            checkpoint_slots=config.num_checkpoints if self.model.geometry.tail_bytes else 0,
        )
        self.outputs: list[Output] = []
        self.engine = Engine(config, self.model, self.attachment, self._take)

    def _take(self, result: StepResult) -> None:
        self.outputs += result.outputs

    def first_token(self, prompt: list[int], reuse: types_pb2.PrefixReuse.ValueType) -> tuple[float, Output]:
        """(seconds from submit to the first token, the output)."""
        self.outputs.clear()
        began = time.perf_counter()
        self.engine.submit(request("r", prompt, 1, reuse=reuse, logprobs=5))
        with torch.inference_mode():
            while not self.outputs:
                self.engine.step()
        seconds = time.perf_counter() - began
        (output,) = self.outputs
        if output.error is not None or not output.token_ids:
            raise AssertionError(f"no token came: {output}")
        return seconds, output


def measure(folder: Path, mode: str, options: argparse.Namespace) -> Answers:
    served = Served(folder, mode, options)
    vocab = served.model.info.vocab_size
    rng = random.Random(SEED)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, vocab) for _ in range(count)]

    prefix = tokens(options.prefix)
    answers = Answers()
    served.first_token(tokens(min(256, options.prefix)), types_pb2.PREFIX_REUSE_NONE)  # warms up
    served.first_token(prefix + tokens(options.own), types_pb2.PREFIX_REUSE_NONE)  # whoever came first
    for _ in range(options.repeats):
        prompt = prefix + tokens(options.own)
        outputs = {}
        for case, reuse in REUSE.items():
            seconds, outputs[case] = served.first_token(prompt, reuse)
            usage = outputs[case].usage
            assert usage is not None
            answers.seconds[case].append(seconds)
            answers.cached[case].append(usage.cached_prompt_tokens)
            answers.exact[case].append(usage.prefix_exact)
            print(f"{mode} {case}: {seconds:.3f} s, {usage.cached_prompt_tokens} tokens cached", file=sys.stderr)
        for case, output in outputs.items():
            answers.error[case] = max(answers.error[case], _difference(output, outputs["cold"]))
    return answers


def _difference(one: Output, other: Output) -> float:
    """Largest difference of logprobs over tokens that both have among their first."""
    ours, theirs = ({t.token_id: t.logprob for t in output.logprobs[0].top} for output in (one, other))
    return max((abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys()), default=float("inf"))


def run(folder: Path, options: argparse.Namespace, command: str) -> list[dict[str, Any]]:
    torch.set_num_threads(options.threads)
    modes = options.modes.split(",")
    answers = {mode: measure(folder, mode, options) for mode in modes}
    info = load_model(config_for(folder)).info
    flops, bandwidth = ceilings()
    common = {
        "bench": "prefix",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {options.threads} threads",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "command": command,
        "kind": "measured",
        "model": folder.name,
        "prompt_tokens": options.prefix + options.own,
    }
    records: list[dict[str, Any]] = []
    for mode, of_mode in answers.items():
        cold = of_mode.seconds["cold"]
        for case, seconds in of_mode.seconds.items():
            computed = options.prefix + options.own - min(of_mode.cached[case])
            by_flops = 2 * info.num_parameters * computed / flops
            by_bytes = 4 * info.num_parameters / bandwidth
            records.append(
                common
                | {"case": f"{mode}-{case}-time-to-first-token", "unit": "s", **spread(seconds)}
                | {
                    "floor": round(max(by_flops, by_bytes), 4),
                    "floor_by": f"flops of {computed} tokens through the weights, attention not counted, at "
                    f"{flops / 1e9:.0f} GFLOP/s of a matrix product in this run"
                    if by_flops > by_bytes
                    else f"bytes of the weights once, at {bandwidth / 1e9:.1f} GB/s read in this run",
                    "rival": None if case == "cold" else "the same prompt computed whole",
                    "rival_value": None if case == "cold" else spread(cold)["value"],
                    "rival_why": "it is what the others are held against" if case == "cold" else None,
                    "error": round(of_mode.error[case], 6),
                    "cached_prompt_tokens": of_mode.cached[case],
                    "prefix_exact": of_mode.exact[case],
                }
            )
        for case in ("shared", "again"):
            ratios = [whole / short for whole, short in zip(cold, of_mode.seconds[case], strict=True)]
            records.append(
                common
                | {"case": f"{mode}-cold-over-{case}", "unit": "ratio", **spread(ratios)}
                | {"floor": None, "floor_by": None, "rival": None, "rival_value": None, "error": None}
                | {"rival_why": "the rival is the numerator"}
            )
    return records


def spread(values: list[float]) -> dict[str, Any]:
    return {
        "value": round(statistics.median(values), 4),
        "spread": [round(min(values), 4), round(max(values), 4)],
        "repeats": len(values),
    }


def ceilings() -> tuple[float, float]:
    """(FLOP/s of a float32 matrix product, bytes/s of summing 256 MB), best of five each."""
    a, data = torch.ones(1024, 1024), torch.ones(64 << 20)
    product = min(_timed(lambda: torch.mm(a, a)) for _ in range(5))
    reading = min(_timed(lambda: data.sum()) for _ in range(5))
    return 2 * 1024**3 / product, data.nbytes / reading


def _timed(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prefix", type=int, default=4000)
    parser.add_argument("--own", type=int, default=32)
    parser.add_argument("--modes", default="dense,turboquant")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    command = (
        f"python -m tests.bench.bench_prefix --model {Path(options.model).name} --prefix {options.prefix} --own "
        f"{options.own} --modes {options.modes} --threads {options.threads} --repeats {options.repeats}"
    )
    records = run(resolve_model(options.model)[0], options, command)
    for line in records:
        print(f"{line['case']:36} {line['value']:>9} {line['unit']:6} {line['spread']}", line.get("prefix_exact", ""))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(json.dumps(line) + "\n" for line in records))


if __name__ == "__main__":
    main()
