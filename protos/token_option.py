"""How a command gets its caller's token: from a file or the environment, never from its command line."""

from __future__ import annotations

import os
from pathlib import Path

import click

from protos.errors import ConfigError

TOKEN_VARIABLE = "TAILPACK_TOKEN"
MAX_TOKEN_BYTES = 4096

token_option = click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"Where routers ask for a token (else ${TOKEN_VARIABLE}).",
)


def read_token(file: Path | None) -> str | None:
    """The token in a file, else in the environment, else None.

    Raises:
        ConfigError: TOKEN_UNREADABLE. What the file holds is not shown.
    """
    if file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_TOKEN_BYTES + 1)
        token = data.decode("ascii").strip()
    except OSError as failure:
        raise ConfigError(
            "the token file cannot be read", reason="TOKEN_UNREADABLE", given=file, hint=failure.strerror
        ) from None
    except UnicodeDecodeError:
        token = ""
    if not token or len(data) > MAX_TOKEN_BYTES or not token.isprintable():
        raise ConfigError(
            "the token file holds no token",
            reason="TOKEN_UNREADABLE",
            given=file,
            allowed=f"one line of printable ASCII, at most {MAX_TOKEN_BYTES} bytes",
        )
    return token
