"""One way to a model, for LLM and the server: text in, deltas and results out. Knows no HTTP."""
