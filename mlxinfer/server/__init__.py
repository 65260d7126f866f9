"""The HTTP server: OpenAI- and Anthropic-style APIs over the engine. Knows no models, no mlx."""
