"""ModelInferRequests of the Open Inference Protocol (protos/kserve.proto) as GenerateRequests. Pure."""

from __future__ import annotations

import math
import re
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protos import kserve_pb2, router_pb2
from protos.errors import InvalidRequest, NotBuilt, NotFound
from router.validate import MAX_STOP_STRINGS

VERSION = "1"
"""Of every model; callers may leave it out."""
INPUTS = ("text_input", "input_ids", "stop")
OUTPUTS = ("text_output", "token_ids", "finish_reason")
MAX_TIMEOUT_US = 86_400 * 10**6
MAX_DIMENSIONS = 8
"""Of a shape. A message has room for millions, whose product alone would take hours."""
MAX_TENSORS = 64
"""Of inputs and of outputs. A message has room for millions, which are read one by one on the event loop."""

_Tensor = kserve_pb2.ModelInferRequest.InferInputTensor
_INTEGERS = {"INT32": "i", "INT64": "q"}  # codes of array.array; 4 and 8 bytes on every platform that we run on
_UNSIGNED = 2**32 - 1
# Parameters of Triton's clients that change nothing here, and the values that they may have.
_NEUTRAL: dict[str, tuple[object, ...] | None] = {
    "triton_enable_empty_final_response": None,  # any: the last part is marked, and never empty of a reason
    "priority": (0,),
    "sequence_id": (0, ""),
    "sequence_start": (False,),
    "sequence_end": (False,),
}


@dataclass(frozen=True)
class Inference:
    """A request, understood.

    raw: tensors come and go as raw bytes. outputs: those asked for, in their order.
    """

    request: router_pb2.GenerateRequest
    raw: bool
    outputs: tuple[str, ...]
    timeout_s: float | None


def read_inference(asked: kserve_pb2.ModelInferRequest) -> Inference:
    """Checks the form; ranges are checked where all requests are.

    Raises:
        InvalidRequest: BAD_TENSOR, BAD_PARAMETER, UNKNOWN_PARAMETER, UNKNOWN_TENSOR, EMPTY_PROMPT, BAD_UTF8.
        NotFound: UNKNOWN_VERSION. NotBuilt: shared memory, classification.
    """
    check_version(asked.model_version)
    for kind, tensors in (("inputs", asked.inputs), ("outputs", asked.outputs)):
        if len(tensors) > MAX_TENSORS:
            raise InvalidRequest(
                f"too many {kind}", reason="BAD_TENSOR", given=len(tensors), allowed=f"at most {MAX_TENSORS}"
            )
    request = router_pb2.GenerateRequest(model=asked.model_name)
    timeout_s = _read_parameters(asked, request)
    _read_inputs(asked, request)
    return Inference(request, bool(asked.raw_input_contents), _outputs(asked), timeout_s)


def check_version(version: str) -> None:
    if version not in ("", VERSION):
        raise NotFound(
            "this version is not served here",
            reason="UNKNOWN_VERSION",
            given=version[:64],
            allowed=f"{VERSION} or none",
        )


def _outputs(asked: kserve_pb2.ModelInferRequest) -> tuple[str, ...]:
    for output in asked.outputs:
        if output.name not in OUTPUTS:
            raise InvalidRequest(
                "an output is not known",
                reason="UNKNOWN_TENSOR",
                given=repr(output.name[:64]),
                allowed=", ".join(OUTPUTS),
            )
        if output.parameters:
            raise _unbuilt_parameters(output.name, output.parameters)
    return tuple(dict.fromkeys(output.name for output in asked.outputs)) or OUTPUTS


# --- tensors ---


def _read_inputs(asked: kserve_pb2.ModelInferRequest, request: router_pb2.GenerateRequest) -> None:
    raw = asked.raw_input_contents
    if raw and len(raw) != len(asked.inputs):
        raise InvalidRequest(
            "raw contents do not match the inputs", reason="BAD_TENSOR", given=len(raw), allowed=len(asked.inputs)
        )
    names = [tensor.name for tensor in asked.inputs]
    for index, tensor in enumerate(asked.inputs):
        if tensor.name not in INPUTS or names.count(tensor.name) > 1:
            raise InvalidRequest(
                "an input is not known, or there twice",
                reason="UNKNOWN_TENSOR",
                given=repr(tensor.name[:64]),
                allowed=", ".join(INPUTS),
            )
        if tensor.parameters:
            raise _unbuilt_parameters(tensor.name, tensor.parameters)
        data = raw[index] if raw else None
        match tensor.name:
            case "input_ids":
                request.token_ids.ids.extend(_token_ids(tensor, data))
            case "text_input":
                texts = _texts(tensor, data)
                if len(texts) != 1:
                    raise _bad(tensor, f"{len(texts)} texts", "one text a request")
                request.text = texts[0]
            case "stop":
                request.stop_strings.extend(_texts(tensor, data))
    if ("text_input" in names) == ("input_ids" in names):
        raise InvalidRequest(
            "the request needs a prompt, and only one",
            reason="EMPTY_PROMPT",
            given=", ".join(names) or "no input",
            allowed="text_input or input_ids",
        )


def _token_ids(tensor: _Tensor, data: bytes | None) -> Sequence[int]:
    if tensor.datatype not in _INTEGERS:
        raise _bad(tensor, tensor.datatype[:32], " or ".join(_INTEGERS))
    if len(tensor.shape) > 2 or (len(tensor.shape) == 2 and tensor.shape[0] != 1):
        raise _bad(tensor, f"shape {list(tensor.shape)[:8]}", "[n] or [1, n]: one prompt a request")
    ids: Sequence[int]
    if data is not None:
        values = array(_INTEGERS[tensor.datatype])
        if len(data) % values.itemsize:
            raise _bad(tensor, f"{len(data)} bytes", f"a multiple of {values.itemsize}")
        values.frombytes(data)
        if sys.byteorder == "big":
            values.byteswap()
        ids = values
    else:
        ids = tensor.contents.int_contents if tensor.datatype == "INT32" else tensor.contents.int64_contents
    _check_count(tensor, len(ids))
    if ids and not (min(ids) >= 0 and max(ids) <= _UNSIGNED):
        raise InvalidRequest(
            "a token id is out of range", reason="BAD_TOKEN_ID", given=next(i for i in ids if i < 0 or i > _UNSIGNED)
        )
    return ids


