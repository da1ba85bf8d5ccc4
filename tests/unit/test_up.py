"""`tailpack up` before and around the cluster: settings refused before anything starts, and which signals end it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protos.errors import ConfigError, ModelError
from protos.metrics import OFF
from protos.tls import ServerTls
from tests.unit.tiny import write_model
from worker import up
from worker.cluster import Interrupted, _metrics_address
from worker.cluster_config import ClusterConfig
from worker.up import check_ready_file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def config(model: Path, **settings: Any) -> ClusterConfig:
    return ClusterConfig.of(model=str(model), listen="127.0.0.1:0", **settings)


def test_settings_are_refused_before_anything_starts(model: Path) -> None:
    assert config(model, kv_bytes=8 << 20, max_sequence_tokens=1024).kv_bytes == 8 << 20
    for kv_bytes in (0, 1, 1 << 16):
        with pytest.raises(ConfigError, match="kv_bytes"):
            config(model, kv_bytes=kv_bytes)
    with pytest.raises(ConfigError, match="max_sequence_tokens"):
        config(model, max_sequence_tokens=99999)
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        config(model)


def test_doors_are_refused_before_anything_starts(model: Path) -> None:
    def refused(listen: str, **settings: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            ClusterConfig.of(model=str(model), listen=listen, **settings)
        return f"{caught.value.reason} {caught.value.given}"

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        address = f"127.0.0.1:{port}"
        in_use = f"PORT_IN_USE {address}"
        before = f"127.0.0.1:{port - 1}"
        assert refused(address) == refused(before) == in_use  # HTTP is behind it where nothing else is said
        assert refused("127.0.0.1:0", http=address) == in_use
        assert refused("127.0.0.1:0", metrics=address) == in_use
        assert refused("127.0.0.1:0", metrics=f"127.0.0.1:{port - 2}", workers=2) == in_use  # the second worker's
    assert refused(address, http=address) == in_use
    assert refused(address, http="none", metrics=before) == in_use
    assert refused("127.0.0.1:65535") == "BAD_ADDRESS 127.0.0.1:65536"
    assert config(model, http="none", metrics=before).metrics == before
    assert config(model, http="127.0.0.1:0", metrics="127.0.0.1:0").http == "127.0.0.1:0"


def test_a_bad_config_json_is_refused_before_anything_starts(model: Path) -> None:
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**raw, "rms_norm_eps": -1}))
    with pytest.raises(ModelError, match="rms_norm_eps"):
        config(model)


def test_a_ready_file_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    check_ready_file(tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []
    for bad in (tmp_path / "none" / "r.json", Path("/proc/r.json")):
        with pytest.raises(ConfigError, match=str(bad)):
            check_ready_file(bad)


class FakeCluster:
    """One that is interrupted while it starts, or once it runs."""

    interrupted_early = False
    stopping = False
    router_address = "127.0.0.1:7701"
    router_socket = Path("/tmp/tp-x/router.sock")
    http_url = None
    logs = Path("/tmp/tp-x/logs")
    kv_socket = Path("/tmp/tp-x/kvstore.sock")

    def __init__(self, config: ClusterConfig, _console: Any) -> None:
        self.config = config

    def __enter__(self) -> FakeCluster:
        if self.interrupted_early:
            raise Interrupted
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def check(self) -> None:
        raise Interrupted


@pytest.mark.parametrize(("early", "status"), [(True, 130), (False, 0)])
def test_an_interrupted_start_is_no_success(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], early: bool, status: int
) -> None:
    monkeypatch.setattr(FakeCluster, "interrupted_early", early)
    monkeypatch.setattr(up, "Cluster", FakeCluster)
    assert up.run(config(model), None) == status
    printed = capsys.readouterr().out.splitlines()
    hints = [
        "Try:  tailpack generate --router 127.0.0.1:7701 'What is the capital of France?'",
        "Mem:  tailpack memory --router 127.0.0.1:7701",
        "KV:   tailpack kvstore stats --kv-socket /tmp/tp-x/kvstore.sock",
    ]
    assert [line for line in printed if "tailpack" in line] == ([] if early else hints)


def test_the_hints_say_what_a_guarded_cluster_asks_for(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(up, "Cluster", FakeCluster)
    up.run(replace(config(model), tokens=Path("t"), tls=ServerTls(Path("c"), Path("k"))), None)
    printed = capsys.readouterr().out
    assert "--router 127.0.0.1:7701 --token-file FILE --tls-ca FILE 'What" in printed
    assert "tailpack memory --router unix:/tmp/tp-x/router.sock" in printed  # which needs neither


# A cluster that takes a while to stop, and writes down how it ended.
SUPERVISED = """
import sys, time, pathlib
from types import SimpleNamespace
from rich.console import Console
from worker import up
from worker.up import Interrupted, interruptible
folder, up.SAME_WISH_S, stop_s = pathlib.Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
cluster = SimpleNamespace(stopping=False, console=Console(), folder=folder / "none")
with interruptible(cluster):
    try:
        (folder / "there").touch()
        while True:
            time.sleep(0.05)
    except Interrupted:
        (folder / "stopping").touch()
        end = time.monotonic() + stop_s
        while time.monotonic() < end:
            cluster.console.print("stopping ...")
            time.sleep(0.05)
