"""Drives a router with Triton's official client, in a process of its own: its generated code has our message names.

    python tests/scenarios/triton_calls.py HOST:PORT

prints one JSON object of what it saw.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc as sync_client
import tritonclient.grpc.aio as client

TIMEOUT_S = 60


def text_input(text: str) -> Any:
    tensor = client.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    return tensor


def ids_input(ids: list[int], datatype: str) -> Any:
    tensor = client.InferInput("input_ids", [1, len(ids)], datatype)
    tensor.set_data_from_numpy(np.array([ids], dtype=np.int32 if datatype == "INT32" else np.int64))
    return tensor


def shown(result: Any) -> dict[str, Any]:
    """An answer, or a part of one, in plain values."""
    response = result.get_response()
    final = response.parameters.get("triton_final_response")
    return {
        "id": response.id,
        "text": result.as_numpy("text_output")[0].decode(),
        "token_ids": result.as_numpy("token_ids").tolist(),
        "finish_reason": result.as_numpy("finish_reason")[0].decode(),
        "final": final.bool_param if final is not None else None,
    }


async def metadata(triton: Any) -> dict[str, Any]:
    model = await triton.get_model_metadata("tiny", as_json=True)
    server = await triton.get_server_metadata(as_json=True)
    return {
        "live": await triton.is_server_live(),
        "ready": await triton.is_server_ready(),
        "model_ready": await triton.is_model_ready("tiny"),
        "other_ready": await triton.is_model_ready("other"),
        "server": server["name"],
        "model": [model["name"], model["versions"], [tensor["name"] for tensor in model["inputs"]]],
    }


async def infer(triton: Any) -> list[dict[str, Any]]:
    parameters = {"max_tokens": 90, "temperature": 0.5, "seed": 7, "top_k": 5, "ignore_eos": False}
    asked: list[dict[str, Any]] = [
        {"inputs": [text_input("hello")], "request_id": "a b", "parameters": parameters},
        {"inputs": [ids_input([5, 6], "INT32")], "parameters": {"max_tokens": 90, "stop": "Paris"}},
        {"inputs": [ids_input([5, 6], "INT64")], "parameters": {"max_tokens": 2}, "client_timeout": TIMEOUT_S},
    ]
    return [shown(await triton.infer("tiny", **options)) for options in asked]


async def stream(triton: Any) -> list[dict[str, Any]]:
    """Three requests on one stream; the second is refused."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for name, tokens in (("one", 90), ("bad", 0), ("two", 90)):
            yield {
                "model_name": "tiny",
                "inputs": [text_input(name)],
                "request_id": name,
                "parameters": {"max_tokens": tokens},
                "enable_empty_final_response": True,
            }

    seen = []
    async for result, error in triton.stream_infer(requests(), stream_timeout=TIMEOUT_S):
        seen.append({"error": str(error)} if error is not None else shown(result))
    return seen


def sync_stream(address: str) -> list[dict[str, Any]]:
    """The client with threads and a callback, as most of its users have it."""
    seen: list[dict[str, Any]] = []
    with sync_client.InferenceServerClient(address) as triton:
        triton.start_stream(
            lambda result, error: seen.append({"error": str(error)} if error is not None else shown(result)),
            stream_timeout=TIMEOUT_S,
        )
        triton.async_stream_infer("tiny", [text_input("hello")], request_id="s", parameters={"max_tokens": 90})
        triton.stop_stream()  # waits for the answers
    return seen


async def main(address: str) -> dict[str, Any]:
    async with client.InferenceServerClient(address) as triton:
        refused = ""
        try:
            await triton.infer("other", [text_input("x")])
        except Exception as error:  # noqa: BLE001 - whatever class it is, the test looks at its text
            refused = f"{type(error).__name__}: {error}"
        return {
            "metadata": await metadata(triton),
            "infer": await infer(triton),
            "stream": await stream(triton),
            "refused": refused,
        }


if __name__ == "__main__":
    found = asyncio.run(main(sys.argv[1]))
    print(json.dumps({**found, "sync_stream": sync_stream(sys.argv[1])}))
