"""ModelInferRequests of the Open Inference Protocol: what is read and what is refused."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import errors, kserve_pb2
from router.kserve_request import read_inference

Request = kserve_pb2.ModelInferRequest


def made(**parameters: Any) -> Request:
    request = Request(model_name="tiny")
    tensor(request, "text_input", "BYTES", [1]).contents.bytes_contents.append(b"hello")
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


def tensor(request: Request, name: str, datatype: str, shape: list[int]) -> Any:
    return request.inputs.add(name=name, datatype=datatype, shape=shape)


def with_ids(datatype: str, shape: list[int], *, raw: bytes | None = None, ids: list[int] | None = None) -> Request:
    request = Request()
    contents = tensor(request, "input_ids", datatype, shape).contents
    if raw is not None:
        request.raw_input_contents.append(raw)
    elif datatype == "INT32":
        contents.int_contents.extend(ids or [])
    else:
        contents.int64_contents.extend(ids or [])
    return request


def reason(request: Request) -> str:
    with pytest.raises(errors.TailpackError) as caught:
        read_inference(request)
    return caught.value.reason


def test_text_and_parameters() -> None:
    inference = read_inference(
        made(
            max_tokens=5,
            temperature=0.5,
            top_k=3,
            top_p="0.25",
            min_p=0.125,
            repetition_penalty=2,
            seed=-1,
            ignore_eos=True,
            stop="END",
            timeout=1_500_000,
            triton_enable_empty_final_response=True,
        )
    )
    request, sampling = inference.request, inference.request.sampling
    assert (request.model, request.text, list(request.stop_strings)) == ("tiny", "hello", ["END"])
    assert (request.stop.max_tokens, request.stop.ignore_eos) == (5, True)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.25, 0.125)
    assert (sampling.repetition_penalty, sampling.seed) == (2.0, 2**64 - 1)
    assert (inference.timeout_s, inference.raw) == (1.5, False)
    assert inference.outputs == ("text_output", "token_ids", "finish_reason")


def test_nothing_asked_is_greedy_and_the_routers_default() -> None:
    request = read_inference(made()).request
    assert (request.sampling.temperature, request.stop.max_tokens, request.sampling.HasField("seed")) == (0, 0, False)


@pytest.mark.parametrize(("datatype", "code"), [("INT32", "i"), ("INT64", "q")])
@pytest.mark.parametrize("shape", [[3], [1, 3]])
def test_token_ids(datatype: str, code: str, shape: list[int]) -> None:
    for request in (
        with_ids(datatype, shape, ids=[5, 6, 7]),
        with_ids(datatype, shape, raw=struct.pack(f"<3{code}", 5, 6, 7)),
    ):
        assert list(read_inference(request).request.token_ids.ids) == [5, 6, 7]


def test_several_stop_strings_are_a_tensor() -> None:
    request = made(stop="a")
    tensor(request, "stop", "BYTES", [2]).contents.bytes_contents.extend([b"b", "日".encode()])
    assert list(read_inference(request).request.stop_strings) == ["a", "b", "日"]


def test_outputs_are_those_asked_for_once() -> None:
    request = made()
    for name in ("token_ids", "text_output", "token_ids"):
        request.outputs.add(name=name)
    assert read_inference(request).outputs == ("token_ids", "text_output")


@pytest.mark.parametrize(
    "parameters",
    [
        {"max_tokens": 0},
        {"max_tokens": 2**32},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"max_tokens": "many"},
        {"max_tokens": "9" * 30},
        {"max_tokens": "٣"},
        {"temperature": "hot"},
        {"temperature": False},
        {"top_k": -1},
        {"seed": "-" + "9" * 19},
        {"ignore_eos": 1},
        {"stop": 1},
        {"timeout": 0},
    ],
)
def test_bad_parameters(parameters: dict[str, Any]) -> None:
    assert reason(made(**parameters)) == "BAD_PARAMETER"


def test_a_parameter_without_a_value_is_bad() -> None:
    request = made()
    request.parameters["max_tokens"].SetInParent()
    assert reason(request) == "BAD_PARAMETER"


def test_what_is_not_known_or_not_built_is_refused_by_name() -> None:
    assert reason(made(best_of=2)) == "UNKNOWN_PARAMETER"
    assert reason(made(sequence_id=5)) == "FEATURE_NOT_BUILT"
    with pytest.raises(errors.NotBuilt) as caught:  # what is given comes back in metadata, which gRPC bounds
        read_inference(made(sequence_id="x" * 100_000))
    assert len(str(caught.value)) < 300
    assert read_inference(made(sequence_id=0, sequence_start=False, priority=0)).request.text == "hello"
    shared = made()
    shared.inputs[0].parameters["shared_memory_region"].string_param = "x"
    assert reason(shared) == "FEATURE_NOT_BUILT"
    classified = made()
    classified.outputs.add(name="text_output").parameters["classification"].int64_param = 3
    assert reason(classified) == "FEATURE_NOT_BUILT"
    other = made()
    other.outputs.add(name="logits")
    assert reason(other) == "UNKNOWN_TENSOR"
    old = made()
    old.model_version = "2"
    assert reason(old) == "UNKNOWN_VERSION"


def two_texts(request: Request) -> None:
    request.inputs[0].shape[:] = [2]
    request.inputs[0].contents.bytes_contents.append(b"x")


def no_utf8(request: Request) -> None:
    request.inputs[0].contents.bytes_contents[0] = b"\xff"


def both_prompts(request: Request) -> None:
    tensor(request, "input_ids", "INT32", [1]).contents.int_contents.append(1)


def twice(request: Request) -> None:
    request.inputs.append(request.inputs[0])


def too_many_raw(request: Request) -> None:
    request.raw_input_contents.extend([b"", b""])


def cut_raw(request: Request) -> None:
    request.raw_input_contents.append(b"\xff\xff\xff\x7fhi")


def many_stops(request: Request) -> None:
    tensor(request, "stop", "BYTES", [17]).contents.bytes_contents.extend([b"x"] * 17)


def many_raw_stops(request: Request) -> None:
    tensor(request, "stop", "BYTES", [1 << 20])
    request.raw_input_contents.extend([b"\x05\0\0\0hello", b"\0\0\0\0" * (1 << 20)])


BROKEN: list[tuple[Callable[[Request], Any], str]] = [
    (two_texts, "BAD_TENSOR"),
    (no_utf8, "BAD_UTF8"),
    (both_prompts, "EMPTY_PROMPT"),
    (twice, "UNKNOWN_TENSOR"),
    (too_many_raw, "BAD_TENSOR"),
    (cut_raw, "BAD_TENSOR"),
    (lambda request: request.ClearField("inputs"), "EMPTY_PROMPT"),
    (lambda request: setattr(request.inputs[0], "name", "x"), "UNKNOWN_TENSOR"),
    (lambda request: setattr(request.inputs[0], "datatype", "FP32"), "BAD_TENSOR"),
    (lambda request: request.inputs[0].ClearField("contents"), "BAD_TENSOR"),
    (lambda request: request.inputs[0].shape.append(5), "BAD_TENSOR"),
    (lambda request: request.inputs[0].shape.extend([1] * 8), "BAD_TENSOR"),
    # Hours of multiplying, or minutes of reading, on the event loop, if it were done.
    (lambda request: request.inputs[0].shape.extend([2**62] * 1_000_000), "BAD_TENSOR"),
    (lambda request: [request.outputs.add(name="token_ids") for _ in range(65)], "BAD_TENSOR"),
    (lambda request: [request.inputs.add(name="x") for _ in range(64)], "BAD_TENSOR"),
    (many_stops, "BAD_TENSOR"),
    (many_raw_stops, "BAD_TENSOR"),
]


@pytest.mark.parametrize(("break_it", "expected"), BROKEN)
def test_broken_requests(break_it: Callable[[Request], Any], expected: str) -> None:
    request = made()
    break_it(request)
    assert reason(request) == expected


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (with_ids("FP32", [1], raw=b"\0\0\0\0"), "BAD_TENSOR"),
        (with_ids("INT32", [2, 2], ids=[1, 2, 3, 4]), "BAD_TENSOR"),
        (with_ids("INT32", [-3], ids=[1]), "BAD_TENSOR"),
        (with_ids("INT32", [3], ids=[1]), "BAD_TENSOR"),
        (with_ids("INT32", [2**62, 2**62], ids=[1]), "BAD_TENSOR"),
        (with_ids("INT64", [1], raw=b"\0\0\0\0"), "BAD_TENSOR"),
        (with_ids("INT32", [1], ids=[-1]), "BAD_TOKEN_ID"),
        (with_ids("INT64", [1], ids=[2**32]), "BAD_TOKEN_ID"),
    ],
)
def test_broken_token_ids(request_: Request, expected: str) -> None:
    assert reason(request_) == expected


@given(st.binary(max_size=40), st.sampled_from(["BYTES", "INT32", "INT64"]), st.integers(-1, 9))
def test_any_raw_bytes_are_read_or_refused(raw: bytes, datatype: str, size: int) -> None:
    for name in ("text_input", "input_ids", "stop"):
        request = Request(raw_input_contents=[raw])
        tensor(request, name, datatype, [size])
        try:
            read_inference(request)
        except errors.TailpackError:
            pass
        else:
            assert size >= 0


@given(st.binary(max_size=200))
def test_any_message_that_parses_is_read_or_refused(data: bytes) -> None:
    request = Request()
    try:
        request.ParseFromString(data)
    except Exception:  # noqa: BLE001 - protobuf's own; RpcServer refuses those
        return
    with contextlib.suppress(errors.TailpackError):
        read_inference(request)
