"""DeepSeek-V4 through the engine and the KV service's memory: logits are transformers' own, whatever happens to a
sequence, and the modes of raw rows change no bit.

Pages and tails that nobody holds are NaN, so a row that is read before it was written shows. Index choices are step
functions: the seeds leave a gap between what is chosen and what is not, and tests that compare with the reference check
that (``gaps``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from protos import types_pb2 as pb
from protos.errors import PreconditionFailed
from tests.unit.deepseek_v4_engine import Reference, V4Harness
from tests.unit.deepseek_v4_tiny import TINY, MemoryRows, make_batch, tiny_config, watched_gaps
from tests.unit.tiny import request
from worker.kv_view import KvView
from worker.model_runner import check_tiles
from worker.models.deepseek_v4_geometry import CSA_ROW
from worker.models.deepseek_v4_kv_rows import KvRows
from worker.sequence import Sequence, StepResult

GAP = 1e-6
EXACT = pb.PREFIX_REUSE_EXACT
DENSE, TURBOQUANT, WINDOW = ("dense", ""), ("turboquant", "tq4"), ("window", "")
FEW = {"hc_sinkhorn_iters": 2}  # the balancing takes most of a tiny model's time
SMALL: dict[str, Any] = {"num_hidden_layers": 3, "compress_ratios": [4, 128, 4], "num_hash_layers": 1, **FEW}
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "all kinds of layers, their own ratios": (1, FEW),
    "no YaRN, HCA of 16": (2, {**SMALL, "rope_scaling": None, "hca_ratio": 16}),
    "every row chosen": (3, {**SMALL, "index_topk": 512}),
}


@pytest.fixture
def gaps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Between the worst score that was chosen and the best that was not; the test's least is beyond rounding."""
    seen = watched_gaps(monkeypatch)
    yield seen
    assert not seen or min(seen) > GAP, f"a near-tie of {min(seen):.2g}: take another seed"


@pytest.fixture(scope="module")
def reference() -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}

    def make(name: str) -> Reference:
        if name not in made:
            seed, changes = VARIANTS[name]
            made[name] = Reference(tiny_config(**changes), seed)
        return made[name]

    return make


@pytest.fixture
def small(reference: Callable[[str], Reference]) -> Reference:
    return reference("no YaRN, HCA of 16")


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(TINY["vocab_size"]) for _ in range(length)]


def running(harness: V4Harness, request_id: str) -> Sequence:
    return next(s for s in harness.engine._running if s.request.request_id == request_id)


def quiet(result: StepResult) -> None:
    """An emit that hears nothing: offsets go back with a rollback."""


def usage(harness: V4Harness, request_id: str) -> tuple[int, bool]:
    last = harness.outputs[request_id][-1].usage
    assert last is not None
    return last.cached_prompt_tokens, last.prefix_exact


# --- however a sequence is cut into steps ---


@pytest.mark.usefixtures("gaps")
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 40, 130])
def test_chunks_of_any_size_then_single_tokens_give_the_reference_logits(small: Reference, chunk: int) -> None:
    ids = prompt(1, 135)
    harness = V4Harness(small, mode=TURBOQUANT, prefill_chunk=chunk)
    tokens = harness.run(request("r", ids, 6))["r"]
    harness.check("r", ids + tokens[:-1])
    assert harness.dequantised == 0 and harness.engine.load().pages_packed == 0


@pytest.mark.usefixtures("gaps")
@pytest.mark.parametrize(
    ("name", "mode"), [*zip([*VARIANTS, *VARIANTS], [DENSE, TURBOQUANT, WINDOW, WINDOW], strict=False)]
)
def test_ragged_batches_give_the_reference_logits(
    reference: Callable[[str], Reference], name: str, mode: tuple[str, str]
) -> None:
    prompts = {f"r{length}": prompt(length, length) for length in (1, 5, 128, 130, 263)}
    harness = V4Harness(reference(name), mode=mode, prefill_chunk=100, max_running=4)
    tokens = harness.run(*(request(r, ids, 6) for r, ids in prompts.items()))
    for r, ids in prompts.items():
        harness.check(r, ids + tokens[r][:-1])
    assert harness.dequantised == 0 and harness.attachment.verify() == []


