"""Options that only specialists need: left out of ``--help``, shown by ``--help-all``.

@click.command(cls=HelpAllCommand)
@click.option("--listen", ...)            # shown always
@advanced_option("--keepalive-ms", ...)   # shown by --help-all
"""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

EXIT_INTERRUPTED = 130
"""Of a command that was interrupted: 128 + SIGINT, as shells have it."""

_F = TypeVar("_F", bound=Callable[..., Any])
_HELP_ALL = "tailpack.help_all"  # key in click's context.meta


def program_name() -> str:
    """``tailpack`` as whoever started this process can write it: with its path where it is not on PATH."""
    called = Path(sys.argv[0])
    if called.name == "cli.py":
        return f"{shlex.quote(sys.executable)} -m protos.cli"
    found = shutil.which("tailpack")
    if called.name != "tailpack" or (found and Path(found).absolute() == called.absolute()):
        return "tailpack"
    return shlex.quote(sys.argv[0])


class AdvancedOption(click.Option):
    """An option without a line in the short help. It works like any other."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        return super().get_help_record(ctx) if ctx.meta.get(_HELP_ALL) else None


def advanced_option(*param_decls: str, **attrs: Any) -> Callable[[_F], _F]:
    """``click.option`` for an option that only ``--help-all`` shows."""
    return click.option(*param_decls, cls=AdvancedOption, **attrs)


def showing_all(ctx: click.Context) -> bool:
    """True while the help being written is that of ``--help-all``."""
    return bool(ctx.meta.get(_HELP_ALL))


def _print_help_all(ctx: click.Context, _param: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def help_all_option() -> click.Option:
    """The ``--help-all`` flag. Eager, so that it wins over missing arguments."""
    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_print_help_all,
        help="Show every option and exit.",
    )


class FiniteRange(click.FloatRange):
    """click's, which lets NaN through where both ends are compared with, and infinity where an end is open."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is no finite number.", param, ctx)
        return number


class HelpAllCommand(click.Command):
    """A command with ``--help-all`` beside ``--help``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(help_all_option())


def accept_help_all(command: click.Command) -> None:
    """Gives a command and what is below it ``--help-all`` where they have none, as those of kernels, which may import
    nothing of ours: a caller need not know which commands have advanced options.
    """
    if not any("--help-all" in param.opts for param in command.params):
        command.params.append(help_all_option())
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if below := command.get_command(context, name):
                accept_help_all(below)
