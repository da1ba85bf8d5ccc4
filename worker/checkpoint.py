"""The safetensors files of a model folder: what their headers say, and their tensors one by one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from safetensors import SafetensorError, safe_open

from protos.errors import ModelError
from worker import model_config

INDEX_FILE = "model.safetensors.index.json"

FLOATS = ("F64", "F32", "BF16", "F16")
INTEGERS = ("I64", "U64", "I32", "U32", "I16", "U16", "I8", "U8")
FP8 = ("F8_E4M3",)
FP4 = ("U8", "I8")
"""Two values to a byte."""
SCALES = ("F8_E8M0", "U8", "I8", "F32")
"""Bytes of any name are e8m0: the exponent of two, plus 127."""
BLOCK_SCALES = ("F32", "BF16", "F8_E8M0")
"""Of FP8 blocks that are held as they are."""
E4M3 = "float8_e4m3fn"
"""``Expected.held`` of their codes."""
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all) after each tensor."""


class Stored(NamedTuple):
    """A tensor as a file's header describes it. ``dtype``: safetensors' name, as "BF16"."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES.get(self.dtype, 1)


class Expected(NamedTuple):
    """A tensor as a model wants it.

    Attributes:
        shape: as stored.
        dtypes: that it may be stored in.
        held: torch's name of the dtype that it is held in; "" is the model's own, which the worker is asked for.
        scale: name of the tensor with its scales; "" where it is not quantised.
        dequantized: (tensor, scales) -> float32, where there are scales.
        packed: values in a stored element.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    held: str = ""
    scale: str = ""
    dequantized: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    packed: int = 1

    @property
    def is_scale(self) -> bool:
        return self.dtypes in (SCALES, BLOCK_SCALES)

    @property
    def is_held(self) -> bool:
        """Else it is a scale that is read with the tensor that it belongs to."""
        return not self.is_scale or bool(self.held)

    @property
    def num_values(self) -> int:
        return prod(self.shape) * self.packed


