"""A model whose weights the kvstore holds: found there and mapped, or loaded, moved there and mapped all the same.

Every life of a worker computes from the same mapping, so a restart takes no reading, and workers of one model on one
host share it. What the store has is compared with the layout that this worker computes, and with checksums; what does
not fit is refused by name, given up by the store, and made anew.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

import structlog
import torch

from kvstore.weights_client import Found, Lease, use_weights
from protos.errors import ModelError
from protos.version import release
from worker.config import WorkerConfig
from worker.device_memory import Driver
from worker.families import Network
from worker.gpu import memory_of, store_name
from worker.weights import Model, Plan
from worker.weights_layout import Layout, replace_tensors
from worker.weights_memory import damaged, fill, host_memory, mapped

log = structlog.get_logger("worker")

VERSION = 1  # of the layout and what is in it: raise it when the same files give other bytes


def open_model(config: WorkerConfig, driver: Driver | None = None) -> tuple[Model, Lease]:
    """The model, and the lease of its weights: to be closed when they are used no more.

    Args:
        driver: of the config's GPU; None: CUDA's.

    Raises:
        What ``load_model`` raises. Unavailable: KVSTORE_NOT_THERE. NotBuilt: OLDER_KVSTORE. CapacityError:
            NOT_ENOUGH_MEMORY, for the weights.
    """
    plan = Plan.of(config)
    network = plan.without_weights()
    layout = Layout.of(network)
    if config.on_gpu:
        driver = driver or memory_of(store_name(config.device))
    where = store_name(config.device) if config.on_gpu else host_memory(os.sched_getaffinity(0))
    key = _key(plan, layout, where)
    told = plan.form.told(config.weights)
    lease = use_weights(
        config.kv_socket,
        worker_id=config.worker_id,
        key=key,
        memory=where,
        model=config.name,
        form=plan.form.owner,
    )
    try:
        while (found := lease.found) is not None:
            memory = _mapped(found, layout, driver)
            if isinstance(memory, str):
                lease.refuse(memory)
                continue
            lease.use()
            log.info("weights mapped", form=told, num_bytes=layout.num_bytes, memory=where)
            return _placed(plan, network, layout, memory, found.manifest.weights_digest), lease
        network, digest = plan.load()
        if _key(plan, layout, where) != key:
            raise ModelError(
                "the model's files have changed while they were read", reason="UNREADABLE_WEIGHTS", given=config.model
            )
        filled = fill(network, layout, driver)
        memory = mapped(filled, driver)
        checksums = {place.name: place.checksum(memory) for place in layout.places}
        lease.give(filled, layout.manifest(digest, checksums))
        log.info("weights loaded", form=told, num_bytes=layout.num_bytes, memory=where)
        return _placed(plan, network, layout, memory, digest), lease
    except BaseException:
        lease.close()
        raise


def _mapped(found: Found, layout: Layout, driver: Driver | None) -> torch.Tensor | str:
    """u8 [layout.num_bytes]; or why it is not to be used. What cannot be mapped or read is not, either: kept by the
    store, it would end this worker's every life.
    """
    try:
        return _checked(found, layout, driver)
    except Exception as failure:  # noqa: BLE001 - of CUDA's and torch's many
        return f"it cannot be read: {type(failure).__name__}: {failure}"


def _checked(found: Found, layout: Layout, driver: Driver | None) -> torch.Tensor | str:
    if (why := layout.mismatch(found.manifest, found.memory.num_bytes)) is not None:
        return f"its layout is another: {why}"
    memory = mapped(found.memory, driver)
    if (name := damaged(memory, layout, [told.checksum for told in found.manifest.tensors])) is not None:
        return f"tensor {name} is damaged"
    return memory


def _placed(plan: Plan, network: Network, layout: Layout, memory: torch.Tensor, digest: bytes) -> Model:
    """The model with its tensors there. ``network``: without values."""
    views = {place.name: place.view(memory) for place in layout.places}
    replace_tensors(network, lambda path, _: views[layout.by_path[path].name])
    return plan.model(network, digest, ())


def _key(plan: Plan, layout: Layout, where: str) -> bytes:
    """Of all that decides the bytes. Files are taken for the same while they look untouched, as make and git do."""
    key = blake2b(digest_size=16, person=b"tailpack-weights")
    folder = plan.config.model
    files = sorted({stored.file for stored in plan.found.values()})
    made_by = (VERSION, release(), torch.__version__, where, plan.dtype, plan.form, layout.digest().hex())
    for part in (*made_by, (folder / "config.json").read_bytes().hex(), *map(_looks, files)):
        key.update(f"{part}\n".encode())
    return key.digest()


def _looks(file: Path) -> str:
    seen = file.stat()
    return f"{file.name} {seen.st_size} {seen.st_mtime_ns} {seen.st_ctime_ns}"
