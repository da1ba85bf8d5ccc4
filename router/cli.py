"""`tailpack router serve` and `tailpack generate`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# gRPC's core writes lines of its own to stderr when a connection ends; our errors say what there is to say. Read once,
# when grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import click

from protos import logs, router_pb2, rpc
from protos.cli_options import EXIT_INTERRUPTED, FiniteRange, HelpAllCommand, advanced_option
from protos.errors import ConfigError, InvalidRequest, TailpackError
from protos.health import health_option
from protos.metrics import OFF
from protos.tls_options import client_tls, client_tls_options, server_tls, server_tls_options
from protos.tracing import endpoint_of
from router.admission import DEFAULT_MAX_IN_FLIGHT, DEFAULT_MAX_REQUEST_BYTES
from router.answer_output import explained, json_line, stats_line
from router.auth import check_tenant, file_lines, new_token
from router.client import DEFAULT_ADDRESS, MAX_TIMEOUT_S, RetryPolicy, as_chat, build_request
from router.connection_options import Connection, connection_options
from router.discovery import WorkerDns
from router.recovery import DEFAULT_RECOVER_WAIT_S
from router.relay import MAX_PENDING_BYTES
from router.requests import DEFAULT_MAX_SESSIONS, DEFAULT_SESSION_IDLE_S
from router.server import RouterConfig, serve
from router.unread import DEFAULT_MAX_UNREAD_BYTES
from router.validate import MAX_PROMPT_BYTES, check_prompt_bytes


@click.group(name="router")
def router_group() -> None:
    """Run a router by itself."""


@router_group.command(name="serve", cls=HelpAllCommand)
@click.option("--listen", default=DEFAULT_ADDRESS, show_default=True, metavar="HOST:PORT", help="Port 0: a free one.")
@click.option(
    "--http",
    metavar="HOST:PORT",
    help="OpenAI-compatible HTTP, health and, without --tokens, /metrics; or none.  [default: behind --listen's port]",
)
@click.option("--worker", "workers", multiple=True, metavar="HOST:PORT", help="A worker; repeatable.")
@advanced_option(
    "--worker-dns",
    multiple=True,
    metavar="HOST:PORT[-PORT]",
    help="Workers at each address of HOST, at each of the ports; looked up every few seconds; repeatable.",
)
@click.option(
    "--model-dir",
    required=True,
    type=click.Path(path_type=Path),
    help="Model folder with tokenizer.json; the workers' own.",
)
@click.option(
    "--drain-s",
    default=60.0,
    show_default=True,
    type=FiniteRange(min=0),
    help="Seconds that running streams may go on after SIGTERM.",
)
@advanced_option(
    "--max-in-flight",
    default=DEFAULT_MAX_IN_FLIGHT,
    show_default=True,
    type=click.IntRange(min=1),
    help="Requests at one time; more are refused with a retry hint.",
)
@advanced_option(
    "--max-request-bytes",
    default=DEFAULT_MAX_REQUEST_BYTES,
    show_default=True,
    type=click.IntRange(min=rpc.MAX_MESSAGE_BYTES),
    help="Bytes of all requests at one time; more are refused with a retry hint.",
)
@advanced_option(
    "--max-unread-bytes",
    default=DEFAULT_MAX_UNREAD_BYTES,
    show_default=True,
    type=click.IntRange(min=MAX_PENDING_BYTES),
    help="Of all answers, gathered for callers who do not read; above, the largest of them ends with an error.",
)
@advanced_option(
    "--recover-wait",
    "recover_wait_s",
    default=DEFAULT_RECOVER_WAIT_S,
    show_default=True,
    type=FiniteRange(min=0),
    metavar="SECONDS",
    help="How long streams stay open for their lost worker to come back, and Resume waits for one that is away.",
)
@advanced_option(
    "--session-idle",
    "session_idle_s",
    default=DEFAULT_SESSION_IDLE_S,
    show_default=True,
    type=FiniteRange(min=1),
    metavar="SECONDS",
    help="A caller's session without requests for so long is ended; its next request opens another.",
)
@advanced_option(
    "--max-sessions",
    default=DEFAULT_MAX_SESSIONS,
    show_default=True,
    type=click.IntRange(min=1),
    help="Sessions at one time; callers without one send each request in a stream of its own.",
)
@click.option(
    "--tokens",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Demand tokens: tenants' hashed tokens and limits (TOML; see `router token`); read anew when it changes.",
)
@server_tls_options
@client_tls_options
@advanced_option(
    "--local-socket",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Serve on this unix socket as well, in plain text and without tokens: to whoever may open it.",
)
@advanced_option(
    "--metrics", default=OFF, show_default=True, metavar="HOST:PORT", help="Where Prometheus finds /metrics, or none."
)
@health_option
@advanced_option("--log-json/--log-text", default=None, help="Form of the log (default: JSON unless at a terminal).")
@advanced_option("--log-prompts", is_flag=True, help="Log what callers send; without it no log has text of prompts.")
@advanced_option("--otlp-endpoint", metavar="URL", help="Collector that traces go to.  [default: OTEL_* variables]")
@advanced_option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]))
def serve_command(
    listen: str,
    http: str | None,
    workers: tuple[str, ...],
    worker_dns: tuple[str, ...],
    metrics: str,
    health: str,
    model_dir: Path,
    drain_s: float,
    max_in_flight: int,
    max_request_bytes: int,
    max_unread_bytes: int,
    recover_wait_s: float,
    session_idle_s: float,
    max_sessions: int,
    tokens: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    tls_ca: Path | None,
    tls_client_cert: Path | None,
    tls_client_key: Path | None,
    tls_server_name: str | None,
    local_socket: Path | None,
    log_prompts: bool,
    otlp_endpoint: str | None,
    log_json: bool | None,
    log_level: str,
) -> None:
    """Serve the Router API in front of running workers.

    --tls-ca and --tls-client-* are for reaching the workers, --tls-cert and --tls-key for callers.
    Prints one JSON line on stdout when it listens; logs go to stderr. SIGTERM or Ctrl-C drains, a second one ends it.
    """
    if not workers and not worker_dns:
        raise click.UsageError("where are the workers? Give --worker or --worker-dns")
    logs.configure("router", log_json, log_level)
    config = RouterConfig(
        listen,
        workers,
        model_dir,
        drain_s,
        max_in_flight,
        max_request_bytes,
        max_unread_bytes,
        log_prompts,
        recover_wait_s=recover_wait_s,
        session_idle_s=session_idle_s,
        max_sessions=max_sessions,
        otlp_endpoint=endpoint_of(otlp_endpoint),
        tokens=tokens,
        tls=server_tls(tls_cert, tls_key, tls_client_ca),
        worker_tls=client_tls(tls_ca, tls_client_cert, tls_client_key, tls_server_name),
        local_socket=local_socket,
        http=http,
        worker_dns=tuple(WorkerDns.parse(name) for name in worker_dns),
        health=health,
        metrics=metrics,
    )

    def listening(address: str, http: str | None, metrics_url: str | None) -> None:
        click.echo(json.dumps({"ready": True, "address": address, "http": http, "metrics": metrics_url}))
        sys.stdout.flush()

    rpc.run(serve(config, listening))


@router_group.command(name="token")
@click.argument("tenant")
def token_command(tenant: str) -> None:
    """Make a token for TENANT, and what to put into the router's --tokens file.

    The token is printed once and kept nowhere. The file keeps its hash, and may limit the tenant:

    \b
    [tenants.NAME]
    tokens = ["sha256:..."]          # several: old and new while a token is changed
    max_requests = 200               # in flight
    max_request_bytes = 268435456    # of requests in flight
    tokens_per_minute = 2000000      # of prompts and outputs
    """
    check_tenant(tenant)
    token = new_token()
    click.echo(f"token, for the tenant alone:\n{token}\n\nfor the router's tokens file:\n{file_lines(tenant, token)}")


@click.command(cls=HelpAllCommand)
@click.argument("prompt", required=False)
@click.option("--file", "file", metavar="FILE", help="Read the prompt from a UTF-8 file ('-': standard input).")
@connection_options
@click.option("--system", help="System message of the chat.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option(
    "--max-tokens",
    type=int,
    metavar="N",
    help="Most tokens of the answer (default 1024); fewer where the model has no room for as many.",
)
@click.option("--temperature", default=0.0, show_default=True, help="0 always takes the likeliest token.")
@click.option("--seed", type=int, help="Repeat a sampled answer.")
@click.option("--stop", "stop_strings", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option("--resumable", is_flag=True, help="Go on with the answer when the connection is lost.")
@click.option("--stats", is_flag=True, help="Print time to first token, tokens/s and usage on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per chunk instead of text.")
@click.option("--thinking", is_flag=True, help="Reason first, with models that know how (deepseek_v4).")
@advanced_option("--model", default="", help="Which model, where several are served.")
@advanced_option("--top-k", default=0, help="Sample among the k likeliest tokens (0: all).")
@advanced_option("--top-p", type=float, help="Sample within this share of probability.")
@advanced_option("--min-p", default=0.0, help="Drop tokens less likely than this share of the likeliest.")
@advanced_option("--repetition-penalty", type=float, help="Above 1: make tokens seen before less likely.")
@advanced_option("--logprobs", type=int, metavar="N", help="Log-probabilities, and of N others (with --json).")
@advanced_option("--ignore-eos", is_flag=True, help="Go on past the end of the answer, up to --max-tokens.")
@advanced_option(
    "--prefix-reuse",
    default="default",
    show_default=True,
    help="What of the prompt may come from KV that is there: any, exact, none, or as the worker likes.",
)
@advanced_option(
    "--timeout-s", type=float, metavar="SECONDS", help=f"End the request after so long, at most {MAX_TIMEOUT_S}."
)
@advanced_option(
    "--resume-grace-ms",
    default=0,
    metavar="MS",
    help="How long a --resumable answer is kept without a connection (default 30000).",
)
@advanced_option(
    "--retries",
    default=RetryPolicy.max_retries,
    show_default=True,
    type=click.IntRange(min=0),
    help="Times to try again while nothing was answered, with growing waits.",
)
@advanced_option("--request-id", help="Id of the request, for Cancel and logs.")
def generate(
    prompt: str | None,
    file: str | None,
    connection: Connection,
    system: str | None,
    raw: bool,
    stats: bool,
    as_json: bool,
    timeout_s: float | None,
    retries: int,
    request_id: str | None,
    **parameters: Any,
) -> None:
    """Stream the answer to PROMPT ('-' reads it from standard input).

    Ctrl-C ends the answer and the work behind it. Exit status: 0 answered, 1 error, 2 wrong usage, 130 interrupted.
    """
    if (prompt is None) == (file is None):
        raise click.UsageError("give a PROMPT or --file, not both" if prompt else "give a PROMPT, '-' or --file FILE")
    if raw and (system or parameters["thinking"]):
        raise click.UsageError(f"--{'system' if system else 'thinking'} needs the chat template: leave --raw out")
    if parameters["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs are printed with --json only: add it")
    shown = _Shown()
    try:
        text = read_prompt(prompt, file)
        request = build_request(text if raw else as_chat(text, system), **parameters)
        sending = _Sending(connection, RetryPolicy(max_retries=retries), request_id, timeout_s)
        interrupted = rpc.run(_print_answer(request, sending, as_json, stats, shown))
    except TailpackError as error:
        if shown.open_line:
            _write("\n")
        raise explained(error, connection.address, shown.num_tokens, timeout_s) from None
    except BrokenPipeError:  # the reader of our stdout (head, less) has seen enough
        sys.stdout = None  # or the interpreter complains when it flushes at exit
        sys.exit(EXIT_INTERRUPTED)
    if interrupted:
        sys.exit(EXIT_INTERRUPTED)


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt's text from the argument, standard input or a file.

    Raises:
        InvalidRequest: PROMPT_UNREADABLE, BAD_UTF8. TooLarge: PROMPT_TOO_LARGE.
    """
    source = file if file is not None else prompt if prompt == "-" else None
    if source is None:
        return prompt or ""
    try:
        if source == "-":
            data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        else:
            check_prompt_bytes(Path(source).stat().st_size)
            with Path(source).open("rb") as opened:
                data = opened.read(MAX_PROMPT_BYTES + 1)
    except OSError as failure:
        raise InvalidRequest(
            "the prompt cannot be read", reason="PROMPT_UNREADABLE", given=source, hint=failure.strerror
        ) from None
    check_prompt_bytes(len(data))
    try:
        return data.decode()
    except UnicodeDecodeError as failure:
        raise InvalidRequest(
            "the prompt is not UTF-8 text",
            reason="BAD_UTF8",
            given=f"{'standard input' if source == '-' else source}, byte {failure.start}",
            hint="convert it, for example with iconv",
        ) from None


