"""Who a caller is: bearer tokens of tenants, hashed at rest, and each tenant's limits.

The file is TOML; several tokens of a tenant let it change them one by one:

[tenants.search]
tokens = ["sha256:<64 hex digits>"]
max_requests = 200                 # in flight; each limit may be left out
max_request_bytes = 268435456      # of requests in flight, as received
tokens_per_minute = 2000000        # of prompts and outputs

Tokens are 256 random bits that new_token() makes, and others are refused by their form. So a plain SHA-256 is enough at
rest: there is no dictionary to try, which is what slow hashes (scrypt) defend against, at 50 ms a request.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import structlog

from protos import rpc
from protos.errors import ConfigError, InvalidRequest, PermissionDenied, TailpackError, Unauthenticated
from router.tenants import NO_LIMITS, TenantLimits

log = structlog.get_logger("auth")

MAX_TOKENS = 1000
"""In one file: each request is compared with all of them, 0.1 us apiece."""
MAX_FILE_BYTES = 1 << 20
CHECK_EVERY_S = 1.0

_TOKEN = re.compile(r"tp_[A-Za-z0-9_-]{43}\Z")
_HASH = re.compile(r"sha256:([0-9a-f]{64})\Z")
_LIMITS = tuple(field.name for field in fields(TenantLimits))


def new_token() -> str:
    """A fresh token: 256 random bits."""
    return f"tp_{secrets.token_urlsafe(32)}"


def hashed(token: str) -> str:
    """A token as it stands in the file."""
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


def file_lines(tenant: str, token: str) -> str:
    """What a tokens file holds for a tenant with this token."""
    return f'[tenants."{tenant}"]\ntokens = ["{hashed(token)}"]'


def check_tenant(tenant: str) -> None:
    """Raises InvalidRequest (BAD_TENANT)."""
    if not rpc.is_id(tenant):
        raise InvalidRequest(
            "this is no name of a tenant", reason="BAD_TENANT", given=repr(tenant[:128]), allowed=rpc.ID_ALLOWED
        )


@dataclass(frozen=True)
class TokensFile:
    """What a tokens file says: (hash, tenant) of each token, and each tenant's limits."""

    hashes: tuple[tuple[bytes, str], ...]
    limits: Mapping[str, TenantLimits]


