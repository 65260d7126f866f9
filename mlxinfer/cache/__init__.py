"""The KV cache: pages, tails and states of layers, and the prefixes that requests share."""