@dataclass(frozen=True)
class _Sending:
    """How a request goes out."""

    connection: Connection
    retry: RetryPolicy
    request_id: str | None
    timeout_s: float | None


@dataclass
class _Shown:
    """What of an answer has been printed."""

    num_tokens: int = 0
    open_line: bool = False


async def _print_answer(
    request: router_pb2.GenerateRequest,
    sending: _Sending,
    as_json: bool,
    stats: bool,
    shown: _Shown,
) -> bool:
    """Streams to stdout; True when Ctrl-C ended it."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        loop.remove_signal_handler(signal.SIGINT)  # a second Ctrl-C ends the process
        task.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    started = time.monotonic()
    first_token: float | None = None
    last: router_pb2.GenerateResponse | None = None
    try:
        async with sending.connection.client(sending.retry, _say_waiting) as client:
            chunks = client.stream(request, request_id=sending.request_id, timeout_s=sending.timeout_s)
            async for chunk in chunks:
                if first_token is None and chunk.token_ids:
                    first_token = time.monotonic()
                shown.num_tokens += len(chunk.token_ids)
                shown.open_line = not as_json and (shown.open_line if not chunk.text else chunk.text[-1] != "\n")
                _write(json_line(chunk) if as_json else chunk.text)
                last = chunk
    except asyncio.CancelledError:
        if not interrupted:
            raise
    if not as_json:
        _write("\n")
    if stats and last is not None and last.finish_reason:
        click.echo(stats_line(last, started, first_token, time.monotonic()), err=True)
    return interrupted


def _say_waiting(error: TailpackError, delay_s: float) -> None:
    """Whoever watches learns why nothing happens; in a pipe stderr keeps to errors."""
    if delay_s >= 0.5 and sys.stderr.isatty():
        click.echo(f"[{error.message}; trying again in {delay_s:.1f} s]", err=True)


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as failure:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - or the interpreter complains at exit
        raise ConfigError("the answer cannot be written", reason="OUTPUT_FAILED", hint=failure.strerror) from None
