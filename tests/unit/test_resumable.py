"""The logs of resumable sequences: who reads what, what is kept and for how long. A clock that the test moves."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

import pytest
from structlog.testing import capture_logs

from protos import types_pb2, worker_pb2
from protos.errors import AlreadyExists, CapacityError, InvalidRequest, NotFound
from worker import resumable
from worker.resumable import DELIVERED_LASTS_S, Answers, Limits, Subscription

ABORTED, EOS, ERROR = (
    types_pb2.FINISH_REASON_ABORTED,
    types_pb2.FINISH_REASON_EOS,
    types_pb2.FINISH_REASON_ERROR,
)


@dataclass
class Session:
    """Takes what there is whenever there is news, if ``reads``."""

    reads: bool = True
    got: list[worker_pb2.SequenceOutput] = field(default_factory=list)
    num_news: int = 0

    def news(self, subscription: Subscription) -> None:
        self.num_news += 1
        if self.reads and (piece := subscription.take()) is not None:
            self.got.append(piece)

    @property
    def token_ids(self) -> list[int]:
        """Offsets leave no gap; only the last output ends."""
        token_ids: list[int] = []
        for output in self.got:
            assert output.token_offset == len(token_ids) + self.got[0].token_offset
            token_ids += output.token_ids
        assert not any(output.finish_reason for output in self.got[:-1])
        return token_ids


class Scene:
    """Answers over an engine that does what it is told at once."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.now = 0.0
        self.answers = Answers(lambda: self.now, limits)
        self.aborts: list[str] = []
        self.owners: dict[str, str] = {}

    def open(self, submit: worker_pb2.Submit, session: Session | None = None) -> Subscription:
        owner = self.answers.new_owner()

        def abort() -> None:
            self.aborts.append(submit.request_id)
            self.say(submit.request_id, finish=ABORTED)

        subscription = self.answers.open(submit, owner, abort, session or Session())
        if subscription.answer.owner == owner:
            self.owners[submit.request_id] = owner
        return subscription

    def say(self, request_id: str, *token_ids: int, finish: types_pb2.FinishReason.ValueType = 0) -> None:  # type: ignore[assignment]
        output = worker_pb2.SequenceOutput(request_id=request_id, token_ids=token_ids, finish_reason=finish, seed=9)
        if submitted_with_logprobs(self, request_id):
            for token_id in token_ids:
                output.logprobs.add(chosen=types_pb2.TokenLogprob(token_id=token_id, logprob=-0.5))
        if finish:
            output.usage.output_tokens = 99
        self.answers.take(self.owners[request_id], [output])

    def found(self, request_id: str, tenant: str = "") -> bool:
        return self.answers.find(request_id, tenant) is not None


def submitted_with_logprobs(scene: Scene, request_id: str) -> bool:
    answer = scene.answers._by_owner.get(scene.owners[request_id])
    return answer is not None and answer.submit.sampling.HasField("logprobs")


def submission(
    request_id: str = "r",
    *,
    tenant: str = "",
    grace_ms: int = 1000,
    digest: bytes = b"d",
    max_tokens: int = 100,
    logprobs: int | None = None,
    emitted: tuple[int, ...] = (),
    caller_request: bytes = b"",
) -> worker_pb2.Submit:
    return worker_pb2.Submit(
        request_id=request_id,
        tenant=tenant,
        prompt_token_ids=[1, 2, 3],
        emitted_token_ids=emitted,
        sampling=types_pb2.Sampling(logprobs=logprobs),
        stop=types_pb2.StopConditions(max_tokens=max_tokens),
        resumable=worker_pb2.Resumable(grace_ms=grace_ms, request_digest=digest, caller_request=caller_request),
    )


# --- what is read ---


def test_each_subscription_reads_all_of_it_whenever_it_came() -> None:
    s = Scene()
    first, middle, last = Session(), Session(), Session()
    s.open(submission(logprobs=1), first)
    s.say("r", 5)
    s.say("r", 6, 7)
    s.answers.resume("r", "", "r#1", middle)
    s.say("r", 8, finish=EOS)
    s.answers.resume("r", "", "r#2", last)
    for name, session in (("r", first), ("r#1", middle), ("r#2", last)):
        assert session.token_ids == [5, 6, 7, 8]
        assert {output.request_id for output in session.got} == {name}
        assert [p.chosen.token_id for output in session.got for p in output.logprobs] == [5, 6, 7, 8]
        assert session.got[0].seed == 9
        end = session.got[-1]
        assert (end.finish_reason, end.usage.output_tokens, end.more) == (EOS, 99, False)
    assert [len(session.got) for session in (first, middle, last)] == [3, 2, 1]


