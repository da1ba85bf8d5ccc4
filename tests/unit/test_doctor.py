"""`tailpack doctor`: each check in its failing form, and in its good one."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.memory_limit import cgroup_limit
from protos import kvstore_pb2, types_pb2
from protos.errors import ConfigError
from protos.tls import ClientTls
from tests.certificates import Authority, Issued
from worker import doctor as checks
from worker.doctor import FAIL, OK, SKIPPED, UNKNOWN, WARN, Finding
from worker.doctor_cli import Local as LocalParts
from worker.doctor_cli import doctor, files, mapped, store


def one(findings: Finding | list[Finding]) -> Finding:
    found = [findings] if isinstance(findings, Finding) else findings
    assert len(found) == 1, found
    return found[0]


def bad(findings: Finding | list[Finding], status: str = FAIL) -> str:
    """What the one finding says; it has the status, and says what to do."""
    finding = one(findings)
    assert finding.status == status and finding.do, finding
    return finding.what


def test_the_exit_status_puts_what_is_wrong_before_what_is_not_known() -> None:
    ok, warn, fail, unknown, skipped = (Finding("x", s, "") for s in (OK, WARN, FAIL, UNKNOWN, SKIPPED))
    assert checks.exit_status([ok, warn, skipped]) == 0
    assert checks.exit_status([ok, unknown]) == 2
    assert checks.exit_status([unknown, fail]) == 1


# --- names, ports, certificates ---


def test_names() -> None:
    assert checks.resolves("localhost").status == OK
    assert "no-such-service.invalid" in bad(checks.resolves("no-such-service.invalid"))


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert checks.reachable(address, "port").status == OK
    assert address in bad(checks.reachable(address, "port"))


@pytest.mark.parametrize(
    "address", ["host", "host:", "host:x", ":7700", "host:0", "host:99999", "http://host:1", "a b:1"]
)
@pytest.mark.parametrize("option", ["--router", "--worker"])
def test_a_malformed_address_is_refused_by_name(option: str, address: str) -> None:
    done = CliRunner().invoke(doctor, [option, address])
    assert isinstance(done.exception, ConfigError) and done.exception.reason == "BAD_ADDRESS"
    assert checks.host_and_port("[::1]:7700") == ("::1", 7700)


@contextmanager
def tls_server(issued: Issued | None) -> Iterator[str]:
    """Answers handshakes, one after another; without a certificate it closes connections."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if issued:
        context.load_cert_chain(issued.cert, issued.key)
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            try:
                if issued:
                    context.wrap_socket(connection, server_side=True).close()
                else:
                    connection.sendall(b"no TLS here\n")
            except OSError:
                pass
            finally:
                connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    folder = tmp_path_factory.mktemp("ca")
    return Authority(folder, "ours"), Authority(folder, "theirs")


@pytest.mark.parametrize(
    ("issue", "status", "what"),
    [
        (lambda a, b: a.issue("good"), OK, "365 more days"),
        (lambda a, b: a.issue("soon", to_day=3), WARN, "3 more days"),
        (lambda a, b: a.issue("late", from_day=-9, to_day=-1), FAIL, "expired"),
        (lambda a, b: a.issue("early", from_day=2), FAIL, "not yet valid"),
        (lambda a, b: b.issue("foreign"), FAIL, "unable to get local issuer certificate"),
        (lambda a, b: a.issue("other", host="127.0.0.2"), FAIL, "IP address mismatch"),
        (lambda a, b: None, FAIL, "no TLS handshake"),
    ],
)
def test_certificates(
    authorities: tuple[Authority, Authority],
    issue: Callable[[Authority, Authority], Issued | None],
    status: str,
    what: str,
) -> None:
    with tls_server(issue(*authorities)) as address:
        found = checks.certificate(address, ClientTls(authorities[0].cert), "certificate")
    assert (found.status, bool(found.do)) == (status, status != OK), found
    assert what in found.what


def test_a_certificate_may_have_another_name_that_is_told(authorities: tuple[Authority, Authority]) -> None:
    issued = authorities[0].issue("named", host="router.example")
    with tls_server(issued) as address:
        told = ClientTls(authorities[0].cert, server_name="router.example")
        assert checks.certificate(address, told, "certificate").status == OK
        wrong = ClientTls(authorities[0].cert, server_name="other.example")
        assert "other.example" in bad(checks.certificate(address, wrong, "certificate"))


