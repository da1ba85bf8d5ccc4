"""`tailpack bench engine` on a CPU with a tiny model: what it measures, says and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from protos.cli import cli
from protos.errors import ConfigError
from tests.unit.tiny import TINY, write_model
from worker.bench_cli import _names, _settings
from worker.bench_profile import STEPS, _summed, busy
from worker.bench_report import verdict
from worker.bench_run import Load, Window

SMALL = ["--tokens", "4", "--warm-up", "1", "--repeats", "2", "--prompt-tokens", "300", "--sequences", "2"]
FACTS = {"host_ms", "append_ms", "seal_ms", "profile", "kv_bytes_held", "kv_bytes_in_use", "memory", "step_ms"}


def bench(*options: str) -> Any:
    return CliRunner().invoke(cli, ["bench", "engine", "--device", "cpu", "--set", "threads=1", *SMALL, *options])


def test_two_kv_modes_in_one_run(tmp_path: Path) -> None:
    folder, file = write_model(tmp_path / "model"), tmp_path / "records.jsonl"
    done = bench("--model", str(folder), "--against", "tq4", "--json", str(file))
    assert done.exit_code == 0, done.output
    for word in ("tokens/s of each user", "of the floor", "host: forward", "operators a token", "pages packed"):
        assert word in done.output
    assert "A try" in done.output and "random" not in done.output
    dense, packed, ratio = map(json.loads, file.read_text().splitlines())
    assert [line["case"] for line in (dense, packed, ratio)] == ["dense-b2-300", "tq4-b2-300", "tq4-over-dense-b2-300"]
    for line in (dense, packed):
        facts = line["facts"]
        assert line["unit"] == "tokens/s" and line["repeats"] == 2 and line["spread"][0] <= line["value"]
        assert set(facts) >= FACTS and not facts["random_weights"] and not facts["enough_tokens"]
        assert facts["profile"]["operators"] > 0 and facts["profile"]["allocations"] > 0
        assert facts["kv_bytes_in_use"][0] > 0 and facts["memory"]["start"]["host weights"] > 0
        assert facts["host_ms"]["forward"] > 0 and line["floor"] > line["value"]
    assert dense["facts"]["pages_packed"] == 0 < packed["facts"]["pages_packed"]
    assert "pages" in str(dense["facts"]["kv_bytes_held"]) and "tails" in str(packed["facts"]["kv_bytes_held"])
    assert ratio["unit"] == "ratio of tokens/s" and ratio["facts"]["verdict"] in " ".join(done.output.split())


def test_random_weights_are_called_so(tmp_path: Path) -> None:
    config, file = tmp_path / "config.json", tmp_path / "records.jsonl"
    config.write_text(json.dumps(TINY))
    done = bench("--model", str(config), "--set", "threads=1,deterministic=on", "--json", str(file))
    assert done.exit_code == 0, done.output
    assert "Weights are random" in done.output
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line["facts"]["random_weights"] and line["facts"]["settings"]["deterministic"] is True


def test_settings_are_those_of_a_worker_and_others_are_refused(tmp_path: Path) -> None:
    assert _settings("tq3,decode-graphs=on") == {"kv_mode": "turboquant", "kv_preset": "tq3", "decode_graphs": "on"}
    assert _settings("kv=fp8") == {"kv_mode": "fp8", "kv_preset": ""}
    with pytest.raises(ConfigError, match="no KV mode"):
        _settings("tq9")
    with pytest.raises(ConfigError, match="decided by the benchmark"):
        _settings("max-running=3")
    folder = write_model(tmp_path / "model")
    assert isinstance(bench("--model", str(folder), "--set", "nonsense=1").exception, ConfigError)
    assert bench("--model", str(folder), "--against", "dense").exit_code == 2
    assert bench("--model", str(folder), "--against", "dense,deterministic=off").exit_code == 0


def test_sides_are_named_by_what_differs() -> None:
    first = {"kv_mode": "dense", "kv_preset": "", "threads": "1", "decode_graphs": "off"}
    second = {**first, "decode_graphs": "on"}
    names = _names({"first": first, "second": second})
    assert names == {"first": "dense decode-graphs=off", "second": "dense decode-graphs=on"}


class Rated:
    """As much of a side as a verdict needs."""

    def __init__(self, name: str, *rates: float) -> None:
        self.name = name
        self.windows = [Window(rate, 1.0, {}, 0.0, 0.0, None) for rate in rates]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ((20, 22, 24), "b is faster than a: 2.20 times the tokens/s (2.00 to 2.40 in 3 pairs of windows)"),
        ((5, 9, 6), "b is slower than a: 0.60 times"),
        ((9, 11, 12), "No difference beyond the spread between a and b: 1.10 times"),
    ],
)
def test_a_difference_within_the_spread_is_none(second: tuple[float, ...], said: str) -> None:
    told = verdict(Rated("a", 10, 10, 10), Rated("b", *second))  # type: ignore[arg-type]
    assert told.startswith(said)


def test_time_in_which_something_runs() -> None:
    assert busy([]) == (0, 0)
    assert busy([(10, 20), (15, 30), (12, 14), (40, 50)]) == (30, 40)


def test_sequences_have_room_for_the_tokens_that_they_draw_while_others_are_filled() -> None:
    load = Load(rows=32, prompt=16384, chunk=512)
    assert load.num_tokens - load.prompt > 32 * 16384 // 512 + load.repeats * load.tokens + load.warm_up


class Event:
    """As the profiler tells one; times in nanoseconds."""

    def __init__(self, name: str, start: int, duration: int = 1, device: str = "CPU") -> None:
        self._told = (name, start, duration, device)

    def name(self) -> str:
        return self._told[0]

    def start_ns(self) -> int:
        return self._told[1]

    def duration_ns(self) -> int:
        return self._told[2]

    def device_type(self) -> str:
        return f"DeviceType.{self._told[3]}"


def test_a_profile_counts_what_the_steps_did_and_not_what_the_profiler_did() -> None:
    events = [
        Event("cudaDeviceSynchronize", 5),
        Event(STEPS, 10, 100),
        Event(STEPS, 12, 90, "CUDA"),
        Event("cudaGraphLaunch", 11),
        Event("cudaLaunchKernel", 12),
        Event("cuLaunchKernelEx", 13),
        Event("cudaEventSynchronize", 14),
        Event("cudaStreamSynchronize", 15),
        Event("cudaMemcpyAsync", 16),
        Event("cudaMalloc", 17),
        Event("aten::mm", 18),
        Event("seal_rows<128>(Args)", 20, 30_000, "CUDA"),
        Event("gemm", 10_020, 40_000, "CUDA"),
        Event("cudaDeviceSynchronize", 111),
    ]
    seen = _summed(events, 2)
    assert (seen.launches, seen.waits, seen.event_waits) == (1.5, 0.5, 0.5)
    assert (seen.copies, seen.allocations, seen.operators) == (0.5, 0.5, 0.5)
    assert (seen.kernels, seen.busy_us, seen.wall_us) == (1.0, 25.0, 25.0)
    assert seen.us_of("seal") == 15.0 and seen.busy_share == 1.0