class Authenticator:
    """Tells tenants by their tokens; without a file, by what callers say. Reads the file again when it changes."""

    def __init__(self, tokens: Path | None, *, now_s: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError: TOKENS_FILE_UNREADABLE, BAD_TOKENS_FILE."""
        self.num_refused: Counter[str] = Counter()
        """Calls by the reason why they were not let in."""
        self._path = tokens
        self._now_s = now_s
        self._checked_s = now_s()
        self._stamp = self._stamp_now()
        self._file = read_tokens(tokens) if tokens is not None else TokensFile((), {})

    @property
    def demands_tokens(self) -> bool:
        return self._path is not None

    @property
    def tenants(self) -> frozenset[str]:
        """Those that the file names."""
        return frozenset(self._file.limits)

    def tenant_of(self, authorization: str | None, x_tenant: str) -> str:
        """The tenant of a call.

        Args:
            authorization: the header's value, "Bearer <token>"; None when there is none.
            x_tenant: what the caller says; "" for nothing.

        Raises:
            Unauthenticated: TOKEN_MISSING, TOKEN_MALFORMED, TOKEN_UNKNOWN.
            PermissionDenied: TENANT_MISMATCH: the token is another tenant's.
        """
        if self._path is None:
            return x_tenant
        self._reload_if_changed()
        try:
            return self._tenant_of(authorization, x_tenant)
        except TailpackError as refused:
            self.num_refused[refused.reason] += 1
            raise

    def _tenant_of(self, authorization: str | None, x_tenant: str) -> str:
        if not authorization:
            raise Unauthenticated(
                "this router demands a token",
                reason="TOKEN_MISSING",
                allowed="authorization: Bearer <token>",
                hint="tailpack's commands take it from --token-file or $TAILPACK_TOKEN",
            )
        scheme, _, token = authorization.partition(" ")
        token = token.strip(" ")
        if scheme.lower() != "bearer" or not _TOKEN.match(token):
            raise Unauthenticated(
                "the authorization is not a token of this kind",
                reason="TOKEN_MALFORMED",
                allowed="Bearer tp_ and 43 characters, as `tailpack router token` makes them",
            )
        tenant = self._find(hashlib.sha256(token.encode()).digest())
        if tenant is None:
            raise Unauthenticated(
                "this token is not known here",
                reason="TOKEN_UNKNOWN",
                hint="it may have been replaced; ask whoever runs the router",
            )
        if x_tenant not in ("", tenant):
            raise PermissionDenied(
                "the token is not that tenant's",
                reason="TENANT_MISMATCH",
                given=repr(x_tenant[:128]),
                hint="leave x-tenant out: the token says it",
            )
        return tenant

    def limits_of(self, tenant: str) -> TenantLimits:
        return self._file.limits.get(tenant, NO_LIMITS)

    def _find(self, digest: bytes) -> str | None:
        """Compares with all, whether or not one was right already: the time taken says nothing."""
        found: str | None = None
        for known, tenant in self._file.hashes:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    def _reload_if_changed(self) -> None:
        """At most once a second. A broken file leaves the old one in force."""
        now_s = self._now_s()
        if self._path is None or now_s - self._checked_s < CHECK_EVERY_S:
            return
        self._checked_s = now_s
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._file = read_tokens(self._path)
            log.info("tokens read anew", file=str(self._path), tenants=len(self._file.limits))
        except ConfigError as broken:
            log.error("changed tokens file refused, the old one stays", error=str(broken))

    def _stamp_now(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat() if self._path is not None else None
        except OSError:
            found = None
        return (found.st_mtime_ns, found.st_size, found.st_ino) if found else (0, 0, 0)


def read_tokens(path: Path) -> TokensFile:
    """Reads and checks a tokens file. Messages never quote hashes.

    Raises:
        ConfigError: TOKENS_FILE_UNREADABLE, BAD_TOKENS_FILE.
    """
    try:
        with path.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as failure:
        raise ConfigError(
            "the tokens file cannot be read", reason="TOKENS_FILE_UNREADABLE", given=path, hint=failure.strerror
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise _bad(path, "it is too large", f"{MAX_FILE_BYTES} bytes")
    try:
        parsed = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as failure:
        raise _bad(path, f"it is not TOML: {failure}", "see --help of `tailpack router token`") from None
    tenants = parsed.get("tenants")
    if set(parsed) != {"tenants"} or not isinstance(tenants, dict):
        raise _bad(path, f"it has {', '.join(sorted(parsed)) or 'nothing'} at its top", "[tenants.NAME] only")
    hashes: dict[bytes, str] = {}
    limits: dict[str, TenantLimits] = {}
    for tenant, table in tenants.items():
        limits[tenant] = _read_limits(path, tenant, table)
        for digest in _read_hashes(path, tenant, table):
            if digest in hashes:
                raise _bad(path, f"tenants {hashes[digest]} and {tenant} have the same token", "a token once")
            hashes[digest] = tenant
    if len(hashes) > MAX_TOKENS:
        raise _bad(path, f"it has {len(hashes)} tokens", f"{MAX_TOKENS}")
    return TokensFile(tuple(hashes.items()), limits)


def _read_limits(path: Path, tenant: str, table: Any) -> TenantLimits:
    if not rpc.is_id(tenant):
        raise _bad(path, f"{tenant!r} is no name of a tenant", rpc.ID_ALLOWED)
    if not isinstance(table, dict) or not set(table) <= {"tokens", *_LIMITS}:
        unknown = sorted(set(table) - {"tokens", *_LIMITS}) if isinstance(table, dict) else [repr(table)[:64]]
        raise _bad(path, f"tenant {tenant} has {', '.join(unknown)}", f"tokens, {', '.join(_LIMITS)}")
    given = {name: table[name] for name in _LIMITS if name in table}
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise _bad(path, f"tenant {tenant}: {name} is {value!r}", "a whole number from 1 on")
    return TenantLimits(**given)


def _read_hashes(path: Path, tenant: str, table: dict[str, Any]) -> list[bytes]:
    tokens = table.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise _bad(path, f"tenant {tenant} has no tokens", 'tokens = ["sha256:..."]')
    found = [_HASH.match(entry) if isinstance(entry, str) else None for entry in tokens]
    if None in found:
        # Never quoted: it may be a token that somebody forgot to hash.
        raise _bad(path, f"token {found.index(None) + 1} of tenant {tenant} is no hash", "sha256: and 64 hex digits")
    return [bytes.fromhex(match[1]) for match in found if match is not None]


def _bad(path: Path, what: str, allowed: str) -> ConfigError:
    return ConfigError(f"the tokens file is wrong: {what}", reason="BAD_TOKENS_FILE", given=path, allowed=allowed)