def headers(folder: Path) -> dict[str, Stored]:
    """What the folder's files hold, by name. Reads headers only.

    Raises:
        ModelError: UNREADABLE_WEIGHTS, a file is missing, cut short or garbage; BAD_MODEL, there is none, the index is
            malformed, or a tensor is in two files.
    """
    if (folder / INDEX_FILE).exists():
        weight_map = model_config.read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise ModelError(
                "the index has no weight_map", given=folder / INDEX_FILE, allowed="tensor name -> file name"
            )
        files = sorted({folder / name for name in weight_map.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError("the model folder holds no weights", given=folder, allowed="*.safetensors")
    found: dict[str, Stored] = {}
    for file in files:
        with naming(file):
            there = _header(file)
        if twice := there.keys() & found.keys():
            name = min(twice)
            raise ModelError(f"tensor {name} is in two files", given=f"{found[name].file.name}, {file.name}")
        found |= there
    return found


def _header(file: Path) -> dict[str, Stored]:
    """By hand, for the library maps the whole file, which a machine that is too small for a model may refuse.

    Raises ValueError or OSError: the file is not whole, or not of this format.
    """
    with file.open("rb") as opened:
        size, length = os.fstat(opened.fileno()).st_size, int.from_bytes(opened.read(8), "little")
        if not 0 < length <= min(_MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"no safetensors file, or cut short: {size} bytes with a header of {length}")
        header = json.loads(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    header.pop("__metadata__", None)
    found: dict[str, Stored] = {}
    end = 0
    for name, entry in header.items():
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(), int(last)]} if all(
                type(extent) is int and extent >= 0 for extent in shape
            ):
                found[name] = Stored(file, dtype, tuple(shape))
                end = max(end, last)
            case _:
                raise ValueError(f"the header says of tensor {name[:80]!r}: {str(entry)[:80]}")
    if 8 + length + end != size:
        raise ValueError(
            f"cut short, or longer than it says: {size} bytes where the header tells of {8 + length + end}"
        )
    return found


def demand_match(
    expected: Mapping[str, Expected], found: Mapping[str, Stored], ignored: Iterable[str], folder: Path
) -> None:
    """Compares names, shapes and dtypes; ``ignored`` are names that may be there.

    Raises:
        ModelError: MISSING_TENSOR, UNEXPECTED_TENSOR, BAD_TENSOR.
    """
    for what, names in (
        ("missing", expected.keys() - found.keys()),
        ("unexpected", found.keys() - expected.keys() - set(ignored)),
    ):
        if names:
            shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ModelError(
                f"{len(names)} tensors are {what} in {folder}", reason=f"{what.upper()}_TENSOR", given=shown
            )
    for name, wanted in expected.items():
        stored = found[name]
        if stored.shape != wanted.shape or stored.dtype not in wanted.dtypes:
            raise ModelError(
                f"tensor {name} does not fit config.json",
                reason="BAD_TENSOR",
                given=f"{stored.shape} {stored.dtype} in {stored.file.name}",
                allowed=f"{wanted.shape}, {' or '.join(wanted.dtypes)}",
            )


class Tensors:
    """The expected tensors, each read, dequantised and converted when it is taken; a context manager.

    So a model that takes them one by one and keeps what it makes of them needs little more room than it fills.

    Args:
        expected, found: as ``demand_match`` accepted them.
        dtype: of tensors whose ``held`` is "".
        device: where they go; quantised ones are dequantised there.
    """

    def __init__(
        self,
        expected: Mapping[str, Expected],
        found: Mapping[str, Stored],
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        self._left = {name: wanted for name, wanted in expected.items() if wanted.is_held}
        self._names = sorted(expected)
        self._found, self._dtype, self._device, self._progress = found, dtype, device, progress
        self._digests: dict[str, bytes] = {}
        self._handles: dict[Path, Any] = {}
        self._done, self._all = 0, sum(found[name].num_bytes for name in expected)

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.clear()  # each closes its file when nothing holds it

    @overload
    def pop(self, name: str, /) -> torch.Tensor: ...

    @overload
    def pop(self, name: str, default: None, /) -> torch.Tensor | None: ...

    def pop(self, name: str, default: None = None, /) -> torch.Tensor | None:
        """Takes one out; of a name that the model does not have, None.

        Raises:
            ModelError: UNREADABLE_WEIGHTS; BAD_TENSOR, it holds NaN or infinity, or its scales do not fit it.
        """
        wanted = self._left.pop(name, None)
        if wanted is None:
            return None
        stored = self._read(name)
        dtype = getattr(torch, wanted.held) if wanted.held else self._dtype
        if wanted.dequantized is not None:
            value = wanted.dequantized(stored.to(self._device), self._read(wanted.scale).to(self._device)).to(dtype)
        else:
            # A copy of its own: what safetensors hands out may lie in the mapped file, which can change under us.
            value = stored.to(self._device, dtype, copy=True)
        if not _is_finite(value):
            raise ModelError(
                f"tensor {name} holds NaN or infinity",
                reason="BAD_TENSOR",
                given=f"{stored.dtype} in {self._found[name].file.name}, read as {value.dtype}",
                allowed="finite values",
            )
        if self._progress is not None:
            self._progress(self._done, self._all)
        return value

    def digest(self) -> bytes:
        """blake2b-128 over name, dtype, shape and bytes of every tensor as stored, in order of names."""
        assert not self._left, f"not taken: {sorted(self._left)[:5]}"
        digest = blake2b(digest_size=16, person=b"tailpack-wts-v2")
        for name in self._names:
            digest.update(self._digests[name])
        return digest.digest()

    def _read(self, name: str) -> torch.Tensor:
        stored = self._found[name]
        with naming(stored.file):
            if stored.file not in self._handles:
                self._handles[stored.file] = safe_open(stored.file, framework="pt")
            tensor: torch.Tensor = self._handles[stored.file].get_tensor(name)
        if tuple(tensor.shape) != stored.shape:
            raise ModelError(
                f"{stored.file.name} has changed while it was read",
                reason="UNREADABLE_WEIGHTS",
                given=f"tensor {name}: {tuple(tensor.shape)}",
                allowed=stored.shape,
            )
        digest = blake2b(f"{name} {stored.dtype} {stored.shape}\n".encode(), digest_size=16)
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._digests[name] = digest.digest()
        self._done += stored.num_bytes
        return tensor


def _is_finite(value: torch.Tensor) -> bool:
    if value.dtype == torch.float8_e4m3fn:  # torch cannot say it of these; they have two NaN and no infinity
        return bool((value.view(torch.uint8) & 0x7F != 0x7F).all())
    return not value.is_floating_point() or bool(torch.isfinite(value).all())


class _Shape(torch.Tensor):
    """A tensor without values. torch's own way to join such brings sympy and more: seconds of a worker's start."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.cat:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if kwargs and "out" in kwargs:
            return kwargs["out"]
        (parts,) = args
        return parts[0].new_empty((sum(len(part) for part in parts), *parts[0].shape[1:]))


class Shapes:
    """As ``Tensors``, of tensors on torch's device "meta": nothing is read."""

    def __init__(self, expected: Mapping[str, Expected], dtype: torch.dtype) -> None:
        self._left = {name: wanted for name, wanted in expected.items() if wanted.is_held}
        self._dtype = dtype

    @overload
    def pop(self, name: str, /) -> torch.Tensor: ...

    @overload
    def pop(self, name: str, default: None, /) -> torch.Tensor | None: ...

    def pop(self, name: str, default: None = None, /) -> torch.Tensor | None:
        wanted = self._left.pop(name, None)
        if wanted is None:
            return None
        dtype = getattr(torch, wanted.held) if wanted.held else self._dtype
        shape = (*wanted.shape[:-1], wanted.shape[-1] * wanted.packed) if wanted.packed > 1 else wanted.shape
        return torch.empty(shape, dtype=dtype, device="meta").as_subclass(_Shape)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Turns what reading ``file`` raises into a ModelError (UNREADABLE_WEIGHTS) that names it."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, RecursionError, RuntimeError) as error:  # RuntimeError: no mapping
        raise ModelError(
            f"cannot read {file.name}: {error}",
            reason="UNREADABLE_WEIGHTS",
            given=file,
            allowed="a readable, whole file",
        ) from error
