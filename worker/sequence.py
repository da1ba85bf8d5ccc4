"""What the engine holds about one sequence: the request as it came, where it stands, and what goes out about it.

A request is frozen. A ``Sequence`` is owned by the engine thread; nobody else touches one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from google.protobuf.message import DecodeError

from protos import types_pb2, worker_pb2
from protos.errors import InvalidRequest, TailpackError, TooLarge
from protos.limits import check_sampling, check_stop, check_token_ids
from worker.seen import Seen

MAX_REQUEST_ID_BYTES = 256
MAX_TENANT_BYTES = 256
MAX_TRACEPARENT_BYTES = 512
COPIED_AT_ONCE = 1 << 14  # token ids: about 2 ms


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen (types.proto, Sampling). The default is greedy decoding."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @staticmethod
    def from_proto(message: types_pb2.Sampling) -> Sampling:
        return Sampling(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
            seed=message.seed if message.HasField("seed") else None,
            logprobs=message.logprobs if message.HasField("logprobs") else None,
        )

    def to_proto(self) -> types_pb2.Sampling:
        return types_pb2.Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            logprobs=self.logprobs,
        )


@dataclass(frozen=True)
class StopConditions:
    """When a sequence ends (types.proto, StopConditions)."""

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @staticmethod
    def from_proto(message: types_pb2.StopConditions) -> StopConditions:
        return StopConditions(message.max_tokens, tuple(message.stop_token_ids), message.ignore_eos)

    def to_proto(self) -> types_pb2.StopConditions:
        return types_pb2.StopConditions(
            max_tokens=self.max_tokens, stop_token_ids=self.stop_token_ids, ignore_eos=self.ignore_eos
        )


@dataclass(frozen=True)
class Request:
    """One sequence to compute (worker.proto, Submit).

    ``owner`` names the router session that submitted it; its outputs carry it back. ``emitted`` are tokens that went
    out elsewhere already: they are computed again as they are, and the first output starts behind them. Where the last
    of them ends the sequence (all went out but the word that it ended) nothing is computed.
    """

    request_id: str
    tenant: str
    prompt: tuple[int, ...]
    sampling: Sampling
    stop: StopConditions
    emitted: tuple[int, ...] = ()
    owner: str = ""
    deadline_unix_ns: int = 0
    traceparent: str = ""
    reuse: types_pb2.PrefixReuse.ValueType = types_pb2.PREFIX_REUSE_DEFAULT
    resumable: worker_pb2.Resumable | None = None  # kept in the control block with the rest; the engine does not look

    @staticmethod
    def from_proto(message: worker_pb2.Submit, owner: str) -> Request:
        return Request(
            request_id=message.request_id,
            tenant=message.tenant,
            prompt=tuple(_token_ids(message.prompt_token_ids)),
            sampling=Sampling.from_proto(message.sampling),
            stop=StopConditions.from_proto(message.stop),
            emitted=tuple(message.emitted_token_ids),
            owner=owner,
            deadline_unix_ns=message.deadline_unix_ns,
            traceparent=message.traceparent,
            reuse=message.prefix_reuse,
            resumable=message.resumable if message.HasField("resumable") else None,
        )

    def to_proto(self) -> worker_pb2.Submit:
        return worker_pb2.Submit(
            request_id=self.request_id,
            tenant=self.tenant,
            prompt_token_ids=self.prompt,
            sampling=self.sampling.to_proto(),
            stop=self.stop.to_proto(),
            emitted_token_ids=self.emitted,
            deadline_unix_ns=self.deadline_unix_ns,
            traceparent=self.traceparent,
            prefix_reuse=self.reuse,
            resumable=self.resumable,
        )

    def frozen(self) -> bytes:
        """The request without its tokens, for the control block: those are in the token log beside it."""
        submit = replace(self, prompt=(), emitted=()).to_proto()
        frozen = worker_pb2.FrozenRequest(submit=submit, num_prompt_tokens=len(self.prompt))
        return frozen.SerializeToString(deterministic=True)

    @staticmethod
    def thawed(frozen: bytes, token_ids: Seq[int], owner: str) -> Request:
        """What ``frozen`` made, with the prompt at the head of a token log.

        Raises:
            InvalidRequest: BAD_FROZEN_REQUEST, another version wrote it, or the log is shorter than the prompt.
        """
        message = worker_pb2.FrozenRequest()
        try:
            message.ParseFromString(frozen)
        except DecodeError:
            message.Clear()
        if not message.HasField("submit") or not 0 < message.num_prompt_tokens <= len(token_ids):
            raise InvalidRequest(
                "a frozen request is not readable",
                reason="BAD_FROZEN_REQUEST",
                given=f"{len(frozen)} bytes, a prompt of {message.num_prompt_tokens} tokens",
                allowed=f"what this version writes, a prompt of 1 to {len(token_ids)} tokens",
            )
        prompt = tuple(token_ids[: message.num_prompt_tokens])
        return replace(Request.from_proto(message.submit, owner), prompt=prompt)

    def with_seed(self, seed: int) -> Request:
        return replace(self, sampling=replace(self.sampling, seed=seed))


def _token_ids(field: Seq[int]) -> list[int]:
    """A repeated field as a list, in pieces: one copy of a million ids would hold the GIL for all of its time."""
    token_ids: list[int] = []
    for first in range(0, len(field), COPIED_AT_ONCE):
        token_ids += field[first : first + COPIED_AT_ONCE]
    return token_ids


@dataclass(frozen=True)
class Output:
    """What one step made for one sequence (worker.proto, SequenceOutput).

    ``finish_reason`` is UNSPECIFIED while the sequence goes on. ``error`` comes with FINISH_REASON_ERROR only;
    ``usage`` and ``timings`` with the last output; ``seed`` with the first output of a sampled sequence, else None.
    """

    request_id: str
    owner: str
    token_offset: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[types_pb2.PositionLogprobs, ...] = ()
    finish_reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED
    error: TailpackError | None = None
    usage: types_pb2.Usage | None = None
    timings: types_pb2.Timings | None = None
    seed: int | None = None


Load = types_pb2.WorkerLoad
"""How busy the engine is; see types.proto, WorkerLoad."""


@dataclass(frozen=True)
class StepResult:
    """All that goes out after one step. ``outputs`` is empty when only the load is reported."""

    outputs: tuple[Output, ...]
    load: Load


@dataclass(eq=False)
class Sequence:
    """Where a sequence stands. ``token_ids``: the prompt and all emitted tokens; rows [0, num_computed) are written."""

    request: Request
    max_total_tokens: int  # prompt and output together, at worst
    submitted_ns: int
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0  # prompt tokens that needed no computing
    prefix_exact: bool = True
    junction: int = 0  # a length at which others would resume; a checkpoint is taken there. 0: none
    slot: int = -1  # in the control block; -1 while waiting
    pages: dict[str, list[int]] = field(default_factory=dict)  # layer group -> page ids in token order; -1: freed
    bases: dict[str, int] = field(default_factory=dict)  # layer group -> first token that is not in a sealed page
    tail_slots: dict[str, int] = field(default_factory=dict)  # of groups with a tail
    num_promised: int = 0  # tokens that pages are promised for
    num_dropped: int = 0  # times that it lost its pages to older sequences, and was computed again
    first_run_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    drafts: list[int] = field(default_factory=list)  # guesses at what follows token_ids, to be checked by the next step
    seen: Seen = field(default_factory=Seen)  # of token_ids, for the repetition penalty
    seed_reported: bool = False
    adopted: bool = False  # began in an earlier life of this worker
    finished: bool = False

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = [*self.request.prompt, *self.request.emitted]

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_emitted(self) -> int:
        """Tokens of the output so far, those emitted elsewhere included."""
        return len(self.token_ids) - len(self.request.prompt)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    def usage(self) -> types_pb2.Usage:
        return types_pb2.Usage(
            prompt_tokens=self.num_prompt,
            output_tokens=self.num_emitted,
            cached_prompt_tokens=min(self.num_cached, self.num_prompt),
            prefix_exact=self.prefix_exact,
        )

    def timings(self, now_ns: int) -> types_pb2.Timings:
        """Phases that were not reached are 0; the one that was cut short ends now."""
        first_run = self.first_run_ns or now_ns
        prefill_end = self.first_token_ns or (now_ns if self.first_run_ns else first_run)
        return types_pb2.Timings(
            queue_ns=first_run - self.submitted_ns,
            prefill_ns=prefill_end - first_run,
            decode_ns=(self.last_token_ns or prefill_end) - prefill_end,
        )


def finish_reason(sequence: Sequence, eos_token_ids: Seq[int]) -> types_pb2.FinishReason.ValueType:
    """Why the sequence ends with its newest token; UNSPECIFIED when it goes on. EOS and stop tokens win over length."""
    newest, stop = sequence.token_ids[-1], sequence.request.stop
    if newest in stop.stop_token_ids:
        return types_pb2.FINISH_REASON_STOP_TOKEN
    if newest in eos_token_ids and not stop.ignore_eos:
        return types_pb2.FINISH_REASON_EOS
    if sequence.num_emitted >= stop.max_tokens or len(sequence.token_ids) >= sequence.max_total_tokens:
        return types_pb2.FINISH_REASON_LENGTH
    return types_pb2.FINISH_REASON_UNSPECIFIED


def validate(request: Request, model: types_pb2.ModelInfo) -> None:
    """Refuses a request that can never be served by this model.

    Raises:
        InvalidRequest: a value is malformed or out of its range; ``reason`` names which.
        TooLarge: the prompt leaves no room for a token (PROMPT_TOO_LONG).
    """
    if not 0 < len(request.request_id.encode()) <= MAX_REQUEST_ID_BYTES:
        raise InvalidRequest(
            "request_id is empty or too long",
            given=f"{len(request.request_id)} characters",
            allowed=f"1 to {MAX_REQUEST_ID_BYTES} bytes",
        )
    for name, value, limit in (
        ("tenant", request.tenant, MAX_TENANT_BYTES),
        ("traceparent", request.traceparent, MAX_TRACEPARENT_BYTES),
    ):
        if len(value.encode()) > limit:
            raise InvalidRequest(f"{name} is too long", given=f"{len(value)} characters", allowed=f"{limit} bytes")
    if not request.prompt:
        raise InvalidRequest("the prompt is empty", reason="EMPTY_PROMPT", given="0 tokens", allowed="at least 1 token")
    if len(request.prompt) >= model.max_sequence_tokens:
        raise TooLarge(
            "the prompt does not fit the longest sequence",
            reason="PROMPT_TOO_LONG",
            given=f"{len(request.prompt)} tokens",
            allowed=f"at most {model.max_sequence_tokens - 1} tokens",
        )
    if request.reuse not in types_pb2.PrefixReuse.values():
        raise InvalidRequest(
            "prefix_reuse is not known",
            reason="BAD_PREFIX_REUSE",
            given=request.reuse,
            allowed=", ".join(types_pb2.PrefixReuse.keys()),
        )
    check_token_ids("prompt", request.prompt, model)
    check_sampling(request.sampling.to_proto())
    _check_stop(request, model)


def _check_stop(request: Request, model: types_pb2.ModelInfo) -> None:
    stop = request.stop
    if stop.max_tokens < 1:
        raise InvalidRequest(
            "max_tokens is out of its range", reason="BAD_MAX_TOKENS", given=stop.max_tokens, allowed="1 or more"
        )
    check_stop(stop.to_proto())
    check_token_ids("stop", stop.stop_token_ids, model)
    check_token_ids("emitted", request.emitted, model)
    if not request.emitted:
        return
    room = min(stop.max_tokens, model.max_sequence_tokens - len(request.prompt))
    ends = {*stop.stop_token_ids, *(() if stop.ignore_eos else model.eos_token_ids)}
    if len(request.emitted) > room or ends.intersection(request.emitted[:-1]):
        raise InvalidRequest(
            "the emitted tokens go on behind the sequence's end",
            reason="ALREADY_FINISHED",
            given=f"{len(request.emitted)} emitted tokens",
            allowed=f"at most {room}, none but the last a stop or end-of-sequence token",
        )
