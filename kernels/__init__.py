"""Packed KV: tables, codecs and page layouts in PyTorch, and the CUDA kernels that do the same on a GPU."""
