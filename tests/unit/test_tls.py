"""Certificates: what is refused at start and by what name, renewal on live doors, and who is let in."""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from protos import rpc
from protos import tls as tls_module
from protos.errors import ConfigError
from protos.tls import ClientTls, ServerCertificate, ServerTls, client_context, read_client, validity
from protos.tls_options import client_tls, server_tls
from tests.certificates import Authority, Issued


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def good(authority: Authority) -> Issued:
    return authority.issue("good")


def refusal(tls: ServerTls | ClientTls) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ServerCertificate(tls) if isinstance(tls, ServerTls) else read_client(tls)
    return caught.value


@pytest.mark.parametrize("days", [1, 365 * 30])  # UTCTime ends in 2049
def test_validity_is_what_another_reader_says(authority: Authority, days: int) -> None:
    pem = authority.issue("leaf", to_day=days).cert.read_bytes()
    other = x509.load_pem_x509_certificate(pem)
    assert validity(pem) == (other.not_valid_before_utc.timestamp(), other.not_valid_after_utc.timestamp())


def test_every_damaged_certificate_is_refused_by_name(good: Issued) -> None:
    pem = good.cert.read_bytes()
    for cut in range(0, len(pem), 7):
        good.cert.write_bytes(pem[:cut])
        assert refusal(ServerTls(good.cert, good.key)).reason == "TLS_BAD_CERTIFICATE"


def test_what_is_wrong_at_start_has_a_name(authority: Authority, good: Issued, tmp_path: Path) -> None:
    other, bad = authority.issue("other"), tmp_path / "bad.pem"
    bad.write_text("no certificate")
    expired, early = authority.issue("expired", from_day=-3, to_day=-1), authority.issue("early", from_day=1)
    locked = authority.issue("locked", password=b"secret")
    cases: dict[str, list[ServerTls | ClientTls]] = {
        "TLS_FILE_MISSING": [
            ServerTls(tmp_path / "none", good.key),
            ServerTls(good.cert, tmp_path / "none"),
            ServerTls(good.cert, good.key, tmp_path / "none"),
            ClientTls(tmp_path / "none"),
            ClientTls(authority.cert, good.cert, tmp_path / "none"),
        ],
        "TLS_FILE_UNREADABLE": [ServerTls(tmp_path, good.key), ClientTls(tmp_path)],
        "TLS_BAD_CERTIFICATE": [
            ServerTls(bad, good.key),
            ServerTls(good.cert, good.key, bad),
            ClientTls(bad),
            ClientTls(authority.cert, bad, good.key),
        ],
        "TLS_BAD_KEY": [
            ServerTls(good.cert, bad),
            ServerTls(locked.cert, locked.key),  # and nobody is asked for a password
        ],
        "TLS_KEY_MISMATCH": [ServerTls(good.cert, other.key), ClientTls(authority.cert, good.cert, other.key)],
        "TLS_CERT_EXPIRED": [
            ServerTls(expired.cert, expired.key),
            ClientTls(authority.cert, expired.cert, expired.key),
        ],
        "TLS_CERT_NOT_YET_VALID": [ServerTls(early.cert, early.key)],
        "TLS_CERT_WITHOUT_KEY": [ClientTls(authority.cert, good.cert), ClientTls(authority.cert, key=good.key)],
    }
    for reason, wrong in cases.items():
        for tls in wrong:
            error = refusal(tls)
            assert error.reason == reason, (tls, error)
            assert error.given is not None and str(tmp_path) in error.given  # says which file
            assert "PRIVATE" not in str(error)


def test_options_are_whole_or_refused(authority: Authority, good: Issued) -> None:
    assert server_tls(None, None, None) is None
    assert client_tls(None, None, None, None) is None
    assert server_tls(good.cert, good.key, None) == ServerTls(good.cert, good.key)
    assert client_tls(authority.cert, None, None, "here") == ClientTls(authority.cert, server_name="here")
    for given in ((good.cert, None, None), (None, good.key, None), (None, None, authority.cert)):
        with pytest.raises(ConfigError, match="TLS_OPTIONS"):
            server_tls(*given)
    with pytest.raises(ConfigError, match="TLS_OPTIONS"):
        client_tls(None, good.cert, good.key, None)


