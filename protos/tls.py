"""Certificates of doors and clients: read, checked by name at start, and read again when their files change.

A server reads a renewed certificate at the next handshake, without a restart; where the new files are broken it goes on
with the old ones and logs that. A client reads its files whenever it makes a channel.
"""

from __future__ import annotations

import binascii
import datetime
import re
import ssl
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from protos.errors import ConfigError

log = structlog.get_logger("tls")

EXPIRES_SOON_S = 14 * 86400.0
MAX_FILE_BYTES = 4 << 20  # a bundle of all public authorities is 250 KB
_WARN_AGAIN_S = 3600.0

_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class ServerTls:
    """Files of a door, all PEM. cert: the chain, the door's own first. client_ca: demand client certificates of it."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True)
class ClientTls:
    """Files of a client, all PEM. cert and key: for servers that demand a client certificate; both or none.

    server_name: the name the server's certificate must have, where it is not the host of the address.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    server_name: str | None = None


@dataclass(frozen=True)
class ServerFiles:
    """What a door's files held when they were read last."""

    cert: bytes
    key: bytes
    client_ca: bytes | None
    not_after_unix_s: float
    context: ssl.SSLContext


@dataclass(frozen=True)
class ClientFiles:
    ca: bytes
    cert: bytes | None
    key: bytes | None


class ServerCertificate:
    """One door's certificate, as its files are now. Threads may share it: gRPC asks from threads of its own."""

    def __init__(self, tls: ServerTls, door: str = "", *, now: Callable[[], float] = time.time) -> None:
        """Reads and checks.

        Args:
            door: whose it is, for the log.

        Raises:
            ConfigError: TLS_FILE_MISSING, TLS_FILE_UNREADABLE, TLS_BAD_CERTIFICATE, TLS_BAD_KEY, TLS_KEY_MISMATCH,
                TLS_CERT_EXPIRED, TLS_CERT_NOT_YET_VALID.
        """
        self.tls = tls
        self._door = door
        self._now = now
        self._lock = threading.Lock()
        self._warned_at = float("-inf")
        self._paths = [tls.cert, tls.key, *([tls.client_ca] if tls.client_ca else [])]
        self._stamp = self._stamp_now()
        self._files = _read_server(tls, now())
        _warn_if_readable(tls.key)
        self._warn_if_expiring()

    def current(self) -> ServerFiles:
        """The files' contents; read again when they changed. Never raises: broken ones leave the old in force."""
        with self._lock:
            stamp = self._stamp_now()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._files = _read_server(self.tls, self._now())
                    log.info("certificate renewed", door=self._door, file=str(self.tls.cert), expires=self._expires())
                except ConfigError as broken:
                    log.error("renewed certificate refused, the old one stays", door=self._door, error=str(broken))
            self._warn_if_expiring()
            return self._files

    def expires_in_s(self) -> float:
        """Seconds until the certificate in force expires; negative when it has."""
        return self.current().not_after_unix_s - self._now()

    def ssl_context(self) -> ssl.SSLContext:
        """A server-side context that always presents the certificate in force, for asyncio and ASGI servers."""
        front = _context(self.tls)
        front.sni_callback = self._pick  # OpenSSL calls it in each handshake, also when the client names no server
        return front

    def _pick(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self.current().context

    def _stamp_now(self) -> _Stamp:
        stamps = []
        for path in self._paths:
            try:
                found = path.stat()
                stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
            except OSError:
                stamps.append((0, 0, 0))
        return tuple(stamps)

    def _expires(self) -> str:
        return datetime.datetime.fromtimestamp(self._files.not_after_unix_s, datetime.UTC).isoformat(timespec="seconds")

    def _warn_if_expiring(self) -> None:
        now = self._now()
        left_s = self._files.not_after_unix_s - now
        if left_s < EXPIRES_SOON_S and now - self._warned_at > _WARN_AGAIN_S:
            self._warned_at = now
            level = log.warning if left_s > 0 else log.error
            event = "certificate expires soon" if left_s > 0 else "certificate has expired"
            level(event, door=self._door, file=str(self.tls.cert), expires=self._expires())


def read_client(tls: ClientTls, now_unix_s: float | None = None) -> ClientFiles:
    """A client's files, checked. Raises ConfigError as ServerCertificate does, and TLS_CERT_WITHOUT_KEY."""
    if (tls.cert is None) != (tls.key is None):
        raise ConfigError(
            "a client certificate needs its key, and a key its certificate",
            reason="TLS_CERT_WITHOUT_KEY",
            given=tls.cert or tls.key,
            allowed="both or none",
        )
    ca = _read(tls.ca)
    _check_ca(tls.ca, ca)
    if tls.cert is None or tls.key is None:
        return ClientFiles(ca, None, None)
    cert, key = _read(tls.cert), _read(tls.key)
    _check_validity(tls.cert, cert, time.time() if now_unix_s is None else now_unix_s)
    _check_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), tls.cert, tls.key)
    _warn_if_readable(tls.key)
    return ClientFiles(ca, cert, key)


def client_context(tls: ClientTls) -> ssl.SSLContext:
    """A client-side context for HTTP. It verifies the server's certificate and name. Raises as read_client."""
    read_client(tls)
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(tls.ca))
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    return context


