"""What the prefix index costs on one core, and whether its memory stays flat over a million random prefixes.

    python -m tests.bench.bench_prefix_index [--prefixes 1000000] [--seconds 1] [--repeats 5] [--out FILE.jsonl]

Pure Python in one process. Hashes are given and are fresh objects each time, as they arrive in a message (a bytes
object that was looked up before remembers its own hash). Rivals are timed in the same run: what one would write without
the module.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from kvstore.checkpoints import CheckpointCache
from kvstore.events import EventLog
from kvstore.prefix_index import PrefixIndex
from protos.page_hash import HASH_BYTES, PAGE_TOKENS, ROOT

ROOT_FOLDER = Path(__file__).resolve().parents[2]
SEED = 20261
GROUPS = ("full", "window")
CHAIN_PAGES = 256  # a prompt of 32,768 tokens
NUM_CHAINS = 256


@dataclass
class Figure:
    """``values`` and ``floors``: one a repeat, in ``unit``."""

    case: str
    unit: str
    values: list[float]
    floors: list[float] | None = None
    floor_by: str | None = None
    rivals: list[float] | None = None
    rival: str | None = None
    rival_why: str | None = None
    kind: str = "measured"
    more: dict[str, Any] = field(default_factory=dict)


def fresh(hashes: Sequence[bytes]) -> list[bytes]:
    """Copies that nobody has looked up yet."""
    text = b"".join(hashes)
    return [text[at : at + HASH_BYTES] for at in range(0, len(text), HASH_BYTES)]


def rate(work: Callable[[list[list[bytes]]], int], batches: list[list[bytes]], seconds: float) -> float:
    """Units of work per second of this process's CPU; making the fresh copies is not timed."""
    done, spent = 0, 0.0
    while spent < seconds:
        copies = [fresh(batch) for batch in batches]
        started = time.process_time()
        done += work(copies)
        spent += time.process_time() - started
    return done / spent


def lookups(seconds: float, repeats: int) -> list[Figure]:
    """Page look-ups per second over chains of which all, half or none are there; each page counts once per group."""
    rng = random.Random(SEED)
    index = PrefixIndex(GROUPS, windowed=["window"])
    chains = [[rng.randbytes(HASH_BYTES) for _ in range(CHAIN_PAGES)] for _ in range(NUM_CHAINS)]
    page = 0
    for chain in chains:
        for parent, page_hash in zip([ROOT, *chain], chain, strict=False):
            for group in GROUPS:
                index.add(group, page_hash, page, parent=parent, exact=True, pinned=False)
            page += 1
    plain: list[dict[bytes, int]] = [
        {page_hash: at for at, page_hash in enumerate(h for chain in chains for h in chain)} for _ in GROUPS
    ]
    half = CHAIN_PAGES // 2
    strangers = [[rng.randbytes(HASH_BYTES) for _ in range(CHAIN_PAGES)] for _ in range(NUM_CHAINS)]
    halves = [chain[:half] + stranger[half:] for chain, stranger in zip(chains, strangers, strict=True)]

    def look(batches: list[list[bytes]]) -> int:
        found = 0
        for batch in batches:
            found += sum(len(leading.pages) for leading in index.lookup(batch).values())
        return found

    def longest(batches: list[list[bytes]]) -> int:
        needs = {"window": lambda k: max(0, k - 32)}
        return len(GROUPS) * sum(index.longest(batch, needs) for batch in batches)

    def miss(batches: list[list[bytes]]) -> int:
        for batch in batches:
            index.lookup(batch)
        return len(batches)

    def loop(batches: list[list[bytes]]) -> int:
        found = 0
        for batch in batches:
            for table in plain:
                pages = []
                for page_hash in batch:
                    at = table.get(page_hash)
                    if at is None:
                        break
                    pages.append(at)
                found += len(pages)
        return found

    def bare(batches: list[list[bytes]]) -> int:
        found = 0
        for batch in batches:
            for table in plain:
                found += len(list(map(table.get, batch)))
        return found

    floor_by = "list(map(dict.get, hashes)) over a plain dict per group, same run"
    figures = []
    for case, batches in (("lookup-whole-chain", chains), ("lookup-half-chain", halves)):
        figures.append(
            Figure(
                case,
                "pages/s",
                [rate(look, batches, seconds) for _ in range(repeats)],
                [rate(bare, chains, seconds) for _ in range(repeats)],
                floor_by,
                [rate(loop, batches, seconds) for _ in range(repeats)],
                "a for loop over dict.get with a break",
                more={"pages_cached": page * len(GROUPS), "chain_pages": CHAIN_PAGES, "groups": len(GROUPS)},
            )
        )
    for case, unit, work, batches in (
        ("longest-with-a-windowed-group", "pages/s", longest, chains),
        ("lookup-miss-at-the-first-page", "prompts/s", miss, strangers),
    ):
        figures.append(
            Figure(
                case,
                unit,
                [rate(work, batches, seconds) for _ in range(repeats)],
                rival_why="no simpler way gives this answer",
                more={"pages_cached": page * len(GROUPS), "chain_pages": CHAIN_PAGES, "groups": len(GROUPS)},
            )
        )
    return figures


