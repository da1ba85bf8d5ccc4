"""GPUs as CUDA tells of them: names by UUID, errors by CUDA's own names."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protos.errors import CapacityError, ConfigError, PreconditionFailed, TailpackError
from worker import gpu


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803


class Cuda:
    """As much of ``cuda.bindings.driver`` as looking at devices takes; two GPUs."""

    CUresult = Result

    def __init__(self) -> None:
        self.init: Result | Exception = Result.CUDA_SUCCESS

    def cuInit(self, flags: int) -> tuple[Result]:
        if isinstance(self.init, Exception):
            raise self.init
        return (self.init,)

    def cuDeviceGetCount(self) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, 2

    def cuDeviceGet(self, index: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, index

    def cuDeviceGetName(self, size: int, device: int) -> tuple[Result, bytes]:
        return Result.CUDA_SUCCESS, b"NVIDIA H200".ljust(size, b"\0")

    def cuDeviceGetUuid(self, device: int) -> tuple[Result, Any]:
        return Result.CUDA_SUCCESS, SimpleNamespace(bytes=bytes(range(device, device + 16)))

    def cuDeviceTotalMem(self, device: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, 139 << 30


FIRST = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
SECOND = "GPU-01020304-0506-0708-090a-0b0c0d0e0f10"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    made = Cuda()
    monkeypatch.setattr(gpu, "_driver", lambda: made)
    yield made


def test_gpus_are_named_by_their_uuid(cuda: Cuda) -> None:
    assert [(g.index, g.uuid, g.name, g.total_bytes) for g in gpu.visible_gpus()] == [
        (0, FIRST, "NVIDIA H200", 139 << 30),
        (1, SECOND, "NVIDIA H200", 139 << 30),
    ]
    for device in ("cuda:1", f"cuda:{SECOND}"):
        assert gpu.find_gpu(device).uuid == SECOND
        assert gpu.store_name(device) == f"cuda:{SECOND}"
        assert gpu.torch_device(device) == torch.device("cuda", 1)
    assert (gpu.store_name("cpu:3"), gpu.torch_device("cpu:3")) == ("cpu:3", torch.device("cpu"))


def test_a_gpu_that_is_not_there_is_named_with_those_that_are(cuda: Cuda) -> None:
    for device in ("cuda:2", "cuda:GPU-00010203-0405-0607-0809-0a0b0c0d0e10"):
        with pytest.raises(ConfigError, match=FIRST) as caught:
            gpu.find_gpu(device)
        assert caught.value.reason == "NO_SUCH_GPU"


@pytest.mark.parametrize("init", [Result.CUDA_ERROR_NO_DEVICE, RuntimeError("no libcuda.so.1")])
def test_a_machine_without_a_gpu_has_none(cuda: Cuda, init: Result | Exception) -> None:
    cuda.init = init
    assert gpu.visible_gpus() == ()
    with pytest.raises(ConfigError, match="no GPU is visible"):
        gpu.find_gpu("cuda:0")


def test_a_driver_that_does_not_work_is_an_error(cuda: Cuda) -> None:
    cuda.init = Result.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    with pytest.raises(PreconditionFailed) as caught:
        gpu.visible_gpus()
    assert caught.value.reason == "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"


@pytest.mark.parametrize(
    ("result", "kind", "reason"),
    [
        (Result.CUDA_ERROR_OUT_OF_MEMORY, CapacityError, "NOT_ENOUGH_MEMORY"),
        (Result.CUDA_ERROR_INVALID_VALUE, PreconditionFailed, "CUDA_ERROR_INVALID_VALUE"),
    ],
)
def test_errors_have_cudas_names(result: Result, kind: type[TailpackError], reason: str) -> None:
    with pytest.raises(kind, match="cuMemCreate") as caught:
        gpu._check(Cuda, "cuMemCreate", (result, None))  # type: ignore[arg-type]
    assert caught.value.reason == reason


def test_results_are_what_comes_behind_the_error() -> None:
    cu: Any = Cuda
    assert gpu._check(cu, "a", (Result.CUDA_SUCCESS,)) == ()
    assert gpu._check(cu, "a", (Result.CUDA_SUCCESS, 7)) == 7
    assert gpu._check(cu, "a", (Result.CUDA_SUCCESS, 7, 8)) == (7, 8)
