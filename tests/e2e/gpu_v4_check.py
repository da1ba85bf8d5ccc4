"""DeepSeek-V4 on a GPU beside a CPU: `python3 -m tests.e2e.gpu_v4_check --records FILE --commit SHA`, four minutes.

Small random models (tiny-v4's geometry, with heads of 128, 512 and 96, several seeds) run through the engine over a
device arena: prompts in chunks, ragged batches, hundreds of decode steps past several seals, rollbacks, forks, prefix
hits, guesses, every KV mode. In float32 each step's logits are compared with the CPU's; in bfloat16 by what they say;
and modes with each other, on the GPU, bit by bit. Tokens follow a script where two runs are compared, so that both
always go on from the same history.

One JSON line a case; a case that fails or breaks (its traceback is in the line) stops no other. Exit status 1: one did.
`--device cpu` runs the same with the kernels' launches done by PyTorch, to try the script (needs pytest).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import torch

from kvstore.arena import Arena, Memory
from kvstore.local import LocalAttachment
from kvstore.pages import PageState
from protos import types_pb2 as pb
from tests.unit.fake_kv import FakeAttachment
from tests.unit.tiny import Harness, config_for, request
from worker import engine, sampler, tiny_v4
from worker.device_memory import DeviceArena, DeviceMemory, Driver
from worker.engine import Engine
from worker.gpu import memory_of
from worker.model_runner import check_tiles
from worker.models import deepseek_v4_attention, deepseek_v4_decode
from worker.models.deepseek_v4_indexer import choose
from worker.sampler import Draw, Drawn
from worker.sequence import Sequence as Seq
from worker.weights import Model, load_model

FLOAT32_MOST = 1e-4  # ||difference|| / ||logits|| of a step, summed in another order through all layers
NEAR_TIE = 1e-5  # of index scores: below, the CPU and the GPU may well choose other rows
BF16_AGREE, BF16_MEDIAN = 0.85, 0.12  # least share of like argmaxes, most median of the same norm
LOSSY_MOST = 0.1  # where what is compared was read from packed rows: a code may fall either way
MODES: dict[str, dict[str, Any]] = {
    "dense": {},
    "fp8": {"kv_mode": "fp8"},
    "turboquant": {"kv_mode": "turboquant"},
    "window": {"kv_mode": "window"},
}
SHAPES: dict[str, dict[str, Any]] = {  # and who packs their raw rows
    "d128": {},  # kernels, both codecs
    "d512": {"head_dim": 512},  # a kernel for TurboQuant, PyTorch for fp8 (590 B)
    "d96": {"head_dim": 96},  # PyTorch
}
MANY_HEADS = {"index_n_heads": 32}  # with few, scores of exactly 0 meet at the boundary of the choice
LENGTHS = (1, 3, 130, 390)
VOCAB = tiny_v4.CONFIG["vocab_size"]


class GpuAttachment(FakeAttachment):
    """A local attachment whose pages and tails lie on a GPU. What nobody holds is NaN there."""

    def __init__(self, *arguments: Any, device: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._host = {"pages": self.arenas, "tails": self.tails}
        self._driver: Driver = memory_of(device)
        self._device = device
        self.bytes: dict[tuple[str, str], torch.Tensor] = {}
        self.arenas = {name: self._on_gpu("pages", name, arena) for name, arena in self.arenas.items()}
        self.tails = {name: self._on_gpu("tails", name, arena) for name, arena in self.tails.items()}

    def _on_gpu(self, kind: str, name: str, arena: Arena) -> Arena:
        num_bytes = arena.num_pages * arena.page_bytes
        size = -(-num_bytes // self._driver.granularity) * self._driver.granularity
        fds = DeviceMemory(self._driver).create([size])
        memory = Memory(tuple(fds), num_bytes, (size,))
        on_gpu = Arena(arena.group, arena.num_pages, arena.page_bytes, memory, self._device)
        mapped = DeviceArena.of(self._driver, on_gpu).tensor().view(arena.num_pages, arena.page_bytes)
        mapped.fill_(0xFF)
        self.bytes[kind, name] = mapped
        return on_gpu

    def release(self, slots: Sequence[int], damaged: Mapping[str, Sequence[int]] | None = None) -> int:
        freed = LocalAttachment.release(self, slots, damaged)  # not the fake's, which writes in host memory
        for name, table in self.table.groups.items():
            free = [page for page in range(table.num_pages) if table.state(page) == PageState.FREE]
            if free and ("pages", name) in self.bytes:
                self.bytes["pages", name][torch.tensor(free)] = 0xFF
        for (kind, _), memory in self.bytes.items():
            if kind == "tails":
                memory[torch.tensor(list(slots))] = 0xFF
        return freed

    def verify(self) -> list[str]:
        for kind, arenas in self._host.items():
            for name, arena in arenas.items():
                host = torch.frombuffer(arena.buffer, dtype=torch.uint8).view(arena.num_pages, arena.page_bytes)
                host.copy_(self.bytes[kind, name])
        return super().verify()


class GpuHarness(Harness):
    """A harness over a ``GpuAttachment``; of the CPU, as it is."""

    def __init__(self, model: Model, config: Any, *, num_pages: int = 96) -> None:
        if not (config.on_gpu and torch.cuda.is_available()):
            super().__init__(model, config, num_pages=num_pages)
            return
        self.attachment = GpuAttachment(
            model.geometry,
            num_pages=num_pages,
            max_sequences=config.num_slots,
            max_sequence_tokens=model.info.max_sequence_tokens,
            checkpoint_slots=config.num_checkpoints,
            device=config.device,
        )
        self.results, self.outputs = [], {}
        self.engine = Engine(config, model, self.attachment, self._take)


@dataclass
class Run:
    """What an engine computed: logits of each step that wanted some, in order; ``gaps`` of the indexer's choices."""

    logits: list[torch.Tensor] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    pages_packed: int = 0
    dequantised: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    verified: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Models:
    """Model folders, and models loaded once for each device and dtype."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self.device = folder, device
        self._networks: dict[tuple[str, str, str], Any] = {}

    def harness(self, name: str, where: str, dtype: str, seed: int = 1, **settings: Any) -> GpuHarness:
        """``where``: "cpu" or "gpu"."""
        folder = self._folder / f"{name}-{seed}"
        if not folder.exists():
            tiny_v4.write_model(folder, seed=seed, **MANY_HEADS, **SHAPES.get(name, {}))
        device = "cpu:0" if where == "cpu" else "cuda:0"
        changes = {"prefill_chunk": 100, "max_sequence_tokens": 1024, "max_running": 6, "checkpoints": 6, **settings}
        config = config_for(folder, device=device, dtype=dtype, **changes)
        return GpuHarness(load_model(config), config)


@contextlib.contextmanager
def recorded(run: Run, *, scripted: bool, gaps: bool) -> Iterator[None]:
    """Keeps what is sampled from; ``scripted``: tokens follow from positions, not from logits."""
    real_sample = sampler.sample
    modules = (deepseek_v4_attention, deepseek_v4_decode)

    def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        run.logits.append(logits.clone())
        if not scripted:
            return real_sample(logits, draws)
        tokens = [7 * len(draw.token_ids) ** 2 + 13 * draw.token_ids[0] for draw in draws]
        return [Drawn(token % VOCAB, None) for token in tokens]

    def watched(scores: torch.Tensor, num_visible: torch.Tensor, topk: int) -> torch.Tensor:
        for row, visible in zip(scores, num_visible.tolist(), strict=True):
            if visible > topk:
                best = row[:visible].topk(topk + 1).values
                run.gaps.append(float(best[-2] - best[-1]))
        return choose(scores, num_visible, topk)

    engine.sample = sample  # type: ignore[attr-defined]
    for module in modules if gaps else ():
        module.choose = watched  # type: ignore[attr-defined]
    began = time.perf_counter()
    try:
        yield
    finally:
        run.seconds = round(time.perf_counter() - began, 2)
        engine.sample = real_sample  # type: ignore[attr-defined]
        for module in modules:
            module.choose = choose  # type: ignore[attr-defined]


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def running(harness: Harness, request_id: str) -> Seq:
    return next(s for s in harness.engine._running if s.request.request_id == request_id)


def told(harness: Harness, run: Run) -> Run:
    load = harness.engine.load()
    run.pages_packed = load.pages_packed
    run.dequantised = {k: v for k, v in harness.engine._held.kv.counters.rows_dequantised.items() if v}
    run.verified = harness.attachment.verify()
    return run


# --- what is run on both, or in every mode ---


def ragged(harness: GpuHarness, max_tokens: int = 150) -> None:
    """Prompts of four lengths, the longest in four chunks; decode seals at 272, 400 and 528 tokens."""
    harness.run(*(request(f"r{length}", prompt(length, length), max_tokens) for length in LENGTHS))


def history(harness: GpuHarness) -> None:
    """A prefix hit, a fork that is rolled back, rollbacks inside the margin."""
    harness.run(request("one", prompt(6, 203), 10))
    known = prompt(6, 203) + harness.tokens("one") + prompt(7, 40)
    harness.run(request("two", known, 8, reuse=pb.PREFIX_REUSE_EXACT))
    usage = harness.outputs["two"][-1].usage
    assert usage is not None and (usage.cached_prompt_tokens, usage.prefix_exact) == (212, True), usage
    harness.engine._emit = lambda result: None  # offsets go back with a rollback
    harness.engine.submit(request("parent", prompt(8, 260), 400))
    harness.step(9)
    parent = running(harness, "parent")
    with torch.inference_mode():
        child = harness.engine.fork(parent, "child")
        assert child is not None
        harness.engine.truncate(child, child.num_computed - 5, next_token=7)
        rng = random.Random(5)
        for step in range(170):
            if step % 13 == 12:
                cut = parent.num_computed - rng.randrange(1, 17)
                if cut >= parent.num_prompt:
                    assert harness.engine.truncate(parent, cut, next_token=rng.randrange(VOCAB)).exact
            harness.engine.step()


def lossy(harness: GpuHarness) -> None:
    """A rollback behind what is dense, which is sealed at 272 tokens: the window is refilled from a packed page."""
    harness.engine._emit = lambda result: None
    harness.engine.submit(request("r", prompt(4, 100), 700, emitted=prompt(5, 173)))
    harness.step(3)
    sequence = running(harness, "r")
    assert (sequence.num_computed, sequence.bases["raw"]) == (273, 128), sequence
    with torch.inference_mode():
        found = harness.engine.truncate(sequence, 254, next_token=9)  # whose window begins at 127
    assert not found.exact and found.refills, found
    harness.step(60)


Work = Callable[[GpuHarness], None]


@dataclass
class Check:
    """The cases and what they found."""

    models: Models
    commit: str
    failed: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)
    runs: dict[str, Run] = field(default_factory=dict)

    def say(self, case: str, passed: bool | None, **found: Any) -> None:
        """``passed`` None: it did not run."""
        self.failed += passed is False
        line = {"bench": "gpu_v4_check", "case": case, "passed": passed, **found}
        self.lines.append(line)
        print(json.dumps(line), flush=True)

    def case(self, name: str, do: Callable[[], tuple[bool, dict[str, Any]]]) -> None:
        if any(line["case"] == name for line in self.lines):
            return
        began = time.perf_counter()
        try:
            passed, found = do()
        except Exception as error:  # noqa: BLE001 -- reported like any other finding
            where = traceback.format_exc().splitlines()[-24:]
            passed, found = False, {"error": f"{type(error).__name__}: {error}"[-1500:], "traceback": where}
        self.say(name, passed, seconds=round(time.perf_counter() - began, 1), **found)

    def run(
        self, shape: str, where: str, dtype: str, mode: str, work: Work, *, scripted: bool = True, **settings: Any
    ) -> Run:
        """Runs once, and keeps it by its name."""
        name = f"{shape} {where} {dtype} {mode} {work.__name__} {settings}"
        if name not in self.runs:
            harness, run = self.models.harness(shape, where, dtype, **MODES[mode], **settings), Run()
            with recorded(run, scripted=scripted, gaps=where == "cpu"):
                work(harness)
            self.runs[name] = told(harness, run)
        return self.runs[name]

    def like_the_cpu(self, shape: str, mode: str, work: Work, *, most: float = FLOAT32_MOST, **settings: Any) -> None:
        """In float32, against the CPU in the same mode where that may change bits, else in mode dense."""

        def do() -> tuple[bool, dict[str, Any]]:
            exact = most == FLOAT32_MOST
            cpu = self.run(shape, "cpu", "float32", "dense" if exact else mode, work, **settings)
            gpu = self.run(shape, "gpu", "float32", mode, work, **settings)
            errors = differences(cpu, gpu)
            gap = min(cpu.gaps, default=1.0)
            near_tie = gap < NEAR_TIE
            median = sorted(errors)[len(errors) // 2]
            passed = (max(errors) <= most or (near_tie and median <= most)) and not gpu.verified
            if exact:
                passed &= not gpu.dequantised and (gpu.pages_packed > 0) == (mode in ("fp8", "turboquant"))
            return passed, {
                "most": max(errors),
                "median": sorted(errors)[len(errors) // 2],
                "worst_step": errors.index(max(errors)),
                "over": sum(error > most for error in errors),
                "limit": most,
                "steps": len(errors),
                "near_tie": near_tie,
                "least_gap": gap,
                **facts(gpu),
                "cpu_s": cpu.seconds,
            }

        self.case(f"float32-{shape}-{mode}-{work.__name__}{named(settings)}", do)

    def like_each_other(self, shape: str, dtype: str, work: Work, modes: Sequence[str] = tuple(MODES)) -> None:
        """On the GPU, bit by bit."""
        for mode in modes[1:]:

            def do(mode: str = mode) -> tuple[bool, dict[str, Any]]:
                one, two = (self.run(shape, "gpu", dtype, each, work) for each in (modes[0], mode))
                same = [torch.equal(a, b) for a, b in zip(one.logits, two.logits, strict=True)]
                return all(same) and not two.dequantised and not two.verified, {
                    "steps": len(same),
                    "unlike": same.count(False),
                    "first_unlike": same.index(False) if False in same else None,
                    **facts(two),
                }

            self.case(f"bits-{shape}-{dtype}-{modes[0]}-{mode}-{work.__name__}", do)

    def bfloat16(self, shape: str, mode: str, work: Work) -> None:
        def do() -> tuple[bool, dict[str, Any]]:
            cpu, gpu = (self.run(shape, where, "bfloat16", mode, work) for where in ("cpu", "gpu"))
            errors = differences(cpu, gpu)
            rows = list(zip(torch.cat(cpu.logits), torch.cat(gpu.logits), strict=True))
            agree = sum(bool(a.argmax() == b.argmax()) for a, b in rows) / len(rows)
            median = sorted(errors)[len(errors) // 2]
            passed = agree >= BF16_AGREE and median <= BF16_MEDIAN and not gpu.verified
            found = {"argmax_alike": round(agree, 4), "median": median, "most": max(errors), "steps": len(errors)}
            return passed, {**found, **facts(gpu), "cpu_s": cpu.seconds}

        self.case(f"bfloat16-{shape}-{mode}-{work.__name__}", do)

    def captured(self, mode: str) -> None:
        """Greedy tokens of captured steps in bfloat16, of sequences that come and go, are mostly those without."""

        def do() -> tuple[bool, dict[str, Any]]:
            found: dict[bool, dict[str, list[int]]] = {}
            launched = 0
            for on in (False, True):
                harness = self.models.harness("d128", "gpu", "bfloat16", decode_graphs=on, **MODES[mode])
                lives = ((1, 60), (3, 30), (130, 140), (390, 150), (250, 20), (30, 90), (127, 40))
                asked = [request(f"r{length}", prompt(length, length), count) for length, count in lives]
                found[on] = harness.run(*asked)
                rows = harness.engine._runner._decode
                launched = rows.graphs.state.num_launched if rows is not None else 0
            pairs = [(found[False][r], found[True][r]) for r in found[False]]
            alike = sum(a == b for one, two in pairs for a, b in zip(one, two, strict=True))
            tokens = sum(len(one) for one, _ in pairs)
            # A sequence that parts at a near-tie goes on from another history.
            passed = alike >= 0.5 * tokens and launched > 100
            same = sum(one == two for one, two in pairs)
            return passed, {
                "tokens": tokens,
                "alike": alike,
                "sequences_alike": same,
                "of": len(pairs),
                "steps": launched,
            }

        self.case(f"captured-bfloat16-{mode}", do)

    def guesses(self, dtype: str, drafts: int, *, deterministic: bool) -> None:
        """Greedy tokens with the MTP block's guesses are those without."""

        def do() -> tuple[bool, dict[str, Any]]:
            found: dict[int, dict[str, list[int]]] = {}
            counted: dict[str, int] = {}
            for number in (0, drafts):
                harness = self.models.harness(
                    "d128", "gpu", dtype, drafts=number, deterministic=deterministic, **MODES["turboquant"]
                )
                asked = [request(f"r{length}", prompt(length, length), 30) for length in (1, 30, 127, 290)]
                found[number] = harness.run(*asked)
                load = harness.engine.load()
                counted = {"drafted": load.tokens_drafted, "accepted": load.tokens_accepted, "steps": load.num_steps}
            alike = sum(a == b for r in found[0] for a, b in zip(found[0][r], found[drafts][r], strict=True))
            tokens = sum(len(each) for each in found[0].values())
            # Elsewhere a row's bits depend on how many rows there are, and a near-tie may fall the other way.
            passed = alike == tokens if deterministic else alike >= 0.5 * tokens
            return passed and counted["drafted"] > 0, {"tokens": tokens, "alike": alike, **counted}

        self.case(f"guesses-{dtype}-{drafts}{'-deterministic' * deterministic}", do)

    def deterministic(self, dtype: str) -> None:
        """The same bits alone as in company; tiles hold what they promise on this GPU."""

        def do() -> tuple[bool, dict[str, Any]]:
            harness = self.models.harness("d128", "gpu", dtype, deterministic=True, **MODES["turboquant"])
            with torch.inference_mode():
                check_tiles(harness.engine._runner._network)
            asked = [request(f"r{length}", prompt(length, length), 24) for length in (5, 130, 300)]
            together = harness.run(*asked)
            alone: dict[str, list[int]] = {}
            for each in asked:
                alone |= self.models.harness("d128", "gpu", dtype, deterministic=True, **MODES["turboquant"]).run(each)
            alike = {r: sum(a == b for a, b in zip(together[r], alone[r], strict=True)) for r in together}
            return together == alone, {"alike": alike, "tokens": 24}

        self.case(f"deterministic-{dtype}", do)


