"""What is served during chaos: small random models in each way of keeping KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.node import Setting
from tests.e2e.cluster import write_tiny_model
from tests.scenarios.tiny_tokenizer import EOS, write_tokenizer
from tests.unit.tiny import write_model
from worker import tiny_v4

ROOMY = ("--max-running", "8")
LIMITS = ("--max-running", "4", "--max-waiting", "64", "--prefill-chunk", "128")


@dataclass(frozen=True)
class Kind:
    """One row of the table below.

    Args:
        write: the model, into a folder.
        prompts: their lengths, as often as they are asked for.
        most_tokens: of outputs.
        pause_s: about what a worker takes to start.
    """

    write: Callable[[Path], Path]
    options: tuple[str, ...]
    vocab_size: int
    prompts: tuple[int, ...]
    most_tokens: int
    pause_s: float = 0.15

    def setting(self, name: str, folder: Path, *, num_workers: int = 1, num_routers: int = 0) -> Setting:
        """With the model in ``folder``, written where it is not there yet."""
        model = folder / self.write.__name__
        if not model.exists():
            self.write(model)
        # What has ended and was not delivered is kept only where what runs leaves room for it.
        options = (*LIMITS, *self.options, *(ROOMY if num_routers else ()))
        return Setting(name, model, options, num_workers=num_workers, num_routers=num_routers)


def tiny(folder: Path) -> Path:
    return write_tiny_model(folder)


def wide(folder: Path) -> Path:
    """Heads of 64, which can be packed."""
    write_tokenizer(folder)
    return write_model(
        folder,
        vocab_size=600,
        eos_token_id=EOS,
        bos_token_id=0,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
    )


def v4(folder: Path) -> Path:
    """tiny-v4 with half its layers, one of each kind: it is slow on a CPU."""
    return tiny_v4.write_model(
        folder, num_hidden_layers=3, compress_ratios=[0, 4, 128, 0], num_hash_layers=1, n_routed_experts=4
    )


# A page is sealed near 128 tokens in mode dense, else near 272: behind window and margin.
KINDS = {
    "dense": Kind(tiny, ("--arena-bytes", "16M"), 600, (1, 7, 60, 127, 128, 129, 300), most_tokens=160),
    # Too little for all: who outgrows its promise becomes a fork of itself, and the youngest is dropped.
    "recompute": Kind(
        tiny, ("--arena-bytes", "768K", "--admission", "recompute"), 600, (1, 30, 129, 200), most_tokens=480
    ),
    "turboquant": Kind(
        wide, ("--arena-bytes", "32M", "--kv-mode", "turboquant"), 600, (1, 130, 200, 262, 400), most_tokens=160
    ),
    # Pending rows, windows, and guesses that are taken back.
    "v4": Kind(v4, ("--arena-bytes", "64M", "--kv-mode", "turboquant", "--drafts", "2"), 263, (5, 262), 40, 0.4),
}
