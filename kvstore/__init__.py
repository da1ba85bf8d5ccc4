"""The KV cache as a service of its own: it owns the memory; workers map it. Imports no GPU library."""
