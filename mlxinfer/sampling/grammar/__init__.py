"""What an answer must look like: grammars compiled to masks over tokens. Knows no requests, no text."""

from .compiled import CompiledGrammar, TokenGrammar
from .compiler import GrammarCompiler
from .spec import GrammarSpec

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarSpec", "TokenGrammar"]
