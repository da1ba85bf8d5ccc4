"""What torch's profiler sees of some steps: on a GPU launches, waits, driver calls and the time that kernels run; on a
CPU operators and allocations.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from protos.errors import InternalError

TOP = 24
STEPS = "tailpack steps"
"""The range that is looked at: the profiler waits for the GPU, too, before and behind it."""


@dataclass
class Profile:
    """Of ``num_steps`` steps; everything is of one of them.

    Attributes:
        launches: calls that start work on the GPU: kernels, and graphs of many.
        waits: calls that block until the GPU is done with all before: a round trip each.
        event_waits: waits for one event, as for the tokens of the step before, while the next one runs.
        copies: asynchronous copies and fills that the host asked for.
        allocations: of memory, from the driver; on a CPU, of tensors.
        operators: of PyTorch that the host ran.
        calls: all of these by name.
        kernels: how many ran on the GPU. busy_us: time with at least one running; wall_us: from the first to the last.
        us_by_kernel: by name: microseconds a step, how many a step, the median of one.
    """

    num_steps: int
    launches: float = 0.0
    waits: float = 0.0
    event_waits: float = 0.0
    copies: float = 0.0
    allocations: float = 0.0
    operators: float = 0.0
    calls: dict[str, float] = field(default_factory=dict)
    kernels: float = 0.0
    busy_us: float = 0.0
    wall_us: float = 0.0
    us_by_kernel: dict[str, tuple[float, float, float]] = field(default_factory=dict)

    @property
    def busy_share(self) -> float:
        """Of the time from the first kernel to the last; 0 where there was none."""
        return self.busy_us / self.wall_us if self.wall_us else 0.0

    def us_of(self, *names: str) -> float:
        """Microseconds a step in kernels whose names have one of these in them."""
        return sum(us for kernel, (us, _, _) in self.us_by_kernel.items() if any(name in kernel for name in names))


def profiled(run: Callable[[], object], num_steps: int, device: torch.device) -> Profile:
    """``run`` makes ``num_steps`` steps."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, profile_memory=not on_gpu) as profiler:
        with record_function(STEPS):
            run()
        if on_gpu:
            torch.cuda.synchronize(device)
    results: Any = profiler.profiler.kineto_results
    return _summed(list(results.events()), num_steps)


def _summed(events: Sequence[Any], num_steps: int) -> Profile:
    calls: Counter[str] = Counter()
    kernels: dict[str, list[float]] = defaultdict(list)
    spans: list[tuple[int, int]] = []
    begin, end = _range(events)
    for event in events:
        name = str(event.name())
        if name == STEPS:
            continue
        if "CUDA" in str(event.device_type()):
            duration_ns = _ns(event, "duration")
            if duration_ns > 0 and not name.startswith("Memset") and "Context" not in name:
                at_ns = _ns(event, "start")
                kernels[_short(name)].append(duration_ns / 1e3)
                spans.append((at_ns, at_ns + duration_ns))
        elif not begin <= _ns(event, "start") <= end:
            continue
        elif name == "[memory]":
            calls["allocation"] += event.nbytes() > 0
        elif name.startswith(("cuda", "cu")):
            calls[name] += 1
        elif name.startswith("aten::"):
            calls["operator"] += 1
    a_step = {name: count / num_steps for name, count in calls.items() if count}

    def total(*words: str) -> float:
        return sum(count for name, count in a_step.items() if any(word in name for word in words))

    events_waited = total("EventSynchronize")
    busy_ns, wall_ns = busy(spans)
    return Profile(
        num_steps,
        launches=total("LaunchKernel", "GraphLaunch"),
        waits=total("Synchronize") - events_waited,
        event_waits=events_waited,
        copies=total("Memcpy", "Memset"),
        allocations=total("Malloc", "MemCreate", "HostAlloc", "allocation"),
        operators=total("operator"),
        calls={name: round(count, 2) for name, count in a_step.items()},
        kernels=sum(map(len, kernels.values())) / num_steps,
        busy_us=busy_ns / 1e3 / num_steps,
        wall_us=wall_ns / 1e3 / num_steps,
        us_by_kernel={
            name: (
                round(sum(each) / num_steps, 1),
                round(len(each) / num_steps, 1),
                round(statistics.median(each), 2),
            )
            for name, each in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:TOP]
        },
    )


def _range(events: Sequence[Any]) -> tuple[int, int]:
    """On the host, in the events' nanoseconds."""
    for event in events:
        if event.name() == STEPS and "CUDA" not in str(event.device_type()):
            begin = _ns(event, "start")
            return begin, begin + _ns(event, "duration")
    raise InternalError("the profiler did not see the steps")


def busy(spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(time in which at least one of ``spans`` [begin, end) runs, time from the first to the last)."""
    if not spans:
        return 0, 0
    ordered = sorted(spans)
    total, end = 0, ordered[0][0]
    for first, last in ordered:
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total, end - ordered[0][0]


def _ns(event: Any, what: str) -> int:
    exact = getattr(event, f"{what}_ns", None)
    return int(exact()) if exact is not None else int(1000 * getattr(event, f"{what}_us")())


def _short(name: str) -> str:
    return name.split("(")[0].split("<")[0][-60:] if "cutlass" not in name else name[:60]
