"""The TLS options of the command line, alike on every command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from protos.cli_options import advanced_option
from protos.errors import ConfigError
from protos.tls import ClientTls, ServerTls, read_client

_F = TypeVar("_F", bound=Callable[..., Any])
_FILE = click.Path(path_type=Path)


def server_tls_options(command: _F) -> _F:
    """``--tls-cert``, ``--tls-key`` and ``--tls-client-ca``, for server_tls()."""
    for option in (
        advanced_option("--tls-client-ca", type=_FILE, help="Demand client certificates of this authority (PEM)."),
        advanced_option("--tls-key", type=_FILE, help="The certificate's private key (PEM)."),
        advanced_option("--tls-cert", type=_FILE, help="Serve TLS with this certificate chain (PEM); read anew."),
    ):
        command = option(command)
    return command


def client_tls_options(command: _F) -> _F:
    """``--tls-ca``, ``--tls-client-cert``, ``--tls-client-key`` and ``--tls-server-name``, for client_tls()."""
    for option in (
        advanced_option("--tls-server-name", help="The name in the server's certificate, if not the address's host."),
        advanced_option("--tls-client-key", type=_FILE, help="The client certificate's private key (PEM)."),
        advanced_option("--tls-client-cert", type=_FILE, help="Client certificate to show (PEM)."),
        advanced_option("--tls-ca", type=_FILE, help="Use TLS; the server's certificate is of this authority (PEM)."),
    ):
        command = option(command)
    return command


def server_tls(tls_cert: Path | None, tls_key: Path | None, tls_client_ca: Path | None) -> ServerTls | None:
    """None when no option was given. Raises ConfigError (TLS_OPTIONS) for a set that is not whole."""
    if tls_cert is not None and tls_key is not None:
        return ServerTls(tls_cert, tls_key, tls_client_ca)
    if tls_cert or tls_key or tls_client_ca:
        raise ConfigError(
            "TLS needs both a certificate and its key", reason="TLS_OPTIONS", allowed="--tls-cert with --tls-key"
        )
    return None


def client_tls(
    tls_ca: Path | None, tls_client_cert: Path | None, tls_client_key: Path | None, tls_server_name: str | None
) -> ClientTls | None:
    """None when no option was given; else checked. Raises ConfigError (TLS_OPTIONS, and those of protos/tls.py)."""
    if tls_ca is not None:
        tls = ClientTls(tls_ca, tls_client_cert, tls_client_key, tls_server_name)
        read_client(tls)
        return tls
    if tls_client_cert or tls_client_key or tls_server_name:
        raise ConfigError(
            "a TLS client must know which authority to trust", reason="TLS_OPTIONS", allowed="--tls-ca as well"
        )
    return None
