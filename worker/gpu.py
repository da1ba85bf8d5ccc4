"""Which GPUs there are, by their UUIDs, and CUDA's virtual memory calls on one of them.

The CUDA library is loaded when it is first asked for, so importing this module needs neither a GPU nor its packages.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from protos.errors import CapacityError, ConfigError, PreconditionFailed
from worker.config import GPU


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use.

    Attributes:
        index: its number here, as torch counts; CUDA_VISIBLE_DEVICES decides it.
        uuid: "GPU-<uuid>", its name everywhere and always.
        total_bytes: of its memory.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int

    @property
    def device(self) -> str:
        """What the kvstore calls it."""
        return f"{GPU}{self.uuid}"


def visible_gpus() -> tuple[Gpu, ...]:
    """In the order of their indices; none where there is no driver. Takes no memory of any of them.

    Raises:
        ConfigError: GPU_PACKAGES_MISSING. PreconditionFailed: there is a driver that does not work; CUDA's name for it.
    """
    cu = _driver()
    try:
        _check(cu, "cuInit", cu.cuInit(0))
    except RuntimeError:  # no driver library on this machine
        return ()
    except PreconditionFailed as failure:
        if failure.reason != "CUDA_ERROR_NO_DEVICE":
            raise
        return ()
    gpus = []
    for index in range(_check(cu, "cuDeviceGetCount", cu.cuDeviceGetCount())):
        device = _check(cu, "cuDeviceGet", cu.cuDeviceGet(index))
        name = _check(cu, "cuDeviceGetName", cu.cuDeviceGetName(128, device))
        uuid = bytes(_check(cu, "cuDeviceGetUuid", cu.cuDeviceGetUuid(device)).bytes).hex()
        parts = (uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:])
        total = _check(cu, "cuDeviceTotalMem", cu.cuDeviceTotalMem(device))
        gpus.append(Gpu(index, f"GPU-{'-'.join(parts)}", bytes(name).split(b"\0")[0].decode(), int(total)))
    return tuple(gpus)


def find_gpu(device: str) -> Gpu:
    """The GPU that "cuda:<index>" or "cuda:GPU-<uuid>" names.

    Raises:
        ConfigError: NO_SUCH_GPU, what is there is named; GPU_PACKAGES_MISSING.
    """
    gpus = visible_gpus()
    wanted = device.removeprefix(GPU)
    for gpu in gpus:
        if wanted in (str(gpu.index), gpu.uuid):
            return gpu
    raise ConfigError(
        "there is no such GPU",
        reason="NO_SUCH_GPU",
        given=device,
        allowed=", ".join(f"{GPU}{gpu.index} ({gpu.uuid}, {gpu.name})" for gpu in gpus) or "no GPU is visible",
        hint="look at CUDA_VISIBLE_DEVICES, or use device cpu:0",
    )


def store_name(device: str) -> str:
    """What the kvstore calls a worker's device: a GPU by its UUID. Raises what ``find_gpu`` raises."""
    return find_gpu(device).device if device.startswith(GPU) else device


def torch_device(device: str) -> torch.device:
    """Where a worker on ``device`` computes. Raises what ``find_gpu`` raises."""
    return torch.device("cuda", find_gpu(device).index) if device.startswith(GPU) else torch.device("cpu")


