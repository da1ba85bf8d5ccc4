"""Switches: what was asked for beside what came of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels import widths
from kvstore.geometry import CacheGeometry, LayerGroup, Region, apply_mode
from protos import types_pb2
from router.features_cli import gathered
from worker.config import WorkerConfig
from worker.switches import switches
from worker.weights_form import AS_STORED

RESULTS = Path(__file__).parents[1] / "bench" / "results"


def geometry(mode: str, dim: int = 128) -> CacheGeometry:
    kinds = [(layer, kind) for layer in range(4) for kind in ("k", "v")]
    regions = tuple(Region(layer=layer, kind=kind, heads=2, dim=dim, dtype="bfloat16") for layer, kind in kinds)
    made = CacheGeometry((LayerGroup(name="kv", regions=regions),))
    return made if mode == "dense" else apply_mode(made, mode, "tq4")


def config(**changed: object) -> WorkerConfig:
    given: dict[str, object] = {"model": Path("m"), "name": "m", "kv_socket": Path("s"), "worker_id": "w", **changed}
    return WorkerConfig(**given)  # type: ignore[arg-type]


def by_name(found: list[types_pb2.Switch]) -> dict[str, types_pb2.Switch]:
    return {one.name: one for one in found}


def test_evidence_is_a_run_on_this_arch_at_this_width() -> None:
    asked = config(kv_mode="turboquant")
    measured = by_name(switches(asked, geometry("turboquant"), "sm_90a", AS_STORED))["kv-mode"]
    assert measured.evidence == next(run.record for run in widths.MEASURED if run.width == 128)
    assert measured.engaged == "kv: turboquant tq4"
    assert not by_name(switches(asked, geometry("turboquant"), "sm_80", AS_STORED))["kv-mode"].evidence
    assert not by_name(switches(asked, geometry("turboquant", 32), "sm_90a", AS_STORED))["kv-mode"].evidence
    assert not by_name(switches(asked, geometry("turboquant"), "", AS_STORED))["attention"].evidence, (
        "no run of it on a CPU"
    )


def test_captured_steps_and_a_steps_time_are_told_with_their_run() -> None:
    on = config(decode_graphs=True, device="cuda:0")
    found = by_name(switches(on, geometry("dense"), "sm_90a", AS_STORED))
    graphs, budget = found["decode-graphs"], found["step-time-budget"]
    assert (graphs.configured, graphs.engaged) == ("on", "on")
    assert (RESULTS / graphs.evidence).is_file() and graphs.evidence
    assert not by_name(switches(on, geometry("dense"), "sm_80", AS_STORED))["decode-graphs"].evidence
    assert budget.configured == budget.engaged == "twice the decode rows' own time"
    off = by_name(switches(config(), geometry("dense"), "", AS_STORED))
    assert (off["decode-graphs"].configured, off["decode-graphs"].engaged) == ("off", "")
    assert (off["step-time-budget"].configured, off["step-time-budget"].engaged) == ("off", "")
    limited = by_name(switches(config(step_time_budget_ms=20), geometry("dense"), "", AS_STORED))["step-time-budget"]
    assert limited.configured == limited.engaged == "20 ms"


def test_what_was_asked_for_and_does_not_run_is_not_engaged() -> None:
    found = switches(config(kv_mode="turboquant"), geometry("dense"), "", AS_STORED)
    (mode,) = (f for f in gathered([("worker-0", found)]) if f.name == "kv-mode")
    assert mode.state == "not engaged"
    found = switches(config(), geometry("dense"), "", AS_STORED)
    states = {f.name: f.state for f in gathered([("worker-0", found)])}
    assert states["kv-mode"] == "engaged"
    assert states["deterministic"] == "off"


@pytest.mark.parametrize("same", [True, False])
def test_processes_that_agree_are_one_row(same: bool) -> None:
    one, other = (switches(config(deterministic=d), geometry("dense"), "", AS_STORED) for d in (True, same))
    rows = [f for f in gathered([("w0", one), ("w1", other)]) if f.name == "deterministic"]
    assert [row.processes for row in rows] == ([("w0", "w1")] if same else [("w0",), ("w1",)])