(folder / "orderly").touch()
"""


def _listen_to_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever runs the tests may ignore it, as nohup does


def _take_terminal() -> None:
    _listen_to_hangups()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def start(folder: Path, same_wish_s: float = 60.0, stop_s: float = 1.0, **options: Any) -> subprocess.Popen[bytes]:
    options.setdefault("preexec_fn", _listen_to_hangups)
    return subprocess.Popen([sys.executable, "-c", SUPERVISED, str(folder), str(same_wish_s), str(stop_s)], **options)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, file
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_and_its_echo_are_one_wish(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, stdout=subprocess.DEVNULL)
    wait_for(tmp_path / "there")
    process.send_signal(number)
    process.send_signal(signal.SIGTERM)  # at once, as `timeout` sends it to the process and to its group
    assert process.wait(60) == 0 and (tmp_path / "orderly").exists()


def test_a_later_signal_ends_everything(tmp_path: Path) -> None:
    process = start(tmp_path, same_wish_s=0.0, stop_s=120.0, stdout=subprocess.DEVNULL)
    wait_for(tmp_path / "there")
    process.send_signal(signal.SIGINT)
    wait_for(tmp_path / "stopping")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and not (tmp_path / "orderly").exists()


def test_a_terminal_that_is_gone_ends_it_in_order(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = start(
        tmp_path,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(theirs)
    wait_for(tmp_path / "there")
    os.close(ours)
    assert process.wait(60) == 0 and (tmp_path / "orderly").exists()


def test_nohup_keeps_it_running(tmp_path: Path) -> None:
    process = start(
        tmp_path, stdout=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    wait_for(tmp_path / "there")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


TWO_SIGNALS = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from rich.console import Console
from worker.cluster import Interrupted, _metrics_address
from worker.up import SAME_WISH_S, interruptible

folder, ready_file = map(Path, sys.argv[1:])
cluster = SimpleNamespace(stopping=False, console=Console(), folder=folder)
with interruptible(cluster, ready_file):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(20)
    except Interrupted:
        time.sleep(SAME_WISH_S + 0.5)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(20)
"""


def test_a_second_ctrl_c_leaves_neither_folder_nor_ready_file(tmp_path: Path) -> None:
    folder, ready_file = tmp_path / "cluster", tmp_path / "ready.json"
    folder.mkdir()
    ready_file.write_text("{}")
    ended = subprocess.run(
        [sys.executable, "-c", TWO_SIGNALS, str(folder), str(ready_file)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 130, ended.stderr
    assert not folder.exists()
    assert not ready_file.exists()


# --- what is exported ---


def test_metrics_take_ports_in_a_row_or_free_ones() -> None:
    assert [_metrics_address("127.0.0.1:9100", index) for index in range(1, 4)] == [
        "127.0.0.1:9101",
        "127.0.0.1:9102",
        "127.0.0.1:9103",
    ]
    assert _metrics_address(OFF, 3) == OFF
    host, _, port = _metrics_address("127.0.0.1:0", 0).rpartition(":")
    assert host == "127.0.0.1" and int(port) > 0  # a fixed one, which a restarted worker takes again


def test_what_cannot_be_exported_is_refused_before_anything_starts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with pytest.raises(ConfigError, match="BAD_OTLP_ENDPOINT"):
        config(model, otlp_endpoint="collector:4317")
    with pytest.raises(ConfigError, match="BAD_ADDRESS"):
        config(model, metrics="somewhere")
    assert config(model).otlp_endpoint is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317")
    assert config(model).otlp_endpoint == "http://collector:4317"
