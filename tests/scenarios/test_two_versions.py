"""Processes of two versions side by side: what they cannot agree on is refused by name, what is unknown is ignored.

The other version is this one, changed in one place at the start of its process. Real older releases are started beside
this one by `python -m tests.e2e.side_by_side`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore import client
from kvstore.client import Attachment, OpenRequest
from kvstore.geometry import LAYOUT_VERSION, CacheGeometry, apply_mode
from protos import kvstore_pb2, router_pb2, rpc, types_pb2
from protos.errors import PreconditionFailed
from tests.scenarios.fake_worker import Script, worker_info
from tests.scenarios.kvstore_process import ROOT, StoreProcess, geometry
from tests.scenarios.router_harness import cluster
from tests.scenarios.tiny_tokenizer import EOS
from tests.unit.tiny import config_for, write_model
from worker import shell
from worker.weights import load_model

TIMEOUT_S = 60.0
TEXT = "hello from a worker"  # what fake workers say
UNKNOWN_FIELD = bytes([0xFA, 0xFF, 0x01, 3]) + b"new"  # field 4095, length-delimited: nobody has it
OTHER_LAYOUT = f"import kvstore.attach_stream as s; s.LAYOUT_VERSION = {LAYOUT_VERSION + 1}"
NO_WEIGHTS = """
import grpc
from kvstore.service import KvStoreService

async def unknown(self, requests, context):
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    yield

KvStoreService.Weights = unknown
"""
OTHER_CONTROL = "import kvstore.control as c; c.VERSION += 1"


@contextmanager
def store_of_another_version(change: str) -> Iterator[Path]:
    """A store's process whose code was changed by ``change``; yields its socket."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        code = f"{change}\nfrom protos.cli import main\nmain(['kvstore', 'serve', '--socket-dir', {folder!r}])"
        with subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            try:
                assert process.stdout is not None and json.loads(process.stdout.readline())["ready"]
                yield Path(folder) / "kvstore.sock"
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(60)


def attach(socket: Path, held: CacheGeometry = geometry(), device: str = "cpu:0") -> Attachment:  # noqa: B008 - frozen
    arena_bytes = 16 * sum(group.page_bytes for group in held.groups) + 6 * held.tail_bytes
    return client.attach(
        socket,
        worker_id="w",
        device=device,
        geometry=held,
        arena_bytes=arena_bytes,
        max_sequences=2,
        max_sequence_tokens=1024,
        weights_digest=b"w" * 16,
        checkpoint_slots=2 if held.tail_bytes else 0,
    )


