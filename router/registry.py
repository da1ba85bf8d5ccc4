"""The workers this router knows: one session each, kept open for good, with what runs there.

States: connecting -> ready -> draining | lost -> (again) connecting; refused when a worker does not fit the tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc
import structlog

from protos import kvstore_pb2, router_pb2, rpc, types_pb2, worker_pb2, worker_pb2_grpc
from protos.errors import ModelError, PreconditionFailed, TailpackError, Unavailable, WorkerLost
from protos.limits import MAX_RESUME_GRACE_MS
from protos.tls import ClientTls
from router.policy import Candidate, OwnLoad, Placement, candidate
from router.relay import Relay

log = structlog.get_logger("router")

_T = TypeVar("_T")

WELCOME_TIMEOUT_S = 10.0
REFUSED_RETRY_S = 5.0
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
SOON_BACKOFF_S = 0.2
SOON_S = 30.0
"""For so long after a worker was lost its next life is looked for more often: streams wait for it."""
RESUME = "resume"
"""The feature of workers that keep resumable sequences; no other is asked for one."""
ADOPT = "adopt"
"""The feature of workers that go on with their predecessor's sequences, and report once a second whatever they do."""
EMITTED = "emitted_token_ids"
"""The feature of workers that go on behind tokens that were emitted elsewhere."""
BATCH = "batch"
"""The feature of workers that take several messages in one."""
MAX_BATCH_BYTES = 256 << 10
"""Of several messages in one, which are copied for it."""
SILENT_S = 10.0
"""Without a message for so long, a worker that reports once a second is taken to be gone. One that was killed is known
at once, by its connection; one that is stopped its store kills; so this is for what gRPC's keepalive sees in 15 s."""

SILENT_LOOKS = 5


@dataclass(frozen=True)
class TokenizerFacts:
    """What a worker's model must agree with."""

    digest: bytes
    vocab_size: int

    def check(self, model: types_pb2.ModelInfo) -> None:
        """Raises ModelError (TOKENIZER_MISMATCH): its token ids would mean other text than ours."""
        problem: tuple[str, object, object] | None = None
        if model.tokenizer_digest and model.tokenizer_digest != self.digest:
            problem = ("its tokenizer.json is another one", model.tokenizer_digest.hex(), self.digest.hex())
        elif model.vocab_size < self.vocab_size:
            problem = (
                "its vocabulary is smaller than the tokenizer's",
                model.vocab_size,
                f"at least {self.vocab_size}",
            )
        elif any(token_id >= self.vocab_size for token_id in model.eos_token_ids):
            problem = (
                "its end-of-sequence token is not in the tokenizer",
                list(model.eos_token_ids),
                f"below {self.vocab_size}",
            )
        if problem:
            what, given, allowed = problem
            raise ModelError(
                f"model {model.name} does not fit this router's tokenizer: {what}",
                reason="TOKENIZER_MISMATCH",
                given=given,
                allowed=allowed,
                hint="start router and workers on the same model folder",
            )


@dataclass
class _Entry:
    """A sequence of ours on a worker, from its submission to the worker's last word about it."""

    relay: Relay | None  # None: the caller is gone
    placement: Placement
    counted: bool = True
    prefilled: bool = False


