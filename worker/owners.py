"""Who holds a worker's memory: what the ledger is told of model, KV memory and engine as they are made."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from kernels.linear_cuda import LinearWeight
from kvstore.client import Arena
from protos import worker_pb2
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.gpu import torch_device
from worker.held import held, storages
from worker.ledger import Ledger
from worker.memory_budget import Budget
from worker.memory_meter import HOST, meter
from worker.memory_plan import (
    BUFFERS,
    CONTEXT,
    FIRST_STEP,
    KERNELS,
    LOADING,
    MODEL_TABLES,
    PROCESS,
    REPACKED,
    STATE,
    TABLES,
    WORKSPACES,
)
from worker.weights import Model


def begin(config: WorkerConfig, budget: Budget | None = None) -> Ledger:
    """Before anything is loaded. Makes a context on a GPU."""
    device = torch_device(config.device)
    planned = {(str(device), use.owner): use.num_bytes for use in budget.uses} if budget is not None else {}
    return Ledger(meter(device), CONTEXT if config.on_gpu else PROCESS, planned)


def loaded(ledger: Ledger, config: WorkerConfig, model: Model) -> None:
    """Weights that the kvstore holds are the store's to tell."""
    if not model.uses:
        num_bytes = sum(storage.num_bytes for storage in storages(model.network))
        ledger.elsewhere(_memory(config), num_bytes, model.network)
    ledger.claim(MODEL_TABLES, model.network)
    ledger.divide(_memory(config), MODEL_TABLES, {use.owner: use.num_bytes for use in model.uses})
    ledger.mark(LOADING)


def made(ledger: Ledger, config: WorkerConfig, engine: Engine, arenas: Iterable[Arena]) -> None:
    """The engine over its KV memory, before its first step."""
    runner = engine.runner
    num_bytes = sum(arena.chunks.allocated_bytes for arena in arenas if arena.chunks is not None)
    ledger.elsewhere(_memory(config), num_bytes, vars(runner.kv))
    graphs = runner.graphs
    if graphs is not None:
        inside = [each.what for each in held(vars(graphs.layers))]
        ledger.claim(REPACKED, [each for each in inside if isinstance(each, LinearWeight)])
        ledger.claim(STATE, graphs.state)
        ledger.claim(BUFFERS, vars(graphs.layers))
    ledger.claim(WORKSPACES, runner.attention)
    ledger.claim(TABLES, engine.packing)
    ledger.mark(KERNELS)


def ready(ledger: Ledger) -> None:
    """After the first step."""
    ledger.settle(FIRST_STEP)


def told(ledger: Ledger, config: WorkerConfig, device: str) -> worker_pb2.WorkerMemory:
    """Now, as ``tailpack memory`` and metrics show it. ``device``: what the kvstore calls the worker's device."""
    answer = worker_pb2.WorkerMemory(host=platform.node(), kv_socket=str(config.kv_socket.absolute()))
    reading = ledger.read()
    for each in reading.owned:
        memory = each.memory if each.memory == HOST else device
        answer.uses.add(memory=memory, owner=each.owner, num_bytes=each.num_bytes, planned_bytes=each.planned)
    for memory, measured in reading.measured.items():
        if memory != HOST:
            answer.gpu_free_bytes, answer.gpu_total_bytes = measured.free, measured.total
    return answer


def _memory(config: WorkerConfig) -> str:
    return str(torch_device(config.device)) if config.on_gpu else HOST
