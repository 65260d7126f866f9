"""Ollama's API, for clients that speak nothing else: a file a kind of path, the types beside it."""
