"""Runs the model over a step's work: from sequences to a batch, from a batch to logits."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
import torch

from kernels.linear_cuda import ROW_TYPES
from protos.errors import ConfigError, InternalError, PreconditionFailed
from worker.batch import DECODE_TILE, TILE_ROWS, Batch, SpanWork, build_batch
from worker.decode_graphs import BUCKETS, DecodeGraphs
from worker.decode_rows import DecodeRows
from worker.decode_state import SLOTS
from worker.families import Network
from worker.gpu_pages import GpuPages
from worker.kv_view import KvView, Workspace
from worker.models.attention import Attend, attend
from worker.models.deepseek_v4 import DeepseekV4
from worker.models.deepseek_v4_geometry import COMPRESSED
from worker.models.deepseek_v4_kv_rows import KvRows
from worker.models.gpu_attention import GpuAttention
from worker.models.layers import Tiles
from worker.models.llama import Llama
from worker.models.llama_fused import FusedLlama
from worker.sampler import Drawn, logprobs
from worker.scheduler import Work
from worker.sequence import Sequence as Seq

log = structlog.get_logger("engine")


@dataclass(frozen=True)
class Step:
    """What a step computed.

    Attributes:
        logits: [S, vocab_size] float32 of the work that wants them and is not in ``drawn``, in order, in host memory.
        workspace: KV rows of prefill spans, of groups with a tail.
        workspace_rows: of each work, where its rows begin in the workspace; -1: they are in the tail.
        batch: its rows, without those of captured steps. streams: what an MTP block reads of each of them; None of
            models that can have none.
        drawn: what captured steps drew, of the work that wants it.
        captured_s: what the captured part of a step took; 0: there was none.
    """

    logits: torch.Tensor
    workspace: Workspace
    workspace_rows: tuple[int, ...]
    batch: Batch | None
    streams: torch.Tensor | None = None
    drawn: Mapping[Seq, Drawn] = field(default_factory=dict)
    captured_s: float = 0.0


class ModelRunner:
    """The model and the memory it writes to. Used by the engine thread only.

    Args:
        pages: of ``kv``, where it lies on a GPU: then the kernels compute there, and are loaded here.
        tiles_checked: ``check_tiles`` has passed.
        max_sequences, max_sequence_tokens: the largest step; a GPU's workspaces are made for it.
        decode_graphs: decode rows run from CUDA graphs, captured here (seconds). In deterministic mode all that are
            behind their prompt do, from one graph, so that their shape never changes; see ``check_rows``.
        eos_token_ids: they end a captured row on the device, but of a sequence that ignores them.

    Raises (constructor):
        ConfigError: DECODE_GRAPHS_NOT_ENGAGED, they are asked for where there are none.
        PreconditionFailed: NOT_DETERMINISTIC, see ``check_tiles``; deterministic mode only.
        KernelError: what ``GpuAttention`` raises.
    """

    def __init__(
        self,
        network: Network,
        kv: KvView,
        pages: GpuPages | None = None,
        *,
        deterministic: bool,
        max_sequences: int,
        max_sequence_tokens: int,
        decode_graphs: bool = False,
        eos_token_ids: Sequence[int] = (),
        tiles_checked: bool = False,
    ) -> None:
        self._decode: DecodeRows | None = None
        if decode_graphs and (pages is None or not _capturable(network, kv, deterministic)):
            raise ConfigError(
                "decode_graphs would not engage",
                reason="DECODE_GRAPHS_NOT_ENGAGED",
                given=f"{type(network).__name__}, {network.embed.dtype}, {network.device}, {deterministic=}",
                allowed="on a GPU llama; or deepseek_v4 in 16 bits, compressed rows dense, without deterministic mode",
                hint="leave decode_graphs out",
            )
        self._network = network
        self._kv = kv
        self._deterministic = deterministic
        if deterministic and not tiles_checked:
            check_tiles(network)
        self._attend: Attend = attend
        self._on_gpu = pages is not None
        on_gpu: GpuAttention | None = None
        self._fused: FusedLlama | None = None
        self._took: dict[int, Stopwatch] = {}  # by number, of steps that are not read
        if pages is not None:
            with _current(network.device):
                if isinstance(network, Llama):
                    self._attend = on_gpu = GpuAttention(
                        kv,
                        q_heads=network.config.q_heads,
                        max_sequences=max_sequences,
                        max_sequence_tokens=max_sequence_tokens,
                    )
                    on_gpu.load()
                    self._fused = fused(network)
                if decode_graphs:
                    graphs = DecodeGraphs(
                        network,
                        kv,
                        on_gpu,
                        max_sequences=max_sequences,
                        max_sequence_tokens=max_sequence_tokens,
                        buckets=() if deterministic else BUCKETS,
                    )
                    graphs.capture(_tell_progress)
                    self._decode = DecodeRows(graphs, eos_token_ids)
                pages.load()

    @property
    def kv(self) -> KvView:
        return self._kv

    @property
    def attention(self) -> Attend:
        """With the workspaces that all layers share, on a GPU."""
        return self._attend

    @property
    def graphs(self) -> DecodeGraphs | None:
        return self._decode.graphs if self._decode is not None else None

    def run(self, work: Sequence[Work]) -> Step:
        """Computes all work: decode rows are in their tails or pages afterwards, prefill rows in pages or workspace.

        Captured decode rows go first, the rest behind them on the same stream.
        """
        captured = [w for w in work if self.captures(w)]
        rest = [w for w in work if not self.captures(w)] if captured else work
        with _current(self._network.device):
            if not captured:
                return self._compute(work)
            with Stopwatch(self._network.device) as took:
                number = self._launch(captured)
            step = self._compute(rest) if rest else Step(torch.empty(0), Workspace(), (), None)
            joined = self._join(work, captured, number, step)
            return replace(joined, captured_s=took.seconds())

    def launches(self, work: Sequence[Work]) -> bool:
        """Whether ``launch`` does all of the work: decode rows alone, whose tokens are drawn on the device."""
        return all(
            self.captures(w) and w.start >= w.sequence.num_prompt and w.sequence.request.sampling.logprobs is None
            for w in work
        )

    def launch(self, work: Sequence[Work]) -> int:
        """Begins a step of such work; ``drawn`` has it. Of each sequence it computes what the step before draws, if
        that is not known yet.
        """
        with _current(self._network.device):
            with Stopwatch(self._network.device) as took:
                number = self._launch(work)
            self._took[number] = took
            self._took.pop(number - SLOTS, None)  # one that nobody asked about
            return number

    def drawn(self, work: Sequence[Work], number: int) -> Step:
        """What ``launch`` began. Waits for that step, and not for those behind it."""
        step = self._join(work, work, number, Step(torch.empty(0), Workspace(), (), None))
        return replace(step, captured_s=self._took.pop(number).seconds())

    def captures(self, w: Work) -> bool:
        """Whether the work is a row of a captured step. In deterministic mode that follows from the position alone."""
        if self._decode is None or w.count > 1 or w.num_drafts:
            return False
        return w.start >= w.sequence.num_prompt or not self._deterministic

    @property
    def has_layers(self) -> bool:
        """Whether ``by_layers`` has more than one."""
        return self._fused is not None

    def by_layers(self, work: Sequence[Work]) -> Slices:
        """Begins a step of other work, a few layers at a time."""
        with _current(self._network.device):
            return Slices(self, work)

    def spreads(self, num_sequences: int) -> bool:
        """Whether so few sequences would have a smaller graph if ``launch`` knew all tokens."""
        assert self._decode is not None
        return self._decode.spreads(num_sequences)

    def check_rows(self, sequence: Seq) -> None:
        """Proves on this machine what deterministic mode with captured steps rests on, as ``check_tiles`` does: the
        bits of a step's row do not depend on its place or its mates. Before any step is launched.

        Args:
            sequence: of at most 128 tokens, some of them computed, which are overwritten.

        Raises:
            PreconditionFailed: NOT_DETERMINISTIC.
        """
        if self._decode is None or not self._deterministic:
            return
        with _current(self._network.device):
            row = self._decode.moved_row(sequence)
        if row is not None:
            raise _not_deterministic(f"row {row} of a captured decode step changes with its place or its mates")

    def _launch(self, work: Sequence[Work]) -> int:
        assert self._decode is not None
        return self._decode.launch(work)

    def _join(self, work: Sequence[Work], captured: Sequence[Work], number: int, rest: Step) -> Step:
        """One step out of a captured one and the ``rest``."""
        assert self._decode is not None
        tokens = self._decode.tokens(number, captured)
        drawn: dict[Seq, Drawn] = {}
        for w, token in zip(captured, tokens, strict=True):
            if token < 0 and not w.sequence.finished:
                raise InternalError("a row ended on the device, and its sequence goes on", given=f"position {w.start}")
            if w.wants_logits:
                drawn[w.sequence] = self._drawn(w, token)
        rows = iter(rest.workspace_rows)
        taken = {w.sequence for w in captured}
        places = tuple(-1 if w.sequence in taken else next(rows) for w in work)
        return replace(rest, workspace_rows=places, drawn=drawn)

    def _drawn(self, w: Work, token: int) -> Drawn:
        assert self._decode is not None
        num_top = w.sequence.request.sampling.logprobs
        return Drawn(token, None if num_top is None else logprobs(self._decode.logits(w), token, num_top))

    def _compute(self, work: Sequence[Work]) -> Step:
        """Without captured steps."""
        batch = self._batch(work)
        workspace = Workspace(batch)
        logits, streams = self._forward(batch, workspace)
        return Step(logits.to("cpu"), workspace, batch.workspace_of_work, batch, streams)

    def _batch(self, work: Sequence[Work]) -> Batch:
        spans = [
            SpanWork(
                token_ids=w.token_ids,
                start=w.start,
                pages=w.sequence.pages,
                is_prompt=w.start < w.sequence.num_prompt,
                wants_logits=w.wants_logits,
                bases=w.sequence.bases,
                tail_slots=w.sequence.tail_slots,
                num_drafts=w.num_drafts,
            )
            for w in work
        ]
        batch = build_batch(spans, self._kv.geometry, deterministic=self._deterministic)
        return batch.to(self._network.device) if self._on_gpu else batch

    def _forward(self, batch: Batch, workspace: Workspace) -> tuple[torch.Tensor, torch.Tensor | None]:
        network = self._network
        if isinstance(network, DeepseekV4):
            streams = network.streams(batch, KvRows(self._kv, workspace, batch))
            return network.logits(streams, batch), streams
        forward = network.forward if self._fused is None else self._fused.forward
        return forward(batch, self._kv, workspace, self._attend), None


def _capturable(network: Network, kv: KvView, deterministic: bool) -> bool:
    """Whether a decode step can be captured: DeepSeek-V4's reads compressed rows in dense pages only, is not proved to
    be deterministic, and has kernels for its experts in 16 bits alone: those of PyTorch are told counts by the host.
    """
    if isinstance(network, Llama):
        return True
    if network.device.type == "cuda" and network.embed.dtype == torch.float32:
        return False
    return not deterministic and not any(g.name == COMPRESSED and g.packed for g in kv.geometry.groups)


class Slices:
    """A step's layers in slices, between which captured steps run on the same stream. ``layer_s``: what a layer takes,
    as far as is known; 0: nothing is.
    """

    def __init__(self, runner: ModelRunner, work: Sequence[Work]) -> None:
        self._runner, self._network = runner, runner._network
        self._batch = runner._batch(work)
        self._workspace = Workspace(self._batch)
        self._logits: torch.Tensor | None = None
        self._layers = self._by_layers()
        self._timed: list[tuple[Stopwatch, int]] = []
        self._last: Stopwatch | None = None
        self.layer_s = 0.0

    def _by_layers(self) -> Iterator[torch.Tensor | None]:
        runner = self._runner
        if runner._fused is not None:
            yield from runner._fused.by_layers(self._batch, runner.kv, self._workspace, runner._attend)
        else:
            yield runner._forward(self._batch, self._workspace)[0]

    @property
    def done(self) -> bool:
        """Whether all has been launched."""
        return self._logits is not None

    @property
    def is_computed(self) -> bool:
        """Whether the GPU is done with all of it."""
        return self.done and self._last is not None and self._last.is_done

    def advance(self, num_layers: int) -> None:
        """Launches so many more layers, at most."""
        with _current(self._network.device), Stopwatch(self._network.device) as took:
            count = 0
            while count < num_layers and self._logits is None:
                self._logits = next(self._layers)
                count += self._logits is None
        self._last = took
        if count:  # else it was the logits alone
            self._timed.append((took, count))
        while self._timed and self._timed[0][0].is_done:
            earlier, count = self._timed.pop(0)
            self.layer_s = earlier.seconds() / count

    def step(self) -> Step:
        """What it computed. Waits for the GPU."""
        while self._logits is None:
            self.advance(1)
        with _current(self._network.device):
            return Step(self._logits.to("cpu"), self._workspace, self._batch.workspace_of_work, self._batch)


def fused(network: Llama) -> FusedLlama | None:
    """None: there are no kernels for its dtype."""
    return FusedLlama(network) if network.embed.dtype in ROW_TYPES else None


class Stopwatch:
    """How long a device takes for what is asked of it inside."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def __enter__(self) -> Stopwatch:
        self._mark()
        return self

    def __exit__(self, *error: object) -> None:
        self._mark()

    def _mark(self) -> None:
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record()
        self._marks.append(mark)

    @property
    def is_done(self) -> bool:
        return not self._on_gpu or bool(self._marks[1].query())

    def seconds(self) -> float:
        """Waits until it is done."""
        began, ended = self._marks
        if not self._on_gpu:
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3


