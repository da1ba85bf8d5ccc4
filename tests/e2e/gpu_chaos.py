"""Workers and kvstores killed in the middle of decoding on a GPU: `python -m tests.e2e.gpu_chaos --records FILE`.

One kvstore and one worker, without Ray, over a random model of SmolLM2's shape: deterministic mode, KV mode turboquant,
with `--graphs` decode steps from CUDA graphs. In each round some streams run; once all have a token, processes are
killed with SIGKILL at a random moment:

    worker            the store keeps the memory, the next worker goes on in it
    kvstore           the worker goes on, and hands its memory to the next store
    worker,kvstore    the worker; then the store, as soon as the next worker has the memory
    kvstore,worker    the store; then the worker, as soon as the next store has the memory
    both              at once: nothing is left, everything is computed again from the tokens
    fault             nobody is killed: a kernel of the worker's fails, which ends its CUDA context

Every stream must end with exactly the tokens of an undisturbed run, offsets without gap or repeat; while somebody holds
the memory no prompt token is prefilled again, and none that was committed is computed again. What the kvstore holds,
promises and counts goes back to nothing after each round; in the end the GPU's memory is where it was at the start.

The first two rounds start every process anew, imports and all, and tell where the time goes; the others fork theirs
from one that has imported everything. Prints one JSON line a round; exit status 1 when one is not as it must be, 2
without a GPU. `--device cpu` tries the script itself. The seed reproduces prompts and moments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.chaos.dying_worker import Death
from tests.chaos.node import Node, Server, Setting, last_lines, records
from tests.chaos.streams import Ask, Caller, Stream, Whole, undisturbed
from tests.chaos.zygote import ROOT, Forked, Zygote
from tests.e2e.gpu_in_flight import facts, used_mib
from tests.unit.tiny import SMOLLM2_135M, write_model

SMOLLM2 = {**SMOLLM2_135M, "vocab_size": 4096, "max_position_embeddings": 4096}
TINY: dict[str, Any] = SMOLLM2 | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 600,
}
PROMPTS = (1, 40, 130, 262, 300, 520, 700, 1000)
KINDS = ("worker", "kvstore", "fault", "worker", "worker,kvstore", "kvstore,worker", "both")
KEEPS_MEMORY = ("worker", "kvstore", "fault")
FAULT_FROM = 60  # steps of the worker's life, up to half of an answer
MOMENT = (0.02, 0.4)  # of the time that the undisturbed run took: when to strike, counted from the last first token
TIMEOUT_S = 120.0
LAST_ROUNDS_S = 15.0  # kept for the end
SETTLED_S = 20.0
SLACK_MIB = 64
POLL_S = 0.001
MOST_FAILURES = 3  # nodes that went wrong: more teach nothing


class Cold(Zygote):
    """Starts processes of ours from nothing, as a supervisor does."""

    def __init__(self) -> None:
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def fork(self, arguments: list[str], *, log: Path, out: Path, death: Death | None = None) -> Forked:
        out.write_text("")
        with log.open("ab") as errors, out.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "protos.cli", *arguments],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        self._running[process.pid] = process
        return Forked(self, process.pid, out)

    def status_of(self, pid: int) -> int:
        return self._running.pop(pid).wait()

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


@dataclass
class Blow:
    """One process killed. Seconds: of the monotonic clock, of the wall clock; when its pidfd was readable."""

    killed: float
    wall: float
    gone: float = 0.0

    def after(self, moment: float | None) -> float | None:
        return None if moment is None else round(moment - self.killed, 4)


@dataclass
class Round:
    kind: str
    blows: list[Blow] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class Chaos:
    """Rounds over one node.

    Args:
        device: "cuda" or "cpu".
        options: of the worker, besides.
    """

    def __init__(
        self, device: str, model: Path, options: Sequence[str], seed: int, most_tokens: int, streams: int, cold: int
    ) -> None:
        fixed: tuple[str, ...] = (
            "--max-running",
            "8",
            "--max-waiting",
            "64",
            "--prefill-chunk",
            "256",
            "--arena-bytes",
            "512M",
        )
        fixed += ("--max-sequence-tokens", "2048", "--kv-mode", "turboquant", "--kv-preset", "tq4")
        self.setting = Setting("gpu", model, (*fixed, *options), device=device)
        self.rng = random.Random(f"gpu chaos {seed}")
        vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        self.asks = [
            Ask(tuple(self.rng.randrange(3, vocab) for _ in range(length)), most_tokens - 16 * number)
            for number, length in enumerate(PROMPTS[:streams])
        ]
        self.expected: dict[Ask, Whole] = {}
        self.whole_s = 0.0
        self.lines: list[dict[str, Any]] = []
        self.number = 0  # of rounds
        self.cold = cold  # of these, so many with every process from nothing
        self.failed = 0  # nodes

    def say(self, case: str, passed: bool, **found: Any) -> None:
        self.lines.append({"bench": "gpu_chaos", "case": case, "passed": passed, **found})
        print(json.dumps(self.lines[-1]), flush=True)

    async def run(self, kinds: Sequence[str], deadline: float, most_rounds: int) -> None:
        """Rounds until then; behind one that went wrong with a node of its own."""
        forked = asyncio.create_task(asyncio.to_thread(Zygote))
        with Cold() as cold:
            launcher: Zygote = cold
            while self.number < most_rounds and time.monotonic() < deadline - LAST_ROUNDS_S:
                if self.failed > MOST_FAILURES:
                    break
                if self.number >= self.cold:
                    launcher = await forked
                await self._node(launcher, forked, kinds, deadline, most_rounds)
        (await forked).close()

    async def _node(
        self, launcher: Zygote, forked: asyncio.Task[Zygote], kinds: Sequence[str], deadline: float, most_rounds: int
    ) -> None:
        node = Node(launcher, self.setting)
        try:
            began = time.monotonic()
            async with node:
                took = round(time.monotonic() - began, 3)
                self.say("started", True, value=took, unit="s", ready=ready_lines(node.workers[0]))
                if not self.expected:
                    await self._undisturbed(node)
                while self.number < most_rounds and time.monotonic() < deadline - LAST_ROUNDS_S:
                    kind = kinds[self.number % len(kinds)]
                    if self.number == self.cold:
                        node.zygote = await forked
                    if kind == "fault":
                        await self._doom(node)
                    await self._round(node, kind, cold=self.number < self.cold)
                await node.stop()
                assert not node.faults, node.faults
        except Exception:  # noqa: BLE001 - told like any other finding
            self.failed += 1
            logs = {server.name: last_lines(server.log, 25)[-6000:] for server in node.servers}
            self.say("node", False, error=traceback.format_exc()[-3000:], faults=node.faults, logs=logs)
        finally:
            shutil.rmtree(node.folder, ignore_errors=True)

    async def _doom(self, node: Node) -> None:
        """The worker's next life is one whose GPU fails in some step."""
        node.errors_expected = True
        (worker,) = node.workers
        step = self.rng.randint(FAULT_FROM, min(ask.max_tokens for ask in self.asks) // 2)
        call = "launch" if "--decode-graphs" in self.setting.options else "run"
        worker.deaths.append(Death.parse(f"fail:worker.model_runner:ModelRunner.{call}:{step}"))
        await _kill(node, worker)
        await node.all_up()

    async def _undisturbed(self, node: Node) -> None:
        """What each ask must say: all at once, and some of them alone, which is the same in deterministic mode."""
        began = time.monotonic()
        self.expected = await undisturbed(node.addresses[0], self.asks)
        self.whole_s = time.monotonic() - began
        alone: dict[Ask, Whole] = {}
        for ask in self.asks[:: max(1, len(self.asks) - 1)]:
            alone |= await undisturbed(node.addresses[0], [ask])
        differing = [len(ask.prompt) for ask, whole in alone.items() if whole != self.expected[ask]]
        self.say(
            "undisturbed",
            not differing,
            value=round(sum(len(whole.token_ids) for whole in self.expected.values()) / self.whole_s, 1),
            unit="tokens/s, all at once",
            seconds=round(self.whole_s, 3),
            prompts=[len(ask.prompt) for ask in self.asks],
            tokens=[len(whole.token_ids) for whole in self.expected.values()],
            differing_when_alone=differing,
            distinct_tokens=len({token for whole in self.expected.values() for token in whole.token_ids}),
        )
        await node.idle()

    async def _round(self, node: Node, kind: str, *, cold: bool) -> None:
        self.number += 1
        this = Round(kind)
        left = [Stream(f"round-{self.number}-{n}", ask, self.expected[ask]) for n, ask in enumerate(self.asks)]
        streams = list(left)
        caller = Caller(node.addresses[0], lambda: left.pop() if left else None, at_once=len(left), name="chaos")
        calling = asyncio.create_task(caller.run())
        error = ""
        try:
            await _until(lambda: calling.done() or all(stream.got for stream in streams), "the first tokens")
            if kind != "fault":
                await asyncio.sleep(self.rng.uniform(*MOMENT) * self.whole_s)
            this.facts["struck_at"] = [len(stream.got) for stream in streams]
            this.facts["ended_before"] = sum(bool(stream.reason) for stream in streams)
            await self._strike(node, this, streams, caller, calling)
            async with asyncio.timeout(TIMEOUT_S):
                await calling
            this.facts |= _counted(node, kind)
            await node.idle()
        except Exception as failure:  # noqa: BLE001 - told with what was found
            error = f"{failure!r} {traceback.format_exc()}"[-2500:]
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
        whole = sum(stream.reason != 0 and stream.whole() == stream.expected for stream in streams)
        passed = not error and whole == len(streams) and not this.facts.get("computed_again")
        self.say(
            kind,
            passed,
            **({"error": error} if error else {}),
            round=self.number,
            cold=cold,
            streams=len(streams),
            bit_equal=whole,
            interrupted=sum(stream.joins > 0 for stream in streams),
            sessions=dict(caller.counts),
            **this.facts,
        )
        assert not error, f"round {self.number} ({kind})"

    async def _strike(
        self, node: Node, this: Round, streams: list[Stream], caller: Caller, calling: asyncio.Task[None]
    ) -> None:
        (worker,), store = node.workers, node.store
        running = [stream for stream in streams if not stream.reason]
        had: dict[str, int] = {}

        async def until(condition: Callable[[], bool]) -> float:
            await _until(lambda: calling.done() or condition(), "what follows a death")
            return time.monotonic()

        async def strike(*servers: Server) -> None:
            sessions = num_sessions(caller)
            this.blows += await asyncio.gather(*[_kill(node, server) for server in servers])
            if worker in servers:  # what it said before its death is read first
                await until(lambda: num_sessions(caller) > sessions)
            had.update({stream.request_id: len(stream.got) for stream in running})

        silence = asyncio.create_task(_longest_silence(streams))
        if this.kind == "both":
            await strike(worker, store)
        elif this.kind == "fault":
            sessions, ends = num_sessions(caller), sum(worker.ends.values())
            gone = await until(lambda: sum(worker.ends.values()) > ends)
            this.blows.append(Blow(gone, time.time(), gone))
            await until(lambda: num_sessions(caller) > sessions)
            had.update({stream.request_id: len(stream.got) for stream in running})
        else:
            first, *second = [worker if name == "worker" else store for name in this.kind.split(",")]
            await strike(first)
            for server in second:
                await until(lambda: _said(store, "attached", this.blows[0].wall) is not None)
                await asyncio.sleep(self.rng.uniform(0, 0.5))
                await strike(server)
        last = this.blows[-1]
        token = await until(lambda: any(len(stream.got) > had[stream.request_id] for stream in running))
        all_on = await until(lambda: all(s.reason or len(s.got) > had[s.request_id] for s in running))
        await node.all_up()
        silence.cancel()
        (longest,) = await asyncio.gather(silence, return_exceptions=True)
        this.facts["split"] = {
            "kill_to_pidfd_ms": [round((blow.gone - blow.killed) * 1e3, 3) for blow in this.blows],
            "kill_to_attached_s": _since(last.wall, _said(store, "attached", last.wall)),
            "kill_to_ready_s": _since(last.wall, _said(worker, "worker ready", last.wall)),
            "kill_to_next_token_s": round(token - last.killed, 4),
            "kill_to_all_streams_s": round(all_on - last.killed, 4),
            "longest_silence_s": longest,
            "worker_ready": ready_lines(worker, since=this.blows[0].wall),
            "store_away_s": [told["away_s"] for told in _all_said(worker, "the kvstore is back", this.blows[0].wall)],
        }


def num_sessions(caller: Caller) -> int:
    """That have ended."""
    return sum(count for what, count in caller.counts.items() if what.startswith("session"))


async def _longest_silence(streams: list[Stream]) -> float:
    """The longest time without a token, while there are streams and until cancelled."""
    longest, last, had = 0.0, time.monotonic(), -1
    try:
        while not all(stream.reason for stream in streams):
            now, has = time.monotonic(), sum(len(stream.got) for stream in streams)
            longest = max(longest, now - last)
            if has != had:
                last, had = now, has
            await asyncio.sleep(POLL_S)
    except asyncio.CancelledError:
        pass
    return round(longest, 4)


async def _kill(node: Node, server: Server) -> Blow:
    """SIGKILL, and its end."""
    process = server.process
    assert process is not None
    pidfd = os.dup(process.pidfd)  # the node closes its own when it has reaped the process
    try:
        node.note(f"SIGKILL {server.name}")
        blow = Blow(time.monotonic(), time.time())
        node.send(server, signal.SIGKILL)
        while not select.select([pidfd], [], [], 0)[0]:
            await asyncio.sleep(POLL_S / 2)
        blow.gone = time.monotonic()
    finally:
        os.close(pidfd)
    return blow


def _counted(node: Node, kind: str) -> dict[str, Any]:
    """What the worker that ended the round counted in its life. Where it was killed it began in this round, and has
    seen nothing but this round's streams, each of which had a token when it began.
    """
    load = node.load()
    again = load.tokens_recomputed_after_adoption + load.sequences_recomputed
    again += load.prompt_tokens if kind in ("worker", "fault") else 0
    return {
        "adopted": load.sequences_adopted,
        "committed_tokens_computed_again": load.tokens_recomputed_after_adoption,
        "prompt_tokens_prefilled": load.prompt_tokens if "worker" in kind or kind == "fault" else None,
        "sequences_recomputed": load.sequences_recomputed,
        "computed_again": again if kind in KEEPS_MEMORY else 0,
    }


def ready_lines(server: Server, since: float = 0.0) -> list[dict[str, Any]]:
    """What a worker's log says of its starts: milliseconds by part."""
    return [
        {name: value for name, value in told.items() if name.endswith("_ms") or name == "adopted"}
        for told in _all_said(server, "worker ready", since)
    ]


def _all_said(server: Server, event: str, since: float) -> list[dict[str, Any]]:
    return [told for told in records(server.log) if told.get("event") == event and _wall(told) >= since - 0.002]


def _said(server: Server, event: str, since: float) -> float | None:
    """When it said so first, by the wall clock."""
    return next((_wall(told) for told in _all_said(server, event, since)), None)


def _wall(told: dict[str, Any]) -> float:
    return datetime.fromisoformat(str(told["timestamp"])).timestamp()


def _since(wall: float, moment: float | None) -> float | None:
    return None if moment is None else round(moment - wall, 4)


async def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come in {TIMEOUT_S:g} s")
        await asyncio.sleep(POLL_S)


def settled_mib(at_most: int | None) -> int | None:
    """The GPU's memory in use, once it is down to that, or after a while."""
    end = time.monotonic() + SETTLED_S
    while (used := used_mib()) is not None and at_most is not None and used > at_most and time.monotonic() < end:
        time.sleep(0.2)
    return used


def summary(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a kind: how long until the next token."""
    by_kind: dict[tuple[str, bool], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if "round" in line and line["passed"]:
            by_kind[line["case"], line["cold"]].append(line)
    made = []
    for (kind, cold), rounds in by_kind.items():
        times = [line["split"]["kill_to_next_token_s"] for line in rounds]
        made.append(
            {
                "bench": "gpu_chaos",
                "case": f"{kind}{'-cold' if cold else ''}-next-token",
                "passed": True,
                "value": round(statistics.median(times), 4),
                "unit": "s from the last SIGKILL to the next token",
                "spread": [min(times), max(times)],
                "repeats": len(times),
                "streams_bit_equal": sum(line["bit_equal"] for line in rounds),
                "computed_again": sum(line.get("computed_again", 0) for line in rounds),
            }
        )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--graphs", action="store_true", help="decode steps from CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="two layers instead of thirty")
    parser.add_argument("--seconds", type=float, default=150.0, help="no round begins later")
    parser.add_argument("--rounds", type=int, default=1000, help="at most")
    parser.add_argument("--cold", type=int, default=2, help="rounds with every process from nothing")
    parser.add_argument("--kinds", default=" ".join(KINDS), help="of rounds, in turn")
    parser.add_argument("--streams", type=int, default=len(PROMPTS))
    parser.add_argument("--most-tokens", type=int, default=600)
    parser.add_argument(
        "--option", action="append", default=[], help="one more of the worker's, as --option=--threads=4"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--records", type=Path)
    parser.add_argument("--commit", default="")
    asked = parser.parse_args()
    deadline = time.monotonic() + asked.seconds
    before = used_mib()
    if asked.device == "cuda" and before is None:
        print("this machine has no GPU that nvidia-smi can see", file=sys.stderr)
        return 2
    options = [part for option in asked.option for part in option.split("=", 1)]
    options += ["--decode-graphs"] * asked.graphs
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "random", **(TINY if asked.tiny else SMOLLM2))
        chaos = Chaos(asked.device, model, options, asked.seed, asked.most_tokens, asked.streams, asked.cold)
        asyncio.run(chaos.run(asked.kinds.split(), deadline, asked.rounds))
    after = settled_mib(None if before is None else before + SLACK_MIB)
    back = before is None or (after is not None and after <= before + SLACK_MIB)
    chaos.say("memory-comes-back", back, used_mib_at_start=before, used_mib_at_end=after)
    command = "python -m " + " ".join(["tests.e2e.gpu_chaos", *sys.argv[1:]])
    told = facts(asked.device) | {
        "commit": asked.commit,
        "command": command,
        "seed": asked.seed,
        "graphs": asked.graphs,
    }
    lines = [*chaos.lines, *summary(chaos.lines)]
    for line in lines[len(chaos.lines) :]:
        print(json.dumps(line), flush=True)
    if asked.records:
        asked.records.write_text("".join(json.dumps(line | told) + "\n" for line in lines))
    return int(any(not line["passed"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