def free_bytes(gpu: Gpu) -> int:
    """Of its memory, now. Makes a context for as long as it takes to ask, where this process has none."""
    cu = _driver()
    device = _check(cu, "cuDeviceGet", cu.cuDeviceGet(gpu.index))
    context = _check(cu, "cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(device))
    try:
        _check(cu, "cuCtxPushCurrent", cu.cuCtxPushCurrent(context))
        try:
            free, _ = _check(cu, "cuMemGetInfo", cu.cuMemGetInfo())
        finally:
            _check(cu, "cuCtxPopCurrent", cu.cuCtxPopCurrent())
    finally:
        _check(cu, "cuDevicePrimaryCtxRelease", cu.cuDevicePrimaryCtxRelease(device))
    return int(free)


class CudaMemory:
    """CUDA's virtual memory calls on one GPU, as ``worker.device_memory.Driver`` has them. Usable from any thread.

    Uses the GPU's primary context, torch's and CuPy's too, and holds it as long as the process lives.
    """

    def __init__(self, gpu: Gpu) -> None:
        cu = self._cu = _driver()
        self._gpu = gpu
        _check(cu, "cuInit", cu.cuInit(0))
        device = _check(cu, "cuDeviceGet", cu.cuDeviceGet(gpu.index))
        self._context = _check(cu, "cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(device))
        on_gpu = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._handle_type = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._kind = cu.CUmemAllocationProp()
        self._kind.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type = on_gpu
        self._kind.location.id = gpu.index
        self._kind.requestedHandleTypes = self._handle_type
        self._access = cu.CUmemAccessDesc()
        self._access.location.type = on_gpu
        self._access.location.id = gpu.index
        self._access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(self._call("cuMemGetAllocationGranularity", self._kind, minimum))

    def create(self, num_bytes: int) -> Any:
        return self._call("cuMemCreate", num_bytes, self._kind, 0)

    def export_fd(self, handle: Any) -> int:
        return int(self._call("cuMemExportToShareableHandle", handle, self._handle_type, 0))

    def import_fd(self, fd: int) -> Any:
        return self._call("cuMemImportFromShareableHandle", fd, self._handle_type)

    def release(self, handle: Any) -> None:
        self._call("cuMemRelease", handle)

    def reserve(self, num_bytes: int) -> int:
        return int(self._call("cuMemAddressReserve", num_bytes, 0, 0, 0))

    def free(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", address, num_bytes)

    def map(self, address: int, num_bytes: int, handle: Any) -> None:
        self._call("cuMemMap", address, num_bytes, 0, handle, 0)
        try:
            self._call("cuMemSetAccess", address, num_bytes, [self._access], 1)
        except BaseException:
            self.unmap(address, num_bytes)
            raise

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", address, num_bytes)

    def zero(self, address: int, num_bytes: int) -> None:
        self._call("cuMemsetD8", address, 0, num_bytes)
        self.synchronize()

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def tensor(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        tensor = torch.as_tensor(_Bytes(address, num_bytes, owner), device=torch.device("cuda", self._gpu.index))
        if tensor.data_ptr() != address:
            raise PreconditionFailed("torch copied what it should have looked at", given=tensor.device)
        return tensor

    def _call(self, name: str, *arguments: Any) -> Any:
        cu = self._cu
        _check(cu, "cuCtxPushCurrent", cu.cuCtxPushCurrent(self._context))  # whatever context this thread has
        try:
            return _check(cu, name, getattr(cu, name)(*arguments))
        finally:
            _check(cu, "cuCtxPopCurrent", cu.cuCtxPopCurrent())


@functools.cache
def memory_of(device: str) -> CudaMemory:
    """The memory of the GPU that ``device`` names. Raises what ``find_gpu`` raises."""
    return CudaMemory(find_gpu(device))


class _Bytes:
    """Device memory as torch and CuPy take it without a copy; what they make of it keeps ``owner`` alive."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@functools.cache
def _driver() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ImportError as missing:
        raise ConfigError(
            "the GPU packages are not installed",
            reason="GPU_PACKAGES_MISSING",
            given=str(missing),
            hint="pip install 'tailpack[gpu]'",
        ) from missing
    return driver  # type: ignore[no-any-return]


def _check(cu: ModuleType, name: str, answer: Any) -> Any:
    """The results of a call. Raises CapacityError (NOT_ENOUGH_MEMORY), or PreconditionFailed with CUDA's own name."""
    error, *results = answer
    if error == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise CapacityError(
            f"the GPU has no memory left ({name})",
            reason="NOT_ENOUGH_MEMORY",
            given="CUDA_ERROR_OUT_OF_MEMORY",
            hint="make the arenas smaller, or end what else uses this GPU",
        )
    if error != cu.CUresult.CUDA_SUCCESS:
        raise PreconditionFailed(f"CUDA's {name} failed", reason=str(getattr(error, "name", error)), given=name)
    return results[0] if len(results) == 1 else tuple(results)
