"""Checksum of a page's bytes, computed by whoever wrote the page and compared where it lands or is verified.

A page whose checksum happens to be NO_CHECKSUM (one in 2^64) is not compared.
"""

from __future__ import annotations

from kernels.page_checksum import page_checksum

__all__ = ["NO_CHECKSUM", "page_checksum"]

NO_CHECKSUM = 0