class WorkerLink:
    """One worker: its session, its state, and this router's sequences there. run() owns the connection."""

    def __init__(
        self,
        address: str,
        router_id: str,
        incarnation: str,
        tokenizer: TokenizerFacts,
        *,
        admit: Callable[[WorkerLink, types_pb2.WorkerInfo], None],
        changed: Callable[[], None],
        tls: ClientTls | None = None,
        welcome_timeout_s: float | None = None,
    ) -> None:
        """admit raises to refuse a worker that others of the registry rule out; changed is called at each new state."""
        self.address = address
        self.state = "connecting"
        self.why = ""
        self.info: types_pb2.WorkerInfo | None = None
        self.load = types_pb2.WorkerLoad()
        self.own = OwnLoad()
        self.num_stray_outputs = 0  # about sequences that nobody here knows; stays 0
        self.num_welcomes = 0  # sessions so far; what was said in one is over with it
        self.away_since_s: float | None = time.monotonic()  # None: it can be asked, or is not a worker of ours
        self._own_at_report = OwnLoad()
        self._hello = worker_pb2.Hello(router_id=router_id, incarnation=incarnation)
        self._tokenizer = tokenizer
        self._admit = admit
        self._changed = changed
        self._tls = tls
        self._welcome_timeout_s = WELCOME_TIMEOUT_S if welcome_timeout_s is None else welcome_timeout_s
        self._welcomed = False
        self._num_messages = 0
        self._entries: dict[str, _Entry] = {}
        self._numbers = itertools.count(1)
        self._outbox: deque[worker_pb2.RouterMessage] = deque()
        self._some_to_send = asyncio.Event()
        self._stub: worker_pb2_grpc.WorkerAsyncStub | None = None

    # --- what the service asks for ---

    @property
    def worker_id(self) -> str:
        return self.info.worker_id if self.info else self.address

    @property
    def num_known(self) -> int:
        """Sequences whose end the worker has not confirmed, those that were aborted included."""
        return len(self._entries)

    def knows(self, request_id: str) -> bool:
        return request_id in self._entries

    def submit(self, submit: worker_pb2.Submit, relay: Relay, placement: Placement) -> None:
        """Places a sequence. From here on its relay hears of it until it ends or detach()."""
        if self.state != "ready" or submit.request_id in self._entries:
            raise Unavailable(f"worker {self.worker_id} cannot take the request", given=self.state, retry_after_ms=100)
        self._entries[submit.request_id] = _Entry(relay, placement)
        self.own.num_sequences += 1
        self.own.queued_tokens += placement.prompt_tokens
        self.own.num_pages += placement.num_pages
        self._send(worker_pb2.RouterMessage(submit=submit))

    @property
    def is_connected(self) -> bool:
        """Whether a session is open."""
        return self.state in ("ready", "draining")

    def away_s(self) -> float | None:
        """For how long it could not be asked, in seconds; None: it can."""
        return None if self.away_since_s is None else time.monotonic() - self.away_since_s

    def may_have_any(self) -> bool:
        """It cannot be asked, but was here, and no longer ago than an answer may be kept: it may have some yet."""
        away_s = self.away_s()
        return self.info is not None and away_s is not None and away_s < MAX_RESUME_GRACE_MS / 1e3

    def subscription_name(self, request_id: str) -> str:
        """A new one: ids have no "#"."""
        return f"{request_id}#{next(self._numbers)}"

    def subscribe(self, name: str, request_id: str, tenant: str, relay: Relay) -> None:
        """Feeds a relay with a resumable sequence, whoever submitted it. It costs the worker nothing to compute."""
        if not self.is_connected:
            raise Unavailable(f"worker {self.worker_id} cannot be asked", given=self.state, retry_after_ms=500)
        self._entries[name] = _Entry(relay, Placement(0, 0), counted=False)
        resume = worker_pb2.Resume(request_id=request_id, tenant=tenant, subscription_id=name)
        self._send(worker_pb2.RouterMessage(resume=resume))

    def abort(self, name: str, *, complete: bool = False) -> None:
        """Asks the worker to end a sequence; its relay hears the end. complete: it can still be resumed."""
        if name in self._entries:
            abort = worker_pb2.Abort(request_id=name, complete=complete)
            self._send(worker_pb2.RouterMessage(abort=abort))

    def more(self, name: str) -> None:
        """Asks for the next piece of a replay."""
        if name in self._entries:
            self._send(worker_pb2.RouterMessage(more=worker_pb2.More(subscription_id=name)))

    def leave(self, name: str, *, delivered: bool) -> None:
        """The caller is through with a resumable sequence, which goes on. Also said behind its end (worker.proto)."""
        if (entry := self._entries.get(name)) is not None:
            entry.relay = None
            self._uncount(entry)
        leave = worker_pb2.Leave(subscription_id=name, delivered=delivered)
        self._send(worker_pb2.RouterMessage(leave=leave))

    def detach(self, request_id: str) -> None:
        """The caller is through with a sequence: if it still runs, it is aborted and no longer counted."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.relay is not None:
            entry.relay = None
            self._uncount(entry)
            self.abort(request_id)

    def can_resume(self) -> bool:
        return self.has(RESUME)

    def has(self, feature: str) -> bool:
        """Whether the worker named this feature when it was here last."""
        return self.info is not None and feature in self.info.features

    async def find(self, request_id: str, tenant: str, timeout_s: float) -> worker_pb2.FindResponse:
        """Whether it has this resumable sequence. Raises TailpackError when it cannot be asked."""
        request = worker_pb2.FindRequest(request_id=request_id, tenant=tenant)
        return await self._ask(lambda stub: stub.Find(request, timeout=timeout_s))

    async def abort_foreign(self, request_id: str, tenant: str, timeout_s: float) -> bool:
        """Ends a sequence that another router submitted. Raises TailpackError when the worker cannot be asked."""
        request = worker_pb2.AbortRequest(request_id=request_id, tenant=tenant)
        return (await self._ask(lambda stub: stub.Abort(request, timeout=timeout_s))).found

    async def kv(self, timeout_s: float) -> kvstore_pb2.DeviceStats | None:
        """What the worker's kvstore says of its device; None where it cannot be asked now."""
        request = worker_pb2.InfoRequest(with_kv=True)
        try:
            answer = await self._ask(lambda stub: stub.Info(request, timeout=timeout_s))
        except TailpackError:
            return None
        return answer.kv if answer.HasField("kv") else None

    async def _ask(self, call: Callable[[worker_pb2_grpc.WorkerAsyncStub], Awaitable[_T]]) -> _T:
        """A call beside the session, on its channel. Raises TailpackError when the worker cannot be asked."""
        if self._stub is None:
            raise Unavailable(f"worker {self.worker_id} is not connected", retry_after_ms=500)
        try:
            return await call(self._stub)
        except grpc.RpcError as failure:
            raise rpc.error_from(failure) from failure
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            # The session ended, and closing its channel cancelled this call: nobody cancelled who asks.
            raise Unavailable(f"worker {self.worker_id} was lost while it was asked", retry_after_ms=500) from None

    def candidate(self) -> Candidate:
        return candidate(
            self.address,
            reported_sequences=self.load.num_running + self.load.num_waiting,
            reported_queued_tokens=self.load.queued_tokens,
            pages_free=self.load.pages_free,
            pages_total=self.load.pages_total,
            own=self.own,
            own_at_report=self._own_at_report,
        )

    def status(self) -> router_pb2.WorkerStatus:
        return router_pb2.WorkerStatus(
            address=self.address,
            state=self.state,
            why=self.why,
            info=self.info,
            load=self.load if self.info else None,
            in_flight=self.own.num_sequences,
        )

    # --- the session ---

    async def run(self) -> None:
        """Connects, again and again, until cancelled."""
        backoff_s = MIN_BACKOFF_S
        while True:
            self._welcomed = False
            pause_s = backoff_s
            try:
                async with rpc.channel(self.address, tls=self._tls) as channel:
                    await self._session(worker_pb2_grpc.WorkerStub(channel))
                self._lose("the worker ended the session")
            except grpc.RpcError as failure:
                self._lose(rpc.error_from(failure).message)
            except PreconditionFailed as failure:
                self._set("refused", str(failure))
                pause_s = REFUSED_RETRY_S
            except TailpackError as failure:
                self._lose(failure.message)
            except Exception as bug:
                # One broken session must not end the link for good; its sequences fail by name.
                log.error("bug in a worker session", address=self.address, exc_info=bug)
                self._lose(f"{type(bug).__name__} in the router")
            finally:
                self._forget_all()
            away_s = self.away_s()
            soon = self.info is not None and away_s is not None and away_s < SOON_S
            longest_s = min(MAX_BACKOFF_S, SOON_BACKOFF_S) if soon else MAX_BACKOFF_S
            backoff_s = MIN_BACKOFF_S if self._welcomed else min(longest_s, 2 * backoff_s)
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))

    async def _session(self, stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
        """One session from hello to its end."""
        self._outbox.clear()
        call = stub.Session()
        tasks: list[asyncio.Task[None]] = []
        silent = False

        def cut() -> None:
            nonlocal silent
            silent = True
            call.cancel()

        try:
            try:
                async with asyncio.timeout(self._welcome_timeout_s):
                    await call.write(worker_pb2.RouterMessage(hello=self._hello))
                    first = await call.read()
            except TimeoutError:
                raise Unavailable(f"no welcome within {self._welcome_timeout_s:g} s") from None
            if not isinstance(first, worker_pb2.WorkerMessage) or first.WhichOneof("message") != "welcome":
                raise Unavailable("the first message was no welcome")
            self._welcome(first.welcome)
            self._stub = stub
            tasks.append(asyncio.create_task(self._write(call)))
            if self.has(ADOPT):
                tasks.append(asyncio.create_task(self._listen(cut)))
            while isinstance(message := await call.read(), worker_pb2.WorkerMessage):
                self._num_messages += 1
                self._take(message)
        except (grpc.RpcError, asyncio.CancelledError):
            if silent and not _is_cancelled():
                raise Unavailable(f"not a word for {SILENT_S:g} s") from None
            raise
        finally:
            self._stub = None
            for task in tasks:
                task.cancel()
            call.cancel()

    async def _listen(self, cut: Callable[[], None]) -> None:
        """Cuts a session in which nothing is said any more. It looks several times: a router that was held up itself
        looks once before it has read what came meanwhile.
        """
        heard, num_silent = -1, 0
        while num_silent < SILENT_LOOKS:
            await asyncio.sleep(SILENT_S / SILENT_LOOKS)
            num_silent = num_silent + 1 if heard == self._num_messages else 0
            heard = self._num_messages
        cut()

    def _welcome(self, welcome: worker_pb2.Welcome) -> None:
        info = welcome.info
        self._tokenizer.check(info.model)
        self._admit(self, info)
        before = self.info
        if before is not None and (before.worker_id, before.incarnation) != (info.worker_id, info.incarnation):
            log.info("worker restarted", worker=info.worker_id, incarnation=info.incarnation, before=before.incarnation)
        self.info = info
        self._welcomed = True
        self.num_welcomes += 1
        self._report(welcome.load)
        self._set("ready")

    async def _write(self, call: grpc.aio.StreamStreamCall[worker_pb2.RouterMessage, worker_pb2.WorkerMessage]) -> None:
        # When the call is over the reader sees it too, and says why.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                await self._some_to_send.wait()
                self._some_to_send.clear()
                while self._outbox:
                    await call.write(self._next_message())

    def _next_message(self) -> worker_pb2.RouterMessage:
        """The oldest that waits, with what waits behind it where the worker takes several at once."""
        first = self._outbox.popleft()
        if not self._outbox or not self.has(BATCH):
            return first
        message = worker_pb2.RouterMessage()
        messages, num_bytes = message.batch.messages, first.ByteSize()
        messages.append(first)
        while self._outbox and (num_bytes := num_bytes + self._outbox[0].ByteSize()) <= MAX_BATCH_BYTES:
            messages.append(self._outbox.popleft())
        return message if len(messages) > 1 else first

    def _send(self, message: worker_pb2.RouterMessage) -> None:
        self._outbox.append(message)
        self._some_to_send.set()

    def _take(self, message: worker_pb2.WorkerMessage) -> None:
        match message.WhichOneof("message"):
            case "step":
                for output in message.step.sequences:
                    self._output(output)
                if message.step.HasField("load"):
                    self._report(message.step.load)
            case "goodbye":
                self._set("draining", message.goodbye.why)
            case other:
                raise Unavailable(f"unexpected message in the session: {other}")

    def _output(self, output: worker_pb2.SequenceOutput) -> None:
        entry = self._entries.get(output.request_id)
        if entry is None:
            self.num_stray_outputs += 1
            return
        if not entry.prefilled and output.token_ids:
            if entry.counted:
                self.own.queued_tokens -= entry.placement.prompt_tokens
            entry.prefilled = True
        if output.finish_reason or output.left:
            del self._entries[output.request_id]
            self._uncount(entry)
        if entry.relay is not None:
            entry.relay.feed(output)

    def _report(self, load: types_pb2.WorkerLoad) -> None:
        self.load = load
        self._own_at_report = self.own.copy()

    def _uncount(self, entry: _Entry) -> None:
        if entry.counted:
            entry.counted = False
            self.own.num_sequences -= 1
            self.own.num_pages -= entry.placement.num_pages
            if not entry.prefilled:
                self.own.queued_tokens -= entry.placement.prompt_tokens

    def gone(self) -> None:
        """Nobody is at this address any more; its run is about to be cancelled."""
        self._set("lost", "its address is no worker's any more")

    def _lose(self, why: str) -> None:
        self._set("connecting" if self.info is None else "lost", why)

    def _forget_all(self) -> None:
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            self._uncount(entry)
            if entry.relay is not None:
                entry.relay.fail(
                    WorkerLost(
                        f"worker {self.worker_id} was lost: {self.why}",
                        given=self.address,
                        hint="send the request again",
                        retry_after_ms=500,
                    )
                )

    def _set(self, state: str, why: str = "") -> None:
        if (state, why) != (self.state, self.why):
            level = log.warning if state in ("lost", "refused") else log.info
            level("worker state", address=self.address, worker=self.worker_id, state=state, why=why)
        self.state, self.why = state, why
        if state in ("ready", "draining", "refused"):
            self.away_since_s = None
        elif self.away_since_s is None:
            self.away_since_s = time.monotonic()
        self._changed()


def _is_cancelled() -> bool:
    """Whether somebody cancelled this task, and not only a call in it."""
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())


