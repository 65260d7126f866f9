"""OpenAI's APIs and vLLM's additions: a file a path, its types beside it."""
