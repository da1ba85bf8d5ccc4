"""The tokenizer inside a GGUF file, as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from protos.errors import ModelError, NotBuilt

# tokenizer.ggml.token_type
_CONTROL, _USER_DEFINED = 3, 4

# tokenizer.ggml.pre -> does it cut digits apart before GPT-2's own rule cuts words?
_SPLITS_DIGITS = {"gpt-2": False, "smollm": True}


def write(metadata: dict[str, Any], folder: Path, source: Path) -> None:
    """Writes both files into ``folder``.

    Args:
        metadata: the GGUF file's key-value pairs.
        source: named in errors.

    Raises:
        NotBuilt: the kind of tokenizer is unknown here.
        ModelError: the vocabulary is missing or inconsistent.
    """
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    tokenizer = _tokenizer(metadata, tokens, source)
    tokenizer.save(str(folder / "tokenizer.json"))

    def token(role: str) -> str | None:
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        return None if token_id is None else tokens[token_id]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length"),
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    text = json.dumps({key: value for key, value in config.items() if value is not None}, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _tokenizer(metadata: dict[str, Any], tokens: list[str], source: Path) -> Tokenizer:
    kind, rule = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or rule not in _SPLITS_DIGITS:
        raise NotBuilt(
            "the GGUF file's tokenizer is of a kind that is not built",
            given=f"{kind} ({rule})",
            allowed=", ".join(f"gpt2 ({name})" for name in _SPLITS_DIGITS),
            hint="use a Hugging Face folder with a tokenizer.json",
        )
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if not tokens or len(vocabulary) != len(tokens):
        raise ModelError("the GGUF file's vocabulary is empty or names a token twice", given=source)
    try:
        merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", [])]
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as failure:  # tokenizers raises bare Exception
        raise ModelError(
            "the GGUF file's merges do not fit its vocabulary", given=source, hint=str(failure)
        ) from failure
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
        if _SPLITS_DIGITS[rule]
        else words
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, kinds, strict=False) if k == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, kinds, strict=False) if k == _USER_DEFINED]
    )
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        bos = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