class Registry:
    """All links: to the addresses given at the start, and to those that ``add`` and ``forget`` tell of."""

    def __init__(
        self,
        addresses: Iterable[str],
        router_id: str,
        incarnation: str,
        tokenizer: TokenizerFacts,
        changed: Callable[[], None] = lambda: None,
        *,
        tls: ClientTls | None = None,
    ) -> None:
        def new_link(address: str) -> WorkerLink:
            return WorkerLink(
                address, router_id, incarnation, tokenizer, admit=self._admit, changed=self._changed, tls=tls
            )

        self.closed = False
        self._new_link = new_link
        self._tell = changed
        self._watchers: set[asyncio.Event] = set()
        self.links = {address: new_link(address) for address in dict.fromkeys(addresses)}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        for link in self.links.values():
            self._run(link)

    def _run(self, link: WorkerLink) -> None:
        self._tasks[link.address] = asyncio.create_task(link.run(), name=f"link {link.address}")

    def _changed(self) -> None:
        for watcher in self._watchers:
            watcher.set()
        self._tell()

    @contextmanager
    def watch(self, watcher: asyncio.Event) -> Iterator[None]:
        """Sets the event whenever a worker comes, goes or changes its state, and when this closes."""
        self._watchers.add(watcher)
        try:
            yield
        finally:
            self._watchers.discard(watcher)

    def add(self, address: str) -> None:
        """Connects to one more worker, after ``start``. Nothing happens where it is known."""
        if address not in self.links:
            self.links[address] = self._new_link(address)
            self._run(self.links[address])

    def forget(self, address: str) -> None:
        """Ends a link for good; its sequences have lost their worker."""
        if (link := self.links.pop(address, None)) is not None:
            link.gone()
            self._tasks.pop(address).cancel()

    def states(self) -> dict[str, str]:
        """Of all workers, by address."""
        return {address: link.state for address, link in self.links.items()}

    async def close(self) -> None:
        """Ends all links; what runs there has lost its worker, and is not taken to another."""
        self.closed = True
        self._changed()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def ready(self, model: str | None = None) -> list[WorkerLink]:
        """Links that take sequences of this model (None: of any)."""
        return [
            link
            for link in self.links.values()
            if link.state == "ready" and link.info is not None and model in (None, link.info.model.name)
        ]

    def named(self, worker_id: str) -> list[WorkerLink]:
        """Links to the worker of this id, wherever it is or was."""
        return [link for link in self.links.values() if link.info is not None and link.info.worker_id == worker_id]

    def is_any_away(self) -> bool:
        """Whether a worker that was here may come back."""
        return any(link.may_have_any() for link in self.links.values())

    def models(self) -> set[str]:
        """Names of all models seen so far, those of lost workers included."""
        return {link.info.model.name for link in self.links.values() if link.info is not None}

    def knows(self, request_id: str) -> bool:
        return any(link.knows(request_id) for link in self.links.values())

    def _admit(self, link: WorkerLink, info: types_pb2.WorkerInfo) -> None:
        for other in self.links.values():
            same = other.info is not None and (other.info.worker_id, other.info.incarnation) == (
                info.worker_id,
                info.incarnation,
            )
            if other is not link and same and other.state in ("ready", "draining"):
                raise PreconditionFailed(
                    f"worker {info.worker_id} is known by another address already",
                    reason="DUPLICATE_WORKER",
                    given=link.address,
                    allowed=other.address,
                )
