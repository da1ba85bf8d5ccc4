"""Chunks of answers as ModelInferResponses of the Open Inference Protocol. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from protos import kserve_pb2, router_pb2
from protos.errors import TailpackError
from router.answer import finish_word
from router.kserve_request import VERSION, Inference

FINAL = "triton_final_response"
"""The parameter by which Triton's clients know a request's last part."""


def inference_response(
    asked: kserve_pb2.ModelInferRequest,
    inference: Inference,
    model: str,
    chunks: Sequence[router_pb2.GenerateResponse],
    *,
    streamed: bool,
) -> kserve_pb2.ModelInferResponse:
    """Consecutive chunks of one answer as one response.

    Args:
        model: its name, also where the request had none.
        streamed: a part of a stream, which says whether it is the last.
    """
    response = kserve_pb2.ModelInferResponse(model_name=model, model_version=VERSION, id=asked.id)
    last = chunks[-1]
    tensors: dict[str, tuple[str, Sequence[bytes | int]]] = {
        "text_output": ("BYTES", ["".join(chunk.text for chunk in chunks).encode()]),
        "token_ids": ("INT32", [token_id for chunk in chunks for token_id in chunk.token_ids]),
        "finish_reason": ("BYTES", [finish_word(last.finish_reason).encode() if last.finish_reason else b""]),
    }
    for name in inference.outputs:
        datatype, values = tensors[name]
        tensor = response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
        if inference.raw:
            response.raw_output_contents.append(_raw(values))
        elif datatype == "BYTES":
            tensor.contents.bytes_contents.extend(values)  # type: ignore[arg-type]
        else:
            tensor.contents.int_contents.extend(values)  # type: ignore[arg-type]
    if streamed:
        response.parameters[FINAL].bool_param = bool(last.finish_reason)
    if last.finish_reason:
        response.parameters["num_prompt_tokens"].int64_param = last.usage.prompt_tokens
        response.parameters["num_output_tokens"].int64_param = last.usage.output_tokens
        response.parameters["num_cached_prompt_tokens"].int64_param = last.usage.cached_prompt_tokens
    return response


def stream_error(asked: kserve_pb2.ModelInferRequest, error: TailpackError) -> kserve_pb2.ModelStreamInferResponse:
    """How one request of a stream fails, while the stream goes on."""
    response = kserve_pb2.ModelStreamInferResponse(error_message=str(error))
    response.infer_response.model_name = asked.model_name
    response.infer_response.id = asked.id
    response.infer_response.parameters[FINAL].bool_param = True
    response.infer_response.parameters["error_reason"].string_param = error.reason
    return response


def _raw(values: Sequence[bytes | int]) -> bytes:
    parts = []
    for value in values:
        if isinstance(value, bytes):
            parts += [len(value).to_bytes(4, "little"), value]
        else:
            parts.append(value.to_bytes(4, "little"))
    return b"".join(parts)