def test_a_worker_beside_a_store_of_another_layout_is_refused_and_says_both(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with store_of_another_version(OTHER_LAYOUT) as socket:
        command = [sys.executable, "-m", "protos.cli", "worker", "serve", "--model", str(model)]
        command += ["--kv-socket", str(socket), "--arena-bytes", "4M", "--threads", "1"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert "GEOMETRY_MISMATCH" in done.stderr
        assert f"layout {LAYOUT_VERSION} (worker)" in done.stderr
        assert f"layout {LAYOUT_VERSION + 1} (store)" in done.stderr
        assert not client.stats(socket).devices  # nothing was taken for it


def test_a_store_that_holds_no_weights_yet_leaves_them_to_the_worker(tmp_path: Path) -> None:
    config = config_for(write_model(tmp_path / "model"))
    with store_of_another_version(NO_WEIGHTS) as socket:
        model, lease = shell.prepare(replace(config, kv_socket=socket))
        assert lease is None and model.uses == load_model(config).uses


def test_a_control_block_of_another_version_is_not_read() -> None:
    with store_of_another_version(OTHER_CONTROL) as socket:
        with pytest.raises(PreconditionFailed) as refused:
            attach(socket)
        assert refused.value.reason == "BAD_CONTROL_BLOCK"
        assert not client.stats(socket).devices[0].worker_id  # and the attachment is given back


def test_pages_of_another_page_layout_are_never_taken_for_ours() -> None:
    """A worker of a release with another order inside of pages comes to a store that holds pages of the old one."""
    rows = apply_mode(geometry(dim=64), "turboquant", "tq4")
    fragments = rows.with_page_layout(2)
    prompt = [*range(400)]
    with StoreProcess() as store:
        for held in (rows, fragments, rows):
            with attach(store.socket, held) as attachment:
                (opened,) = attachment.open([OpenRequest("r", "", prompt, 500)])
                assert opened.num_cached == 0, held.summary()  # type: ignore[union-attr]
                slot = opened.slot  # type: ignore[union-attr]
                attachment.reserve([(slot, 400, 1)])
                attachment.control.commit(slot, 400)
                attachment.seal([(slot, 400, 1)])
                attachment.release([slot])
                assert client.verify(store.socket) == []
        with attach(store.socket, rows) as attachment:  # the same again: now there is something to reuse
            (opened,) = attachment.open([OpenRequest("r", "", prompt, 500)])
            assert opened.num_cached > 0  # type: ignore[union-attr]


def test_a_store_ignores_what_a_newer_worker_adds() -> None:
    asked = kvstore_pb2.AttachOpen(
        worker_id="w",
        device="cpu:0",
        geometry=geometry().to_proto(),
        geometry_digest=geometry().digest(),
        arena_bytes=1 << 20,
        max_sequences=2,
        max_sequence_tokens=512,
        weights_digest=b"w",
    )
    request = kvstore_pb2.AttachRequest(open=asked)
    grown = request.open.SerializeToString() + UNKNOWN_FIELD
    request.open.ParseFromString(grown)
    assert request.open.SerializeToString() == grown  # it is still in it when it is sent
    with StoreProcess() as store, rpc.sync_channel(f"unix:{store.socket}") as channel:
        call = channel.stream_stream("/tailpack.v1.KvStore/Attach", lambda message: message, lambda data: data)
        answers = call(iter([request.SerializeToString()]), timeout=20)
        assert kvstore_pb2.AttachResponse.FromString(next(answers)).WhichOneof("message") == "attached"
        answers.cancel()


async def test_a_router_ignores_what_newer_callers_and_workers_add(folder: Path, text_ids: list[int]) -> None:
    """And does not ask a worker for a behaviour that it does not know, however new the worker is."""
    newer = worker_info(features=("resume", "teleport"))
    newer.ParseFromString(newer.SerializeToString() + UNKNOWN_FIELD)
    async with cluster(folder, Script([*text_ids, EOS]), infos=[newer]) as it:
        request = router_pb2.GenerateRequest(text="hello", stop=types_pb2.StopConditions(max_tokens=64))
        async with rpc.channel(it.address) as channel:
            call: Any = channel.unary_stream(
                "/tailpack.v1.Router/Generate", lambda data: data, router_pb2.GenerateResponse.FromString
            )(request.SerializeToString() + UNKNOWN_FIELD, timeout=20)
            chunks = [chunk async for chunk in call]
        assert "".join(chunk.text for chunk in chunks)
        assert chunks[-1].finish_reason
        workers = await it.client.list_workers()
        assert list(workers[0].info.features) == ["resume", "teleport"]


async def test_a_newer_router_says_so_where_an_older_worker_cannot(folder: Path, text_ids: list[int]) -> None:
    async with cluster(folder, Script([*text_ids, EOS]), infos=[worker_info(features=())]) as it:
        request = router_pb2.GenerateRequest(text="hello", stop=types_pb2.StopConditions(max_tokens=8), resumable=True)
        async with rpc.channel(it.address) as channel:
            call: Any = channel.unary_stream(
                "/tailpack.v1.Router/Generate",
                router_pb2.GenerateRequest.SerializeToString,
                router_pb2.GenerateResponse.FromString,
            )(request, timeout=20)
            with pytest.raises(grpc.RpcError) as failed:
                await asyncio.wait_for(call.read(), 60)
        assert rpc.error_from(failed.value).reason == "RESUME_NOT_SUPPORTED"
