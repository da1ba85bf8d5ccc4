"""The command line's root: lazy, short by default, one line for errors of ours. And the form of logs."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from protos import cli
from protos.cli_options import HelpAllCommand, advanced_option, program_name
from protos.errors import ConfigError
from worker.cli import num_bytes, seconds


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "protos.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_root_imports_no_heavy_library() -> None:
    code = (
        "import sys; sys.argv = ['tailpack', '--help']; import protos.cli\n"
        "try: protos.cli.main()\nexcept SystemExit: pass\n"
        "print('loaded', sorted({'torch', 'ray', 'grpc', 'numpy', 'cupy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "loaded []" in done.stdout


def test_router_commands_do_not_import_torch_or_ray() -> None:
    code = "import sys, router.cli; print('loaded', sorted({'torch', 'ray', 'cupy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "loaded []" in done.stdout


def test_short_help_lists_everyday_commands_and_help_all_everything() -> None:
    short, full = run("--help").stdout, run("--help-all").stdout
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in full
        assert (f"  {name} " in short) == command.everyday
    assert run().stdout == short or run().stderr == short


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_is_where_the_root_says(name: str) -> None:
    module, _, attribute = cli.COMMANDS[name].target.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command)
    result = CliRunner().invoke(cli.cli, [name, "--help"])
    assert result.exit_code == 0 and "Usage: tailpack" in result.output.replace("cli", "tailpack")


def every_command(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from every_command(below, (*path, name))


def test_every_command_and_group_takes_help_all() -> None:
    paths = list(every_command(cli.cli))
    assert {("kvstore",), ("kvstore", "stats"), ("codec", "report"), ("router",), ("kernels", "build")} < set(paths)
    for path in paths:
        result = CliRunner().invoke(cli.cli, [*path, "--help-all"])
        assert result.exit_code == 0 and "Usage:" in result.output, path


@pytest.mark.parametrize(
    ("called", "on_path", "expected"),
    [
        ("tailpack", "", "tailpack"),
        ("bin/tailpack", "", "bin/tailpack"),
        ("a b/tailpack", "", "'a b/tailpack'"),
        ("bin/tailpack", "bin", "tailpack"),
        ("bin/tailpack", "other", "bin/tailpack"),
        ("protos/cli.py", "bin", f"{shlex.quote(sys.executable)} -m protos.cli"),
        ("bin/pytest", "", "tailpack"),
    ],
)
def test_hints_name_the_program_as_it_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: str, on_path: str, expected: str
) -> None:
    for folder in ("bin", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tailpack").touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / on_path) if on_path else "/none")
    monkeypatch.setattr(sys, "argv", [called])
    assert program_name() == expected


def test_an_unknown_command_is_a_usage_error() -> None:
    done = run("serve-me")
    assert done.returncode == 2 and "serve-me" in done.stderr


def test_version_comes_from_the_installed_package() -> None:
    done = run("--version")
    assert done.returncode == 0 and done.stdout.startswith("tailpack")


@click.command(cls=HelpAllCommand)
@click.argument("what")
@click.option("--common", default="c", help="for all")
@advanced_option("--rare", default=3, show_default=True, help="for few")
def sample(what: str, common: str, rare: int) -> None:
    """A sample."""
    click.echo(f"{what} {common} {rare}")


def test_advanced_options_work_and_only_help_all_shows_them() -> None:
    runner = CliRunner()
    short = runner.invoke(sample, ["--help"])
    full = runner.invoke(sample, ["--help-all"])  # in spite of the missing argument
    assert short.exit_code == full.exit_code == 0
    assert "--common" in short.output and "--rare" not in short.output
    assert "--common" in full.output and "--rare INTEGER  for few  [default: 3]" in full.output
    assert runner.invoke(sample, ["x", "--rare", "5"]).output == "x c 5\n"


def test_an_error_of_ours_is_one_line_and_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_args: object, **_kwargs: object) -> None:
        raise ConfigError("no such thing", given="x", allowed="y", hint="use `tailpack y` or pip install 'tailpack[y]'")

    monkeypatch.setattr(sys, "argv", ["./bin/tailpack"])
    monkeypatch.setattr(cli.cli, "main", broken)
    with pytest.raises(SystemExit) as status:
        cli.main([])
    assert status.value.code == 1
    assert capsys.readouterr().err == (
        "Error: no such thing; given: x; allowed: y; use `./bin/tailpack y` or "
        f"{shlex.quote(sys.executable)} -m pip install 'tailpack[y]' [BAD_CONFIG]\n"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1048576", 1 << 20), ("512M", 512 << 20), ("1.5G", 3 << 29), ("2GiB", 2 << 30), ("1kb", 1024)],
)
def test_sizes(text: str, expected: int) -> None:
    assert num_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "G", "-1", "1e9", "1X", "nan", "1 2", "9" * 400, "1025T"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        num_bytes(text)


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "1e300", "86401", "soon"])
def test_bad_seconds_are_refused(text: str) -> None:
    assert (seconds("2.5"), seconds("0")) == (2.5, 0.0)
    with pytest.raises(click.BadParameter):
        seconds(text)


LOGGING = """
import logging, threading, structlog
from protos import logs
logs.configure("worker", json={json})
log = structlog.get_logger("any")
secret = "the caller's prompt"
log.debug("unseen")
threading.Thread(target=lambda: log.info("from a thread", rows=3)).start()
logging.getLogger("grpc").warning("library %s", "speaks")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("broken", request_id="r1")
"""


def logged(*, json: bool) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", LOGGING.format(json=json)], capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_logs_are_json_lines_on_stderr_and_hold_no_local_variables() -> None:
    stdout, stderr = logged(json=True)
    assert stdout == "" and "prompt" not in stderr
    records = [json.loads(line) for line in stderr.splitlines()]
    assert [(r["event"], r["level"], r["component"]) for r in records] == [
        ("from a thread", "info", "worker"),
        ("library speaks", "warning", "worker"),
        ("broken", "error", "worker"),
    ]
    assert records[0]["rows"] == 3 and records[2]["request_id"] == "r1"
    assert "ZeroDivisionError" in records[2]["exception"]


def test_logs_for_people_have_no_braces_and_hold_no_local_variables() -> None:
    stdout, stderr = logged(json=False)
    assert stdout == "" and "prompt" not in stderr and "{" not in stderr
    assert "from a thread" in stderr and "rows=3" in stderr and "ZeroDivisionError" in stderr


def test_control_characters_do_not_reach_the_terminal() -> None:
    error = ConfigError("müßte \x1b[31m", given="a\r\nb\x9b1m", allowed="日本 \u202e", hint="\x07")
    assert str(error) == "müßte \\x1b[31m; given: a\\r\\nb\\x9b1m; allowed: 日本 \\u202e; \\x07 [BAD_CONFIG]"
    assert error.given == "a\r\nb\x9b1m"  # programs get what was sent