def _tell_progress(number: int, of: int) -> None:
    log.info("capturing decode steps", captured=number, of=of)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU this thread's, which torch does by itself for its own kernels only; CuPy loads others onto it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check_tiles(network: Network) -> None:
    """Proves on this machine what deterministic mode rests on: a row's bits do not depend on its place or its mates.

    For every tile size, runs the row-wise parts of a layer and the output matrix over random rows, then over the same
    rows in another order among other mates, and compares bits. Then the same for tiles alone and in one batch.

    Raises:
        PreconditionFailed: NOT_DETERMINISTIC, naming the part and the tile size or the batch.
    """
    generator = torch.Generator().manual_seed(20260101)
    for rows in TILE_ROWS:
        for trial in range(3):
            ours = torch.randn(rows, network.embed.shape[1], generator=generator).to(network.embed)
            order = torch.randperm(rows, generator=generator).to(network.device)
            mates = torch.randn(rows, network.embed.shape[1], generator=generator).to(ours)
            kept = torch.arange(rows, device=network.device) < max(1, rows // (trial + 1))  # all, half, a third stay
            moved = torch.where(kept.unsqueeze(1), ours, mates)[order]
            for part, first, second in zip(
                ("layer", "output"), _row_parts(network, ours), _row_parts(network, moved), strict=True
            ):
                if not torch.equal(first[order][kept[order]], second[kept[order]]):
                    raise _not_deterministic(f"a row of the {part} changes with its place in a tile of {rows} rows")
    for sizes in ((8, 16), (8, 16, 64), (8, 128), TILE_ROWS):
        ends = list(itertools.accumulate(sizes))
        tiles = tuple(zip([0, *ends], ends, strict=False))
        together = torch.randn(ends[-1], network.embed.shape[1], generator=generator).to(network.embed)
        in_batch, _ = _row_parts(network, together, tiles)
        for a, b in tiles:
            alone, _ = _row_parts(network, together[a:b])
            if not torch.equal(alone, in_batch[a:b]):
                raise _not_deterministic(f"a tile of {b - a} rows changes in a batch of {ends[-1]} rows")


def _not_deterministic(found: str) -> PreconditionFailed:
    return PreconditionFailed(
        "deterministic mode does not hold on this machine",
        reason="NOT_DETERMINISTIC",
        given=found,
        allowed="results that depend on the row alone",
        hint="try another number of threads, or run without deterministic mode",
    )


def _row_parts(network: Network, x: torch.Tensor, tiles: Tiles = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, hidden] through what works on single rows: a layer, and the output matrix, which sees decode tiles only.

    ``tiles`` cover x; none: it is one tile.
    """
    rows = len(x)
    zeros, empty = (torch.zeros(count, dtype=torch.int64, device=x.device) for count in (rows, 0))
    tiles = tiles or ((0, rows),)
    num_logits = rows if rows == DECODE_TILE else 0
    logit_rows = torch.arange(num_logits, device=x.device)
    logit_tiles = tiles if num_logits else ()
    batch = Batch(
        zeros, zeros, tiles, (), False, {}, empty, (), (), logit_rows, logit_tiles, num_logits, deterministic=True
    )
    layer, logits = network.row_parts(x, batch)
    return layer, logits if num_logits else layer
