"""A small byte-level BPE tokenizer with a chat template, made on the spot: tests need no download."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

# ChatML, written the way small chat models' configs hold it.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "{{ bos_token + message['role'] + '\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. The capital of France is Paris, the capital of Italy is Rome.",
    "Numbers: one two three four five six seven eight nine ten. Stop here. STOP there.",
    "Ein Text mit Umlauten: äöü ÄÖÜ ß. Où est la bibliothèque?",
    "日本語の文章。東京は日本の首都です。中文也可以。한국어도 있어요.",
    "Emoji: 😀 😃 🎉 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
]


def write_tokenizer(folder: Path, *, vocab_size: int = 600, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Writes the two JSON files. Ids 0 and 1 are <|im_start|> and <|im_end|> (end of sequence: EOS below)."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


EOS = 1
