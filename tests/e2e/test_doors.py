"""The doors of a real cluster beside its own gRPC API: OpenAI's client over HTTP, Triton's and grpcurl over gRPC."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import openai

from router.client import Tailpack
from tests.e2e.cluster import ClusterProcess
from tests.e2e.probe import assert_nothing_left_over

PROMPT = "The capital of France"
TIMEOUT_S = 60.0


def expected_text(cluster: ClusterProcess) -> str:
    with Tailpack(cluster.router) as client:
        return client.complete(PROMPT, chat=False, max_tokens=24).text


def test_openai_over_http_gives_the_clusters_answer(cluster: ClusterProcess) -> None:
    """Workers of this cluster are deterministic, so texts may be compared."""
    with openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="unused", timeout=TIMEOUT_S, max_retries=0) as client:
        (model,) = client.models.list()
        whole = client.completions.create(model=model.id, prompt=PROMPT, max_tokens=24, temperature=0, logprobs=2)
        stream = client.completions.create(model=model.id, prompt=PROMPT, max_tokens=24, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text == expected_text(cluster)
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None
        assert all(len(top) == 2 for top in logprobs.top_logprobs or ())
        assert all(logprob <= 0 for logprob in logprobs.token_logprobs or () if logprob is not None)
        two = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": PROMPT}], n=2, seed=1, max_tokens=24
        )
        assert len({choice.message.content for choice in two.choices}) == 2


def test_grpcurl_needs_no_file_of_ours(cluster: ClusterProcess) -> None:
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    asked = {
        "inputs": [{**text, "contents": {"bytes_contents": [base64.b64encode(PROMPT.encode()).decode()]}}],
        "parameters": {"max_tokens": {"int64_param": 24}},
        "outputs": [{"name": "text_output"}],
    }
    (output,) = grpcurl(cluster, "inference.GRPCInferenceService/ModelInfer", asked)[0]["outputs"]
    assert base64.b64decode(output["contents"]["bytes_contents"][0]).decode() == expected_text(cluster)
    chunks = grpcurl(cluster, "tailpack.v1.Router/Generate", {"text": PROMPT, "stop": {"max_tokens": 24}})
    assert "".join(chunk.get("text", "") for chunk in chunks) == expected_text(cluster)


def grpcurl(cluster: ClusterProcess, method: str, message: object) -> list[dict[str, Any]]:
    """All responses of a call, its method looked up by reflection."""
    program = Path(sys.executable).parent / "grpcurl"
    command = [str(program), "-plaintext", "-d", json.dumps(message), cluster.router, method]
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False, text=True)
    assert done.returncode == 0, done.stderr
    decoder, at, found = json.JSONDecoder(), 0, []
    while at < len(done.stdout.rstrip()):
        value, at = decoder.raw_decode(done.stdout, at)
        found.append(value)
        at += len(done.stdout[at:]) - len(done.stdout[at:].lstrip())
    return found


def test_health_and_metrics_are_on_the_http_door(cluster: ClusterProcess) -> None:
    for path, part in (("/health/live", b"live"), ("/health/ready", b"ready"), ("/metrics", b"tailpack_build_info")):
        with urllib.request.urlopen(f"{cluster.http}{path}", timeout=TIMEOUT_S) as reply:
            assert part in reply.read()


async def test_leaving_over_http_frees_real_sequences(cluster: ClusterProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="unused", max_retries=0) as client:
        stream = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=900, n=2, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
    await assert_nothing_left_over(cluster)
