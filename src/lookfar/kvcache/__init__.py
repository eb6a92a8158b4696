"""The KV cache: the interface that the engine uses, and its implementation with slots."""