def test_a_replay_comes_in_pieces_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MAX_PIECE_WEIGHT", 8)
    s = Scene()
    s.open(submission(logprobs=2))  # a token weighs 1 + 1 + 1 + 2
    for token_id in range(6):
        s.say("r", token_id)
    session = Session()
    subscription = s.answers.resume("r", "", "r#1", session)
    for count in range(1, 6):
        assert (session.token_ids, session.got[-1].more) == (list(range(count)), True)
        subscription.go_on()
    assert (session.token_ids, session.got[-1].more) == (list(range(6)), False)
    s.say("r", 6, finish=EOS)
    assert session.token_ids == list(range(7)) and session.got[-1].finish_reason == EOS


def test_one_that_reads_late_gets_what_gathered_and_the_end_with_the_last_of_it() -> None:
    s = Scene()
    session = Session(reads=False)
    subscription = s.open(submission(), session)
    for token_id in range(50):
        s.say("r", token_id)
    s.say("r", 50, finish=EOS)
    output = subscription.take()
    assert output is not None
    assert (list(output.token_ids), output.finish_reason) == (list(range(51)), EOS)
    assert subscription.take() is None and subscription.told_end


def test_tokens_that_were_emitted_elsewhere_are_replayed_and_not_sent_again() -> None:
    s = Scene()
    first, other = Session(), Session()
    s.open(submission(emitted=(7, 8)), first)
    assert not first.num_news
    s.say("r", 9)
    assert (first.got[0].token_offset, first.token_ids) == (2, [9])
    s.answers.resume("r", "", "r#1", other)
    assert other.token_ids == [7, 8, 9]


def test_tokens_that_were_emitted_elsewhere_have_no_logprobs_and_no_output_with_others() -> None:
    s = Scene()
    first, other = Session(), Session()
    s.open(submission(emitted=(7, 8), logprobs=0), first)
    s.say("r", 9, 10)
    s.say("r", 11, finish=EOS)
    assert [(o.token_offset, len(o.token_ids), len(o.logprobs)) for o in first.got] == [(2, 2, 2), (4, 1, 1)]
    s.answers.resume("r", "", "r#1", other).go_on()
    assert [(o.token_offset, len(o.token_ids), len(o.logprobs)) for o in other.got] == [(0, 2, 0), (2, 3, 3)]
    assert [o.more for o in other.got] == [True, False] and other.got[-1].finish_reason == EOS


# --- who may ---


def test_the_same_submission_joins_and_another_is_a_duplicate() -> None:
    s = Scene()
    s.open(submission())
    s.say("r", 5)
    again = Session()
    assert s.open(submission(), again).answer.owner == s.owners["r"]
    assert again.token_ids == [5]
    for other in (submission(digest=b"e"), submission(digest=b""), submission(tenant="t")):
        with pytest.raises(AlreadyExists, match="DUPLICATE_REQUEST"):
            s.open(other)
    s.say("r", finish=EOS)
    with pytest.raises(AlreadyExists):
        s.open(submission(digest=b"e"))


def test_another_tenant_finds_nothing() -> None:
    s = Scene()
    s.open(submission(tenant="acme"))
    with pytest.raises(NotFound) as foreign:
        s.answers.resume("r", "other", "r#1", Session())
    with pytest.raises(NotFound) as absent:
        s.answers.resume("nothing", "other", "r#1", Session())
    assert str(foreign.value) == str(absent.value)
    assert not s.found("r", "other") and not s.found("r") and s.found("r", "acme")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"grace_ms": 600_001}, "BAD_RESUME_GRACE"), ({"caller_request": bytes(8193)}, "BAD_CALLER_REQUEST")],
)
def test_what_no_router_of_ours_sends_is_refused(changes: dict[str, int], reason: str) -> None:
    s = Scene()
    with pytest.raises(InvalidRequest, match=reason):
        s.open(submission(**changes))  # type: ignore[arg-type]
    assert s.answers.num_bytes == 0 and not s.found("r")


# --- for how long ---