# --- files ---


def test_tokens_files(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    assert "cannot be read" in bad(checks.tokens_file(path))
    for text, problem in (("tenants = [", "no TOML"), ("", "names no tenant"), ("[tenants]", "names no tenant")):
        path.write_text(text)
        assert problem in bad(checks.tokens_file(path))
    path.write_text('[tenants.a]\ntokens = ["sha256:00"]\n')
    assert checks.tokens_file(path).status == OK


def test_certificate_files(tmp_path: Path, authorities: tuple[Authority, Authority]) -> None:
    from protos.tls import ServerTls

    def found(issued: Issued, key: Path | None = None) -> Finding:
        return one(list(files(ServerTls(issued.cert, key or issued.key), None)))

    good, soon = authorities[0].issue("file-good"), authorities[0].issue("file-soon", to_day=2)
    assert found(good).status == OK
    assert "more days" in bad(found(soon), WARN)
    assert "TLS_KEY_MISMATCH" in bad(found(good, soon.key))
    assert "TLS_CERT_EXPIRED" in bad(found(authorities[0].issue("file-late", from_day=-9, to_day=-1)))


def test_sockets_of_the_store(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("kv")
    folder.chmod(0o700)
    assert "No such file" in bad(checks.socket_folder(folder / "none", ["a"]))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "a"))
        assert "refused" in bad(checks.socket_folder(folder, ["a"]))  # a dead store's leftover
        server.listen()
        assert one(checks.socket_folder(folder, ["a"])).status == OK
        assert "No such file" in bad(checks.socket_folder(folder, ["a", "b"]))
        (folder / "b").touch()
        assert "no socket" in bad(checks.socket_folder(folder, ["a", "b"]))
        folder.chmod(0o755)
        assert "open to other users" in bad(checks.socket_folder(folder, ["a"]), WARN)


def test_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert "is of user" in bad(checks.socket_folder(tmp_path, []))


# --- workers ---


def info(worker_id: str, **changes: object) -> types_pb2.WorkerInfo:
    made = types_pb2.WorkerInfo(worker_id=worker_id, geometry_digest=b"g", version="0.1.0")
    made.model.MergeFrom(types_pb2.ModelInfo(name="m", weights_digest=b"w", max_sequence_tokens=9))
    for name, value in changes.items():
        setattr(made.model if hasattr(made.model, name) else made, name, value)
    return made


def test_workers_that_are_not_ready() -> None:
    assert one(checks.workers_ready([("a:1", "ready", "")])).status == OK
    assert "knows of no worker" in bad(checks.workers_ready([]))
    assert "b:2 is lost: gone" in bad(checks.workers_ready([("a:1", "ready", ""), ("b:2", "lost", "gone")]))
    assert "refused" in bad(checks.workers_ready([("a:1", "refused", "other weights")]))
    assert "draining" in bad(checks.workers_ready([("a:1", "draining", "")]), WARN)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"weights_digest": b"x"}, "weights"),
        ({"tokenizer_digest": b"x"}, "tokenizer"),
        ({"geometry_digest": b"x"}, "KV geometry"),
        ({"max_sequence_tokens": 8}, "longest sequence"),
    ],
)
def test_workers_of_a_model_that_differ(change: dict[str, object], what: str) -> None:
    told = bad(checks.workers_agree([info("one"), info("two"), info("three", **change)]))
    assert told.startswith(f"{what} of m differ") and "one, two" in told and "three" in told
    assert one(checks.workers_agree([info("one"), info("two")])).status == OK
    assert one(checks.workers_agree([info("one"), info("two", name="n", **change)])).status == OK  # another model


def test_versions() -> None:
    assert checks.versions({"a": "0.1.0", "b": "0.1.0"}).status == OK
    assert "older, unnamed: b" in bad(checks.versions({"a": "0.1.0", "b": ""}), WARN)


# --- memory ---


