"""The Open Inference Protocol: Triton's official client, and what no client of theirs would send."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import errors, kserve_pb2, kserve_pb2_grpc, rpc, worker_pb2
from router import kserve
from tests.scenarios.fake_worker import Script
from tests.scenarios.router_harness import ROOT, Harness, cluster, until
from tests.scenarios.tiny_tokenizer import EOS

TEXT = "The capital of France is Paris. 日本語 🎉 done"
ENDLESS = Script([70, 71, 72], endless=True, every_s=0.005)
HANG_S = 60.0


@asynccontextmanager
async def kserve_door(folder: Path, script: Any) -> AsyncIterator[tuple[Harness, Any]]:
    async with cluster(folder, script) as it, rpc.channel(it.address) as channel:
        yield it, kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        await it.settled()


def asked(text: str = "hello", request_id: str = "", max_tokens: int = 90) -> kserve_pb2.ModelInferRequest:
    request = kserve_pb2.ModelInferRequest(model_name="tiny", id=request_id)
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text.encode())
    request.parameters["max_tokens"].int64_param = max_tokens
    return request


def text_of(response: kserve_pb2.ModelInferResponse) -> str:
    return response.outputs[0].contents.bytes_contents[0].decode()


def is_final(response: kserve_pb2.ModelInferResponse) -> bool:
    return response.parameters["triton_final_response"].bool_param


async def test_tritons_official_client(folder: Path, text_ids: list[int]) -> None:
    async with cluster(folder, Script([*text_ids, EOS])) as it:
        command = [sys.executable, "tests/scenarios/triton_calls.py", it.address]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
        output, _ = await asyncio.wait_for(process.communicate(), 2 * HANG_S)
        seen = json.loads(output)
        await it.settled()
        submits = it.workers[0].submits
    assert seen["metadata"] == {
        "live": True,
        "ready": True,
        "model_ready": True,
        "other_ready": False,
        "server": "tailpack",
        "model": ["tiny", ["1"], ["text_input", "input_ids", "stop"]],
    }
    whole, stopped, short = seen["infer"]
    assert whole == {
        "id": "a b",
        "text": TEXT,
        "token_ids": [*text_ids, EOS],
        "finish_reason": "eos",
        "final": None,
    }
    assert (stopped["text"], stopped["finish_reason"]) == (TEXT[: TEXT.index("Paris")], "stop_string")
    assert (short["token_ids"], short["finish_reason"]) == (text_ids[:2], "length")
    assert (submits[0].sampling.temperature, submits[0].sampling.seed, submits[0].sampling.top_k) == (0.5, 7, 5)
    assert [list(submit.prompt_token_ids) for submit in submits[1:3]] == [[5, 6], [5, 6]]
    assert "UNKNOWN_MODEL" in seen["refused"] or "not served" in seen["refused"]

    parts = defaultdict(list)
    for part in seen["stream"]:
        parts[part.get("id")].append(part)
    assert len(parts[None]) == 1
    assert "BAD_PARAMETER" in parts[None][0]["error"]
    for name in ("one", "two"):
        assert "".join(part["text"] for part in parts[name]) == TEXT
        assert [part["final"] for part in parts[name]] == [False] * (len(parts[name]) - 1) + [True]
        assert [part["finish_reason"] for part in parts[name]][-1] == "eos"
    assert "".join(part["text"] for part in seen["sync_stream"]) == TEXT


def test_the_messages_are_those_of_the_official_client() -> None:
    """Names, numbers and types, of everything that Tailpack has of the protocol."""
    code = """
import json, {module} as module
def fields(message):
    return {{
        "fields": [[f.number, f.name, f.type, f.is_repeated] for f in sorted(message.fields, key=lambda f: f.number)],
        "nested": {{nested.name: fields(nested) for nested in message.nested_types}},
    }}
