"""Which memory our objects hold: every tensor that can be reached from them, and every storage once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

OURS = ("worker.", "kernels.")  # modules whose objects are looked into; of others only containers are
_PLAIN = (int, float, str, bytes, bool, complex, type(None))


class Storage(NamedTuple):
    """Memory behind tensors. ``memory``: "cpu", or "cuda:0"."""

    memory: str
    address: int
    num_bytes: int


class Held(NamedTuple):
    """A tensor, or what leads to one: ``holder`` (a dict, also of an object's attributes, or a list) has it at ``key``;
    None: it cannot be replaced there.
    """

    name: str
    holder: Any
    key: Any
    what: Any


def storage_of(tensor: torch.Tensor) -> Storage:
    storage = tensor.untyped_storage()
    return Storage(str(tensor.device), storage.data_ptr(), storage.nbytes())


def storages(*roots: object) -> set[Storage]:
    """Those of ``roots`` that take memory."""
    found = {storage_of(each.what) for each in held(roots) if isinstance(each.what, torch.Tensor)}
    return {storage for storage in found if storage.num_bytes}


def held(root: object, name: str = "") -> list[Held]:
    """All that leads from ``root`` to a tensor, and the tensors: attributes of our own objects, items of containers,
    what a ``partial`` is given.
    """
    found: list[Held] = []
    _leads(Held(name, None, None, root), found, {})
    return found


def _leads(here: Held, found: list[Held], known: dict[int, bool]) -> bool:
    """Whether a tensor is behind ``here``; adds it and what is behind it."""
    what = here.what
    if isinstance(what, torch.Tensor):
        found.append(here)
        return True
    if isinstance(what, _PLAIN):
        return False
    if id(what) not in known:
        known[id(what)] = False  # also while it is looked into: it may lead to itself
        inside = [_leads(each, found, known) for each in _inside(here.name, what)]
        known[id(what)] = any(inside)
    if known[id(what)]:
        found.append(here)
    return known[id(what)]


def _inside(name: str, what: Any) -> Iterator[Held]:
    if isinstance(what, Mapping):
        yield from (Held(f"{name}[{key!r}]", what, key, value) for key, value in list(what.items()))
    elif isinstance(what, list | tuple | set | frozenset):
        if what and isinstance(next(iter(what)), _PLAIN):
            return  # token ids, page tables: long, and no tensor is among them
        holder = what if isinstance(what, list) else None
        yield from (Held(f"{name}[{index}]", holder, index, value) for index, value in enumerate(what))
    elif isinstance(what, partial):
        given = (*what.args, *what.keywords.values())
        yield from (Held(f"{name}({index})", None, None, value) for index, value in enumerate(given))
    elif type(what).__module__.startswith(OURS):
        own = getattr(what, "__dict__", {})
        yield from (Held(f"{name}.{key}", own, key, value) for key, value in list(own.items()))