def stats(worker: str = "w", memory: str = "host") -> kvstore_pb2.KvStatsResponse:
    device = kvstore_pb2.DeviceStats(device="cpu:0", worker_id=worker, memory=memory, control_bytes=1 << 20)
    return kvstore_pb2.KvStatsResponse(devices=[device])


def test_arenas() -> None:
    assert one(checks.arenas(stats(), {"w": True}, {"w": "cpu:0"})).status == OK
    assert "maps nothing" in bad(checks.arenas(stats(), {"w": False}, {"w": "cpu:0"}))
    assert "held by nobody" in bad(checks.arenas(stats(""), {"w": True}, {"w": "cpu:0"}))
    assert "held by v" in bad(checks.arenas(stats("v"), {"w": True}, {"w": "cpu:0"}))
    assert "not known" in bad(checks.arenas(stats(), {"w": True}, {"w": "cpu:1"}))
    assert "cannot be seen" in bad(checks.arenas(stats(), {"w": None}, {"w": "cpu:0"}), UNKNOWN)


def test_who_maps_a_devices_memory_is_seen_in_the_processes(tmp_path: Path) -> None:
    assert mapped("cpu:0", tmp_path) is None

    def process(pid: int, device: str) -> None:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "maps").write_text(f"7f-8f rw-s 0 00:01 1 /memfd:tailpack-{device}-control (deleted)\n")

    process(1, "cpu:0")
    process(2, "cpu:1")
    assert mapped("cpu:0", tmp_path) is False
    process(3, "cpu:0")
    assert mapped("cpu:0", tmp_path) is True


def test_integrity() -> None:
    assert checks.integrity([]).status == OK
    assert bad(checks.integrity(["page 3", "page 4"])) == "page 3 and 1 more"


def test_memory_limits(tmp_path: Path) -> None:
    assert checks.memory_limit(5 << 30, None).status == OK
    assert checks.memory_limit(5 << 30, 8 << 30).status == OK
    assert "5120 MiB" in bad(checks.memory_limit(5 << 30, 5500 << 20), WARN)
    assert "will be killed" in bad(checks.memory_limit(5 << 30, 4 << 30))
    (tmp_path / "a" / "b").mkdir(parents=True)
    for folder, limit in (("a", "3000"), ("a/b", "max")):
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        (tmp_path / folder / "memory.current").write_text("10\n")
    assert cgroup_limit("0::/a/b", tmp_path) == 3000
    assert cgroup_limit("0::/other", tmp_path) is None


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No such file" in bad(checks.shared_memory(tmp_path / "none"), UNKNOWN)
    assert checks.shared_memory(tmp_path).status == OK
    monkeypatch.setattr(checks, "RAY_OBJECT_STORE_BYTES", 1 << 60)
    assert "MiB" in bad(checks.shared_memory(tmp_path), WARN)


def test_gpus() -> None:
    used = ["cuda:GPU-a", "cuda:GPU-b"]
    assert checks.gpus(None, [], []).status == checks.gpus(0, used, []).status == OK
    assert checks.gpus(1, [], ["H200"]).status == checks.gpus(None, used, ["H200", "H200"]).status == OK
    assert "2 expected, 1 visible: no driver" in bad(checks.gpus(2, [], ["H200"], "no driver"))
    assert "2 expected, 1 visible" in bad(checks.gpus(None, used, ["H200"]))
    assert "2 expected, 0 visible: CUDA_ERROR" in bad(checks.gpus(None, used, [], "CUDA_ERROR"))


def test_gpus_are_not_missed_where_none_belongs() -> None:
    """A kvstore's container has none, in a pod that is in order. Who asks for them there is told so."""
    used = ["cuda:GPU-a", "cuda:GPU-b"]
    assert "cuda:GPU-a, cuda:GPU-b" in bad(checks.gpus(None, used, []), SKIPPED)
    assert "1 expected, 0 visible" in bad(checks.gpus(1, used, []))


def test_a_store_that_does_not_answer(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("s")
    found = list(store(LocalParts((), folder / "kvstore.sock"), {}))
    assert [f.status for f in found].count(FAIL) == 3 and "KVSTORE_NOT_THERE" in found[-1].what
    assert one(list(store(LocalParts((), None), {}))).status == SKIPPED
