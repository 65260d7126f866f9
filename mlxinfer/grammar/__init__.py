"""What an answer must look like: grammars compiled to masks over tokens. Knows no mlx."""

from .compiler import GrammarCompiler
from .formats import response_format
from .spec import GrammarSpec

__all__ = ["GrammarCompiler", "GrammarSpec", "response_format"]
