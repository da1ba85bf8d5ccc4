"""The hash chain of KV pages (DESIGN.md 3.4), computed alike by router, worker and store.

A page's hash is blake2b-128 over its parent's hash, its 128 token ids, the tenant salt, the weights digest and the
geometry digest. Each part is length-prefixed or of fixed length, so no two inputs share an encoding, and nothing
depends on the process (no ``hash()``, no locale, no native byte order).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b

PAGE_TOKENS = 128
HASH_BYTES = 16
ROOT = bytes(HASH_BYTES)
"""The parent of a sequence's first page."""

_PERSON = b"tailpack-page-v1"  # blake2b's domain separation; exactly 16 bytes


def page_hash(
    parent: bytes, token_ids: Sequence[int], *, salt: str, weights_digest: bytes, geometry_digest: bytes
) -> bytes:
    """Hash of one full page.

    Args:
        parent: hash of the page before, or ROOT; 16 bytes.
        token_ids: exactly 128 ids, each in [0, 2^32).
        salt: the tenant's; different salts never share pages.
        weights_digest: of the model's weights.
        geometry_digest: of the CacheGeometry.

    Raises:
        ValueError: a length is wrong.
    """
    if len(parent) != HASH_BYTES:
        raise ValueError(f"parent hash has {len(parent)} bytes; allowed: {HASH_BYTES}")
    if len(token_ids) != PAGE_TOKENS:
        raise ValueError(f"a page has {PAGE_TOKENS} tokens; given: {len(token_ids)}")
    digest = blake2b(digest_size=HASH_BYTES, person=_PERSON)
    digest.update(parent)
    digest.update(struct.pack(f"<{PAGE_TOKENS}I", *token_ids))
    for part in (salt.encode(), weights_digest, geometry_digest):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return digest.digest()


def page_hashes(
    token_ids: Sequence[int],
    *,
    salt: str,
    weights_digest: bytes,
    geometry_digest: bytes,
    parent: bytes = ROOT,
) -> Iterator[bytes]:
    """Hashes of the full pages of ``token_ids``, in order; a partial last page has none."""
    for start in range(0, len(token_ids) - PAGE_TOKENS + 1, PAGE_TOKENS):
        parent = page_hash(
            parent,
            token_ids[start : start + PAGE_TOKENS],
            salt=salt,
            weights_digest=weights_digest,
            geometry_digest=geometry_digest,
        )
        yield parent