def test_a_key_that_others_may_read_is_warned_of(authority: Authority, good: Issued) -> None:
    with capture_logs() as quiet:
        ServerCertificate(ServerTls(good.cert, good.key))
        read_client(ClientTls(authority.cert, good.cert, good.key))
    assert quiet == []
    good.key.chmod(0o644)
    with capture_logs() as logs:
        ServerCertificate(ServerTls(good.cert, good.key))
        read_client(ClientTls(authority.cert, good.cert, good.key))
    assert [line["event"] for line in logs] == ["every user of this machine may read the TLS key"] * 2


def test_expiry_is_told_and_warned_of_once_an_hour(good: Issued) -> None:
    clock = [time.time()]
    with capture_logs() as logs:
        certificate = ServerCertificate(ServerTls(good.cert, good.key), "a door", now=lambda: clock[0])
        assert 364 * 86400 < certificate.expires_in_s() < 365 * 86400
        assert not logs
        clock[0] += 352 * 86400
        for _ in range(3):
            certificate.current()
        assert [line["event"] for line in logs] == ["certificate expires soon"]
        clock[0] += 3601
        certificate.current()
        clock[0] += 14 * 86400
        assert certificate.expires_in_s() < 0
    assert [line["event"] for line in logs] == ["certificate expires soon"] * 2 + ["certificate has expired"]
    assert {line["door"] for line in logs} == {"a door"}


def test_a_broken_renewal_leaves_the_old_certificate_in_force(authority: Authority, good: Issued) -> None:
    certificate = ServerCertificate(ServerTls(good.cert, good.key))
    before = certificate.current()
    assert certificate.current() is before  # nothing changed: nothing is read
    other = authority.issue("other")
    with capture_logs() as logs:
        other.cert.replace(good.cert)  # a renewal half done: the key is still the old one
        assert certificate.current() is before
        assert certificate.current() is before
        assert [line["event"] for line in logs] == ["renewed certificate refused, the old one stays"]
        assert "TLS_KEY_MISMATCH" in logs[0]["error"]
        other.key.replace(good.key)
        after = certificate.current()
        assert after is not before and after.cert == good.cert.read_bytes()
        good.cert.unlink()
        assert certificate.current() is after
    assert [line["event"] for line in logs][1:] == [
        "certificate renewed",
        "renewed certificate refused, the old one stays",
    ]


# --- doors: gRPC, and asyncio with an SSLContext, must treat callers alike ---


class GrpcDoor:
    """A gRPC server; a handshake that succeeds ends in a health check."""

    def __init__(self, tls: ServerTls) -> None:
        self._server = rpc.RpcServer("door", tls=tls)

    async def __aenter__(self) -> GrpcDoor:
        self._address = await self._server.start("127.0.0.1:0")
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._server.stop(0)

    async def call(self, tls: ClientTls | None) -> str:
        """ "ok", or why not."""
        async with rpc.channel(self._address, tls=tls) as channel:
            try:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
            except grpc.RpcError as failure:
                return rpc.error_from(failure).reason
        return "ok"


class StreamDoor:
    """An asyncio server on ServerCertificate.ssl_context(), as HTTP doors use it."""

    def __init__(self, tls: ServerTls) -> None:
        self._context = ServerCertificate(tls).ssl_context()

    async def __aenter__(self) -> StreamDoor:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                writer.write(await reader.readline())
                await writer.drain()
            except OSError:
                pass  # the client refused us
            finally:
                writer.close()

        self._server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=self._context)
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def call(self, tls: ClientTls | None) -> str:
        host, port = self._server.sockets[0].getsockname()
        context = client_context(tls) if tls else None
        name = (tls.server_name if tls else None) or (host if context else None)
        try:
            reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name)
            try:
                writer.write(b"hello\n")
                return "ok" if await reader.readline() == b"hello\n" else "CONNECTION_CLOSED"
            finally:
                writer.close()
        except ssl.SSLCertVerificationError:
            return "SERVER_CERTIFICATE_REFUSED"
        except (OSError, EOFError):
            return "CONNECTION_CLOSED"


