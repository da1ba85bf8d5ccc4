"""The benchmark itself on the PyTorch reference, small, so that it cannot rot; and that it finds what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.decode import DecodeLayer
from kernels.decode_cells import decode_cell
from kernels.decode_workspace import DecodeLimits
from tests.bench import bench_kernels, kernel_cases, kernel_checks, kernel_performance
from tests.bench.kernel_cases import Case, Timed, for_cpu
from tests.bench.kernel_engines import Engine, Reference
from tests.bench.kernel_inputs import Inputs, make
from tests.bench.kernel_performance import _timed_facts
from tests.bench.kernel_reference import check, compare
from tests.bench.kernel_timing import Times

CPU = torch.device("cpu")
SMALL = [
    "tq4-d64-g8",
    "tq3v2-d128-g4",
    "tq3-d256-softcap",
    "fp8-d64-tail",
    "dense-d128-f16",
    "tq4-shared-d512-g8",
    "tq4-d64-sinks",
    "length-1",
    "length-129",
    "ratio-7",
    "queries-8-g4",
    "window-129-t6",
    "window-dense",
    "sinks-inf",
    "sinks-minus-inf",
    "strided",
    "padding-only",
    "zero-rows",
    "huge-rows",
    "mates",
    "graph",
    "decode-long",
    "decode-mqa512",
    "prefill-32k",
    "prefill-window",
    "prefill-d256-softcap",
    "prefill-d512-shared",
]


def test_a_case_of_each_kind_passes_on_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lines.jsonl"
    status = bench_kernels.main(["--device", "cpu", "--only", ",".join(SMALL), "--out", str(file)])
    out = capsys.readouterr().out
    assert status == 0, out
    first, *lines = map(json.loads, file.read_text().splitlines())
    assert first["seed"] >= 0 and str(first["seed"]) in out
    assert [line["case"] for line in lines] == sorted(SMALL, key=[line["case"] for line in lines].index)
    assert all(line["ok"] and line["error"] < 6e-3 for line in lines)
    assert f"{len(SMALL)} passed, 0 failed" in out


def test_every_case_is_listed_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernels.main(["--list"]) == 0
    names = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert len(names) == len(set(names)) > 100
    issue = ("decode-long", "decode-mid", "decode-one", "decode-d64", "decode-d256", "decode-mqa512", "decode-fixed")
    assert {*issue, "seal-d128", "restore-d128"} <= set(names)
    corners = [case for case in kernel_cases.corners() if "queries-" not in case.name]
    assert {n for case in corners for n in case.lengths} >= {1, 17, 127, 128, 129, 16385, 100_000}
    assert {case.group for case in kernel_cases.corners()} >= {1, 2, 4, 7, 8, 64}


@pytest.mark.parametrize("case", kernel_cases.correctness() + kernel_cases.corners() + kernel_cases.small_corners())
def test_every_case_can_be_one_call(case: Case) -> None:
    """Lengths hold the query tokens, packed groups without a tail end with whole pages, shrinking keeps the kind."""
    for one in (case, for_cpu(case)):
        assert all(n == 0 or n >= one.queries for n in one.lengths)
        if one.packed or one.kept is not None:
            assert all(one.base(n) % 128 == 0 for n in one.lengths)
        assert max(one.lengths) - one.base(max(one.lengths)) <= 1400
    shrunk = for_cpu(case)
    assert (shrunk.mode, shrunk.dim, shrunk.queries, shrunk.window) == (case.mode, case.dim, case.queries, case.window)


@pytest.mark.parametrize(
    "name", ["tq4v3-d64-g4", "fp8-d128-f16", "tq4-shared-d512-g64", "window-softcap", "queries-8-g8"]
)
def test_what_is_compiled_ahead_is_what_a_case_uses(name: str) -> None:
    (case,) = [c for c in kernel_cases.correctness() + kernel_cases.corners() if c.name == name]
    inputs = make(replace(case, lengths=(20,)), CPU)
    layer = DecodeLayer(
        keys=inputs.keys,
        values=inputs.values,
        tail=inputs.tail,
        q_heads=case.kv_heads * case.group,
        dtype=inputs.dtype,
        options=inputs.options,
        limits=DecodeLimits(1, 1),
        num_queries=case.queries,
        arch="sm_90a",
    )
    assert (layer.shape, layer.cell) == (case.shape, decode_cell(case.shape, "sm_90a"))


@pytest.mark.parametrize(("only", "lists"), [("decode-lung", ""), ("", "corner")])
def test_an_unknown_name_is_an_error(only: str, lists: str) -> None:
    with pytest.raises(SystemExit, match=only or "corners"):
        bench_kernels.main(["--device", "cpu", "--only", only, "--lists", lists])


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert bench_kernels.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_time_up_is_not_a_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernels.main(["--device", "cpu", "--only", "length-1,length-17", "--seconds", "-1"]) == 3
    assert "out of time: length-1, length-17 not run" in capsys.readouterr().out


# -- what the checks find --------------------------------------------------------------------------------------------

CASE = Case("case", "tq4", 64, (300, 17, 0), strided=True, queries=2)


def _altered(alter: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[[Inputs], Engine]:
    """The reference, and then something else done to out and lse."""

    def make_engine(inputs: Inputs) -> Engine:
        engine = Reference(inputs)

        def run(q: torch.Tensor, batch: Any, out: torch.Tensor, lse: torch.Tensor) -> None:
            engine(q, batch, out, lse)
            alter(out, lse)

        return run

    return make_engine


@pytest.mark.parametrize(
    ("alter", "found"),
    [
        (lambda out, lse: out[0].mul_(1.02), "sequence"),
        (lambda out, lse: out[1, 1, 3].fill_(float("nan")), "sequence"),
        (lambda out, lse: out[2, 0, 0, 0].fill_(1e-3), "sequence"),
        (lambda out, lse: out[0, 0, 0, 5].fill_(float("inf")), "sequence"),
        (lambda out, lse: lse[0, 0, 0].add_(0.1), "sequence"),
        (lambda out, lse: lse[2].fill_(0.0), "sequence"),
        (lambda out, lse: out._base[0, 0].zero_(), "written_outside"),
        (lambda out, lse: out[0, 0, 0].add_(1e-3 * torch.rand(())), "again"),
    ],
)
def test_a_wrong_result_fails(
    monkeypatch: pytest.MonkeyPatch, alter: Callable[[torch.Tensor, torch.Tensor], object], found: str
) -> None:
    assert kernel_checks.run_case(CASE, CPU)["ok"]
    monkeypatch.setattr(kernel_checks, "make_engine", _altered(alter))
    facts = kernel_checks.run_case(CASE, CPU)
    assert not facts["ok"] and found in facts, facts


def test_a_row_that_depends_on_its_mates_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASE, strided=False, checks=("mates",))
    assert kernel_checks.run_case(case, CPU)["ok"]
    monkeypatch.setattr(kernel_checks, "make_engine", _altered(lambda out, lse: out.mul_(1 + 2**-8 * (len(out) == 1))))
    facts = kernel_checks.run_case(case, CPU)
    assert not facts["ok"] and "sequence 0 differs" in facts["mates"]


def test_a_page_that_is_read_wrongly_fails() -> None:
    """The reference reads bytes, so damage after the call shows; rows behind what a query sees do not count."""
    inputs = make(replace(CASE, window=100), CPU)
    inputs.poison()
    Reference(inputs)(inputs.q, inputs.batch, inputs.out, inputs.lse)
    inputs.keys.planes.heads[int(inputs.page_ids[0][0])] = 0  # type: ignore[union-attr]
    assert check(inputs, [0])["ok"]
    inputs.tail.values[int(inputs.batch.tail_slots[0]), 290 % kernel_cases.RING] = 9.0  # type: ignore[union-attr,index]
    assert not check(inputs, [0])["ok"]


def test_infinities_and_nan_are_compared_by_place_first() -> None:
    inf, nan = float("inf"), float("nan")
    facts = compare(torch.tensor([1.0, nan, inf, -inf, 2.0]), torch.tensor([1.0, nan, -inf, -inf, 2.5]))
    assert (facts["misplaced"], facts["worst"], facts["max_abs"]) == (1, [2], 0.5)
    assert facts["error"] == pytest.approx(0.5 / (1 + 2.5**2) ** 0.5)
    assert compare(torch.zeros(3), torch.zeros(3))["error"] == 0.0
    assert compare(torch.ones(3), torch.zeros(3))["error"] > 1e100


def test_a_record_has_what_records_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_performance, "arch_of", lambda device: "sm_90a")
    timed = Timed(CASE, 0.3, 0.2)
    facts = _timed_facts(CASE, Times([0.25, 0.2, 0.28], 0.19), 0.15, "bytes", ("cuDNN SDPA", 0.9), 1e-3, timed)
    record = facts["record"]
    keys = {"case", "value", "unit", "spread", "repeats", "floor", "floor_by", "rival", "rival_value", "error"}
    assert keys <= set(record)
    assert (record["value"], record["spread"], record["repeats"]) == (0.25, [0.2, 0.28], 3)
    assert facts["required"] == "0.3 (met)"
    assert "rival_why" in _timed_facts(CASE, Times([0.4]), 0.1, "bytes", "none", 0.0, timed)["record"]
    report = bench_kernels.Report()
    report.add("performance", "case", True, 1.0, facts)
    report.add("performance", "wrong", False, 1.0, facts | {"ok": False})
    (line,) = bench_kernels.records(report, {"machine": "m", "kind": "measured"})
    assert (line["bench"], line["machine"], line["case"]) == ("kernels", "m", "case")
