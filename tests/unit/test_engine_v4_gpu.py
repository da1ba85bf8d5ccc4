"""DeepSeek-V4's way over a GPU: all decode rows of a step at once, pages packed by the kernels where there are some.

The kernels' launches are done by PyTorch (fake_gpu_kernels), and so is everything else; logits are transformers' own.
Pages and tails that nobody holds are NaN, so a row that is read for nothing and not hidden shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from protos import types_pb2 as pb
from tests.unit.deepseek_v4_engine import Reference, V4Harness
from tests.unit.deepseek_v4_tiny import tiny_config, watched_gaps
from tests.unit.fake_gpu_kernels import FakeGpuKernels
from tests.unit.test_engine_v4 import GAP, SMALL, prompt, quiet, running
from tests.unit.tiny import config_for, request
from worker.models.deepseek_v4_geometry import cache_geometry, with_raw_mode
from worker.switches import switches
from worker.weights_form import AS_STORED

MODES = {
    "dense": ("dense", ""),
    "fp8": ("fp8", ""),
    "turboquant": ("turboquant", "tq4"),
    "window": ("window", ""),
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> FakeGpuKernels:
    return FakeGpuKernels(monkeypatch)


@pytest.fixture
def gaps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    seen = watched_gaps(monkeypatch)
    yield seen
    assert not seen or min(seen) > GAP, f"a near-tie of {min(seen):.2g}: take another seed"


@pytest.fixture(scope="module")
def reference() -> Callable[..., Reference]:
    made: dict[str, Reference] = {}

    def make(seed: int = 2, hca_ratio: int = 16, **changes: Any) -> Reference:
        key = repr((seed, hca_ratio, changes))
        if key not in made:
            made[key] = Reference(tiny_config(hca_ratio=hca_ratio, **{**SMALL, **changes}), seed)
        return made[key]

    return make


def gpu(reference: Reference, mode: str, **settings: Any) -> V4Harness:
    return V4Harness(reference, mode=MODES[mode], device="cuda:0", **settings)


@pytest.mark.usefixtures("gaps")
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("mode", MODES)
def test_ragged_batches_give_the_reference_logits(
    reference: Callable[..., Reference], kernels: FakeGpuKernels, mode: str, width: int
) -> None:
    model = reference(head_dim=width)
    harness = gpu(model, mode, prefill_chunk=100, max_running=4)
    prompts = {f"r{length}": prompt(length, length) for length in (1, 3, 128, 130, 263)}
    tokens = harness.run(*(request(r, ids, 60) for r, ids in prompts.items()))
    for r, ids in prompts.items():
        harness.check(r, ids + tokens[r][:-1])
    load = harness.engine.load()
    packed = mode in ("fp8", "turboquant")
    assert harness.dequantised == 0 and (load.pages_packed > 0) == packed and harness.attachment.verify() == []
    by_kernels = packed and (mode == "fp8" or width == 64)
    assert (kernels.num_launches("seal") > 0) == by_kernels


@pytest.mark.usefixtures("kernels", "gaps")
@pytest.mark.parametrize(
    "changes", [{"hca_ratio": 128}, {"index_topk": 512}, {"seed": 3, "compress_ratios": [0, 4, 0]}]
)
def test_other_layers(reference: Callable[..., Reference], changes: dict[str, Any]) -> None:
    """HCA rows of a page each; every row chosen; layers of the window alone."""
    harness = gpu(reference(**changes), "turboquant", prefill_chunk=128)
    prompts = {f"r{length}": prompt(length, length) for length in (2, 250, 120)}
    tokens = harness.run(*(request(r, ids, 20) for r, ids in prompts.items()))
    for r, ids in prompts.items():
        harness.check(r, ids + tokens[r][:-1])


@pytest.mark.usefixtures("kernels")
def test_rollbacks_have_the_same_bits_in_every_mode(reference: Callable[..., Reference]) -> None:
    def run(mode: str) -> tuple[V4Harness, list[int]]:
        harness = gpu(reference(head_dim=64), mode, prefill_chunk=64)
        for r in ("a", "b"):
            harness.engine.submit(request(r, prompt(3, 100), 900))
        harness.step(5)
        harness.engine._emit = quiet
        rng, sequence = random.Random(5), running(harness, "a")
        with torch.inference_mode():
            for step in range(300):
                if step % 29 == 28:
                    cut = sequence.num_computed - rng.randrange(1, 17)
                    assert harness.engine.truncate(sequence, cut, next_token=rng.randrange(97)).exact
                harness.engine.step()
        return harness, sequence.token_ids

    dense, expected = run("dense")
    for mode in ("turboquant", "fp8", "window"):
        other, tokens = run(mode)
        assert tokens == expected
        for position, logits in dense.logits["a"].items():
            assert torch.equal(other.logits["a"][position], logits), f"{mode} at {position}"
        assert not any(other.engine._held.kv.counters.rows_dequantised.values())


@pytest.mark.parametrize("width", [32, 64])
def test_a_rollback_to_packed_rows_refills_the_window(
    reference: Callable[..., Reference], kernels: FakeGpuKernels, width: int
) -> None:
    harness = gpu(reference(head_dim=width), "turboquant", prefill_chunk=256)
    harness.engine._emit = quiet
    harness.engine.submit(request("r", prompt(4, 100), 100, emitted=prompt(5, 61)))
    harness.step(1)
    sequence = running(harness, "r")
    with torch.inference_mode():
        assert not harness.engine.truncate(sequence, 142).exact
    assert harness.engine.load().rows_dequantised_rollback == 0
    harness.step()
    assert harness.engine.load().rows_dequantised_rollback == 3 * 128 and harness.dequantised == 0
    assert (kernels.num_launches("restore") > 0) == (width == 64)


@pytest.mark.usefixtures("kernels", "gaps")
@pytest.mark.parametrize("mode", MODES)
def test_forks_and_prefix_hits_go_on_as_they_were(reference: Callable[..., Reference], mode: str) -> None:
    harness = gpu(reference(), mode, prefill_chunk=100)
    history = prompt(6, 203)
    history += harness.run(request("one", history, 10))["one"]
    history += prompt(7, 40)
    answer = harness.run(request("two", history, 8, reuse=pb.PREFIX_REUSE_EXACT))["two"]
    usage = harness.outputs["two"][-1].usage
    assert usage is not None and (usage.cached_prompt_tokens, usage.prefix_exact) == (212, True)
    harness.check("two", history + answer[:-1], first=212)
    harness.engine._emit = quiet
    harness.engine.submit(request("parent", prompt(8, 140), 40))
    harness.step(9)
    parent = running(harness, "parent")
    with torch.inference_mode():
        child = harness.engine.fork(parent, "child")
        assert child is not None
        harness.engine.truncate(child, child.num_computed - 5, next_token=7)
        harness.step(12)
    for sequence in (parent, child):
        r = sequence.request.request_id
        known = sequence.token_ids[: sequence.num_computed]
        harness.check(r, known, first=min(harness.logits[r]))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("deterministic", [False, True])
def test_guesses_change_no_token(reference: Callable[..., Reference], deterministic: bool) -> None:
    ratios = {"compress_ratios": [4, 128, 4, 0], "num_nextn_predict_layers": 1}
    model = reference(**ratios)
    requests = [request(f"r{length}", prompt(length, length), 24) for length in (1, 30, 127, 128)]
    plain = gpu(model, "turboquant", deterministic=deterministic).run(*requests)
    harness = gpu(model, "turboquant", drafts=3, deterministic=deterministic)
    assert harness.run(*requests) == plain
    assert harness.engine.load().tokens_drafted > 0 and harness.dequantised == 0


@pytest.mark.parametrize(
    ("width", "mode", "packing"),
    [
        (64, "turboquant", "raw: CUDA kernels for sm_90a"),
        (512, "turboquant", "raw: CUDA kernels for sm_90a"),
        (64, "fp8", "raw: CUDA kernels for sm_90a"),
        (32, "turboquant", "raw: PyTorch on sm_90a, no kernel packs such rows"),
        (512, "fp8", "raw: PyTorch on sm_90a, no kernel packs such rows"),
    ],
)
def test_what_kernels_do_and_what_they_do_not_is_said(width: int, mode: str, packing: str) -> None:
    config = config_for(Path("none"), kv_mode=mode, device="cuda:0")
    geometry = with_raw_mode(cache_geometry(tiny_config(head_dim=width), "bfloat16"), *MODES[mode])
    told = {switch.name: switch.engaged for switch in switches(config, geometry, "sm_90a", AS_STORED)}
    assert (told["attention"], told["packing"]) == ("PyTorch on sm_90a", packing)


@pytest.mark.usefixtures("kernels")
def test_deterministic_mode_has_the_same_bits_alone_and_in_company(reference: Callable[..., Reference]) -> None:
    model, lengths = reference(), (1, 30, 127, 200)
    together = gpu(model, "turboquant", deterministic=True)
    together.run(*(request(f"r{length}", prompt(length, length), 40) for length in lengths))
    for length in lengths:
        alone = gpu(model, "turboquant", deterministic=True)
        alone.run(request(f"r{length}", prompt(length, length), 40))
        for position, logits in alone.logits[f"r{length}"].items():
            assert torch.equal(together.logits[f"r{length}"][position], logits), f"r{length} at {position}"
