"""The engine: continuous batching over a paged KV cache. Token ids in, token ids out."""
