"""Where each tensor of a network lies in one piece of memory, and the network's tensors put there.

A network is an object whose attributes hold tensors: by themselves, in lists, tuples, dicts and dataclasses. A tensor's
name is its path there. What the constructor made of the files (fused, dequantised, converted) is what is laid out, so
whoever maps it computes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from protos import kvstore_pb2
from protos.errors import InternalError

ALIGNMENT = 512
"""Bytes, of every tensor: what torch's own allocator on a GPU gives."""

_Change = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Place:
    """A tensor's place: ``offset`` in bytes; ``shape``, contiguous."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, out of memory u8 [Layout.num_bytes]."""
        return memory[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)

    def checksum(self, memory: torch.Tensor) -> int:
        """Sum of its 64-bit words mod 2^64; the last one is filled up by the zeros that follow. It finds accidents."""
        words = memory[self.offset : self.offset + -(-self.num_bytes // 8) * 8].view(torch.int64)
        return int(words.sum()) & ((1 << 64) - 1)


@dataclass(frozen=True)
class Layout:
    """``places``: in order of offsets; ``by_path``: of every path, of which two may be of one tensor."""

    places: tuple[Place, ...]
    by_path: Mapping[str, Place]
    num_bytes: int

    @staticmethod
    def of(network: Any) -> Layout:
        """Of a network with values or without (torch's device "meta")."""
        places: list[Place] = []
        by_path: dict[str, Place] = {}
        seen: dict[int, Place] = {}  # by the tensor's id: it lives as long as the network does
        end = 0
        for path, tensor in tensors(network):
            place = seen.get(id(tensor))
            if place is None:
                num_bytes = tensor.numel() * tensor.element_size()
                if not num_bytes:
                    raise InternalError("a weight without values cannot be laid out", given=path)
                place = seen[id(tensor)] = Place(path, tensor.dtype, tuple(tensor.shape), end, num_bytes)
                places.append(place)
                end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            by_path[path] = place
        return Layout(tuple(places), by_path, end)

    def digest(self) -> bytes:
        """16 bytes of names, dtypes, shapes and offsets."""
        digest = blake2b(digest_size=16, person=b"tailpack-wlayout")
        for path, place in self.by_path.items():
            digest.update(f"{path} {place.name} {place.dtype_name} {place.shape} {place.offset}\n".encode())
        return digest.digest()

    def manifest(self, weights_digest: bytes, checksums: Mapping[str, int]) -> kvstore_pb2.WeightsManifest:
        return kvstore_pb2.WeightsManifest(
            weights_digest=weights_digest,
            tensors=[
                kvstore_pb2.WeightsTensor(
                    name=p.name, dtype=p.dtype_name, shape=p.shape, offset=p.offset, checksum=checksums[p.name]
                )
                for p in self.places
            ],
        )

    def mismatch(self, manifest: kvstore_pb2.WeightsManifest, num_bytes: int) -> str | None:
        """How a manifest of so many bytes differs from this layout; None: it does not."""
        if len(manifest.weights_digest) != 16:
            return f"a weights digest of {len(manifest.weights_digest)} bytes"
        if num_bytes != self.num_bytes or len(manifest.tensors) != len(self.places):
            return (
                f"{len(manifest.tensors)} tensors in {num_bytes} bytes, where it should be {len(self.places)} in "
                f"{self.num_bytes}"
            )
        for told, place in zip(manifest.tensors, self.places, strict=True):
            given = (told.name, told.dtype, tuple(told.shape), told.offset)
            if given != (wanted := (place.name, place.dtype_name, place.shape, place.offset)):
                return f"{given} where it should be {wanted}"
        return None


def tensors(network: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor and its path, in a fixed order."""
    found: list[tuple[str, torch.Tensor]] = []

    def note(path: str, tensor: torch.Tensor) -> torch.Tensor:
        found.append((path, tensor))
        return tensor

    replace_tensors(network, note)
    yield from found


def replace_tensors(network: Any, change: _Change) -> None:
    """Puts ``change(path, tensor)`` in place of every tensor. Piece by piece: what is replaced can go at once."""
    for name, value in sorted(vars(network).items()):
        setattr(network, name, _changed(name, value, change))


def _changed(path: str, value: Any, change: _Change) -> Any:
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, list):
        for index in range(len(value)):
            value[index] = _changed(f"{path}.{index}", value[index], change)
        return value
    if isinstance(value, dict):
        for key in value:
            value[key] = _changed(f"{path}.{key}", value[key], change)
        return value
    if isinstance(value, tuple):
        parts = value._asdict() if hasattr(value, "_asdict") else dict(enumerate(value))
        new = [_changed(f"{path}.{key}", part, change) for key, part in parts.items()]
        return type(value)(*new) if hasattr(value, "_asdict") else tuple(new)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        new_fields = {name: _changed(f"{path}.{name}", part, change) for name, part in fields.items()}
        same = all(new_fields[name] is fields[name] for name in fields)
        return value if same else dataclasses.replace(value, **new_fields)
    if value is None or isinstance(value, str | int | float | bool | torch.dtype | torch.device):
        return value
    raise InternalError("a network holds what may hide a tensor", given=f"{path}: {type(value).__name__}")
