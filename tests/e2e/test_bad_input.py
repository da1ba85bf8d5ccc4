"""Bad requests through the real command line and the wire: each is refused by name, and the next request works."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import router_pb2, router_pb2_grpc, rpc, types_pb2
from protos.errors import InvalidRequest, NotBuilt, NotFound, TailpackError
from tests.e2e.cluster import MAX_SEQUENCE_TOKENS, ClusterProcess, run_cli
from tests.e2e.probe import assert_nothing_left_over, assert_works
from tests.scenarios.tiny_tokenizer import write_tokenizer


def refused_cli(cluster: ClusterProcess, *arguments: str, input: bytes | None = None) -> str:
    """stderr of a ``generate`` that must fail without a traceback and without an answer."""
    run = run_cli("generate", "--router", cluster.router, *arguments, input=input)
    assert run.returncode in (1, 2), (run.returncode, run.stdout, run.stderr)
    stderr = run.stderr.decode()
    assert "Traceback" not in stderr and not run.stdout.strip()
    return stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--raw", ""], "EMPTY_PROMPT"),
        (["--model", "gpt-17", "Hello"], "gpt-17"),
        (["--max-tokens", "-1", "Hello"], "max_tokens"),
        (["--temperature", "nan", "Hello"], "temperature"),
        (["--temperature", "-0.5", "Hello"], "temperature"),
        (["--top-p", "0", "Hello"], "top_p"),
        (["--logprobs", "21", "Hello"], "logprobs"),
        (["--stop", "x" * 257, "Hello"], "stop string"),
        (["word " * MAX_SEQUENCE_TOKENS], "PROMPT_TOO_LONG"),
        (["--file", "/nonexistent/prompt.txt"], "/nonexistent/prompt.txt"),
    ],
)
async def test_bad_arguments(cluster: ClusterProcess, arguments: list[str], named: str) -> None:
    assert named in await asyncio.to_thread(refused_cli, cluster, *arguments)
    await assert_works(cluster)


async def test_a_file_that_is_not_utf8(cluster: ClusterProcess, tmp_path: Path) -> None:
    bad = tmp_path / "latin1.txt"
    bad.write_bytes("naïve".encode("latin-1"))
    stderr = await asyncio.to_thread(refused_cli, cluster, "--file", str(bad))
    assert "BAD_UTF8" in stderr and "byte 2" in stderr
    await assert_works(cluster)


async def test_a_prompt_of_50_mb(cluster: ClusterProcess) -> None:
    big = b"word " * (10 << 20)
    assert "PROMPT_TOO_LARGE" in await asyncio.to_thread(refused_cli, cluster, "-", input=big)
    # A client that does not check for itself is refused by the router, also above gRPC's own limit.
    for size, reason in ((50 << 20, "PROMPT_TOO_LARGE"), (80 << 20, "TOO_LARGE")):
        error = await refused(cluster, router_pb2.GenerateRequest(text="w" * size))
        assert isinstance(error, InvalidRequest) and error.reason == reason, error
    await assert_works(cluster)


async def refused(cluster: ClusterProcess, request: router_pb2.GenerateRequest) -> TailpackError:
    """The error of a raw request: nothing of our client checks it before."""
    async with rpc.channel(cluster.router) as channel:
        call = router_pb2_grpc.RouterStub(channel).Generate(request, timeout=30.0)
        with pytest.raises(grpc.RpcError) as failure:
            async for _ in call:
                pass
    return rpc.error_from(failure.value)


def request(**fields: Any) -> router_pb2.GenerateRequest:
    return router_pb2.GenerateRequest(**{"text": "Hello", **fields})


NAN = float("nan")


@pytest.mark.parametrize(
    ("bad", "kind", "named"),
    [
        (router_pb2.GenerateRequest(), InvalidRequest, "prompt"),
        (request(text=""), InvalidRequest, "EMPTY_PROMPT"),
        (router_pb2.GenerateRequest(chat=router_pb2.Chat()), InvalidRequest, "EMPTY_PROMPT"),
        (router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds()), InvalidRequest, "EMPTY_PROMPT"),
        (router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[600])), InvalidRequest, "BAD_TOKEN_ID"),
        (
            router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[5] * MAX_SEQUENCE_TOKENS)),
            InvalidRequest,
            "PROMPT_TOO_LONG",
        ),
        (request(model="gpt-17"), NotFound, "gpt-17"),
        (request(sampling=types_pb2.Sampling(temperature=NAN)), InvalidRequest, "temperature"),
        (request(sampling=types_pb2.Sampling(top_p=NAN)), InvalidRequest, "top_p"),
        (request(sampling=types_pb2.Sampling(repetition_penalty=-1.0)), InvalidRequest, "repetition_penalty"),
        (request(stop=types_pb2.StopConditions(stop_token_ids=[10_000])), InvalidRequest, "stop"),
        (request(stop_strings=[""]), InvalidRequest, "stop string"),
        (request(tools_json="[]"), NotBuilt, "tools_json"),
        (request(json_schema="{}"), NotBuilt, "json_schema"),
        (request(lora_adapter="mine"), NotBuilt, "lora_adapter"),
    ],
)
async def test_bad_messages(
    cluster: ClusterProcess, bad: router_pb2.GenerateRequest, kind: type[TailpackError], named: str
) -> None:
    error = await refused(cluster, bad)
    assert isinstance(error, kind) and named in str(error), error
    await assert_works(cluster)


async def test_nothing_is_left_of_refused_requests(cluster: ClusterProcess) -> None:
    for bad in (request(text=""), request(model="gpt-17"), request(tools_json="[]")):
        await refused(cluster, bad)
    await assert_nothing_left_over(cluster)


@pytest.mark.slow
async def test_a_router_with_another_tokenizer_refuses_the_workers(cluster: ClusterProcess, tmp_path: Path) -> None:
    other = write_tokenizer(tmp_path / "other", vocab_size=400)
    command = [sys.executable, "-m", "protos.cli", "router", "serve", "--listen", "127.0.0.1:0"]
    command += ["--model-dir", str(other), "--worker", cluster.workers[0]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        address = json.loads(await asyncio.to_thread(process.stdout.readline))["address"]
        async with rpc.channel(address) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            async with asyncio.timeout(60):
                while True:
                    (worker,) = (await stub.ListWorkers(router_pb2.ListWorkersRequest())).workers
                    if worker.state == "refused":
                        break
                    await asyncio.sleep(0.05)
            assert "TOKENIZER_MISMATCH" in worker.why
            with pytest.raises(grpc.RpcError) as failure:
                async for _ in stub.Generate(request(), timeout=10.0):
                    pass
            assert "TOKENIZER_MISMATCH" in str(rpc.error_from(failure.value))
    finally:
        process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()
    await assert_works(cluster)