def test_what_nobody_resumes_is_aborted_when_its_grace_time_is_over() -> None:
    s = Scene()
    subscription = s.open(submission())
    s.now = 100.0
    s.answers.expire()
    assert s.found("r")  # somebody is subscribed
    s.answers.leave(subscription)
    s.now = 100.9
    s.answers.expire()
    assert s.found("r") and not s.aborts
    s.now = 101.0
    s.answers.expire()
    assert not s.found("r") and s.aborts == ["r"] and s.answers.num_bytes == 0


def test_the_grace_time_begins_with_the_end_where_that_is_later() -> None:
    s = Scene()
    s.answers.leave(s.open(submission()))
    s.now = 0.9
    s.say("r", 5, finish=EOS)
    s.now = 1.8
    s.answers.expire()
    assert s.found("r")
    subscription = s.answers.resume("r", "", "r#1", Session())
    s.now = 5.0
    s.answers.expire()
    s.answers.leave(subscription)
    s.now = 5.9
    s.answers.expire()
    assert s.found("r")
    s.now = 6.0
    s.answers.expire()
    assert not s.found("r") and not s.aborts and s.answers.num_kept == 0


def test_a_slot_outlives_the_delivery_for_a_while_and_is_let_go_of_once() -> None:
    s = Scene()
    let_go: list[str] = []
    for name in ("first", "second"):
        subscription = s.answers.open(
            submission(name, grace_ms=60_000), name, lambda: None, Session(), partial(let_go.append, name)
        )
        s.answers.take(name, [worker_pb2.SequenceOutput(token_ids=[5], finish_reason=EOS)])
        subscription.take()
        s.answers.leave(subscription, delivered=True)
    s.now = DELIVERED_LASTS_S - 0.1
    s.answers.expire()
    assert let_go == [], "the router's last bytes may not be with its caller"
    second = s.answers.find("second", "")
    assert second is not None
    s.answers.cancel(second)
    assert let_go == ["second"]
    for s.now in (DELIVERED_LASTS_S, 2 * DELIVERED_LASTS_S, 100.0):
        s.answers.expire()
    assert let_go == ["second", "first"] and not s.found("first")


def test_the_last_of_several_subscriptions_counts() -> None:
    s = Scene()
    first = s.open(submission())
    second = s.answers.resume("r", "", "r#1", Session())
    s.answers.leave(first)
    s.now = 50.0
    s.answers.expire()
    assert s.found("r")
    s.answers.leave(second)
    s.now = 51.0
    s.answers.expire()
    assert s.aborts == ["r"]


def test_a_complete_answer_is_kept_and_a_cancelled_one_is_not() -> None:
    s = Scene()
    for request_id in ("complete", "cancelled"):
        session = Session()
        answer = s.open(submission(request_id), session).answer
        s.say(request_id, 5, 6)
        (s.answers.complete if request_id == "complete" else s.answers.cancel)(answer)
        assert session.token_ids == [5, 6] and session.got[-1].finish_reason == ABORTED
    assert s.aborts == ["complete", "cancelled"]
    assert s.found("complete") and not s.found("cancelled")
    late = Session()
    s.answers.resume("complete", "", "c#1", late)
    assert late.token_ids == [5, 6] and late.got[-1].finish_reason == ABORTED
    s.answers.complete(s.answers._by_id["complete"])  # by a router that sees the stop string in the replay
    assert s.aborts == ["complete", "cancelled"] and s.found("complete")
    s.answers.cancel(s.answers._by_id["complete"])
    assert not s.found("complete") and s.answers.num_bytes == 0


def test_a_refusal_is_no_answer_and_a_failure_after_tokens_is_one() -> None:
    s = Scene()
    for request_id, tokens in (("refused", ()), ("failed", (5,))):
        session = Session()
        s.open(submission(request_id), session)
        s.say(request_id, *tokens, finish=ERROR)
        assert session.got[-1].finish_reason == ERROR
    assert not s.found("refused") and s.found("failed")
    s.open(submission("refused"))


def test_what_the_engine_did_not_take_is_dropped() -> None:
    s = Scene()
    s.open(submission())
    s.answers.drop(s.owners["r"])
    assert not s.found("r") and s.answers.num_bytes == 0


# --- how much ---


def test_the_answers_that_ended_first_are_lost_first_and_said_to_be() -> None:
    s = Scene(Limits(max_kept=2))
    for request_id in ("a", "b", "c"):
        s.open(submission(request_id))
    with capture_logs() as lines:
        for request_id in ("b", "a", "c"):
            s.say(request_id, 5, finish=EOS)
    assert [s.found(request_id) for request_id in ("a", "b", "c")] == [True, False, True]
    (line,) = lines
    assert (line["request_id"], line["num_tokens"], line["log_level"]) == ("b", 1, "warning")


