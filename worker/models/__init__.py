"""Model families. Each is plain PyTorch over a ``Batch`` and a ``KvView``."""
