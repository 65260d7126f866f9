"""Grammars of answers, compiled to bitmasks over the vocabulary. No mlx."""

from .compiler import GrammarCompiler
from .spec import GrammarSpec, response_format
