"""Makes the tokenizers and the expected results in this folder, with transformers as the judge.

Run it with a Python that has transformers 5 and tokenizers; nothing else reads those.
"""

import json
from collections import Counter
from datetime import datetime
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent
CORPUS = (HERE / "corpus.txt").read_text().splitlines()
NOW = datetime(2025, 3, 9, 14, 5, 6)
CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # added, but not special


def byte_level() -> Tokenizer:
    """GPT-2's kind: bytes as characters, merges over them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """Llama 2's kind: ▁ for spaces, one before the text, bytes for what has no token."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    counts = Counter("".join(CORPUS).replace(" ", "▁"))
    common = sorted(counts, key=lambda char: (-counts[char], char))[:60]
    trainer = BpeTrainer(
        vocab_size=600,
        special_tokens=specials,
        show_progress=False,
        initial_alphabet=common,  # named, as ties would otherwise fall differently each time
        limit_alphabet=60,
        max_token_length=8,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = spec["added_tokens"][:3]  # bytes are tokens of the model, not added ones
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


CONVERSATIONS = json.loads((HERE / "conversations.json").read_text())
OPTIONS = json.loads((HERE / "options.json").read_text())


class FrozenClock(datetime):
    """`datetime` with a now() that stands still."""

    @classmethod
    def now(cls, tz=None):
        return NOW


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>", unk_token="<unk>"
    )


def renderings(judge: PreTrainedTokenizerFast) -> list[dict]:
    cases = []
    for path in sorted((HERE / "templates").glob("*.jinja")):
        for name, messages in CONVERSATIONS.items():
            for number, options in enumerate(OPTIONS):
                try:
                    text = judge.apply_chat_template(
                        messages, tokenize=False, chat_template=path.read_text(), **options
                    )
                except Exception:  # whatever a template raises: ours must refuse it too
                    text = None
                cases.append({"case": [path.stem, name, number], "text": text})
    return cases


def encodings(judges: dict[str, PreTrainedTokenizerFast]) -> list[dict]:
    cases = []
    for kind, judge in judges.items():
        for template in ("chatml_tools", "chatml_plain", "docs_continue"):
            source = (HERE / "templates" / f"{template}.jinja").read_text()
            for name, messages in CONVERSATIONS.items():
                try:
                    ids = judge.apply_chat_template(
                        messages,
                        chat_template=source,
                        add_generation_prompt=True,
                        return_dict=False,
                        sanitize_control_tokens=True,
                    )
                    text = judge.apply_chat_template(
                        messages, chat_template=source, add_generation_prompt=True, tokenize=False
                    )
                except Exception:  # the same
                    continue
                if unspaced(judge.decode(ids)) != unspaced(text):
                    continue  # what sanitizing puts into the messages made the template decide else
                cases.append({"tokenizer": kind, "template": template, "name": name, "ids": ids})
    return cases


def unspaced(text: str) -> str:
    """Without spaces, of which some tokenizers add one after each token of a template."""
    return text.translate(str.maketrans("", "", " ▁"))


def write(name: str, value: object) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=0, separators=(",", ":"))
    (HERE / name).write_text(text + "\n")


def main() -> None:
    chat_template_utils.datetime = FrozenClock
    judges = {}
    for kind, tokenizer in (("bytelevel", byte_level()), ("sentencepiece", sentencepiece_like())):
        (HERE / kind).mkdir(exist_ok=True)
        judges[kind] = wrap(tokenizer)
        judges[kind].backend_tokenizer.save(str(HERE / kind / "tokenizer.json"))
        named = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, "unk_token": "<unk>"}
        write(f"{kind}/tokenizer_config.json", named)
    write("renderings.json", renderings(judges["bytelevel"]))
    write("encodings.json", encodings(judges))


if __name__ == "__main__":
    main()
