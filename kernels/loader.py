"""Runs a cell's kernels on a device: finds or compiles the cubin, loads it by CuPy, launches on torch's current stream.

Launches make no allocation and no synchronisation, so they may be captured into a CUDA graph. Load before a capture
(`load`, or one launch): loading a module is not allowed inside one.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.cells import ARCHES, Cell
from kernels.cubins import default_folder, ensure_cubin, shipped_folder
from kernels.declared import DECLARED
from kernels.errors import MachineError

logger = logging.getLogger(__name__)

_DEFAULT_SHARED_BYTES = 48 * 1024  # more than this must be asked for, per device


class UnsupportedDeviceError(MachineError):
    """No cubin that we compile runs on this GPU."""


class LoadError(MachineError):
    """CuPy is missing, or the driver refused a cubin."""


class LaunchError(MachineError):
    """The driver refused a launch."""


def arch_for(major: int, minor: int) -> str:
    """The arch whose cubin runs on compute capability `major`.`minor`. Raises UnsupportedDeviceError.

    An arch with suffix "a" runs on exactly its own capability; another one also on later minors of its major.
    """
    best: tuple[int, str] | None = None
    for arch in ARCHES:
        found = re.fullmatch(r"sm_(\d+)(\d)(a?)", arch)
        assert found, arch
        arch_major, arch_minor, exact = int(found[1]), int(found[2]), bool(found[3])
        fits = arch_major == major and (arch_minor == minor if exact else arch_minor <= minor)
        if fits and (best is None or arch_minor > best[0]):
            best = (arch_minor, arch)
    if best is None:
        raise UnsupportedDeviceError(
            "no kernel is compiled for this GPU",
            given=f"compute capability {major}.{minor}",
            allowed=", ".join(ARCHES),
            action="add the arch to kernels/cells.py, or run in mode dense",
        )
    return best[1]


def arch_of(device: torch.device) -> str:
    """The arch for a CUDA device. Raises UnsupportedDeviceError."""
    return arch_for(*torch.cuda.get_device_capability(device))


@functools.cache
def load(cell: Cell, device_index: int) -> dict[str, Any]:
    """The cell's kernels on that device, by name, loaded once per process and device.

    Compiles on demand where the cubin is not in the archive, and logs it. Raises UnsupportedDeviceError,
    CompileError or ToolchainError (kernels/compiler.py), LoadError; and LoadError inside a capture, which goes on.
    """
    # The driver would break the capture, and name neither the kernel nor what to do.
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise LoadError(
            "kernels cannot be loaded while a CUDA graph is captured",
            given=cell.name,
            allowed="kernels that are loaded already",
            action="load them, or make the call once, before the capture begins",
        )
    arch = arch_of(torch.device("cuda", device_index))
    built = ensure_cubin(cell, arch, default_folder(), shipped=shipped_folder())
    if built.compiled:
        why = "declared, but not built ahead" if cell in DECLARED else "not a declared cell"
        logger.warning("compiled on demand: %s for %s in %.1f s (%s)", cell.name, arch, built.seconds, why)
    try:
        import cupy
    except ImportError as error:
        raise LoadError(
            "CuPy is needed to launch GPU kernels",
            given=str(error),
            allowed="cupy-cuda13x",
            action='install it with: pip install "tailpack[gpu]"',
        ) from error
    with torch.cuda.device(device_index):
        torch.empty(1, device="cuda")  # torch creates the primary context, CuPy joins it
        try:
            module = cupy.RawModule(path=str(built.path))
            kernels = {name: module.get_function(name) for name in cell.kernels}
            for kernel in kernels.values():
                kernel.compile()  # resolves the name now, not at the first launch
        except (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError) as error:
            raise LoadError(
                f"the driver refuses {built.path}",
                given=str(error),
                allowed=f"a cubin for {arch}",
                action="remove the file, so that it is compiled again, and check the driver's CUDA version",
            ) from error
    return kernels


class _TorchStream(NamedTuple):
    """A raw stream handle as CuPy takes it (the CUDA stream protocol)."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


