"""How long an engine's steps take, learnt as they end, and so how much time prompts have beside decode rows.
Pure: times come in and go out.
"""

from __future__ import annotations

from worker.scheduler import Work
from worker.step_time import PrefillTime

STEP_OF_DECODE = 2.0
"""A step with decode rows takes at most so much of what they take alone, where the config does not say."""
FIRST_STEP_S = 0.05  # while that is not known
DECODE_SHARE = 0.1  # of a step in the running mean


class Pace:
    """Used by the engine thread only.

    Args:
        budget_ms: of a step with decode rows (``WorkerConfig.step_time_budget_ms``).
        decode_graphs: what decode rows take is told by their graphs, not by steps.
    """

    def __init__(self, budget_ms: int, *, decode_graphs: bool) -> None:
        self._budget_ms = budget_ms
        self._decode_graphs = decode_graphs
        self.prefill_time = PrefillTime()
        self.decode_s = 0.0
        """What decode rows take alone; 0: not known."""
        self.layer_token_s = 0.0
        """A layer of the newest chunk, a token; 0: not known."""

    def learn(self, work: list[Work], captured_s: float, seconds: float) -> None:
        """From a step of ``work``, which took so long, and its captured rows ``captured_s``; 0: it had none."""
        chunks = [(w.start, w.count) for w in work if w.count > 1 + w.num_drafts]
        decoded = len(chunks) < len(work)
        alone_s = captured_s or (0.0 if chunks or self._decode_graphs else seconds)
        if decoded and alone_s:
            self.decode_s += DECODE_SHARE * (alone_s - self.decode_s) if self.decode_s else alone_s
        if chunks and (self.decode_s or not decoded):
            self.prefill_time.observe(chunks, seconds - decoded * (captured_s or self.decode_s))

    def budget_s(self) -> float:
        """For prompt tokens in a step in which others decode; 0 or less: no limit."""
        budget_s = self._budget_ms / 1e3
        if budget_s < 0:
            budget_s = STEP_OF_DECODE * self.decode_s or FIRST_STEP_S
        return budget_s - self.decode_s