@pytest.mark.parametrize("door_kind", [GrpcDoor, StreamDoor])
async def test_doors_take_renewed_certificates_without_a_restart(
    door_kind: type[GrpcDoor | StreamDoor], authority: Authority, good: Issued, tmp_path: Path
) -> None:
    new_folder = tmp_path / "new"
    new_folder.mkdir()
    new_authority = Authority(new_folder, "new")
    old_client, new_client = ClientTls(authority.cert), ClientTls(new_authority.cert)
    async with door_kind(ServerTls(good.cert, good.key)) as door:
        assert await door.call(old_client) == "ok"
        assert await door.call(new_client) == "SERVER_CERTIFICATE_REFUSED"
        good.cert.write_text("broken")
        assert await door.call(old_client) == "ok"
        new_authority.issue("renewed").move_to(good)
        assert await door.call(new_client) == "ok"
        assert await door.call(old_client) == "SERVER_CERTIFICATE_REFUSED"


@pytest.mark.parametrize("door_kind", [GrpcDoor, StreamDoor])
async def test_only_clients_of_the_authority_in_force_are_let_in(
    door_kind: type[GrpcDoor | StreamDoor], authority: Authority, good: Issued, tmp_path: Path
) -> None:
    trusted = tmp_path / "clients.pem"
    trusted.write_bytes(authority.cert.read_bytes())
    foreign_folder = tmp_path / "foreign"
    foreign_folder.mkdir()
    foreign = Authority(foreign_folder)  # of the same name
    mine, theirs = authority.issue("client"), foreign.issue("client")

    def showing(issued: Issued) -> ClientTls:
        return ClientTls(authority.cert, issued.cert, issued.key)

    async with door_kind(ServerTls(good.cert, good.key, trusted)) as door:
        assert await door.call(showing(mine)) == "ok"
        for stranger in (ClientTls(authority.cert), showing(theirs), None):
            assert await door.call(stranger) == "CONNECTION_CLOSED"
        trusted.write_bytes(foreign.cert.read_bytes())
        assert await door.call(showing(theirs)) == "ok"
        assert await door.call(showing(mine)) == "CONNECTION_CLOSED"


@pytest.mark.parametrize("door_kind", [GrpcDoor, StreamDoor])
async def test_certificates_that_expired_or_have_another_name_are_refused(
    door_kind: type[GrpcDoor | StreamDoor], authority: Authority, good: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ours would not start with an expired one; a peer of another make, or one that runs for long, may show it.
    monkeypatch.setattr(tls_module, "_check_validity", lambda path, pem, now_unix_s: 0.0)
    expired = authority.issue("expired", from_day=-3, to_day=-1)
    named = authority.issue("named", host="router.example")
    trusting = ClientTls(authority.cert)
    async with door_kind(ServerTls(expired.cert, expired.key)) as door:
        assert await door.call(trusting) == "SERVER_CERTIFICATE_REFUSED"
    async with door_kind(ServerTls(named.cert, named.key)) as door:
        assert await door.call(trusting) == "SERVER_CERTIFICATE_REFUSED"
        assert await door.call(ClientTls(authority.cert, server_name="router.example")) == "ok"
    async with door_kind(ServerTls(good.cert, good.key, authority.cert)) as door:
        assert await door.call(ClientTls(authority.cert, expired.cert, expired.key)) == "CONNECTION_CLOSED"


async def test_a_client_that_expects_tls_does_not_fall_back_to_plain_text(authority: Authority) -> None:
    server = rpc.RpcServer("plain")
    address = await server.start("127.0.0.1:0")
    async with rpc.channel(address, tls=ClientTls(authority.cert)) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    await server.stop(0)
    error = rpc.error_from(caught.value)
    assert error.reason == "TLS_NOT_SPOKEN"
    assert error.hint


def test_threads_without_a_loop_call_over_tls(authority: Authority, good: Issued) -> None:
    async def serve() -> None:
        server = rpc.RpcServer("door", tls=ServerTls(good.cert, good.key))
        address = await server.start("127.0.0.1:0")
        try:
            await asyncio.to_thread(check, address)
        finally:
            await server.stop(0)

    def check(address: str) -> None:
        with rpc.sync_channel(address, tls=ClientTls(authority.cert)) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

    asyncio.run(serve())
