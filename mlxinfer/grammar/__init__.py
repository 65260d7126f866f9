"""What an answer must look like: grammars compiled to masks over tokens. Knows no mlx."""

from .compiler import GrammarCompiler
from .spec import GrammarSpec, response_format

__all__ = ["GrammarCompiler", "GrammarSpec", "response_format"]