def named(settings: dict[str, Any]) -> str:
    return "".join(f"-{name}-{value}" for name, value in settings.items())


def facts(run: Run) -> dict[str, Any]:
    return {
        "pages_packed": run.pages_packed,
        "rows_dequantised": run.dequantised,
        "checksums": run.verified[:3] or "right",
        "gpu_s": run.seconds,
    }


def differences(one: Run, two: Run) -> list[float]:
    """||a - b|| / ||a|| of each step; inf where one is not finite."""
    assert one.logits and [a.shape for a in one.logits] == [b.shape for b in two.logits]
    errors = [float((a - b).norm() / a.norm()) for a, b in zip(one.logits, two.logits, strict=True) if len(a)]
    return [error if error == error else float("inf") for error in errors]


def chunks_of_any_size(check: Check) -> None:
    """Logits behind a prompt of 300 tokens and four more, whatever the chunks; float32."""
    for chunk in (40, 7, 130, 1):

        def do(chunk: int = chunk) -> tuple[bool, dict[str, Any]]:
            whole, cut = (
                check.run("d128", where, "float32", "turboquant", one_prompt, prefill_chunk=size)
                for where, size in (("cpu", 300), ("gpu", chunk))
            )
            pairs = zip(*([logits for logits in run.logits if len(logits)] for run in (whole, cut)), strict=True)
            errors = [float((a - b).norm() / a.norm()) for a, b in pairs]
            gap = min(whole.gaps, default=1.0)
            return max(errors) <= FLOAT32_MOST or gap < NEAR_TIE, {"most": max(errors), "least_gap": gap, **facts(cut)}

        check.case(f"chunks-of-{chunk}", do)


