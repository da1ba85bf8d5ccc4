"""Command-line options that say which cluster to call, and as whom. For every command that is a client of routers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from protos.cli_options import advanced_option
from protos.errors import TailpackError
from protos.tls import ClientTls
from protos.tls_options import client_tls, client_tls_options
from protos.token_option import read_token, token_option
from router.client import DEFAULT_ADDRESS, AsyncTailpack, RetryPolicy, Tailpack
from router.client_settings import ignore


@dataclass(frozen=True)
class Connection:
    """What the options said. address: one router, or several with commas between."""

    address: str = DEFAULT_ADDRESS
    tenant: str | None = None
    token: str | None = field(default=None, repr=False)
    tls: ClientTls | None = None

    def client(
        self,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        on_retry: Callable[[TailpackError, float], None] = ignore,
        *,
        session: bool = True,
    ) -> AsyncTailpack:
        """Not connected yet; the caller closes it."""
        return AsyncTailpack(
            self.address,
            tenant=self.tenant,
            token=self.token,
            tls=self.tls,
            session=session,
            retry=retry,
            on_retry=on_retry,
        )

    def blocking_client(self) -> Tailpack:
        """One that asks once. The caller closes it."""
        retry = RetryPolicy(max_retries=0)
        return Tailpack(self.address, tenant=self.tenant, token=self.token, tls=self.tls, retry=retry)


_OPTIONS = (
    click.option(
        "--router",
        "address",
        default=DEFAULT_ADDRESS,
        show_default=True,
        metavar="HOST:PORT",
        help="Several, with commas between: the next one is asked where one fails.",
    ),
    token_option,
    client_tls_options,
    advanced_option("--tenant", help="On whose behalf, where no token says so."),
)


def connection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options; the command gets one argument of them, `connection`."""

    @functools.wraps(function)
    def connected(
        *,
        address: str,
        token_file: Path | None,
        tls_ca: Path | None,
        tls_client_cert: Path | None,
        tls_client_key: Path | None,
        tls_server_name: str | None,
        tenant: str | None,
        **others: Any,
    ) -> Any:
        tls = client_tls(tls_ca, tls_client_cert, tls_client_key, tls_server_name)
        connection = Connection(address, tenant, read_token(token_file), tls)
        return function(connection=connection, **others)

    for option in reversed(_OPTIONS):
        connected = option(connected)
    return connected
