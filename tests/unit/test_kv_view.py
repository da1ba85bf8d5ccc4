"""Views of mapped KV memory: they must hold the mapping for as long as they live."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

READS_AFTER_THE_CLOSE = """
import mmap
from kvstore.arena import Arena
from kvstore.geometry import CacheGeometry, LayerGroup, Region
from worker.kv_view import KvView

group = LayerGroup("full", (Region(0, "k", 1, 16, "float32"),))
arena = Arena("full", 4, group.page_bytes, mmap.mmap(-1, 4 * group.page_bytes))
arena.buffer[:] = b"\\0" * (4 * group.page_bytes)
view = KvView(CacheGeometry((group,)), {"full": arena}, {})
arena.close()
pages = view.view(0, "k").pages
assert pages is not None
print(float(pages.sum()))
"""


def test_the_memory_stays_mapped_under_a_view_of_a_closed_arena() -> None:
    # In a process of its own: without the mapping the read is a SIGSEGV.
    ended = subprocess.run(
        [sys.executable, "-c", READS_AFTER_THE_CLOSE], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "0.0"), ended.stderr