@functools.cache
def _cupy_stream(handle: int, device_index: int) -> Any:
    import cupy

    return cupy.cuda.Stream.from_external(_TorchStream(handle))


def launch(
    cell: Cell,
    kernel: str,
    device: torch.device,
    *,
    ctas: int,
    threads: int,
    arguments: tuple[torch.Tensor | int, ...],
    shared_bytes: int = 0,
) -> None:
    """Launch on torch's current stream of `device`; tensors pass as pointers, ints as 64-bit.

    The caller has checked every argument. Raises what `load` raises, before anything runs.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    function = load(cell, index)[kernel]
    values = tuple(np.int64(a.data_ptr() if isinstance(a, torch.Tensor) else a) for a in arguments)
    with torch.cuda.device(index), _cupy_stream(torch.cuda.current_stream().cuda_stream, index):
        _allow_shared(function, kernel, shared_bytes)
        function((ctas,), (threads,), values, shared_mem=shared_bytes)


def _allow_shared(function: Any, kernel: str, shared_bytes: int) -> None:
    """Let the kernel have that much dynamic shared memory. Raises LaunchError where the device does not."""
    if shared_bytes <= _DEFAULT_SHARED_BYTES or shared_bytes <= function.max_dynamic_shared_size_bytes:
        return
    import cupy

    try:
        function.max_dynamic_shared_size_bytes = shared_bytes
    except (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError) as error:
        raise LaunchError(
            f"this device does not have the shared memory that {kernel} needs",
            given=f"{shared_bytes} bytes a CTA: {error}",
            allowed="what the arch's tiling was made for (kernels/decode_tiling.py)",
            action="load the cell of the device's own arch",
        ) from error


class PreparedLaunch:
    """One kernel with its grid and one struct by value as its only argument, for launching again and again.

    A launch costs the host about a microsecond: everything but grid and stream is set up here. `arguments` is read at
    the launch (a graph keeps a copy); the caller keeps it alive. overlap: the kernel may start while the one before it
    on the stream still runs, and waits for it itself (programmatic dependent launch; sm_90 and later).
    """

    def __init__(
        self,
        cell: Cell,
        kernel: str,
        device_index: int,
        arguments: ctypes.Structure,
        *,
        threads: int,
        shared_bytes: int = 0,
        overlap: bool = False,
    ) -> None:
        """Raises what `load` raises, and LaunchError where the device has not that much shared memory."""
        function = load(cell, device_index)[kernel]
        _allow_shared(function, kernel, shared_bytes)
        from cuda.bindings import driver

        self.name = kernel
        self._arguments = arguments
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        self._address = ctypes.addressof(self._parameters)
        self._function = driver.CUfunction(function.kernel.ptr)
        self._config = config = driver.CUlaunchConfig()
        config.gridDimX = config.gridDimY = config.gridDimZ = 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = 0
        if overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
        config.numAttrs = int(overlap)
        self._launch = driver.cuLaunchKernelEx
        self._success = driver.CUresult.CUDA_SUCCESS
        self._stream = 0

    def set_ctas(self, x: int, y: int = 1) -> None:
        """The grid of the launches from here on."""
        self._config.gridDimX, self._config.gridDimY = x, y

    def __call__(self, stream: int) -> None:
        """Launch on that stream of the current device. Raises LaunchError."""
        if stream != self._stream:
            self._config.hStream = self._stream = stream
        (status,) = self._launch(self._config, self._function, self._address, 0)
        if status != self._success:
            raise LaunchError(
                f"the driver refuses to launch {self.name}",
                given=f"{status!s}, grid {self._config.gridDimX} x {self._config.gridDimY}",
                allowed="CUDA_SUCCESS",
                action="look for an earlier error on this device, and whether its context is current in this thread",
            )


def current_stream(device_index: int) -> int:
    """torch's current stream, as the driver's handle: what torch.cuda.current_stream says, without its object."""
    return int(torch._C._cuda_getCurrentRawStream(device_index))


def overlaps_launches(arch: str) -> bool:
    """Whether kernels for `arch` wait for the one before them themselves (csrc/ptx.cuh, wait_for_dependencies)."""
    return int(re.sub(r"\D", "", arch)) >= 90
