"""What a worker takes of its machine's and its GPU's memory, by owner."""

from __future__ import annotations

import platform

import psutil
import torch

from protos import worker_pb2
from worker.config import WorkerConfig
from worker.gpu import torch_device
from worker.memory_plan import total
from worker.weights import Model

HOST = "host"


def worker_memory(config: WorkerConfig, model: Model, device: str) -> worker_pb2.WorkerMemory:
    """Now. Owners: "weights", and by themselves those dequantised on loading; "workspaces", all else that torch's
    allocator holds on a GPU; "process", all else that is this process's alone in host memory (interpreter, libraries,
    workspaces).

    Args:
        device: what the kvstore calls the worker's device.
    """
    weights = total(model.uses)
    resident = psutil.Process().memory_info()
    private = int(resident.rss - resident.shared)  # mapped arenas are shared, and the store's to tell
    answer = worker_pb2.WorkerMemory(host=platform.node(), kv_socket=str(config.kv_socket.absolute()))
    if not config.on_gpu:
        for use in model.uses:
            answer.uses.add(memory=HOST, owner=use.owner, num_bytes=use.num_bytes)
        answer.uses.add(memory=HOST, owner="process", num_bytes=max(0, private - weights))
        return answer
    gpu = torch_device(config.device)
    held = torch.cuda.memory_reserved(gpu)
    for use in model.uses:
        answer.uses.add(memory=device, owner=use.owner, num_bytes=use.num_bytes)
    answer.uses.add(memory=device, owner="workspaces", num_bytes=max(0, held - weights))
    answer.uses.add(memory=HOST, owner="process", num_bytes=private)
    answer.gpu_free_bytes, answer.gpu_total_bytes = torch.cuda.mem_get_info(gpu)
    return answer
