"""The hash chain of KV pages: one value, wherever it is computed."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.page_hash import HASH_BYTES, PAGE_TOKENS, ROOT, page_hash, page_hashes

TOKENS = list(range(1000, 1000 + PAGE_TOKENS))
BASE: dict[str, Any] = {"salt": "tenant", "weights_digest": b"w" * 16, "geometry_digest": b"g" * 16}


def test_value_follows_the_written_encoding() -> None:
    text = ROOT + b"".join(struct.pack("<I", token) for token in TOKENS)
    text += b"\x06\0\0\0tenant" + b"\x10\0\0\0" + b"w" * 16 + b"\x10\0\0\0" + b"g" * 16
    assert page_hash(ROOT, TOKENS, **BASE) == blake2b(text, digest_size=16, person=b"tailpack-page-v1").digest()


def test_value_is_frozen() -> None:
    # Stored pages are found by this value: a change of the encoding needs a new domain, and shows here.
    assert page_hash(ROOT, TOKENS, **BASE).hex() == "66382ebcb2394d923d0b3c2df46cffae"


@pytest.mark.parametrize(
    "change", [{"salt": "other"}, {"salt": ""}, {"weights_digest": b"x" * 16}, {"geometry_digest": b"x" * 16}]
)
def test_every_part_counts(change: dict[str, Any]) -> None:
    assert page_hash(ROOT, TOKENS, **{**BASE, **change}) != page_hash(ROOT, TOKENS, **BASE)


def test_parent_and_each_token_count() -> None:
    reference = page_hash(ROOT, TOKENS, **BASE)
    assert page_hash(b"\1" * HASH_BYTES, TOKENS, **BASE) != reference
    for position in (0, 1, PAGE_TOKENS - 1):
        changed = [*TOKENS]
        changed[position] += 1
        assert page_hash(ROOT, changed, **BASE) != reference
    assert page_hash(ROOT, TOKENS[::-1], **BASE) != reference


def test_parts_cannot_be_shifted_into_each_other() -> None:
    one = page_hash(ROOT, TOKENS, salt="ab", weights_digest=b"c", geometry_digest=b"")
    two = page_hash(ROOT, TOKENS, salt="a", weights_digest=b"bc", geometry_digest=b"")
    three = page_hash(ROOT, TOKENS, salt="a", weights_digest=b"b", geometry_digest=b"c")
    assert len({one, two, three}) == 3


@pytest.mark.parametrize("count", [0, 127, 129])
def test_only_full_pages_have_a_hash(count: int) -> None:
    with pytest.raises(ValueError, match="128 tokens"):
        page_hash(ROOT, [1] * count, **BASE)


def test_parent_of_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="parent hash has 3 bytes"):
        page_hash(b"abc", TOKENS, **BASE)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=3 * PAGE_TOKENS + 5))
def test_chain_is_the_hash_of_each_page_after_its_parent(token_ids: list[int]) -> None:
    chain = list(page_hashes(token_ids, **BASE))
    assert len(chain) == len(token_ids) // PAGE_TOKENS
    parent = ROOT
    for index, digest in enumerate(chain):
        assert digest == page_hash(parent, token_ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS], **BASE)
        parent = digest


def test_chain_goes_on_from_any_page() -> None:
    token_ids = list(range(4 * PAGE_TOKENS))
    whole = list(page_hashes(token_ids, **BASE))
    assert list(page_hashes(token_ids[2 * PAGE_TOKENS :], parent=whole[1], **BASE)) == whole[2:]


def test_three_processes_with_different_hash_seeds_agree() -> None:
    code = (
        "from protos.page_hash import page_hashes;"
        "print([h.hex() for h in page_hashes(range(300), salt='t', weights_digest=b'w', geometry_digest=b'g')])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "4711")
    }
    here = [h.hex() for h in page_hashes(range(300), salt="t", weights_digest=b"w", geometry_digest=b"g")]
    assert outputs == {f"{here}\n"}
