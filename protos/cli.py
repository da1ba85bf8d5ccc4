"""The console script ``tailpack``: composes the packages' command lines by name.

A command's module is imported when the command runs, never for ``tailpack --help``; so this module needs neither torch
nor Ray, and a missing optional library breaks only the command that needs it.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from typing import Any, NamedTuple

import click

from protos.cli_options import accept_help_all, help_all_option, program_name, showing_all
from protos.errors import TailpackError
from protos.version import UNINSTALLED, release

# Before anything imports gRPC: in a child between fork and exec it would start its threads anew, and end the child with
# SIGABRT when their descriptors are closed there. None of our commands goes on in a fork without exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


class LazyCommand(NamedTuple):
    """Where a command lives (``module:attribute``), its line in the help, and whether the short help lists it."""

    target: str
    summary: str
    everyday: bool = False


COMMANDS = {
    "up": LazyCommand("worker.cli:up", "Run a whole cluster on this machine.", everyday=True),
    "generate": LazyCommand("router.cli:generate", "Send a prompt and stream the answer.", everyday=True),
    "demo": LazyCommand("worker.cli:demo", "Bring up two workers, answer some prompts, stop again.", everyday=True),
    "status": LazyCommand("router.status_cli:status", "Show what a cluster does.", everyday=True),
    "top": LazyCommand("router.status_cli:top", "Watch what a cluster does.", everyday=True),
    "bench": LazyCommand("router.bench_cli:bench_group", "Measure a cluster under load.", everyday=True),
    "features": LazyCommand("router.features_cli:features", "Show what was asked for and what is engaged."),
    "size": LazyCommand("worker.size_cli:size", "Show what a model and its KV will take of a GPU.", everyday=True),
    "doctor": LazyCommand("worker.doctor_cli:doctor", "Check a running deployment, and say what to do.", everyday=True),
    "memory": LazyCommand("worker.memory_cli:memory", "Show what takes memory, by owner.", everyday=True),
    "router": LazyCommand("router.cli:router_group", "Run a router by itself."),
    "worker": LazyCommand("worker.cli:worker_group", "Run a worker by itself."),
    "kvstore": LazyCommand("kvstore.cli:kvstore_group", "Run a kvstore by itself, or look into one.", everyday=True),
    "kernels": LazyCommand("kernels.cli:kernels_group", "Build and verify GPU kernels."),
    "codec": LazyCommand("kernels.cli:codec_group", "Measure the KV codec.", everyday=True),
    "quality": LazyCommand("worker.quality_cli:quality", "Measure what KV modes do to a model's predictions."),
}
BELOW = {
    "bench": {"engine": LazyCommand("worker.bench_cli:engine", "Measure an engine by itself, in this process.")},
}
"""Commands of a group that live in another package than the group."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        lazy = COMMANDS.get(cmd_name)
        if lazy is None:
            return None
        command = _loaded(lazy)
        if isinstance(command, click.Group):
            for name, below in BELOW.get(cmd_name, {}).items():
                command.add_command(_Later(name, below))
        accept_help_all(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # The summaries stand above, so that writing the help imports nothing.
        rows = [(name, lazy.summary) for name, lazy in COMMANDS.items() if lazy.everyday or showing_all(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class _Later(click.Command):
    """Stands for a command until it is used."""

    def __init__(self, name: str, lazy: LazyCommand) -> None:
        super().__init__(name, short_help=lazy.summary)
        self._lazy = lazy

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        return _loaded(self._lazy).make_context(info_name, args, parent, **extra)


def _loaded(lazy: LazyCommand) -> click.Command:
    module_name, _, attribute = lazy.target.partition(":")
    command = getattr(importlib.import_module(module_name), attribute)
    if not isinstance(command, click.Command):
        raise TypeError(f"{lazy.target} is no click command")
    return command


def _print_version(ctx: click.Context, _param: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        known = release() != UNINSTALLED
        click.echo(f"tailpack {release()}" if known else "tailpack, from a source tree that is not installed")
        ctx.exit()


cli = LazyGroup(
    name="tailpack",
    help="Serve long-context language models from a cluster, with the KV cache as a service of its own.",
    epilog="Start with `tailpack up`, then `tailpack generate 'What is the capital of France?'`.",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Show the version and exit.",
        ),
        help_all_option(),
    ],
    no_args_is_help=True,
)


def main(args: list[str] | None = None) -> Any:
    """Entry point. An error of our tree becomes one line on stderr and exit status 1; a bug keeps its traceback."""
    _fill_standard_streams()
    try:
        return cli.main(args=args, prog_name="tailpack")
    except TailpackError as error:
        # As click words its own. Whoever reads hints must be able to paste them, and another Python's pip would take
        # what an index holds under our name.
        told = f"Error: {error}".replace("`tailpack ", f"`{program_name()} ")
        pip = f"{shlex.quote(sys.executable)} -m pip install 'tailpack["
        click.echo(told.replace("pip install 'tailpack[", pip), err=True)
        sys.exit(1)


def _fill_standard_streams() -> None:
    """/dev/null where whoever started this closed one: else a socket would get its number, and what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


if __name__ == "__main__":
    main()
