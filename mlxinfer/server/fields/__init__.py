"""The meaning of request fields that several APIs share: sampling, grammars, prompts."""
