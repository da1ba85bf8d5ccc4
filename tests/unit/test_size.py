"""`tailpack size`: its numbers are those of a store that is asked for the same, and its verdict is the truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvstore.answers import Admitted, Refused
from kvstore.arena import chunk_sizes, planned_arenas
from kvstore.client import OpenRequest
from protos.errors import ConfigError, ModelError
from tests.scenarios.kvstore_process import StoreProcess
from tests.unit.deepseek_v4_tiny import TINY as TINY_V4
from tests.unit.tiny import config_for, write_model
from worker.families import architecture
from worker.size_cli import GPUS, size
from worker.sizing import GRANULARITY
from worker.weights import load_model, planned_uses

TOKENS = 700


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("size") / "model")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a width that GPU kernels are built for; config.json alone."""
    folder = tmp_path_factory.mktemp("wide")
    config = json.loads((write_model(folder / "m", head_dim=64) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    return folder / "config.json"


def asked(*arguments: object, status: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(size, [*map(str, arguments), "--json"])
    assert done.exit_code == status, (done.output, done.exception)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def by_owner(answer: dict[str, Any], memory: str) -> dict[str, int]:
    return {use["owner"]: use["num_bytes"] for use in answer["uses"] if use["memory"] == memory}


MODES: list[tuple[list[str], dict[str, Any]]] = [
    ([], {}),
    (["--kv-mode", "turboquant", "--kv-preset", "tq3v2"], {"kv_mode": "turboquant", "kv_preset": "tq3v2"}),
    (["--kv-mode", "fp8", "--checkpoints", "2"], {"kv_mode": "fp8", "checkpoints": 2}),
    (["--kv-mode", "turboquant", "--dense-layers", "1,0"], {"kv_mode": "turboquant", "dense_layers": (1, 0)}),
    (["--kv-mode", "turboquant", "--admission", "recompute"], {"kv_mode": "turboquant", "admission": "recompute"}),
]


def test_a_store_takes_what_it_says_and_holds_as_many_sequences(model: Path) -> None:
    """Of every mode: the arenas, tails and control block of a real store; pages for so many, and not one more."""
    with StoreProcess() as store:
        for index, (options, settings) in enumerate(MODES):
            told = asked("--model", model, "--host-bytes", "4G", "--sequences", 5, "--tokens", TOKENS, *options)
            config = config_for(model, max_running=5, max_sequence_tokens=TOKENS, **settings)
            loaded = load_model(config)
            assert told["geometry_digest"] == loaded.geometry.digest().hex()
            with store.attach(
                device=f"cpu:{index}",
                geometry=loaded.geometry,
                arena_bytes=told["arena_bytes"],
                max_sequences=config.num_slots,
                max_sequence_tokens=TOKENS,
                checkpoint_slots=config.num_checkpoints if loaded.geometry.tail_bytes else 0,
            ) as attachment:
                device = next(d for d in store.stats().devices if d.device == f"cpu:{index}")
                uses = by_owner(told, "host, kvstore")
                assert uses["control block"] == device.control_bytes
                for group in device.groups:
                    mine = sum(v for owner, v in uses.items() if owner.split(",")[0].endswith(f" {group.group}"))
                    assert mine == group.arena_bytes, (options, group.group)
                    assert told["pages"][group.group] == group.pages_total
                prompts = [OpenRequest(f"r{i}", "", [1 + i, *range(1, 100)], TOKENS) for i in range(6)]
                answers = attachment.open(prompts)
                assert [type(a) for a in answers[:5]] == [Admitted] * 5, (options, answers)
                has_room = config.admission == "recompute" or not any(g.has_pages for g in loaded.geometry.groups)
                assert has_room or isinstance(answers[5], Refused)  # the sixth slot is nobody's
            held = {use.owner: use.num_bytes for use in loaded.uses}
            assert held.items() <= by_owner(told, "host, worker").items()


def test_one_sequence_is_promised_its_whole_length(model: Path) -> None:
    """A worker clips its longest sequence to what pages hold alone, though a packed one's newest tokens need none."""
    told = asked("--model", model, "--host-bytes", "4G", "--sequences", 1, "--tokens", TOKENS, "--kv-mode", "fp8")
    assert told["pages"]["full"] * 128 >= TOKENS


def test_most_sequences_is_where_it_stops_fitting(model: Path) -> None:
    common = ("--model", model, "--host-bytes", "600M", "--tokens", 1000, "--kv-mode", "turboquant")
    most = asked(*common, "--sequences", 1)["most_sequences"]
    assert 1 < most < 4096
    assert asked(*common, "--sequences", most)["fits"]
    too_many = asked(*common, "--sequences", most + 1, status=1)
    assert not too_many["fits"] and too_many["needed_bytes"] > too_many["available_bytes"]
    assert asked("--model", model, "--host-bytes", "300M", status=1)["most_sequences"] == 0


def test_what_does_not_fit_is_shown_all_the_same(model: Path) -> None:
    done = CliRunner().invoke(size, ["--model", str(model), "--host-bytes", "300M", "--tokens", "1000"])
    assert done.exit_code == 1
    assert (
        "DOES NOT FIT" in done.output and "pages full" in done.output and "At most 0 of that length fit" in done.output
    )
    assert "Ask for fewer --tokens" in done.output and "--kv-bytes" not in done.output  # nobody is to copy that line


def test_the_last_lines_say_what_to_ask_for(model: Path) -> None:
    common = ["--model", str(model), "--tokens", "1000", "--kv-mode", "turboquant"]
    done = CliRunner().invoke(size, [*common, "--host-bytes", "4G", "--sequences", "5"])
    kv_bytes = asked(*common, "--host-bytes", "4G", "--sequences", 5)["arena_bytes"]
    kv_mib = -(-kv_bytes // 2**20)
    assert f"--kv-bytes {kv_bytes} --max-running 5 --max-sequence-tokens 1000" in done.output
    assert f"chart: kvMiB: {kv_mib}, maxRunning: 5, maxSequenceTokens: 1000" in done.output
    many = CliRunner().invoke(size, [*common, "--host-bytes", "600M", "--sequences", "4096"])
    most = asked(*common, "--host-bytes", "600M", "--sequences", 4096, status=1)["most_sequences"]
    assert many.exit_code == 1 and many.output.rstrip().endswith(f"--sequences {most}")


def test_on_a_gpu_arenas_are_cut_in_chunks_and_weights_are_told_from_config_json(wide: Path) -> None:
    told = asked("--model", wide, "--gpu", "h200", "--kv-mode", "turboquant", "--tokens", 1000)
    assert told["available_bytes"] == GPUS["h200"] << 30 and told["dtype"] == "bfloat16" and not told["weights_seen"]
    raw = json.loads(wide.read_text())
    config = config_for(
        wide, device="cuda:0", dtype="bfloat16", kv_mode="turboquant", max_running=16, max_sequence_tokens=1000
    )
    geometry = architecture(raw).geometry(config, "bfloat16", 1000)
    slots = 2 * 16 + 1  # of sequences, of checkpoints, and one that a tail is saved in
    arenas = planned_arenas(geometry, told["arena_bytes"], slots, 16)
    on_gpu = by_owner(told, "GPU")
    kv = sum(v for owner, v in on_gpu.items() if owner.split()[0] in ("pages", "tails", "rounding"))
    assert kv == sum(map(sum, chunk_sizes(arenas, GRANULARITY)))
    assert geometry.page_layout_version == 2  # of the GPU's kernels
    folder = wide.parent / "m"
    assert on_gpu["weights"] == planned_uses(folder, "bfloat16")[0].num_bytes
    assert asked("--model", folder, "--gpu-bytes", "80G", "--tokens", 1000)["weights_seen"]


def test_deepseek_v4_with_its_retentions(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_V4))
    bytes_of = {}
    for retention in ("all", "checkpoints", "none"):
        mode = ["--kv-mode", "window"] if retention == "none" else ["--kv-mode", "fp8", "--kv-retention", retention]
        told = asked("--model", config, "--host-bytes", "4G", "--tokens", 2000, "--dtype", "float32", *mode)
        bytes_of[retention] = told["arena_bytes"]
    assert bytes_of["none"] < bytes_of["checkpoints"] < bytes_of["all"]


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        (["--gpu", "h999"], ConfigError, "UNKNOWN_GPU"),
        (["--gpu", "h200", "--host-bytes", "1G"], ConfigError, None),
        (["--gpu", "h200", "--kv-mode", "turboquant"], ConfigError, "WIDTH_NOT_COMPILED"),
        (["--tokens", "5000"], ConfigError, None),
        (["--kv-preset", "tq4"], ConfigError, None),
        (["--drafts", "2"], ConfigError, "NO_DRAFT_LAYERS"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    model: Path, arguments: list[str], error: type[Exception], reason: str | None
) -> None:
    with pytest.raises(error) as caught:
        size.main(["--model", str(model), "--tokens", "1000", *arguments], standalone_mode=False)
    assert reason is None or caught.value.reason == reason  # type: ignore[attr-defined]


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        size.main(["--model", str(tmp_path / "none")], standalone_mode=False)
