"""Who holds a worker's memory: objects, torch's allocator, phases of the start; and what nobody does."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from structlog.testing import capture_logs

from worker import ledger as ledger_module
from worker.held import Storage, storages
from worker.ledger import DEVICE_LIMIT, Ledger, Owned
from worker.memory_meter import HOST, Measured

GPU = "cuda:0"
MIB = 1 << 20


class Machine:
    """A GPU and a host, counted in MiB; torch's allocator has the addresses from 1000 on."""

    def __init__(self) -> None:
        self.host, self.context, self.reserved, self.pools, self.allocated, self.mapped = 200, 500, 0, 0, 0, 0

    def __call__(self) -> dict[str, Measured]:
        used = self.context + self.reserved + self.mapped
        blocks = ((1000, 1000 + self.reserved),) if self.reserved else ()
        device = Measured(
            used * MIB, self.reserved * MIB, self.pools * MIB, 0, self.allocated * MIB, 4000 * MIB, blocks=blocks
        )
        return {HOST: Measured(self.host * MIB), GPU: device}


@dataclass
class Thing:
    """Stands for an object of ours that holds memory."""

    held: list[Storage] = field(default_factory=list)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(ledger_module, "storages", lambda *roots: {storage for root in roots for storage in root.held})
    return Machine()


def thing(machine: Machine, size: int, *, in_torch: bool = True) -> Thing:
    """Makes one of so many MiB."""
    if not in_torch:
        machine.mapped += size
        return Thing([Storage(GPU, 10, size * MIB)])
    found = Thing([Storage(GPU, 1000 + machine.reserved, size * MIB)])
    machine.reserved += size
    machine.allocated += size
    return found


def sizes(ledger: Ledger, memory: str = GPU) -> dict[str, int]:
    return {each.owner: each.num_bytes // MIB for each in ledger.read().owned if each.memory == memory}


def started(machine: Machine) -> Ledger:
    """As a worker starts."""
    ledger = Ledger(machine, "context", {(GPU, "activations, kept by torch's allocator"): 300 * MIB})
    weights = thing(machine, 1000)
    machine.context += 30
    ledger.claim("weights", weights)
    ledger.mark("loading")
    ledger.elsewhere(GPU, 640 * MIB, thing(machine, 640, in_torch=False))
    ledger.claim("workspaces", thing(machine, 50), weights)
    machine.reserved += 70
    machine.pools += 70
    machine.context += 11
    ledger.mark("kernels")
    machine.reserved += 40
    machine.allocated += 32  # a library's
    machine.context += 5
    machine.host += 9
    ledger.settle("first steps")
    return ledger


def test_every_byte_of_a_start_has_an_owner(machine: Machine) -> None:
    ledger = started(machine)
    assert sizes(ledger) == {
        "weights": 1000,
        "workspaces": 50,
        "graph pools": 70,
        "libraries' workspaces": 32,
        "activations, kept by torch's allocator": 8,
        "context": 500,
        "loading": 30,
        "kernels": 11,
        "first steps": 5,
        "unknown": 0,
    }
    told = sum(sizes(ledger).values()) + 640  # the arenas are the store's to tell
    assert told * MIB == machine()[GPU].used
    assert sizes(ledger, HOST) == {"context": 200, "first steps": 9, "unknown": 0}
    assert ledger.read().grown == {HOST: 0, GPU: 0} and ledger.alarm_bytes() == 0


def test_what_comes_later_beside_all_owners_is_unknown_and_an_alarm_once(machine: Machine) -> None:
    ledger = started(machine)
    machine.context += 60
    with capture_logs() as lines:
        assert ledger.alarm_bytes() == 0 and sizes(ledger)["unknown"] == 60
        machine.context += 10
        assert DEVICE_LIMIT == 64 * MIB and ledger.alarm_bytes() == 70 * MIB
        assert ledger.alarm_bytes() == 70 * MIB
    (line,) = lines
    assert (line["memory"], line["grown_mib"], line["limit_mib"]) == (GPU, 70, 64)
    machine.context -= 70
    assert ledger.alarm_bytes() == 0, "what is given back is no growth"


def test_activations_may_grow_to_what_was_planned_for_them(machine: Machine) -> None:
    ledger = started(machine)
    machine.reserved += 292
    (activations,) = (each for each in ledger.read().owned if each.owner.startswith("activations"))
    assert activations == Owned(GPU, activations.owner, 300 * MIB, 300 * MIB) and ledger.read().grown[GPU] == 0
    machine.reserved += 100
    assert ledger.read().grown[GPU] == 100 * MIB == ledger.alarm_bytes()


def test_parts_of_an_owner_are_shown_and_add_up(machine: Machine) -> None:
    ledger = Ledger(machine, "context")
    ledger.claim("rest", thing(machine, 100))
    ledger.divide(GPU, "rest", {"bf16": 60 * MIB, "fp8": 30 * MIB})
    assert sizes(ledger) == {
        "bf16": 60,
        "fp8": 30,
        "rest": 10,
        "context": 500,
        "unknown": 0,
    }


def test_nothing_is_growth_before_the_worker_is_ready(machine: Machine) -> None:
    ledger = Ledger(machine, "context")
    machine.context += 1000
    assert ledger.read().grown == {HOST: 0, GPU: 0} and ledger.alarm_bytes() == 0


def test_a_storage_counts_once_whatever_looks_at_it() -> None:
    whole = torch.zeros(64, 4)
    found = storages({"a": whole, "b": [whole[3:], (whole.view(-1),)]}, whole.t())
    assert found == {Storage("cpu", whole.data_ptr(), 64 * 4 * 4)}
