"""The engine over captured decode steps, by PyTorch: deterministic mode, and the host a step behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from protos import types_pb2
from protos.errors import PreconditionFailed
from tests.unit.gpu_pair import MODES, prompt
from tests.unit.test_decode_graphs import SHAPE
from tests.unit.tiny import Harness, request, write_model
from tests.unit.torch_step import TorchLayers, TorchStep
from worker import model_runner
from worker.decode_rows import DecodeRows
from worker.decode_state import STOPS
from worker.pace import Pace
from worker.trials import Trials

_LIVES = ((120, 20), (3, 9), (270, 12), (30, 4), (14, 16), (250, 30))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Harness]:
    """An engine over captured steps; ``ahead`` False: it reads each before it launches the next."""
    TorchStep(monkeypatch)
    path = write_model(tmp_path / "model", seed=5, **SHAPE)

    def make(*, ahead: bool = True, **settings: Any) -> Harness:
        more = {"dtype": "float16", "device": "cuda:0", "max_running": 4, "prefill_chunk": 1024, **settings}
        harness = Harness.load(path, decode_graphs=True, **more)
        if not ahead:
            harness.engine._launch_ahead = lambda flight: None  # type: ignore[method-assign]
        return harness

    return make


def rows_of(harness: Harness) -> DecodeRows:
    decode: DecodeRows | None = harness.engine._runner._decode
    assert decode is not None
    return decode


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Harness]:
    """Deterministic mode over captured steps."""
    TorchStep(monkeypatch)
    path = write_model(tmp_path / "model", seed=5, **SHAPE)

    def make(**settings: Any) -> Harness:
        more = {"dtype": "float16", "device": "cuda:0", "max_running": 4, "deterministic": True, **settings}
        return Harness.load(path, decode_graphs=True, **more)

    return make


@pytest.mark.parametrize("mode", ["dense", "tq4"])
def test_deterministic_tokens_are_the_same_alone_batched_forked_and_computed_again(
    deterministic: Callable[..., Harness], mode: str
) -> None:
    requests = [request(f"r{i}", prompt(i, length), tokens) for i, (length, tokens) in enumerate(_LIVES[:4])]
    alone = deterministic(**MODES[mode])
    want = {name: tokens for each in requests for name, tokens in alone.run(each).items()}

    batched = deterministic(**MODES[mode])
    assert batched.run(*requests) == want
    # Prompts are computed by tiles, all that is behind them by captured steps.
    assert rows_of(batched).num_entered == len(requests)

    again = deterministic(**MODES[mode])
    cut = 7
    for each in requests:
        again.engine.submit(
            request(each.request_id, each.prompt, each.stop.max_tokens, emitted=want[each.request_id][:cut])
        )
    again.run()
    assert {each.request_id: again.tokens(each.request_id) for each in requests} == {
        name: tokens[cut:] for name, tokens in want.items()
    }

    forked = deterministic(**MODES[mode])
    forked.engine.submit(requests[0])
    forked.step(4)
    (parent,) = forked.engine._running
    with torch.inference_mode():
        assert forked.engine.fork(parent, "fork") is not None
    cut = parent.num_emitted  # a step was under way
    forked.engine.submit(requests[1])
    tokens = forked.run()
    assert forked.tokens("r0") == want["r0"] and forked.tokens("fork") == want["r0"][cut:] and not tokens


def test_deterministic_tokens_are_the_same_after_a_drop(deterministic: Callable[..., Harness]) -> None:
    requests = [request(f"r{i}", prompt(i, 120), 275) for i in range(2)]
    want = {name: tokens for each in requests for name, tokens in deterministic().run(each).items()}
    scarce = deterministic(admission="recompute", num_pages=7)
    assert scarce.run(*requests) == want
    assert scarce.engine.load().sequences_recomputed > 0


def test_rows_are_proved_before_the_worker_is_ready(
    deterministic: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    deterministic().engine.warm_up()
    right = TorchLayers.run

    def wrong(layers: TorchLayers, rows: int, reach: int) -> None:
        right(layers, rows, reach)
        layers.logits[rows - 1] *= 1 + 2**-20  # of a row in the last place

    monkeypatch.setattr(TorchLayers, "run", wrong)
    harness = deterministic()
    with pytest.raises(PreconditionFailed) as refused:
        harness.engine.warm_up()
    assert refused.value.reason == "NOT_DETERMINISTIC"


def test_the_next_step_is_launched_before_this_one_is_read(captured: Callable[..., Harness]) -> None:
    harness = captured()
    graphs: Any = rows_of(harness)._graphs
    order: list[tuple[str, int]] = []
    launch: Callable[[int], int] = graphs.launch
    tokens: Callable[[int], list[int]] = graphs.tokens

    def launched(rows: int) -> int:
        number = launch(rows)
        order.append(("launch", number))
        return number

    def read(number: int) -> list[int]:
        order.append(("read", number))
        return tokens(number)

    graphs.launch, graphs.tokens = launched, read
    assert len(harness.run(request("r", prompt(1, 20), 6))["r"]) == 6  # one comes with the prompt
    want = [("launch", 1)]
    for number in range(1, 5):
        want += [("launch", number + 1), ("read", number)]
    assert order == [*want, ("read", 5)]  # no step behind the last


@pytest.mark.parametrize("others", [0, 6, 30])
def test_a_stop_token_ends_its_row_on_the_device(captured: Callable[..., Harness], others: int) -> None:
    """The step behind it has begun: nothing is computed for the row there. The device knows the first stops; of one
    behind them the host alone does, which drops what was computed.
    """
    free = captured().run(request("r", prompt(1, 20), 12), request("s", prompt(2, 20), 12))
    stops = [*[token for token in range(200) if token not in free["r"]][:others], free["r"][5]]
    harness = captured()
    told = harness.run(request("r", prompt(1, 20), 12, stop_token_ids=stops), request("s", prompt(2, 20), 12))
    assert told["s"] == free["s"] and told["r"] == free["r"][: free["r"].index(stops[-1]) + 1]
    layers: Any = rows_of(harness)._graphs.layers
    assert layers.num_computed == len(told["r"]) - 1 + len(told["s"]) - 1 + (others >= STOPS)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_stop_that_a_known_token_stands_in_place_of_ends_nothing(
    deterministic: Callable[..., Harness], penalty: float
) -> None:
    """What was emitted elsewhere is computed by captured rows, whatever they draw there."""

    def told(emitted: list[int], *stops: int) -> list[int]:
        harness = deterministic()
        harness.engine.submit(
            request("r", prompt(1, 20), 12, emitted=emitted, stop_token_ids=stops, repetition_penalty=penalty)
        )
        harness.run()
        return harness.tokens("r")

    drawn = told([9])[0]
    emitted = [9, (drawn + 1) % 200, 11]
    free = told(emitted)
    assert told(emitted, drawn) == free[: free.index(drawn) + 1 if drawn in free else None]


def test_the_models_end_of_text_is_among_what_the_device_knows(captured: Callable[..., Harness]) -> None:
    harness = captured()
    rows = rows_of(harness)
    rows._eos_token_ids = (7,)
    harness.engine.submit(request("r", prompt(1, 20), 12, stop_token_ids=list(range(20, 40)), ignore_eos=False))
    harness.engine.submit(request("s", prompt(2, 20), 12, stop_token_ids=[30], ignore_eos=True))
    harness.step(4)
    stops = {each.request.request_id: rows._rows[row].stops for each, row in rows._row_of.items()}
    assert stops == {"r": (7, *range(20, 20 + STOPS - 1)), "s": (30,)}


def test_a_stop_within_a_prompt_ends_nothing(captured: Callable[..., Harness]) -> None:
    """Which captured rows compute token by token, each drawing the next."""
    (drawn,) = captured().run(request("r", [9], 1))["r"]
    asked = request("r", [9, drawn, 11], 6, stop_token_ids=[drawn])
    assert captured(prefill_chunk=1).run(asked) == captured().run(asked)


def test_a_prompt_runs_layer_by_layer_between_decode_steps(captured: Callable[..., Harness]) -> None:
    requests = [request("short", prompt(1, 20), 60), request("long", prompt(2, 700), 3)]
    want: dict[str, list[int]] = {}
    for each in requests:
        want |= captured().run(each)
    harness = captured()
    order: list[str] = []
    graphs: Any = rows_of(harness)._graphs
    launch: Callable[[int], int] = graphs.launch
    slices: Any = model_runner.Slices
    advance = slices.advance

    def launched(rows: int) -> int:
        order.append("step")
        return launch(rows)

    def advanced(self: Any, num_layers: int) -> None:
        order.append("layers")
        advance(self, num_layers)

    graphs.launch = launched
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "advance", advanced)
        harness.engine.submit(requests[0])
        harness.step(3)
        order.clear()
        told = harness.run(requests[1])
    assert told["long"] == want["long"] and harness.tokens("short") == want["short"]
    chunks = [at for at, what in enumerate(order) if what == "layers"]
    assert len(chunks) >= 2 and "step" in order[chunks[0] : chunks[-1]]


def test_a_chunk_lands_while_the_gpu_decodes(captured: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    """What its last layers take is waited for by no decode row: steps go on until they are computed. Then the host
    keeps the chunk's rows, behind what the steps before have to say.
    """
    requests = [request("short", prompt(1, 20), 60), request("long", prompt(2, 700), 3)]
    want: dict[str, list[int]] = {}
    for each in requests:
        want |= captured().run(each)
    harness = captured()
    engine, computed = harness.engine, iter([False, False])
    monkeypatch.setattr(
        model_runner.Slices, "is_computed", property(lambda slices: slices.done and next(computed, True))
    )
    events: list[str] = []
    launch, land = engine._runner.launch, engine._land_chunk

    def launched(work: Any) -> int:
        events.append("decode, all launched" if engine._chunk is not None and engine._chunk.slices.done else "decode")
        return launch(work)

    def landed() -> None:
        assert not engine._outputs
        events.append("landed beside a step" if engine._flight is not None else "landed")
        land()

    monkeypatch.setattr(engine._runner, "launch", launched)
    monkeypatch.setattr(engine, "_land_chunk", landed)
    engine.submit(requests[0])
    harness.step(3)
    told = harness.run(requests[1])
    assert told["long"] == want["long"] and harness.tokens("short") == want["short"]
    first = events.index("landed beside a step")
    assert events[:first].count("decode, all launched") == 2 and "landed" not in events


def test_a_sequence_on_trial_has_its_step_for_itself_also_where_a_prompt_is_between_its_layers(
    captured: Callable[..., Harness],
) -> None:
    requests = [request(f"short{n}", prompt(n, 20), 60) for n in range(3)] + [request("long", prompt(3, 700), 3)]
    want = captured().run(*requests)
    harness = captured(ahead=False)  # as when news comes: else steps go on ahead until the prompt's layers are done
    engine, steps, chunks = harness.engine, [], []
    for each in requests[:3]:
        engine.submit(each)
    harness.step(3)
    suspects = [each for each in engine._running if each.request.request_id != "short0"]
    engine._trials = Trials((each, 1) for each in suspects)
    land, land_chunk = engine._land, engine._land_chunk

    def in_step() -> list[str]:
        return [w.sequence.request.request_id for w in engine._in_step]

    def landed(flight: Any) -> None:
        steps.append(in_step())
        land(flight)

    def chunk_landed() -> None:
        slices: Any = engine._chunk and engine._chunk.slices
        if slices:
            wait = slices.step

            def waited() -> Any:
                chunks.append(in_step())
                return wait()

            slices.step = waited
        land_chunk()

    engine._land, engine._land_chunk = landed, chunk_landed  # type: ignore[method-assign]
    engine.submit(requests[3])
    with pytest.MonkeyPatch.context() as patch:  # a layer a step: the prompt is under way when the trials begin
        patch.setattr(Pace, "budget_s", lambda self: 1e-9)
        told = harness.run()
    assert sorted(steps[0]) == ["long", "short0"], "the others first"
    assert chunks[0] == ["long"], "whom a failure would be laid on"
    assert steps[1:3] == [["short1"], ["short2"]]
    assert {each: told.get(each) or harness.tokens(each) for each in want} == want


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_prompt_that_is_aborted_between_its_layers_hurts_nobody(captured: Callable[..., Harness], after: int) -> None:
    want = captured().run(request("short", prompt(1, 20), 60))
    harness = captured(num_pages=12)
    harness.engine.submit(request("short", prompt(1, 20), 60))
    harness.step(3)
    harness.engine.submit(request("long", prompt(2, 700), 3))
    harness.step(after)
    assert harness.engine.abort("long")
    harness.engine.submit(request("next", prompt(3, 600), 4))  # it needs the pages
    alone = captured().run(request("next", prompt(3, 600), 4))
    told = harness.run()
    assert not told and harness.tokens("short") == want["short"] and harness.tokens("next") == alone["next"]
    assert harness.attachment.verify() == []


def life(harness: Harness, seed: int) -> tuple[dict[str, list[int]], dict[str, list[int]], set[str]]:
    """A random life of an engine: arrivals, aborts, forks, rollbacks. (what was said, what was in the log at the last
    commit, who was aborted).
    """
    rng = random.Random(seed)
    said: dict[str, list[int]] = {}
    logged: dict[str, list[int]] = {}
    aborted: set[str] = set()
    engine, control = harness.engine, harness.attachment.control

    def take(result: Any) -> None:
        for output in result.outputs:
            tokens = said.setdefault(output.request_id, [])
            del tokens[output.token_offset :]
            tokens += output.token_ids
            if output.finish_reason == types_pb2.FINISH_REASON_ABORTED:
                aborted.add(output.request_id)

    engine._emit = take
    commit = control.commit

    def committed(slot: int, length: int) -> None:
        commit(slot, length)
        sequence = next((s for s in engine._running if s.slot == slot), None)
        if sequence is not None:
            assert length <= control.logged(slot)
            logged[sequence.request.request_id] = list(control.tokens(slot, 0, control.logged(slot)))

    control.commit = committed  # type: ignore[method-assign, assignment]
    arrivals = dict(zip(rng.sample(range(30), 7), range(7), strict=True))
    cuts = {i: rng.randrange(1, 20) for i in range(7) if rng.random() < 0.4}  # emitted tokens -> back to so many
    forks = {i for i in range(7) if rng.random() < 0.3}
    aborts = {i for i in range(7) if rng.random() < 0.2}
    asked = [(rng.choice((5, 100, 120, 250)), rng.randrange(1, 90), rng.random() < 0.3) for _ in range(7)]
    for turn in range(2000):
        if turn in arrivals:
            i = arrivals[turn]
            length, most, sampled = asked[i]
            extra: Any = {"temperature": 0.9, "seed": i, "top_k": 20} if sampled else {}
            engine.submit(request(f"r{i}", prompt(i, length), most, **extra))
        harness.step()
        for sequence in list(engine._running):
            name, emitted = sequence.request.request_id, sequence.num_emitted
            i = int(name[1:].removesuffix("f"))
            if sequence.finished or name.endswith("f"):
                continue
            if i in forks and emitted > 10:
                forks.discard(i)
                with torch.inference_mode():
                    engine.fork(sequence, f"r{i}f")
            elif i in cuts and emitted > 25:
                back = sequence.num_prompt + cuts.pop(i)
                with torch.inference_mode(), suppress(PreconditionFailed):
                    engine.truncate(sequence, back)
            elif i in aborts and emitted > 20:
                aborts.discard(i)
                engine.abort(name)
        if turn > 30 and not engine._running and not engine._waiting:
            harness.attachment.check_empty()
            return said, logged, aborted
    raise AssertionError("the engine did not come to an end")


@pytest.mark.parametrize(("mode", "seed"), [("dense", 0), ("tq4", 1), ("tq4", 2), ("dense edges", 3)])
def test_a_step_ahead_says_and_keeps_what_a_step_at_a_time_does(
    captured: Callable[..., Harness], mode: str, seed: int
) -> None:
    # Prompts are computed in other company here and there: without deterministic mode they round otherwise.
    settings = {"num_pages": 24, "admission": "recompute" if seed % 2 else "worst_case", "deterministic": True}
    settings |= MODES[mode]
    at_once, ahead = captured(ahead=False, **settings), captured(**settings)
    want, want_log, want_aborted = life(at_once, seed)
    said, log, aborted = life(ahead, seed)
    assert aborted == want_aborted and len(said.keys() & want.keys()) >= 7
    for name in said.keys() & want.keys():  # a fork may find no room here or there
        tokens = want[name]
        both = min(len(tokens), len(said[name]))
        if name.endswith("f"):  # a fork begins a step sooner or later, an abort comes so
            assert said[name][-both:] == tokens[-both:], name
            continue
        assert said[name][:both] == tokens[:both], name
        assert name in aborted or len(said[name]) == len(tokens), name
        if name not in aborted:
            assert log[name] == want_log[name], name
    assert ahead.attachment.verify() == at_once.attachment.verify() == []