def one_prompt(harness: GpuHarness) -> None:
    harness.run(request("r", prompt(11, 300), 5))


def cases(check: Check, shapes: Sequence[str]) -> None:
    """In order of worth."""
    check.like_the_cpu("d128", "turboquant", ragged)
    check.like_each_other("d128", "float32", ragged, ("dense", "turboquant"))
    check.bfloat16("d128", "turboquant", ragged)
    for mode in ("window", "turboquant", "dense"):
        check.captured(mode)
    check.guesses("float32", 3, deterministic=False)
    for mode in ("turboquant", "window"):
        check.like_the_cpu("d128", mode, history)
    check.like_the_cpu("d128", "turboquant", lossy, most=LOSSY_MOST)
    check.like_the_cpu("d512", "fp8", lossy, most=LOSSY_MOST)
    check.like_each_other("d128", "bfloat16", history, ("dense", "turboquant", "window"))
    check.deterministic("bfloat16")
    chunks_of_any_size(check)
    check.like_the_cpu("d128", "turboquant", ragged, most=LOSSY_MOST, pack_compressed="tq4")
    check.like_the_cpu("d128", "turboquant", ragged, seed=2)
    check.guesses("bfloat16", 2, deterministic=True)
    check.like_the_cpu("d128", "dense", history)
    check.like_the_cpu("d512", "turboquant", lossy, most=LOSSY_MOST)
    check.like_the_cpu("d128", "fp8", lossy, most=LOSSY_MOST)
    for mode in MODES:
        check.like_the_cpu("d128", mode, ragged)
    check.like_each_other("d128", "float32", ragged)
    for shape in shapes:
        for mode in MODES if shape == "d512" else ("turboquant", "fp8"):
            check.like_the_cpu(shape, mode, ragged)
    check.like_each_other("d512", "bfloat16", ragged)
    check.like_the_cpu("d128", "fp8", history)
    check.like_the_cpu("d128", "turboquant", ragged, seed=3)
    check.deterministic("float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shapes", default="d512,d96", help="beside d128")
    parser.add_argument("--only", default="", help="cases whose names hold this")
    parser.add_argument("--seconds", type=float, default=240.0, help="a case that would begin later is skipped by name")
    parser.add_argument("--records", type=Path, help="write the findings here too, a JSON object a line")
    parser.add_argument("--commit", default="")
    asked = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if asked.device == "cpu":
            import pytest

            from tests.unit.emulated_step import EmulatedStep

            EmulatedStep(stack.enter_context(pytest.MonkeyPatch.context()))
        check = Check(Models(folder, asked.device), asked.commit)
        deadline, real = time.monotonic() + asked.seconds, check.case

        def case(name: str, do: Callable[[], tuple[bool, dict[str, Any]]]) -> None:
            if asked.only in name:
                late = time.monotonic() > deadline
                check.say(name, None, skipped="time is up") if late else real(name, do)

        check.case = case  # type: ignore[method-assign]
        cases(check, [shape for shape in asked.shapes.split(",") if shape])
        del check.case
    if asked.records:
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        shared = {"machine": machine, "torch": torch.__version__, "commit": asked.commit}
        lines = [json.dumps({**line, **shared, "date": time.strftime("%Y-%m-%d")}) for line in check.lines]
        asked.records.write_text("\n".join(lines) + "\n")
    skipped = sum(line["passed"] is None for line in check.lines)
    print(f"{check.failed} of {len(check.lines) - skipped} cases failed, {skipped} were skipped", flush=True)
    sys.exit(check.failed > 0)


if __name__ == "__main__":
    main()