def test_of_csa_rows_only_the_chosen_ones_are_read(small: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = V4Harness(small)
    harness.engine.submit(request("r", prompt(1, 100), 20))
    harness.step(4)
    read: list[tuple[str, int]] = []
    span, rows_at = KvView.span, KvView.rows_at

    def spans(self: KvView, view: Any, place: Any, first: int, length: int, reason: str) -> torch.Tensor:
        read.append((view.region.kind, length // view.region.ratio))
        return span(self, view, place, first, length, reason)

    def rows(self: KvView, view: Any, place: Any, numbers: torch.Tensor) -> torch.Tensor:
        read.append((view.region.kind, len(numbers)))
        return rows_at(self, view, place, numbers)

    monkeypatch.setattr(KvView, "span", spans)
    monkeypatch.setattr(KvView, "rows_at", rows)
    harness.step()
    assert [count for kind, count in read if kind == CSA_ROW] == [8, 8], "index_topk in each of two layers, of 25 rows"
    assert [count for kind, count in read if kind == "raw"] == [15] * 3, "the window without the token itself"


# --- the modes of raw rows ---


def test_600_steps_with_rollbacks_have_the_same_bits_in_every_mode(pairs: Callable[[int], Reference]) -> None:
    """The reference is mode dense; rollbacks stay inside the margin, and end in other tokens than before."""

    def run(mode: tuple[str, str]) -> tuple[V4Harness, list[int]]:
        harness = V4Harness(pairs(16), mode=mode, prefill_chunk=64)
        harness.engine.submit(request("r", prompt(3, 100), 900))
        rng = random.Random(5)
        harness.step(3)
        sequence = running(harness, "r")
        harness.engine._emit = quiet
        for step in range(600):
            if step % 29 == 28:
                cut = sequence.num_computed - rng.randrange(1, 17)
                truncated = harness.engine.truncate(sequence, cut, next_token=rng.randrange(97))
                assert truncated.exact and truncated.num_tokens == cut
            harness.step()
        return harness, sequence.token_ids

    with torch.inference_mode():
        dense, expected = run(DENSE)
        for mode in (TURBOQUANT, WINDOW):
            other, tokens = run(mode)
            assert tokens == expected
            for position, logits in dense.logits["r"].items():
                assert torch.equal(other.logits["r"][position], logits), f"{mode} at {position}"
            counted = other.engine._held.kv.counters.rows_dequantised
            assert not any(counted.values()), counted
            assert other.engine.load().pages_packed == (4 if mode == TURBOQUANT else 0)


def test_packed_compressed_rows_are_read_as_chosen_and_cost_little(
    small: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by default: nobody serves V4 like this. Before the first page is packed nothing differs."""
    real = KvRows.chosen

    def compared(self: KvRows, span: int, layer: int, kind: str, numbers: torch.Tensor) -> torch.Tensor:
        rows, at = real(self, span, layer, kind, numbers), self._batch.spans[span]
        counted = dict(self._kv.counters.rows_dequantised)
        if at.num_rows == 1:
            assert torch.equal(rows, self.held(span, layer, kind, 0, (at.start + 1) // 4)[numbers])
        self._kv.counters.rows_dequantised.update(counted)
        return rows

    monkeypatch.setattr(KvRows, "chosen", compared)
    ids = prompt(1, 200) + prompt(2, 150)
    divergences = []
    for chunk in (1, 100):
        harness = V4Harness(small, mode=TURBOQUANT, geometry={"pack_compressed": "tq4"}, prefill_chunk=chunk)
        harness.engine.submit(request("r", ids[:200], 160, emitted=ids[200:]))
        harness.step(-(-len(ids) // chunk))
        before = harness.dequantised
        harness.step()
        sequence = running(harness, "r")
        base, num_tokens = sequence.bases["compressed"], sequence.num_computed
        assert base == 128
        # HCA rows and two layers' index keys of [0, base), and 8 of CSA's rows at most, some of them in the tail.
        assert base // 16 + 2 * base // 4 <= harness.dequantised - before <= base // 16 + 2 * (base // 4 + 8)
        theirs = small.logits(sequence.token_ids[:num_tokens]).log_softmax(-1)
        ours = torch.stack([harness.logits["r"][at] for at in range(num_tokens)]).log_softmax(-1)
        assert (ours[:100] - theirs[:100]).abs().max() < 2e-5
        divergences.append(torch.nn.functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)[300:])
        harness.run()
        assert harness.attachment.verify() == []
    for divergence in divergences:
        assert 0 < divergence.mean() < 0.05, f"KL {divergence.mean():.3g}"


# --- going back ---


def append(harness: V4Harness, sequence: Sequence, tokens: list[int]) -> None:
    """More tokens to compute, as if they had been drawn."""
    sequence.token_ids += tokens
    harness.attachment.control.append_tokens(sequence.slot, tokens)


@pytest.mark.usefixtures("gaps")
@pytest.mark.parametrize(("hca_ratio", "mode"), [(16, DENSE), (16, WINDOW), (128, TURBOQUANT)])
def test_rollback_by_1_to_16_tokens_at_every_phase_of_both_ratios(
    pairs: Callable[[int], Reference], hca_ratio: int, mode: tuple[str, str]
) -> None:
    """With blocks of 16, every depth at every phase. With blocks of 128, every phase, at one depth each."""
    tokens, junk = prompt(11, 270), prompt(12, 16)
    firsts = {f"s{i}": 105 + (16 * i if hca_ratio == 128 else 0) for i in range(8 if hca_ratio == 128 else 16)}
    harness = V4Harness(pairs(hca_ratio), mode=mode, max_running=16, prefill_chunk=8192, num_pages=100)
    harness.engine._emit = quiet
    for r, first in firsts.items():
        harness.engine.submit(request(r, tokens[:first], 400))
    harness.step()
    with torch.inference_mode():
        for step in range(16):
            sequences = [running(harness, r) for r in firsts]
            lengths = [first + step for first in firsts.values()]
            for index, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
                depth = 1 + (index + (7 * step if hca_ratio == 128 else 0)) % 16
                harness.engine.truncate(sequence, length, next_token=tokens[length])
                append(harness, sequence, junk[: depth - 1])
            harness.engine.step()
            for sequence, length in zip(sequences, lengths, strict=True):
                truncated = harness.engine.truncate(sequence, length, next_token=tokens[length])
                assert truncated.exact and truncated.num_tokens == length
            harness.engine.step()
    for r, first in firsts.items():
        harness.check(r, tokens[: first + 16])
    assert not any(harness.engine._held.kv.counters.rows_dequantised.values())


@pytest.fixture(scope="module")
def pairs() -> Callable[[int], Reference]:
    """A CSA and an HCA layer."""
    made: dict[int, Reference] = {}

    def make(hca_ratio: int) -> Reference:
        changes = {"compress_ratios": [4, 128], "num_hidden_layers": 2, "num_hash_layers": 1, "hc_sinkhorn_iters": 2}
        if hca_ratio not in made:
            made[hca_ratio] = Reference(tiny_config(hca_ratio=hca_ratio, **changes), 11)
        return made[hca_ratio]

    return make


@pytest.mark.usefixtures("gaps")
@pytest.mark.parametrize("mode", [DENSE, TURBOQUANT, WINDOW])
def test_a_deep_rollback_goes_to_a_kept_boundary_and_runs_the_tokens_from_there(
    small: Reference, mode: tuple[str, str]
) -> None:
    tokens = prompt(4, 420)
    harness = V4Harness(small, mode=mode, prefill_chunk=150)
    harness.engine._emit = quiet
    harness.engine.submit(request("r", tokens[:150], 500, emitted=tokens[150:420]))
    harness.step(4)
    sequence = running(harness, "r")
    with torch.inference_mode():
        truncated = harness.engine.truncate(sequence, 200, next_token=5)
    assert truncated.exact and (truncated.num_tokens, sequence.num_computed) == (150, 150), "kept at the prompt's end"
    harness.step(30)
    harness.check("r", sequence.token_ids[: sequence.num_computed])
    assert sequence.token_ids[:201] == [*tokens[:200], 5]
    assert not any(harness.engine._held.kv.counters.rows_dequantised.values())


def test_a_deep_rollback_is_refused_where_nothing_was_kept(small: Reference) -> None:
    harness = V4Harness(small, checkpoints=0, prefill_chunk=256)
    harness.engine.submit(request("r", prompt(4, 150), 100, emitted=prompt(5, 90)))
    harness.step(2)
    with pytest.raises(PreconditionFailed) as refused, torch.inference_mode():
        harness.engine.truncate(running(harness, "r"), 160)
    assert refused.value.reason == "TRUNCATE_TOO_DEEP"
    harness.run()
    harness.check("r", prompt(4, 150) + prompt(5, 90) + harness.tokens("r")[:-1])


def test_a_rollback_to_packed_rows_says_that_it_is_lossy(small: Reference) -> None:
    harness = V4Harness(small, mode=TURBOQUANT, prefill_chunk=256)
    harness.engine._emit = quiet
    harness.engine.submit(request("r", prompt(4, 100), 100, emitted=prompt(5, 61)))
    harness.step(1)
    sequence = running(harness, "r")
    assert sequence.bases["raw"] == 128
    with capture_logs() as logs, torch.inference_mode():
        assert not harness.engine.truncate(sequence, 142).exact
    assert [(line["event"], line["refilled"]) for line in logs if line["log_level"] == "warning"] == [
        ("rolled back to packed rows, which is lossy", {"raw": 128})
    ]
    harness.step()
    assert not sequence.usage().prefix_exact
    assert harness.engine.load().rows_dequantised_rollback == 3 * 128 and harness.dequantised == 0


def test_a_resume_behind_a_lossy_rollback_says_that_it_is_inexact(small: Reference) -> None:
    """The tail is dense again when the turn ends, and what it was computed over was not."""
    harness = V4Harness(small, mode=TURBOQUANT, prefill_chunk=100)
    emit, harness.engine._emit = harness.engine._emit, quiet
    harness.engine.submit(request("r", prompt(4, 100), 100, emitted=prompt(5, 61)))
    harness.step(2)
    sequence = running(harness, "r")
    with torch.inference_mode():
        assert not harness.engine.truncate(sequence, 142, next_token=3).exact
    while harness.engine._running:
        harness.step()
    harness.engine._emit = emit
    assert sequence.num_computed == 199 and sequence.bases["raw"] == 128
    history = [*sequence.token_ids, 7]
    with capture_logs() as logs:
        harness.run(request("exact", history, 3, reuse=EXACT), request("any", history, 3, reuse=pb.PREFIX_REUSE_ANY))
    assert usage(harness, "exact") == (100, True), "kept at the prompt's end"
    assert usage(harness, "any") == (199, False)
    assert [(line["request_id"], line["num_cached"]) for line in logs if "lossy" in line["event"]] == [("any", 199)]
    harness.check("exact", history, first=100)


# --- again, and twice ---


@pytest.mark.usefixtures("gaps")
@pytest.mark.parametrize("mode", [DENSE, TURBOQUANT, WINDOW])
def test_an_exact_prefix_hit_goes_on_with_window_carry_and_pending_rows(
    small: Reference, mode: tuple[str, str]
) -> None:
    harness = V4Harness(small, mode=mode, prefill_chunk=100)
    history = prompt(6, 203)
    history += harness.run(request("one", history, 10))["one"]
    history += prompt(7, 40)
    for r, cached in (("two", 212), ("again", len(history) - 1)):
        answer = harness.run(request(r, history, 8, reuse=EXACT))[r]
        assert usage(harness, r) == (cached, True)
        harness.check(r, history + answer[:-1], first=cached)
    assert harness.dequantised == 0 and harness.attachment.verify() == []


def test_no_prompt_goes_on_from_the_warm_up(small: Reference) -> None:
    """Its one token is the first of every prompt where 0 is the mark of the beginning."""
    harness = V4Harness(small)
    harness.engine.warm_up()
    harness.run(request("r", [0, *prompt(6, 20)], 2))
    assert usage(harness, "r") == (0, True)


def test_without_a_kept_boundary_nothing_is_reused(small: Reference) -> None:
    """Pages are all there, but what waits for a block cannot be made of them."""
    harness = V4Harness(small, checkpoints=0)
    harness.run(request("one", prompt(6, 260), 4))
    harness.run(request("two", [*prompt(6, 260), 1], 4, reuse=pb.PREFIX_REUSE_ANY))
    assert usage(harness, "two") == (0, True)


@pytest.mark.usefixtures("gaps")
@pytest.mark.parametrize("mode", [DENSE, TURBOQUANT])
def test_what_was_dropped_and_what_was_forked_go_on_as_they_were(small: Reference, mode: tuple[str, str]) -> None:
    harness = V4Harness(small, mode=mode, prefill_chunk=128)
    harness.engine._emit = quiet
    ids = prompt(8, 140)
    harness.engine.submit(request("r", ids, 40))
    harness.step(9)
    parent = running(harness, "r")
    with torch.inference_mode():
        child = harness.engine.fork(parent, "child")
        sibling = harness.engine.fork(parent, "sibling")
        assert child is not None and sibling is not None
        harness.engine.truncate(sibling, sibling.num_computed - 5, next_token=7)
        harness.step(4)
        harness.engine._drop(parent)
    while harness.engine._running or harness.engine._waiting:
        harness.step()
    assert parent.token_ids == child.token_ids != sibling.token_ids
    for sequence, first in ((parent, 0), (child, 147), (sibling, 142)):
        harness.check(sequence.request.request_id, sequence.token_ids[:-1], first=first)
    harness.attachment.check_empty()


# --- deterministic mode, and guesses ---

LENGTHS = (1, 30, 127, 128, 150)


@pytest.fixture(scope="module")
def drafting() -> Reference:
    """With an MTP block."""
    ratios = {"compress_ratios": [4, 128, 4, 0], "num_nextn_predict_layers": 1}
    return Reference(tiny_config(hca_ratio=16, **{**SMALL, **ratios}), 2)


@pytest.fixture(scope="module")
def plain(drafting: Reference) -> dict[str, V4Harness]:
    """Plain greedy decoding of each prompt, alone."""
    harnesses = {}
    for length in LENGTHS:
        harness = harnesses[f"r{length}"] = V4Harness(drafting, deterministic=True, max_running=1)
        harness.run(request(f"r{length}", prompt(length, length), 24))
    return harnesses


def same_bits(harness: V4Harness, plain: dict[str, V4Harness]) -> None:
    for r, alone in plain.items():
        assert harness.tokens(r) == alone.tokens(r)
        for position, logits in alone.logits[r].items():
            assert torch.equal(harness.logits[r][position], logits), f"{r} at {position}"


def requests() -> list[Any]:
    return [request(f"r{length}", prompt(length, length), 24) for length in LENGTHS]


def test_deterministic_mode_holds_in_company_and_dropped(drafting: Reference, plain: dict[str, V4Harness]) -> None:
    with torch.inference_mode():
        check_tiles(drafting.network)
    harness = V4Harness(drafting, mode=WINDOW, deterministic=True, max_running=4, prefill_chunk=256)
    for each in requests():
        harness.engine.submit(each)
    harness.step(9)
    with torch.inference_mode():
        harness.engine._drop(running(harness, "r127"))
    harness.run()
    same_bits(harness, plain)


@pytest.mark.parametrize(
    ("drafts", "mode", "oracle"),
    [(1, DENSE, 1), (2, TURBOQUANT, 2), (3, WINDOW, 3), (4, TURBOQUANT, 4), (3, DENSE, 0)],
)
def test_guesses_change_no_token_and_no_bit(
    drafting: Reference, plain: dict[str, V4Harness], drafts: int, mode: tuple[str, str], oracle: int
) -> None:
    """``oracle``: guesses are right but by chance and at boundaries of blocks and pages, and where raw rows are sealed
    (160); 0: they are the MTP block's own, which of random weights are rarely right.
    """
    harness = V4Harness(drafting, mode=mode, deterministic=True, max_running=4, prefill_chunk=256, drafts=drafts)
    drafter = harness.engine._drafter
    assert drafter is not None
    rng, propose = random.Random(oracle), drafter.propose

    def boundary_guesses() -> None:
        propose()
        for sequence in harness.engine._running:
            at = len(sequence.token_ids)
            right = (
                prompt(sequence.num_prompt, sequence.num_prompt)
                + plain[sequence.request.request_id].tokens(sequence.request.request_id)
            )[at : at + len(sequence.drafts)]
            wrong = [(at + i) % 32 in (0, 1, 31) or rng.random() < 0.15 for i in range(len(right))]
            sequence.drafts = [(token + missed) % 97 for token, missed in zip(right, wrong, strict=True)]

    if oracle:
        drafter.propose = boundary_guesses  # type: ignore[method-assign]
    harness.run(*requests())
    same_bits(harness, plain)
    load = harness.engine.load()
    print(f"{load.tokens_accepted} of {load.tokens_drafted} accepted in {load.num_steps} steps")
    assert 0 < load.tokens_accepted < load.tokens_drafted
    assert load.tokens_emitted == 24 * len(LENGTHS) and harness.dequantised == 0
    for name, pages in harness.attachment.control.pages.items():
        published = pages["hash"].any(axis=1)
        assert (pages["checksum"][published] != 0).all(), f"a page of {name} was packed before its tokens were certain"
    assert harness.attachment.verify() == []


def test_a_stop_among_accepted_guesses_ends_the_sequence_there(
    drafting: Reference, plain: dict[str, V4Harness]
) -> None:
    expected = plain["r30"].tokens("r30")
    harness = V4Harness(drafting, deterministic=True, drafts=4)
    drafter = harness.engine._drafter
    assert drafter is not None
    propose = drafter.propose

    def right_guesses() -> None:
        propose()
        for sequence in harness.engine._running:
            sequence.drafts = expected[sequence.num_emitted :][: len(sequence.drafts)]

    drafter.propose = right_guesses  # type: ignore[method-assign]
    stop = next(i for i in (8, 9, 10) if expected[i] not in expected[:i])
    harness.run(request("r", prompt(30, 30), 30, stop_token_ids=[expected[stop]]))
    assert harness.tokens("r") == expected[: stop + 1]
    assert harness.reason("r") == pb.FINISH_REASON_STOP_TOKEN


def test_sampled_sequences_are_not_guessed_at(drafting: Reference) -> None:
    harness = V4Harness(drafting, drafts=2)
    harness.run(request("r", prompt(30, 30), 12, temperature=1.0, seed=1))
    assert len(harness.tokens("r")) == 12 and harness.engine.load().tokens_drafted == 0


@pytest.mark.parametrize("mode", [DENSE, WINDOW])
def test_guesses_are_those_of_the_block_over_all_that_the_model_has_seen(
    drafting: Reference, mode: tuple[str, str]
) -> None:
    """Across chunks, single steps, a rejected row and a rollback; the reference is one pass over plain memory."""
    harness = V4Harness(drafting, mode=mode, drafts=3, prefill_chunk=50)
    harness.engine._emit = quiet
    harness.engine.submit(request("r", prompt(9, 130), 60))
    with torch.inference_mode():
        for steps in (3, 1, 4):
            harness.step(steps)
            sequence = running(harness, "r")
            assert sequence.drafts == block_guesses(drafting, sequence.token_ids, 3)
        harness.engine.truncate(sequence, sequence.num_computed - 3, next_token=5)
        assert sequence.drafts == []
        harness.step()
        assert sequence.drafts == block_guesses(drafting, sequence.token_ids, 3)


def block_guesses(reference: Reference, token_ids: list[int], count: int) -> list[int]:
    network, num_tokens = reference.network, len(token_ids) - 1
    rows = MemoryRows(reference.config, drafts=True)
    sequence = rows.add()
    batch = make_batch([(0, token_ids[:-1])])
    rows.begin(batch, [sequence])
    streams = network.draft(0, network.streams(batch, rows), torch.tensor(token_ids[1:]), batch, rows)
    guesses = [int(network.draft_logits(0, streams, batch)[-1].argmax())]
    for depth in range(count - 1):
        rows.lengths[sequence] = num_tokens + depth
        batch = make_batch([(num_tokens + depth, guesses[-1:])])
        rows.begin(batch, [sequence])
        streams = network.draft(0, streams[-1:], batch.token_ids, batch, rows)
        guesses.append(int(network.draft_logits(0, streams, batch)[-1].argmax()))
    return guesses