print(json.dumps({{name: fields(message) for name, message in module.DESCRIPTOR.message_types_by_name.items()}}))
"""
    ours, theirs = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", code.format(module=module)],
                cwd=ROOT,
                capture_output=True,
                timeout=HANG_S,
                check=True,
            ).stdout
        )
        for module in ("protos.kserve_pb2", "tritonclient.grpc.service_pb2")
    )
    assert ours == {name: theirs[name] for name in ours}


async def test_tensors_come_back_in_the_form_that_they_were_sent_in(folder: Path, text_ids: list[int]) -> None:
    async with kserve_door(folder, Script([*text_ids, EOS])) as (_, stub):
        typed = await stub.ModelInfer(asked(), timeout=HANG_S)
        assert text_of(typed) == TEXT
        assert list(typed.outputs[1].contents.int_contents) == [*text_ids, EOS]
        assert not typed.raw_output_contents
        assert typed.parameters["num_output_tokens"].int64_param == len(text_ids) + 1
        raw = asked()
        raw.inputs[0].ClearField("contents")
        raw.raw_input_contents.append(b"\x05\0\0\0hello")
        raw.outputs.add(name="token_ids")
        raw.outputs.add(name="finish_reason")
        answer = await stub.ModelInfer(raw, timeout=HANG_S)
        assert [output.name for output in answer.outputs] == ["token_ids", "finish_reason"]
        assert answer.raw_output_contents[0] == b"".join(i.to_bytes(4, "little") for i in [*text_ids, EOS])
        assert answer.raw_output_contents[1] == b"\x03\0\0\0eos"


async def test_a_refused_call_has_its_status_and_reason(folder: Path) -> None:
    async with kserve_door(folder, ENDLESS) as (it, stub):
        request = asked()
        request.parameters["best_of"].int64_param = 2
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelInfer(request, timeout=HANG_S)
        error = rpc.error_from(refused.value)
        assert isinstance(error, errors.InvalidRequest)
        assert (error.reason, error.given) == ("UNKNOWN_PARAMETER", "'best_of'")
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.ModelMetadata(kserve_pb2.ModelMetadataRequest(name="nope"), timeout=HANG_S)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        it.requests.admission.draining = True
        assert not (await stub.ServerReady(kserve_pb2.ServerReadyRequest(), timeout=HANG_S)).ready
        assert (await stub.ServerLive(kserve_pb2.ServerLiveRequest(), timeout=HANG_S)).live


async def test_requests_of_a_stream_are_answered_side_by_side(folder: Path) -> None:
    def script(submit: worker_pb2.Submit) -> Script:
        return Script([70, EOS]) if submit.request_id.endswith("~1") else ENDLESS

    async with kserve_door(folder, script) as (_, stub):
        call = stub.ModelStreamInfer(timeout=HANG_S)
        await call.write(asked(request_id="slow", max_tokens=4000))
        await call.write(asked(request_id="fast"))
        async for part in call:
            if is_final(part.infer_response):
                break
        assert part.infer_response.id == "fast"
        call.cancel()


async def test_requests_of_a_stream_have_ids_of_their_own_and_end_by_its(folder: Path) -> None:
    async with kserve_door(folder, ENDLESS) as (it, stub):
        call = stub.ModelStreamInfer(timeout=HANG_S, metadata=rpc.metadata("x"))
        for _ in range(3):
            await call.write(asked(max_tokens=4000))
        await until(lambda: sorted(it.workers[0].active) == ["x", "x~1", "x~2"])
        others = [it.client.generate("hello", request_id=f"x.{number}") for number in range(3)]
        for other in others:
            await anext(other)
        assert await it.client.cancel("x")
        await until(lambda: sorted(it.workers[0].active) == ["x.0", "x.1", "x.2"])
        for other in others:
            await other.aclose()
        call.cancel()


async def test_an_error_in_one_request_of_a_stream_leaves_the_others(folder: Path) -> None:
    def script(submit: worker_pb2.Submit) -> Script:
        failing = submit.request_id.endswith("~1")
        return Script([70, 71], error=errors.KvLost("its pages are gone") if failing else None)

    async with kserve_door(folder, script) as (_, stub):
        call = stub.ModelStreamInfer(timeout=HANG_S)
        for name in ("a", "b", "c"):
            await call.write(asked(request_id=name))
        await call.done_writing()
        ends = {part.infer_response.id: part.error_message async for part in call if is_final(part.infer_response)}
    assert {name: bool(message) for name, message in ends.items()} == {"a": False, "b": True, "c": False}
    assert "KV_LOST" in ends["b"]


@pytest.mark.parametrize("unary", [True, False])
async def test_leaving_ends_all_that_runs(folder: Path, unary: bool) -> None:
    async with kserve_door(folder, ENDLESS) as (it, stub):
        if unary:
            call = stub.ModelInfer(asked(max_tokens=4000), timeout=HANG_S)
            await until(lambda: it.workers[0].active)
        else:
            call = stub.ModelStreamInfer(timeout=HANG_S)
            for _ in range(3):
                await call.write(asked(max_tokens=4000))
            await until(lambda: len(it.workers[0].active) == 3)
            await call.read()
        call.cancel()
        await until(lambda: not it.workers[0].active)


async def test_a_stream_reads_no_further_while_too_many_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kserve, "MAX_STREAM_REQUESTS", 2)
    most = 0

    def script(submit: worker_pb2.Submit) -> Script:
        nonlocal most
        most = max(most, 1 + len(it.workers[0].active))
        return Script([70, EOS], hold_at=0)

    async with kserve_door(folder, script) as (it, stub):
        call = stub.ModelStreamInfer(timeout=HANG_S)
        for _ in range(8):
            await call.write(asked())
        await call.done_writing()
        await until(lambda: most == 2)
        it.workers[0].gate.set()
        assert sum([is_final(part.infer_response) async for part in call]) == 8
    assert most == 2


async def test_a_cancelled_request_is_an_error(folder: Path) -> None:
    async with kserve_door(folder, ENDLESS) as (it, stub):
        call = stub.ModelInfer(asked(max_tokens=4000), timeout=HANG_S, metadata=rpc.metadata("r-1"))
        await until(lambda: it.workers[0].active)
        await it.requests.cancel("r-1", "")
        with pytest.raises(grpc.aio.AioRpcError) as cancelled:
            await call
        assert rpc.error_from(cancelled.value).reason == "CANCELLED"


async def test_a_timeout_in_the_request_is_a_deadline_of_the_worker(folder: Path) -> None:
    async with kserve_door(folder, Script([70, EOS])) as (it, stub):
        request = asked()
        request.parameters["timeout"].int64_param = 5_000_000
        await stub.ModelInfer(request, timeout=HANG_S)
        await stub.ModelInfer(asked(), timeout=HANG_S)
        first, second = (submit.deadline_unix_ns for submit in it.workers[0].submits)
        assert 0 < first < second - 10**10


async def test_a_timeout_in_the_request_ends_it(folder: Path) -> None:
    request = asked(max_tokens=4000)
    request.parameters["timeout"].int64_param = 50_000
    async with kserve_door(folder, ENDLESS) as (it, stub):
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.ModelInfer(request, timeout=HANG_S)
        error = rpc.error_from(late.value)
        assert isinstance(error, errors.DeadlineExceeded)
        assert (error.reason, error.given) == ("DEADLINE_EXCEEDED", "timeout 0.05 s")

        call = stub.ModelStreamInfer(timeout=HANG_S)
        await call.write(request)
        await call.write(asked("another", "b", max_tokens=3))
        await call.done_writing()
        parts = [part async for part in call]
        failed = [part for part in parts if part.error_message]
        assert [part.infer_response.parameters["error_reason"].string_param for part in failed] == ["DEADLINE_EXCEEDED"]
        assert [is_final(part.infer_response) for part in parts if part.infer_response.id == "b"][-1]
        counters = it.requests.counters
        assert (counters.finished, counters.cancelled, counters.failed) == (1, 2, 0)
