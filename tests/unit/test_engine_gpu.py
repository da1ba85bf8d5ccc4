"""The engine's way over a GPU beside its way over a CPU: the same requests, the same tokens, the same logits.

The kernels' launches are done by PyTorch (fake_gpu_kernels); tables, argument checks, places of rows and the order of
things are those of a worker on a GPU. Tokens follow from a script, so that both always go on from the same history.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels import loader
from kvstore.answers import Relinked, Split
from protos import types_pb2 as pb
from protos.errors import ConfigError, InternalError, PreconditionFailed
from tests.unit.fake_gpu_kernels import FakeGpuKernels
from tests.unit.gpu_pair import MODES, SHAPE, TQ4, Pair, attend_rows, prompt, running
from tests.unit.tiny import Harness, config_for, request, write_model
from worker import kv_moves
from worker.batch import SpanWork, build_batch
from worker.weights import load_model

TOLERANCE = {"float16": 0.004, "bfloat16": 0.03}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), seed=3, **SHAPE)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> FakeGpuKernels:
    return FakeGpuKernels(monkeypatch)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, kernels: FakeGpuKernels, folder: Path) -> Callable[..., Pair]:
    return lambda **settings: Pair(monkeypatch, kernels, settings.pop("folder", folder), **settings)


# --- every mode ---


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [*zip(MODES, itertools.cycle(["float16", "bfloat16"])), ("dense", "bfloat16"), ("tq4", "float16")],
)
def test_sequences_of_different_lengths(
    pair: Callable[..., Pair], kernels: FakeGpuKernels, mode: str, dtype: str
) -> None:
    """Prompts in chunks over packed history, pages sealed while prompts are computed and in the middle of decode."""
    two = pair(dtype=dtype, **MODES[mode])
    if mode == "dense edges":
        two.cpu.engine._runner._attend = attend_rows
    two.run(*(request(f"r{i}", prompt(i, length), 150) for i, length in enumerate((400, 5, 129, 1))))
    two.check(TOLERANCE[dtype] if mode == "dense" else 0)
    load = two.gpu.engine.load()
    assert (load.pages_packed > 0) == (mode != "dense")
    if mode != "dense":
        assert load.rows_dequantised_attention > 0 and kernels.num_launches("restore") > 0
        assert kernels.num_launches("seal") > 0
    num_decoding = kernels.num_launches("merge") / SHAPE["num_hidden_layers"]
    assert 150 < num_decoding <= load.num_steps, "all decode rows of a layer are one call"


def test_one_launch_seals_what_is_due_in_a_step(pair: Callable[..., Pair], kernels: FakeGpuKernels) -> None:
    two = pair(prefill_chunk=1024, **TQ4)
    two.run(*(request(f"r{i}", prompt(i, 270), 8) for i in range(3)))
    two.check()
    assert two.gpu.engine.load().pages_packed == 3 and kernels.num_launches("seal") == 1


@pytest.mark.parametrize(
    ("settings", "model"),
    [
        ({"kv_mode": "window"}, {"sliding_window": 100}),
        ({}, {"sliding_window": 100}),
        (TQ4, {"sliding_window": 100}),
        (TQ4, {"sliding_window": 300}),
        (TQ4, {"sliding_window": 300, "layer_types": ["full_attention", "sliding_attention"]}),
        ({"kv_mode": "fp8"}, {"sliding_window": 300}),
    ],
)
def test_windows(pair: Callable[..., Pair], tmp_path: Path, settings: dict[str, Any], model: dict[str, Any]) -> None:
    folder = write_model(tmp_path, seed=5, **SHAPE, model_type="mistral", **model)
    two = pair(folder=folder, max_sequence_tokens=1024, **settings)
    two.run(*(request(f"r{i}", prompt(i, length), 300) for i, length in enumerate((500, 90))))
    two.check()


def test_deterministic_mode_sorts_rows_into_tiles(pair: Callable[..., Pair]) -> None:
    for settings, tolerance in (({}, TOLERANCE["float16"]), (TQ4, 0.0)):
        two = pair(deterministic=True, max_running=3, **settings)
        two.run(*(request(f"r{i}", prompt(i, length), 20) for i, length in enumerate((257, 129, 30, 385, 1))))
        two.check(tolerance)


# --- going back, and going on twice ---


@pytest.mark.parametrize(
    ("mode", "back_to"), [("tq4", 1), ("tq4", 128), ("tq4", 150), ("tq3", 300), ("fp8", 300), ("tq4", 520)]
)
def test_a_rollback_and_what_comes_after_it(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, mode: str, back_to: int
) -> None:
    sources: list[Any] = []
    real = kv_moves.pack

    def pack(kv: Any, jobs: Any, *rest: Any) -> Any:
        sources.extend(page.source for job in jobs for page in job.pages)
        return real(kv, jobs, *rest)

    monkeypatch.setattr(kv_moves, "pack", pack)
    two = pair(prefill_chunk=256, **MODES[mode])
    ids = prompt(1, 540)
    two.cpu.engine._emit = two.gpu.engine._emit = lambda result: None  # offsets go back with a rollback

    def roll_back(harness: Harness) -> bool:
        harness.engine.submit(request("r", ids[:1], 999, emitted=ids[1:]))
        harness.step(10)
        sequence = running(harness, "r")
        assert sequence.bases["full"] == 384
        truncated = harness.engine.truncate(sequence, back_to, next_token=7)
        harness.step(260)
        assert sequence.num_computed == back_to + 260
        return truncated.exact

    assert two.both(roll_back) == (back_to == 520,) * 2
    if back_to in (150, 300):
        assert any(isinstance(source, Split) and source.num_tokens % 32 for source in sources)
        assert any(isinstance(source, Relinked) for source in sources)
    two.check()


def test_a_fork_and_its_parent(pair: Callable[..., Pair]) -> None:
    for settings in (TQ4, {**TQ4, "dense_layers": (0, 1)}):
        two = pair(**settings)
        two.cpu.engine._runner._attend = attend_rows

        def fork(harness: Harness) -> None:
            harness.engine.submit(request("r", prompt(1, 290), 80))
            harness.step(10)
            parent = running(harness, "r")
            child, sibling = harness.engine.fork(parent, "child"), harness.engine.fork(parent, "sibling")
            assert child is not None and sibling is not None
            harness.engine._emit = lambda result: None  # a child's first output does not start at 0
            harness.engine.truncate(sibling, sibling.num_computed - 3, next_token=5)
            while harness.engine._running:
                harness.step()
            harness.attachment.check_empty()

        two.both(fork)
        two.check()


# --- prefixes, admission ---


def test_a_next_turn_resumes_at_a_checkpoint(pair: Callable[..., Pair]) -> None:
    two = pair(**TQ4)
    two.run(request("one", prompt(1, 300), 50))
    history = prompt(1, 300) + two.gpu.tokens("one")
    two.run(request("two", history + prompt(9, 80), 100, reuse=pb.PREFIX_REUSE_EXACT))
    usage = two.gpu.outputs["two"][-1].usage
    assert usage is not None and (usage.cached_prompt_tokens, usage.prefix_exact) == (349, True)
    two.check()


@pytest.mark.parametrize("settings", [TQ4, {"kv_mode": "fp8"}])
def test_without_a_checkpoint_tails_are_refilled_from_pages(
    pair: Callable[..., Pair], kernels: FakeGpuKernels, settings: dict[str, Any]
) -> None:
    two = pair(checkpoints=0, **settings)
    ids = prompt(1, 500)
    two.run(request("a", ids, 5))
    before = kernels.num_launches("restore")
    two.run(request("b", ids[:450] + prompt(2, 50), 200, reuse=pb.PREFIX_REUSE_ANY))
    assert two.gpu.engine.load().rows_dequantised_resume > 0
    launches = kernels.num_launches("restore") - before
    assert launches % SHAPE["num_hidden_layers"] == 1, "one for the tails of all layers; the chunks' are one a layer"
    two.check()


def test_dense_pages_are_reused(pair: Callable[..., Pair]) -> None:
    two = pair()
    two.run(request("a", prompt(1, 300), 30))
    two.run(request("b", prompt(1, 300), 30))
    usage = two.gpu.outputs["b"][-1].usage
    assert usage is not None and usage.cached_prompt_tokens == 256
    two.check(TOLERANCE["float16"])


def test_what_is_dropped_is_computed_again(pair: Callable[..., Pair]) -> None:
    two = pair(num_pages=4, checkpoints=0, admission="recompute", **TQ4)
    two.run(*(request(f"r{i}", prompt(i, 250), 300) for i in range(2)))
    assert two.gpu.engine.load().sequences_recomputed > 0
    two.check()


# --- what is refused, and when ---


@pytest.mark.parametrize(
    ("model", "settings", "named"),
    [
        ({}, {"dtype": "float32"}, "float32"),
        ({"head_dim": 48}, {}, "width 48"),
        ({"num_attention_heads": 130, "num_key_value_heads": 2}, {}, "130 query heads"),
    ],
)
def test_what_no_kernel_reads_is_refused_before_weights_are_read(
    kernels: FakeGpuKernels, tmp_path: Path, model: dict[str, Any], settings: dict[str, Any], named: str
) -> None:
    folder = write_model(tmp_path, **{**SHAPE, **model})
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=named) as refused:
        load_model(config_for(folder, **{"dtype": "bfloat16", "device": "cuda:0", **settings}))
    assert refused.value.reason == "NO_GPU_KERNEL"


def test_a_machine_that_cannot_load_kernels_says_so(
    kernels: FakeGpuKernels, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_cupy(cell: Any, index: int) -> Any:
        raise loader.LoadError("CuPy is needed", given="no module", allowed="cupy", action="install it")

    monkeypatch.setattr(loader, "load", no_cupy)
    with pytest.raises(PreconditionFailed, match="CuPy is needed") as refused:
        Harness.load(folder, device="cuda:0", dtype="float16", **TQ4)
    assert refused.value.reason == "GPU_KERNELS_NOT_READY"


def test_a_freed_page_is_never_handed_to_a_kernel(pair: Callable[..., Pair], tmp_path: Path) -> None:
    folder = write_model(tmp_path, model_type="mistral", sliding_window=300, **SHAPE)
    geometry = load_model(config_for(folder, **TQ4)).geometry

    def build(pages: list[int]) -> None:
        work = SpanWork([1], 700, {"window": pages}, False, True, {"window": 512}, {"window": 0})
        build_batch([work], geometry, deterministic=False)

    build([-1, -1, -1, 4])  # the query at 700 sees tokens from 401 on
    with pytest.raises(InternalError, match="was freed"):
        build([-1, -1, 3, -1])