def _texts(tensor: _Tensor, data: bytes | None) -> list[str]:
    if tensor.datatype != "BYTES":
        raise _bad(tensor, tensor.datatype[:32], "BYTES")
    values: Sequence[bytes] = tensor.contents.bytes_contents if data is None else _split(tensor, data)
    _check_count(tensor, len(values))
    if len(values) > MAX_STOP_STRINGS:
        raise _bad(tensor, f"{len(values)} texts", f"at most {MAX_STOP_STRINGS}")
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError as failure:
        raise InvalidRequest(
            f"input {tensor.name} is not UTF-8 text", reason="BAD_UTF8", given=f"byte {failure.start}"
        ) from None


def _split(tensor: _Tensor, data: bytes) -> list[bytes]:
    """Elements, each behind its length in 4 bytes."""
    values: list[bytes] = []
    at = 0
    while at < len(data):
        if len(values) > MAX_STOP_STRINGS:
            raise _bad(tensor, f"more than {MAX_STOP_STRINGS} texts", f"at most {MAX_STOP_STRINGS}")
        start = at + 4
        at = start + int.from_bytes(data[at:start], "little")
        if start > len(data) or at > len(data):
            raise _bad(tensor, f"{len(data)} bytes", "each element as 4 bytes of length, then so many bytes")
        values.append(data[start:at])
    return values


def _check_count(tensor: _Tensor, count: int) -> None:
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise _bad(tensor, f"{len(tensor.shape)} dimensions", f"at most {MAX_DIMENSIONS}")
    if min(tensor.shape, default=0) < 0 or math.prod(tensor.shape) != count:
        raise _bad(tensor, f"{count} elements", f"as its shape {list(tensor.shape)[:8]} says")


def _bad(tensor: _Tensor, given: object, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"input {tensor.name} is malformed", reason="BAD_TENSOR", given=given, allowed=allowed)


def _unbuilt_parameters(name: str, parameters: Iterable[str]) -> NotBuilt:
    return NotBuilt(
        f"parameters of tensor {name} are not built", given=", ".join(sorted(parameters))[:200], hint="leave them out"
    )


# --- parameters ---


def _read_parameters(asked: kserve_pb2.ModelInferRequest, request: router_pb2.GenerateRequest) -> float | None:
    """Into the request; returns the timeout, in seconds."""
    sampling, timeout_s = request.sampling, None
    for name, parameter in asked.parameters.items():
        match name:
            case "temperature" | "min_p" | "top_p" | "repetition_penalty":
                setattr(sampling, name, _real(name, parameter))
            case "top_k":
                sampling.top_k = _integer(name, parameter, 0, _UNSIGNED)
            case "seed":
                sampling.seed = _integer(name, parameter, -(2**63), 2**64 - 1) % 2**64
            case "max_tokens":
                request.stop.max_tokens = _integer(name, parameter, 1, _UNSIGNED)
            case "ignore_eos":
                request.stop.ignore_eos = _boolean(name, parameter)
            case "stop":
                request.stop_strings.append(_string(name, parameter))
            case "timeout":
                timeout_s = _integer(name, parameter, 1, MAX_TIMEOUT_US) / 1e6
            case _ if name in _NEUTRAL:
                allowed = _NEUTRAL[name]
                if allowed is not None and _value(parameter) not in allowed:
                    given = repr(_value(parameter))[:64]
                    raise NotBuilt(f"parameter {name} is not built", given=given, hint="leave it out")
            case _:
                raise InvalidRequest(
                    "a parameter is not known",
                    reason="UNKNOWN_PARAMETER",
                    given=repr(name[:64]),
                    allowed="max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, ignore_eos, stop, "
                    "timeout",
                )
    return timeout_s


def _value(parameter: kserve_pb2.InferParameter) -> bool | int | float | str | None:
    kind = parameter.WhichOneof("parameter_choice")
    value: bool | int | float | str | None = getattr(parameter, kind) if kind else None
    return value


def _real(name: str, parameter: kserve_pb2.InferParameter) -> float:
    value = _value(parameter)
    if isinstance(value, str):  # from clients that know no double_param
        try:
            return float(value[:64])
        except ValueError:
            pass
    elif isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise _bad_parameter(name, value, "a number")


def _integer(name: str, parameter: kserve_pb2.InferParameter, low: int, high: int) -> int:
    value = _value(parameter)
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return value
    raise _bad_parameter(name, value, f"an integer from {low} to {high}")


def _boolean(name: str, parameter: kserve_pb2.InferParameter) -> bool:
    value = _value(parameter)
    if not isinstance(value, bool):
        raise _bad_parameter(name, value, "true or false")
    return value


def _string(name: str, parameter: kserve_pb2.InferParameter) -> str:
    value = _value(parameter)
    if not isinstance(value, str):
        raise _bad_parameter(name, value, "a string; several as input tensor `stop`")
    return value


def _bad_parameter(name: str, value: object, allowed: str) -> InvalidRequest:
    return InvalidRequest(
        f"parameter {name} is malformed", reason="BAD_PARAMETER", given=repr(value)[:64], allowed=allowed
    )