def _read_server(tls: ServerTls, now_unix_s: float) -> ServerFiles:
    cert, key = _read(tls.cert), _read(tls.key)
    client_ca = _read(tls.client_ca) if tls.client_ca else None
    not_after = _check_validity(tls.cert, cert, now_unix_s)
    if tls.client_ca and client_ca is not None:
        _check_ca(tls.client_ca, client_ca)
    return ServerFiles(cert, key, client_ca, not_after, _context(tls))


def _context(tls: ServerTls) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # No resumption: a ticket outlives the certificates by which its client was let in.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    _check_pair(context, tls.cert, tls.key)
    if tls.client_ca:
        try:
            context.load_verify_locations(cafile=str(tls.client_ca))
        except (OSError, ssl.SSLError) as failure:
            raise _bad_certificate(tls.client_ca, str(failure)) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError("a TLS file is missing", reason="TLS_FILE_MISSING", given=path) from None
    except OSError as failure:
        raise ConfigError(
            "a TLS file cannot be read", reason="TLS_FILE_UNREADABLE", given=path, hint=failure.strerror
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(
            "a TLS file is too large", reason="TLS_FILE_UNREADABLE", given=path, allowed=f"{MAX_FILE_BYTES} bytes"
        )
    return data


def _check_pair(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Loads certificate and key into a context. Raises ConfigError: TLS_KEY_MISMATCH, TLS_BAD_KEY."""
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as failure:
        if failure.reason == "KEY_VALUES_MISMATCH" or failure.reason == "KEY_TYPE_MISMATCH":
            raise ConfigError(
                "the TLS key is not the certificate's",
                reason="TLS_KEY_MISMATCH",
                given=f"{cert} and {key}",
                hint="give the pair that was issued together",
            ) from None
        raise ConfigError(
            "the TLS key cannot be used",
            reason="TLS_BAD_KEY",
            given=key,
            allowed="an unencrypted private key in PEM form",
            hint=str(failure),
        ) from None
    except OSError as failure:
        raise ConfigError(
            "a TLS file cannot be read", reason="TLS_FILE_UNREADABLE", given=f"{cert} or {key}", hint=failure.strerror
        ) from None


def _no_password() -> str:
    return ""  # OpenSSL would ask at the terminal; the key is then refused as what it is, encrypted


def _check_ca(path: Path, pem: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError, ValueError) as failure:
        raise _bad_certificate(path, str(failure)) from None


def _bad_certificate(path: Path, why: str) -> ConfigError:
    return ConfigError(
        "a TLS file holds no readable certificate",
        reason="TLS_BAD_CERTIFICATE",
        given=path,
        allowed="certificates in PEM form",
        hint=why,
    )


def _check_validity(path: Path, pem: bytes, now_unix_s: float) -> float:
    """The end, in Unix seconds, of the first certificate's time. Raises ConfigError when now is outside of it."""
    try:
        not_before, not_after = validity(pem)
    except ValueError as failure:
        raise _bad_certificate(path, str(failure)) from None
    given = f"{path}, valid {_day(not_before)} to {_day(not_after)}"
    if now_unix_s > not_after:
        raise ConfigError("a TLS certificate has expired", reason="TLS_CERT_EXPIRED", given=given, hint="renew it")
    if now_unix_s < not_before:
        raise ConfigError(
            "a TLS certificate is not valid yet",
            reason="TLS_CERT_NOT_YET_VALID",
            given=given,
            hint="compare this machine's clock",
        )
    return not_after


def _day(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ")


_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----\s(.+?)-----END CERTIFICATE-----", re.DOTALL)


def validity(pem: bytes) -> tuple[float, float]:
    """(not before, not after) of the first certificate, in Unix seconds. Raises ValueError.

    The standard library tells these only of certificates that a handshake has verified; RFC 5280, section 4.1:
    Certificate ::= { tbsCertificate { [0] version?, serial, algorithm, issuer, validity { from, to }, ... }, ... }
    """
    found = _PEM.search(pem)
    if found is None:
        raise ValueError("no BEGIN CERTIFICATE in it")
    try:
        der = binascii.a2b_base64(found[1])
        _, certificate, _ = _element(der)
        _, rest, _ = _element(certificate)
        tag, times, rest = _element(rest)
        for _ in range(4 if tag == 0xA0 else 3):  # from the first to validity; version 1 leaves its version out
            _, times, rest = _element(rest)
        from_tag, from_time, to = _element(times)
        to_tag, to_time, _ = _element(to)
        return _time(from_tag, from_time), _time(to_tag, to_time)
    except (IndexError, binascii.Error, UnicodeDecodeError) as failure:
        raise ValueError(f"not a certificate: {failure}") from None


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """Tag, content, and what follows, of the first DER element. Raises IndexError when it is cut off."""
    tag, length, at = der[0], der[1], 2
    if length & 0x80:
        at += length & 0x7F
        length = int.from_bytes(der[2:at], "big")
    if at + length > len(der):
        raise IndexError("it is cut off")
    return tag, der[at : at + length], der[at + length :]


def _time(tag: int, content: bytes) -> float:
    """UTCTime (tag 0x17, two digits of the year, 50 to 99 being of the last century) or GeneralizedTime (0x18)."""
    text = content.decode("ascii")
    if tag == 0x17:
        text = ("19" if text[:2] >= "50" else "20") + text
    elif tag != 0x18:
        raise ValueError(f"a time has tag {tag:#x}")
    moment = datetime.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=datetime.UTC)
    return moment.timestamp()


def _warn_if_readable(key: Path) -> None:
    if key.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        log.warning("every user of this machine may read the TLS key", file=str(key), hint=f"chmod o= {key}")
