"""A turn of an assistant: written by a chat template, and read back by what reads its model."""

import re

from text_data import answer_read, tokenizer_with

from mlxinfer.errors import TemplateError
from mlxinfer.text import (
    ChatTemplate,
    TextStream,
    Tokenizer,
    ToolUse,
    WrittenCall,
    detect_reasoning,
    detect_tools,
)
from mlxinfer.text.samples import facts_of
from mlxinfer.text.template import with_text_arguments
from mlxinfer.text.tools import generic_messages

THOUGHT, SAID = "Wigeon müssen", "Élan?"
CALLS = [
    ("river_of", {"city": "Bergen, \"Ål\"", "days": 2, "wet": True}),
    ("bridge_of", {"city": "Oslo", "stops": [1, {"a": "b"}]}),
]  # fmt: skip
PROPERTIES = {
    name: {"type": kind, "description": "A fact."}
    for name, kind in (
        ("city", "string"), ("days", "integer"), ("wet", "boolean"), ("stops", "array")
    )
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A river.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": []},
        },
    }
    for name, _ in CALLS
]
USER = {"role": "user", "content": "Amaranth"}
_MARK = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|｜DSML｜|\[/?[A-Z_]{2,30}\]|\]<\]minimax\[>\["
)
_UNIT = re.compile(r"<[^<>\s]{1,60}>|.", re.DOTALL)
_ENDS = re.compile(  # tokens that end an answer, so that they are no part of it
    r"(\s|<\|tool_response>|<\|END_OF_TURN_TOKEN\|>|<SPECIAL_12>|<\|calls?\|>|"
    r"<｜hy_eos:opensource｜>|<\|START_OF_TURN_TOKEN\|>|<\|CHATBOT_TOKEN\|>)+$"
)


def tokenizer_of(source: str, *, has_tokens: bool, **variables: str) -> Tokenizer:
    """A tokenizer with the marks of a template as special tokens, or as text."""
    marks = sorted(set(_MARK.findall(source))) if has_tokens else []
    tokens = dict.fromkeys([*marks, *variables.values()])
    return tokenizer_with(source, tokens, **variables)


def rendered(tokenizer: Tokenizer, messages, tools, **kwargs) -> str:
    """The prompt of messages in the forms that the template takes."""
    chosen = tokenizer.template
    return render(
        chosen, facts_of(chosen), detect_tools(tokenizer), messages, tools=tools, **kwargs
    )


def render(chosen: ChatTemplate, facts, format, messages, *, tools, **kwargs) -> str:
    """As `rendered`, of a template whose facts are known; calls as text are in the format."""
    if tools and not chosen.reads("tools"):
        messages, tools = generic_messages(messages, tools), None
    chat = facts.forms.apply(
        messages, lambda calls: format.write([WrittenCall.of(call) for call in calls])
    )
    try:
        return chosen.render(chat, tools=tools, **kwargs)
    except TemplateError:
        return chosen.render(with_text_arguments(chat), tools=tools, **kwargs)


def turns_of(tokenizer: Tokenizer, calls=CALLS):
    """[(thought, text, calls)]: one turn, or several where the template writes no such message."""
    forms = facts_of(tokenizer.template).forms
    parts = [calls] if forms.several_calls else [[call] for call in calls]
    if forms.beside_calls == "apart" or not forms.several_calls:
        return [(THOUGHT, SAID, []), *((THOUGHT, "", part) for part in parts)]
    return [(THOUGHT, SAID, calls)]


def written_turn(tokenizer: Tokenizer, thought=THOUGHT, said=SAID, calls=CALLS):
    """(the end of the prompt, what the model writes after it)."""
    made = [
        {"id": f"call_{i:020}", "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate(calls)
    ]
    turn = {"role": "assistant", "content": said}
    turn |= {"tool_calls": made} if made else {}
    turn |= {"reasoning_content": thought} if thought else {}
    wish, _ = facts_of(tokenizer.template).thinking.variables(bool(thought))
    asked = rendered(tokenizer, [USER], TOOLS, **wish)
    plain, whole = (
        rendered(tokenizer, [USER, item], TOOLS, add_generation_prompt=False, **wish)
        for item in ({"role": "assistant", "content": SAID}, turn)
    )
    left, right = _UNIT.findall(asked), _UNIT.findall(whole)
    pairs = enumerate(zip(left, right, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), len(left))
    prompt, answer = "".join(right[:shared]), "".join(right[shared:])
    reasoning = detect_reasoning(tokenizer)
    if reasoning and thought in answer and asked[len(prompt) :].strip() == reasoning.start:
        prompt = asked  # it leaves the mark out of earlier turns
    return prompt, _ENDS.sub("", answer.removesuffix(plain.rpartition(SAID)[2]))


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHER = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {b: chr(b) for b in _PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(_OTHER)}


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A token for each byte, but for the control tokens."""
    ids = []
    contents = sorted((t.content for t in tokenizer.added_tokens.values()), key=len, reverse=True)
    for piece in re.split(f"({'|'.join(map(re.escape, contents))})", text):
        known = tokenizer.piece_to_id(piece) if piece in contents else None
        ids += [known] if known is not None else [
            tokenizer.piece_to_id(_BYTES[byte]) for byte in piece.encode()
        ]  # fmt: skip
    return ids


def read(tokenizer: Tokenizer, prompt: str, answer: str, tools=TOOLS):
    """[(calls, text, thought)] read token by token, byte by byte and at once."""
    reasoning, format = detect_reasoning(tokenizer), detect_tools(tokenizer)
    use = ToolUse.plan(tokenizer, format, tools) if tools else None
    prompt_ids, ids = (
        tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        for text in (prompt, answer)
    )
    one_by_one, bytewise = [[i] for i in ids], [[i] for i in byte_ids(tokenizer, answer)]
    answers = []
    for pushes in (one_by_one, bytewise, [ids]):
        parser = use.parser() if use else None
        stream = TextStream(tokenizer, reasoning=reasoning, tools=parser, prompt_ids=prompt_ids)
        calls, said, thought = answer_read(stream, pushes)
        answers.append((calls, said.strip(), thought.strip()))
    return answers
