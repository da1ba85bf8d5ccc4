"""`tailpack quality`, small: what it counts, against figures by hand, and that a worse codec shows as worse."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from protos.errors import ConfigError, InvalidRequest
from tests.scenarios.tiny_tokenizer import write_tokenizer
from tests.unit.tiny import config_for, write_model
from worker import quality_report
from worker.models.llama import Llama
from worker.quality import MODES, Case, CaseResult, Tally, all_cases, compare, measure
from worker.quality_cli import quality
from worker.quality_texts import own_texts
from worker.weights import Model, load_model

CHUNK, TOKENS = 128, 640
EDGES = (1, 1)  # of three layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("quality") / "tiny", head_dim=64)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    torch.set_num_threads(1)
    return load_model(config_for(folder))


def random_texts(count: int, num_tokens: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 211, (num_tokens,), generator=generator).tolist() for _ in range(count)]


def llama(model: Model) -> Llama:
    """What is measured: V4 has a KV of its own."""
    assert isinstance(model.network, Llama)
    return model.network


@pytest.fixture(scope="module")
def results(model: Model) -> Iterator[dict[str, CaseResult]]:
    with torch.inference_mode():
        found = measure(
            llama(model), model.geometry, list(all_cases(MODES, EDGES)), random_texts(2, TOKENS), chunk=CHUNK
        )
        yield {result.case.name: result for result in found}


def test_all_cases_are_there(results: dict[str, CaseResult]) -> None:
    packed = ("fp8", "tq4", "tq4v3", "tq3", "tq3v2")
    assert [*results] == ["dense", *(name for mode in packed for name in (mode, f"{mode}-edges-1-1"))]
    for result in results.values():
        assert [tally.predictions for tally in result.texts] == [TOKENS - 1, TOKENS - 1]


def test_dense_is_dense(results: dict[str, CaseResult]) -> None:
    """A store of its own, the same code: not close, equal."""
    total = results["dense"].total
    assert (total.kl, total.agreement, total.packed_share) == (0.0, 1.0, 0.0)


def test_fewer_bits_lose_more_and_dense_edges_less(results: dict[str, CaseResult]) -> None:
    kls = {name: result.total.mean_kl for name, result in results.items()}
    order = ["dense", "fp8", "tq4", "tq4v3", "tq3", "tq3v2"]
    assert all(kls[better] < kls[worse] for better, worse in pairwise(order)), kls
    for mode in order[1:]:
        assert 0 < kls[f"{mode}-edges-1-1"] < kls[mode], kls
    assert results["tq3v2"].total.agreement < results["fp8"].total.agreement < 1


def test_the_share_read_packed_is_the_one_by_hand(results: dict[str, CaseResult]) -> None:
    # At a chunk from token n on, whole pages below n - 144 are packed: 144 is the window plus the margin.
    packed = sum(max(0, n - 144) // 128 * 128 for n in range(0, TOKENS, CHUNK))
    read = sum(n + CHUNK for n in range(0, TOKENS, CHUNK))
    assert (packed, read) == (0 + 0 + 0 + 128 + 256, 128 + 256 + 384 + 512 + 640)
    for mode in ("fp8", "tq4", "tq3v2"):
        assert results[mode].total.packed_share == pytest.approx(packed / read)
        assert results[f"{mode}-edges-1-1"].total.packed_share == pytest.approx(packed / read / 3)  # one layer of three


def test_perplexity_is_that_of_transformers_at_any_chunk(folder: Path, model: Model) -> None:
    from transformers import AutoModelForCausalLM

    (token_ids,) = random_texts(1, 300)
    with torch.inference_mode():
        logits = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(torch.tensor([token_ids])).logits
        )
        expected = torch.nn.functional.cross_entropy(logits[0, :-1], torch.tensor(token_ids[1:])).exp().item()
        for chunk in (1, 97, 128, 300):
            (result,) = measure(llama(model), model.geometry, [Case("dense")], [token_ids], chunk=chunk)
            assert result.total.predictions == 299
            assert result.total.perplexity == pytest.approx(expected, rel=1e-4)


def test_compare_by_hand() -> None:
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]).double().log()
    got = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]]).double().log()
    tally = compare(reference, got, torch.tensor([1, 2]))
    kl = 0.5 * math.log(2) + 0.25 * math.log(0.5) + 0.2 * math.log(0.5) + 0.8 * math.log(0.8 / 0.6)
    assert (tally.predictions, tally.agreed) == (2, 1)
    assert tally.kl == pytest.approx(kl, rel=1e-6)
    assert tally.nll == pytest.approx(-math.log(0.5) - math.log(0.6), rel=1e-6)
    assert tally.mean_kl == pytest.approx(kl / 2, rel=1e-6)
    assert tally.perplexity == pytest.approx((0.5 * 0.6) ** -0.5, rel=1e-6)
    assert tally + Tally(1, 1, 1.0, 1.0, 8, 4) == Tally(3, 2, tally.kl + 1, tally.nll + 1, 8, 4)


def test_an_interrupt_leaves_whole_chunks_of_every_case(model: Model) -> None:
    def stop_in_the_second_chunk(count: int) -> None:
        seen.append(count)
        if len(seen) == 6:
            raise KeyboardInterrupt

    seen: list[int] = []
    partial: list[CaseResult] = []
    cases = [Case("dense"), Case("tq4"), Case("fp8")]
    with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
        measure(
            llama(model),
            model.geometry,
            cases,
            random_texts(1, 300),
            results=partial,
            on_forward=stop_in_the_second_chunk,
        )
    assert [result.total.predictions for result in partial] == [128, 128, 128]


def test_refusals_are_named(model: Model) -> None:
    with pytest.raises(ConfigError, match="tq5"):
        Case("tq5")
    with pytest.raises(ConfigError, match="pin every layer"):
        measure(llama(model), model.geometry, [Case("tq4", (2, 1))], random_texts(1, 300))
    for texts in ([], [[1]], random_texts(1, 1025)):
        with pytest.raises(InvalidRequest, match="2 to 1024"):
            measure(llama(model), model.geometry, [Case("tq4")], texts)


def test_table_and_records_are_complete(results: dict[str, CaseResult]) -> None:
    lines = quality_report.records([*results.values()], [], model="tiny", chunk=CHUNK, command="test")
    console = Console(width=80)
    with console.capture() as captured:
        console.print(quality_report.table(lines, "title"))
    rows = [line.split() for line in captured.get().splitlines() if line.startswith(MODES)]
    assert [(row[0], row[1] != "-") for row in rows] == [(r.case.mode, any(r.case.edges)) for r in results.values()]
    assert all(len(row) == 9 and "nan" not in row and "…" not in "".join(row) for row in rows)
    by_case = {line["case"]: line for line in json.loads(json.dumps(lines))}
    assert [*by_case] == [f"tiny-{name}" for name in results]
    line = by_case["tiny-tq4"]
    assert line["value"] == results["tq4"].total.mean_kl and line["rival_value"] == results["fp8"].total.mean_kl
    assert line["spread"][0] <= line["value"] <= line["spread"][1] and line["repeats"] == 2
    assert line["bytes_per_token"] == 3 * 2 * 2 * (64 // 2 + 4)  # layers, K and V, heads; half a byte each, and a scale
    dense = by_case["tiny-dense"]
    assert (dense["bytes_per_token"], dense["bytes_per_token_bf16"]) == (3 * 2 * 2 * 64 * 4, 3 * 2 * 2 * 64 * 2)


def test_own_texts_are_pieces_in_turn() -> None:
    texts = own_texts(lambda text: [ord(c) for c in text], 7, 1000)
    assert {len(text.token_ids) for text in texts} == {1000}
    assert len({tuple(text.token_ids) for text in texts}) == 7
    assert texts[3].name == "pydoc topics, tokens 1000 to 2000"
    assert "statement" in "".join(map(chr, texts[0].token_ids))
    with pytest.raises(InvalidRequest, match="too little text"):
        own_texts(lambda text: [ord(c) for c in text], 4, 1 << 20)


def test_the_command(tmp_path: Path) -> None:
    folder = write_tokenizer(write_model(tmp_path / "tiny", vocab_size=600, head_dim=16), vocab_size=600)
    (tmp_path / "mine.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    arguments = ["--model", str(folder), "--tokens", "400", "--threads", "1", "--out", str(tmp_path / "out")]
    arguments += ["--modes", "dense,tq4", "--edges", "1,0", "--text", str(tmp_path / "mine.txt")]
    done = CliRunner().invoke(quality, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "400 tokens of mine.txt" in done.output
    lines = [json.loads(line) for line in (tmp_path / "out" / "quality.jsonl").read_text().splitlines()]
    assert [line["case"] for line in lines] == ["tiny-dense", "tiny-tq4", "tiny-tq4-edges-1-0"]
    assert lines[0]["value"] == 0.0 and lines[1]["value"] > 0 and lines[1]["texts"] == ["mine.txt"]
    assert all((tmp_path / "out" / f"quality.{kind}").stat().st_size > 1000 for kind in ("png", "svg"))
    for bad in (["--edges", "2"], ["--edges", "a,b"]):
        refused = CliRunner().invoke(quality, [*arguments, *bad])
        assert refused.exit_code == 2 and "F,L" in refused.output
