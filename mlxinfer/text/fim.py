"""Fill in the middle: prompts of code models for the text between a prefix and a suffix.

Source: Bavarian et al. 2022, arXiv:2207.14255. The tokens are those of the models' own cards and
tokenizers: Qwen2.5-Coder, StarCoder 2, Granite, Code Llama, DeepSeek-Coder, CodeGemma, GLM-4,
Falcon-H1 and Codestral.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .tokenizer import Tokenizer

_MARKS = (  # before the prefix, before the suffix, before the middle; None: the prefix comes last
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
    ("[PREFIX]", "[SUFFIX]", None),
)
_ENDS = (  # of the middle, beside the model's end tokens: padding, or the next file
    "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>", "▁<EOT>", "<EOT>", "[EOT]",
    "<|endoftext|>", "<|file_sep|>", "<|file_separator|>", "<file_sep>", "<|repo_name|>",
    "<｜end▁of▁sentence｜>", "<|end_of_text|>", "<|code_end|>",
)  # fmt: skip
_FILE_MARKS = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<filename>")


@dataclass(frozen=True, slots=True)
class FimTokens:
    """The tokens that divide a prompt with a gap."""

    prefix: int  # stands before the text in front of the gap
    suffix: int  # stands before the text after the gap
    # stands at the end, where the model fills the gap; None: the model continues the prefix, which
    # then comes last (Codestral)
    middle: int | None
    end_ids: frozenset[int]  # tokens that end the middle, beside the model's own end tokens

    def prompt_ids(
        self,
        tokenizer: Tokenizer,
        prefix: str,
        suffix: str,
        *,
        files: Sequence[tuple[str, str]] = (),
    ) -> list[int]:
        """Return the prompt for the text between `prefix` and `suffix`.

        Text that spells a control token stays text. `files` are other files (name, text) before
        these, each behind the token that separates files if the model has one.
        """
        begin = tokenizer.encode("")[:1]
        start = list(begin if begin == [tokenizer.bos_token_id] else ())
        marks = [i for i in map(tokenizer.piece_to_id, _FILE_MARKS) if i is not None][:1]
        for name, text in files:
            start += [*marks, *tokenizer.encode_plain(f"{name}\n{text}\n")]
        front = [self.prefix, *_ids(tokenizer, prefix)]
        back = [self.suffix, *_ids(tokenizer, suffix)]
        if self.middle is None:
            return [*start, *back, *front]
        return [*start, *front, *back, self.middle]


def fim_tokens(tokenizer: Tokenizer) -> FimTokens | None:
    for names in _MARKS:
        prefix, suffix, middle = (name and tokenizer.piece_to_id(name) for name in names)
        if not isinstance(prefix, int) or not isinstance(suffix, int):
            continue
        if isinstance(middle, int) or names[2] is None:
            ends = (tokenizer.piece_to_id(name) for name in _ENDS)
            return FimTokens(
                prefix,
                suffix,
                middle if isinstance(middle, int) else None,
                frozenset(i for i in ends if i is not None) | tokenizer.eos_token_ids,
            )
    return None


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False) if text else []
