"""The kernels of deepseek_v4's decode step (csrc/v4_step.cuh), run on a CPU thread by thread, beside PyTorch."""

from __future__ import annotations

import pytest
import torch

from kernels.errors import ArgumentError
from kernels.v4_step_cells import EXPERT_KERNELS, V4_KERNELS, experts_cell, v4_step_cell
from kernels.v4_step_cuda import V4Step
from tests.kernels.emulator import Emulator, needs_compiler
from tests.kernels.v4_step_checks import SMALL, checks
from tests.unit.deepseek_v4_tiny import Driver, random_weights, tiny_config
from worker.models.deepseek_v4_checkpoint import is_integer, kept_in_float32

CPU = torch.device("cpu")
MOST = 3e-3  # some roundings fall the other way
launched: set[str] = set()


@pytest.fixture(scope="module")
def step() -> V4Step:
    library, experts = Emulator.of(v4_step_cell("bf16", 4, 20)), Emulator.of(experts_cell("bf16"))

    def launch(name: str, ctas: int, arguments: tuple[torch.Tensor | int, ...], shared_bytes: int) -> None:
        launched.add(name)
        if name in EXPERT_KERNELS:
            experts.call(f"v4_{name}", ctas, shared_bytes, *arguments, seed=3)
        else:
            library.call(f"v4_{name}", ctas, *arguments, seed=3)

    return V4Step(torch.bfloat16, 4, 20, launch)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 11])
def test_rows_are_those_of_pytorch(step: V4Step, rows: int) -> None:
    for name, error in checks(step, rows, SMALL, CPU):
        assert error <= MOST, f"{name} of {rows} rows: {error:.3g}"


@needs_compiler
def test_a_model_says_the_same_through_them(step: V4Step) -> None:
    widths = {"head_dim": 64, "q_lora_rank": 64, "index_head_dim": 64, "hidden_size": 256, "moe_intermediate_size": 256}
    config = tiny_config(hca_ratio=16, num_hidden_layers=2, compress_ratios=[4, 0], num_hash_layers=1, **widths)
    weights = {
        name: value if kept_in_float32(name) or is_integer(name) else value.bfloat16()
        for name, value in random_weights(config, 2).items()
    }
    plain, ours = (Driver(config, weights, dtype="bfloat16") for _ in range(2))
    ours.model.kernels = step
    tokens = torch.randint(97, (9,), generator=torch.Generator().manual_seed(1)).tolist()
    launched.clear()
    want, got = (driver.run(tokens, [8, 1]) for driver in (plain, ours))
    assert (got - want).norm() < 1e-2 * want.norm()
    assert launched == {*V4_KERNELS, *EXPERT_KERNELS} - {
        "softmax",
        "complete",
        "choose",
    }  # these rows are read span by span


def test_what_does_not_fit_is_refused() -> None:
    names: list[str] = []
    step = V4Step(torch.bfloat16, 4, 20, lambda name, ctas, arguments, shared: names.append(name))
    streams, y = torch.zeros(2, 4, 64, dtype=torch.bfloat16), torch.zeros(2, 64, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="does not fit"):
        step.hyper_write(streams.transpose(0, 1), y, y, y)
    with pytest.raises(ArgumentError, match="does not fit"):
        step.swiglu(y.float(), None, 1.0)
    with pytest.raises(ArgumentError, match="does not fit"):
        step.rotate(torch.zeros(2, 1, 96, dtype=torch.bfloat16), torch.zeros(2, 8), torch.zeros(2, 8))
    with pytest.raises(ArgumentError, match="experts"):
        step.route(torch.zeros(2, 513), torch.zeros(513), None, torch.zeros(2), num_chosen=2, scale=1.0)
    with pytest.raises(ArgumentError, match="decode step"):
        V4Step(torch.float32, 4, 20)
    assert not names and len(V4_KERNELS) == len(step.cell.kernels)