def random_prefixes(num_prefixes: int, num_pages: int, samples: int = 10) -> list[Figure]:
    """Prompts of 1 to 4 pages of their own, a fifth of them behind a shared beginning, in a cache of ``num_pages``.

    Each looks up, evicts what it lacks, adds, and is released, as the store does it. Memory is the process's resident
    set, read ``samples`` times; its growth is counted from a fifth of the way on, when the cache has long been full.
    """
    rng = random.Random(SEED)
    events = EventLog("bench", 65_536)
    index = PrefixIndex(["full"], events=events)
    free = list(range(num_pages))
    trunks = [[rng.randbytes(HASH_BYTES) for _ in range(8)] for _ in range(64)]
    process = psutil.Process()
    resident: list[int] = []
    added = evicted = hits = 0
    started = time.process_time()
    for number in range(1, num_prefixes + 1):
        trunk = trunks[rng.randrange(len(trunks))] if rng.random() < 0.2 else []
        hashes = [*trunk, *(rng.randbytes(HASH_BYTES) for _ in range(rng.randint(1, 4)))]
        matched = index.lookup(hashes)["full"].pages
        index.pin("full", matched)
        hits += len(matched)
        lacking = len(hashes) - len(matched)
        if len(free) < lacking:
            victims = index.evict("full", lacking - len(free))
            evicted += len(victims)
            free.extend(victim.page for victim in victims)
        mine = [free.pop() for _ in range(lacking)]
        chain = [ROOT, *hashes]
        for at, page in enumerate(mine, start=len(matched)):
            index.add("full", hashes[at], page, parent=chain[at], exact=True)
        added += lacking
        if index.unpin("full", [*matched, *mine]):
            raise AssertionError("a page was lost")
        if number % max(1, num_prefixes // samples) == 0:
            resident.append(process.memory_info().rss)
    spent = time.process_time() - started
    index.check()
    if index.num_cached("full") + len(free) != num_pages:
        raise AssertionError("pages do not add up")
    more = {
        "prefixes": num_prefixes,
        "pages_of_the_cache": num_pages,
        "pages_added": added,
        "pages_evicted": evicted,
        "pages_hit": hits,
        "rss_mib": [round(size / 2**20, 1) for size in resident],
    }
    why = "no simpler way keeps chains whole"
    warm = resident[: max(1, len(resident) // 5)][-1]
    growth = (resident[-1] - warm) / 2**20
    return [
        Figure("random-prefixes-memory-growth", "MiB", [growth], rival_why="growth has no rival", more=more),
        Figure("random-prefixes", "prefixes/s", [num_prefixes / spent], rival_why=why, more=more),
        Figure("random-prefixes-churn", "pages added and evicted/s", [(added + evicted) / spent], rival_why=why),
    ]


def checkpoints(seconds: float, repeats: int) -> list[Figure]:
    """A prompt of 32,768 tokens against 1,000 checkpoints of other chains and 100 behind its own pages."""
    rng = random.Random(SEED)
    cache = CheckpointCache({"full": range(1_100)})
    tokens = [rng.randrange(1 << 17) for _ in range(CHAIN_PAGES * PAGE_TOKENS + 1)]
    hashes = [rng.randbytes(HASH_BYTES) for _ in range(CHAIN_PAGES)]
    for number in range(1_000):
        other = [rng.randbytes(HASH_BYTES) for _ in range(3)]
        checkpoint = cache.put("t", other, [number] * (3 * PAGE_TOKENS + number % 128), exact=True, kind="turn_end")
        assert checkpoint is not None
        cache.commit(checkpoint)
    for number in range(100):  # same length, other tokens after the page, but for the last
        at = 4 * PAGE_TOKENS + 50
        mine = tokens[:at] if number == 99 else [*tokens[: at - 1], number]
        checkpoint = cache.put("t", hashes[:4], mine, exact=True, kind="turn_end")
        assert checkpoint is not None
        cache.commit(checkpoint)

    def match(_: list[list[bytes]]) -> int:
        for _repeat in range(100):
            found = next(cache.matches("t", hashes, tokens), None)
            assert found is not None
            assert found.num_tokens == 4 * PAGE_TOKENS + 50
        return 100

    def compare(_: list[list[bytes]]) -> int:
        for _repeat in range(10):
            at = max(
                len(c.tokens)
                for c in cache.checkpoints
                if (k := c.num_tokens // PAGE_TOKENS) <= len(hashes)
                and c.page_hash == hashes[k - 1]
                and tuple(tokens[k * PAGE_TOKENS : c.num_tokens]) == c.tokens
            )
            assert at == 50
        return 10

    return [
        Figure(
            "checkpoint-match-32k-prompt",
            "matches/s",
            [rate(match, [], seconds) for _ in range(repeats)],
            rivals=[rate(compare, [], seconds) for _ in range(repeats)],
            rival="a search through all checkpoints",
            more={"checkpoints": len(cache)},
        )
    ]


def event_log(seconds: float, repeats: int) -> list[Figure]:
    log = EventLog("bench", 65_536)
    hashes = [random.Random(SEED).randbytes(HASH_BYTES) for _ in range(10_000)]
    lru: OrderedDict[int, bytes] = OrderedDict()

    def append_and_read(_: list[list[bytes]]) -> int:
        cursor = log.cursor
        for page_hash in hashes:
            log.added("full", page_hash)
        while cursor < log.cursor:
            batch = log.since("bench", cursor, limit=1_000)
            cursor = batch.cursor
        return len(hashes)

    def bare(_: list[list[bytes]]) -> int:
        for at, page_hash in enumerate(hashes):
            lru[at] = page_hash
        list(lru.items())
        lru.clear()
        return len(hashes)

    return [
        Figure(
            "events-logged-and-read",
            "events/s",
            [rate(append_and_read, [], seconds) for _ in range(repeats)],
            [rate(bare, [], seconds) for _ in range(repeats)],
            "the same hashes into an OrderedDict and out of it, same run",
            rival_why="no simpler log has a cursor and a bound",
        )
    ]


def record(figure: Figure, command: str) -> dict[str, Any]:
    """One line as the records of this project have it."""
    return {
        "bench": "prefix_index",
        "case": figure.case,
        "value": _round(statistics.median(figure.values)),
        "unit": figure.unit,
        "spread": [_round(min(figure.values)), _round(max(figure.values))],
        "repeats": len(figure.values),
        "floor": _round(statistics.median(figure.floors)) if figure.floors else None,
        "floor_by": figure.floor_by,
        "rival": figure.rival,
        "rival_value": _round(statistics.median(figure.rivals)) if figure.rivals else None,
        "rival_why": figure.rival_why,
        "error": None,
        "machine": f"{platform.machine()}, {psutil.cpu_count()} CPUs, {_cpu_model()}",
        "versions": {"python": platform.python_version()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT_FOLDER, capture_output=True, text=True
        ).stdout.strip(),
        "command": command,
        "kind": figure.kind,
        **figure.more,
    }


def _round(value: float) -> float:
    return round(value) if abs(value) >= 1000 else round(value, 2)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def run(num_prefixes: int, num_pages: int, seconds: float, repeats: int) -> list[Figure]:
    figures = random_prefixes(num_prefixes, num_pages)  # first, so that the heap holds nothing else
    return [*figures, *lookups(seconds, repeats), *checkpoints(seconds, repeats), *event_log(seconds, repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prefixes", type=int, default=1_000_000)
    parser.add_argument("--pages", type=int, default=65_536)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    command = (
        f"python -m tests.bench.bench_prefix_index --prefixes {options.prefixes} --pages {options.pages} "
        f"--seconds {options.seconds:g} --repeats {options.repeats}"
    )
    records = [
        record(figure, command) for figure in run(options.prefixes, options.pages, options.seconds, options.repeats)
    ]
    for line in records:
        floor = f"floor {line['floor']:,}" if line["floor"] is not None else ""
        rival = f"rival {line['rival_value']:,}" if line["rival_value"] is not None else ""
        print(f"{line['case']:34} {line['value']:>14,} {line['unit']:26} {floor:20} {rival}")
        if "rss_mib" in line:
            print(f"{'':34} resident set, MiB: {line['rss_mib']}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(json.dumps(line) + "\n" for line in records))


if __name__ == "__main__":
    main()
