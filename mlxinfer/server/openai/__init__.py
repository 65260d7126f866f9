"""OpenAI's APIs, and what vLLM adds to them: one file a path, the types beside it."""