def test_bytes_are_bounded_by_what_running_logs_may_come_to() -> None:
    one = resumable._most_bytes(submission(max_tokens=1000))
    s = Scene(Limits(max_bytes=2 * one))
    for request_id in ("a", "b"):
        s.open(submission(request_id, max_tokens=1000))
    with pytest.raises(CapacityError, match="RESUME_LOG_FULL") as full:
        s.open(submission("c", max_tokens=1000))
    assert full.value.retry_after_ms
    s.say("a", 5, finish=EOS)
    assert s.answers.num_bytes < 2 * one
    with capture_logs() as lines:
        s.open(submission("c", max_tokens=1000))  # there is room if the kept one goes
    assert [line["request_id"] for line in lines] == ["a"] and not s.found("a")
    with pytest.raises(CapacityError):
        s.open(submission("d", max_tokens=1))
    assert s.answers.num_bytes == 2 * one


def test_logprobs_count() -> None:
    plain, with_them = (resumable._most_bytes(submission(max_tokens=1000, logprobs=n)) for n in (None, 20))
    assert with_them - plain == 1000 * (48 + 13 * 21)
    s = Scene()
    s.open(submission(logprobs=20))
    for _ in range(100):
        output = worker_pb2.SequenceOutput(token_ids=[1])
        entry = types_pb2.TokenLogprob(token_id=1 << 20, logprob=-3.25)
        output.logprobs.add(chosen=entry, top=[entry] * 20)
        s.answers.take(s.owners["r"], [output])
    promised = s.answers.num_bytes
    s.answers.take(s.owners["r"], [worker_pb2.SequenceOutput(finish_reason=EOS)])
    assert 100 * 20 * 8 < s.answers.num_bytes <= promised


def test_who_is_owed_an_answer() -> None:
    s = Scene()
    first = s.open(submission())
    assert s.answers.num_owed == 1
    s.say("r", 5, finish=EOS)
    assert s.answers.num_owed == 1  # it may still be on its way
    s.answers.leave(first)
    assert s.answers.num_owed == 1
    s.answers.leave(s.answers.resume("r", "", "r#1", Session()), delivered=True)
    assert s.answers.num_owed == 0 and s.found("r")


def test_random_lives_leave_no_gap_no_repeat_and_no_byte() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    s = Scene(Limits(max_kept=3, max_bytes=16_000))
    truth: dict[str, list[int]] = {}  # by owner
    readers: list[tuple[str, Session, Subscription]] = []
    running: dict[str, str] = {}

    for number in range(1000):
        request_id = f"r{rng.randrange(8)}"
        match rng.randrange(8):
            case 0 | 1:
                session = Session()
                try:
                    subscription = s.open(submission(request_id, grace_ms=rng.randrange(2000)), session)
                except CapacityError:
                    continue
                truth.setdefault(subscription.answer.owner, [])
                running.setdefault(request_id, subscription.answer.owner)
                readers.append((subscription.answer.owner, session, subscription))
            case 2 | 3 if request_id in running:
                truth[running[request_id]].append(number)
                s.say(request_id, number)
            case 4 if request_id in running:
                s.say(request_id, finish=EOS)
                running.pop(request_id, None)
            case 5 if s.found(request_id):
                session = Session()
                subscription = s.answers.resume(request_id, "", f"{request_id}#{number}", session)
                readers.append((subscription.answer.owner, session, subscription))
            case 6 if readers:
                _, _, subscription = readers.pop(rng.randrange(len(readers)))
                s.answers.leave(subscription)
            case 7:
                s.now += rng.random()
                s.answers.expire()
                if rng.random() < 0.3 and (answer := s.answers.find(request_id, "")):
                    s.answers.cancel(answer)
        running = {r: o for r, o in running.items() if o in s.answers._by_owner}
        for owner, session, _ in readers:
            assert session.token_ids == truth[owner]
        assert s.answers.num_kept <= 3 and s.answers.num_bytes <= 16_000
        assert s.answers.num_bytes == sum(
            a.num_bytes for a in {*s.answers._by_owner.values(), *s.answers._kept.values()}
        )
    for _, _, subscription in readers:
        s.answers.leave(subscription)
    s.now += 10
    s.answers.expire()
    assert s.answers.num_bytes == 0 and not s.answers._by_id and not s.answers._by_owner and not s.answers._kept
