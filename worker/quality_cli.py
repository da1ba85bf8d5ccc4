"""``tailpack quality``: what each KV mode does to a model's predictions."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import tokenizers
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from protos import logs
from protos.cli_options import HelpAllCommand, advanced_option
from protos.errors import ModelError, NotBuilt
from worker import quality_report, quality_texts
from worker.cluster_config import resolve_model
from worker.config import WorkerConfig
from worker.models.llama import MODEL_TYPES, Llama
from worker.quality import MODES, CaseResult, all_cases, measure
from worker.weights import load_model

LOG_EVERY_S = 60.0


def _edges(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[int, int]:
    first, _, last = text.partition(",")
    if not (first.strip().isdigit() and last.strip().isdigit()):
        raise click.BadParameter(f"{text!r} is no F,L as in 2,2")
    return int(first), int(last)


def _modes(_ctx: click.Context, _param: click.Parameter, text: str) -> list[str]:
    return [mode.strip() for mode in text.split(",")]


@click.command(cls=HelpAllCommand)
@click.option("--model", default="smollm2", show_default=True, help="As for `tailpack up`.")
@click.option(
    "--text",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A text of your own, may be repeated.  [default: pydoc topics, docstrings and source of the standard library]",
)
@click.option("--tokens", default=8192, show_default=True, type=click.IntRange(2), help="In all, up to whole texts.")
@click.option("--modes", default=",".join(MODES), show_default=True, callback=_modes, help="What to measure.")
@click.option(
    "--edges", default="2,2", show_default=True, callback=_edges, help="Layers left dense in each mode's second run."
)
@click.option("--out", default="quality-report", show_default=True, type=click.Path(path_type=Path, file_okay=False))
@advanced_option("--text-tokens", default=4096, show_default=True, type=click.IntRange(2), help="Of a text, at most.")
@advanced_option("--chunk", default=128, show_default=True, type=click.IntRange(1), help="Tokens of a step.")
@advanced_option("--threads", default=0, help="[default: one per core]")
@advanced_option("--no-plot", is_flag=True, help="Table and records only; needs no matplotlib.")
def quality(
    model: str,
    files: tuple[Path, ...],
    tokens: int,
    modes: list[str],
    edges: tuple[int, int],
    out: Path,
    text_tokens: int,
    chunk: int,
    threads: int,
    no_plot: bool,
) -> None:
    """Measure what each KV mode does to a model's predictions.

    Feeds real text to the model (teacher forcing), in mode dense and in every mode, each also with dense edge layers,
    and compares: how often the most likely token is the same, the divergence KL(dense || mode), perplexity. Prints a
    table; writes quality.png, quality.svg and quality.jsonl to OUT. Ctrl-C prints what there is until then.
    """
    logs.configure("quality", level="warning")  # how far a mode engages is in the table
    console = Console(highlight=False)
    cases = list(all_cases(modes, edges))
    folder, name = resolve_model(model)
    encode = _encoder(folder)
    text_tokens = min(text_tokens, tokens)
    if files:
        texts = quality_texts.texts_of_files(encode, files, text_tokens)
    else:
        texts = quality_texts.own_texts(encode, -(-tokens // text_tokens), text_tokens)
    config = WorkerConfig(model=folder, name=name, kv_socket=Path("none"), worker_id="quality", threads=threads)
    torch.set_num_threads(config.num_threads)
    loaded = load_model(config)
    if not isinstance(loaded.network, Llama):
        raise NotBuilt(
            "quality is measured on models of the llama family only",
            given=loaded.info.architecture,
            allowed=", ".join(MODEL_TYPES),
        )
    for text in texts:
        console.print(f"{len(text.token_ids):>6} tokens of {text.name}")
    results: list[CaseResult] = []
    forward_tokens = sum(len(text.token_ids) for text in texts) * (len(cases) + 1)
    stopped = ""
    try:
        with torch.inference_mode(), _progress(console, forward_tokens) as advance:
            measure(
                loaded.network,
                loaded.geometry,
                cases,
                [text.token_ids for text in texts],
                chunk=chunk,
                results=results,
                on_forward=advance,
            )
    except KeyboardInterrupt:
        stopped = ", stopped early"
    measured = results[0].total.predictions if results else 0
    title = f"{name}: {measured:,} predictions, {len(texts)} texts, chunks of {chunk}{stopped}"
    command = (
        f"tailpack quality --model {Path(model).name} --tokens {tokens} --text-tokens {text_tokens} "
        f"--modes {','.join(modes)} --edges {edges[0]},{edges[1]} --chunk {chunk} --threads {config.num_threads}"
    ) + "".join(f" --text {file.name}" for file in files)
    lines = quality_report.records(results, texts, model=name, chunk=chunk, command=command) if measured else []
    if lines:
        console.print(quality_report.table(lines, title))
    if stopped:
        console.print("stopped; no files written")
        sys.exit(130)
    out.mkdir(parents=True, exist_ok=True)
    (out / "quality.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    console.print(f"wrote {out / 'quality.jsonl'}")
    if no_plot:
        return
    plots = [out / "quality.png", out / "quality.svg"]
    try:
        quality_report.plot(lines, title, plots)
    except ModuleNotFoundError as missing:
        raise click.ClickException(
            f"plots need matplotlib ({missing}): install tailpack[plots], or pass --no-plot"
        ) from None
    console.print("wrote " + ", ".join(map(str, plots)))


def _encoder(folder: Path) -> quality_texts.Encode:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as failure:  # the library raises no class of its own
        raise ModelError(
            "tokenizer.json cannot be loaded", reason="BAD_TOKENIZER", given=folder, hint=str(failure)
        ) from failure
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: list(tokenizer.encode(text).ids)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with the time left at a terminal; elsewhere a line a minute."""
    if console.is_terminal:
        columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TextColumn("forward tokens, left"))
        with Progress(*columns, TimeRemainingColumn(), TimeElapsedColumn(), console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda count: bar.advance(task, count)
        return
    began = last = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= LOG_EVERY_S:
            last = now
            left_s = (now - began) / done * (total - done)
            console.print(f"{done / total:.1%}, {(now - began) / 60:.1f} min, about {left_s / 60:.0f} min left")

    yield advance
