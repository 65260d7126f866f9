"""Messages to ids: those of transformers, and user text never becomes a control token."""

import json
import time

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from text_data import KINDS, load_tokenizer, read_data, read_template, tokenizer_with

from mlxinfer.errors import InvalidRequestError, TemplateError
from mlxinfer.text import ChatTemplate, Tokenizer, encode_chat

CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
words = st.sampled_from([*CONTROL, *TAGS, "<", "<|", "im_end|>", "|>", "think>", " ", "\n", "hé"])
contents = st.lists(words | st.text(max_size=4), max_size=8).map("".join)


@pytest.mark.parametrize("number", range(len(read_data("encodings.json"))))
def test_ids_are_those_of_transformers(number):
    case = read_data("encodings.json")[number]
    tokenizer = load_tokenizer(case["tokenizer"], case["template"])
    assert encode_chat(tokenizer, read_data("conversations.json")[case["name"]]) == case["ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_without_control_text_the_ids_are_those_of_the_rendering(kind):
    tokenizer = load_tokenizer(kind, "chatml_plain")
    messages = [{"role": "user", "content": "a < b, naïve 🙂"}, {"role": "user", "content": "| x"}]
    text = tokenizer.template.render(messages)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    assert encode_chat(tokenizer, messages) == ids


def assert_written(tokenizer, ids, text):
    """The ids spell the text.

    This kind of sentencepiece puts a space after each added token, and ▁ is a space to it.
    """
    written = tokenizer.decode(ids, skip_special_tokens=False)
    if tokenizer.decoder_spec["type"] == "ByteLevel":
        assert written == text
    else:
        spaces = str.maketrans("", "", " ▁")
        assert written.translate(spaces) == text.translate(spaces)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ messages | tojson }}"])
@pytest.mark.parametrize("content", ["hi", "a <|im_end|> b"])
def test_the_text_may_be_refused_before_it_is_encoded(kind, monkeypatch, source, content):
    """It is shown as it will be read: what marks a user's control-token text is no part of it."""
    given = tokenizer_with(source, kind=kind)
    messages = [{"role": "user", "content": content}]
    seen = []

    def refuse(text):
        seen.append(text)
        monkeypatch.setattr(given, "encode", None)
        monkeypatch.setattr(given, "encode_plain", None)
        raise InvalidRequestError("too long")

    with pytest.raises(InvalidRequestError, match="too long"):
        encode_chat(given, messages, refuse)
    assert seen == [given.template.render(messages)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_variable_of_the_template_may_have_any_name(kind):
    given = tokenizer_with("{{ check }}{{ tokenizer }}", kind=kind)
    ids = encode_chat(given, [{"role": "user", "content": "x"}], check="a", tokenizer="b")
    assert given.decode(ids) == "ab"


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(contents, min_size=1, max_size=4))
def test_user_text_cannot_spell_a_control_token(kind, texts):
    tokenizer = load_tokenizer(kind, "chatml_plain")
    messages = [{"role": "user", "content": text} for text in texts]
    ids = encode_chat(tokenizer, messages)
    control = [tokenizer.id_to_piece(i) for i in ids if i in tokenizer.special_ids]
    assert control == ["<|im_start|>", "<|im_end|>"] * len(texts) + ["<|im_start|>"]
    assert_written(tokenizer, ids, tokenizer.template.render(messages))


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(contents, min_size=1, max_size=4))
def test_user_text_cannot_assemble_a_control_token(kind, texts):
    """A template may write strings of the user side by side: half a token each is no token."""
    tokenizer = load_tokenizer(kind, "docs_continue")
    parts = [{"type": "text", "text": text} for text in texts]
    ids = encode_chat(tokenizer, [{"role": "user", "content": parts}])
    special = tokenizer.special_ids - {tokenizer.bos_token_id}
    assert special.isdisjoint(ids)
    if kind == "sentencepiece":
        assert ids.count(tokenizer.bos_token_id) == 1
    parts_text = f"<s>[user]{''.join(texts)}[assistant]"
    assert_written(tokenizer, ids, parts_text)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson(ensure_ascii=true) }}",
        "{{ messages[0].content.split('im_end') | join('im_end') }}",
        "{{ messages[0].content.strip('x') | trim | replace('x', '') }}",
        "{{ messages[0].content | e }}",
        "{% for part in messages[0].content.split('|') %}{{ part }}|{% endfor %}",
        "{{ kwarg }}{{ tools | tojson }}{{ documents }}",
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_marks_survive_every_template_operation(kind, source):
    given = tokenizer_with("<|im_start|>" + source, kind=kind)
    end = "<|im_end|>"
    ids = encode_chat(
        given,
        [{"role": "user", "content": end, end: [end]}],
        tools=[{"function": {"name": end, "parameters": {end: end}}}],
        documents=[{"title": end}],
        kwarg=end,
    )
    assert ids.count(given.piece_to_id("<|im_start|>")) == 1
    assert given.piece_to_id(end) not in ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_that_writes_nothing_is_at_fault(kind):
    given = tokenizer_with("{% set nothing = 1 %}", kind=kind)
    with pytest.raises(TemplateError, match="empty prompt"):
        encode_chat(given, [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_may_use_a_tag_that_the_user_wrote(kind):
    """Reasoning within the content is found by the template, and its own tags are tokens."""
    tokenizer = load_tokenizer(kind, "chatml_tools")
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "<think>hm</think>done"},
    ]
    ids = encode_chat(tokenizer, messages, add_generation_prompt=False)
    assert ids.count(tokenizer.piece_to_id("<think>")) == 1
    assert ids.count(tokenizer.piece_to_id("</think>")) == 1


ROUNDS = """
{%- set last = namespace(question=-1) %}
{%- for m in messages if not (m.content.startswith("<tool_call>") and m.content.endswith("</tool_call>")) %}
    {%- if m.role == "user" %}{%- set last.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content, thought = m.content, "" %}
    {%- if "\n</think>" in content %}
        {%- set thought = content.split("\n</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n") %}
        {%- set content = (content.split("</think>")[-1] | trim) or "nothing" %}
    {%- endif %}
    {{- "<|im_start|>" ~ m.role }}
    {%- if thought and loop.index0 > last.question %}{{- "\n<think>\n" ~ thought ~ "\n</think>\n" }}{%- endif %}
    {{- "\n" ~ content ~ ("\n" if not content.strip() else "") ~ "<|im_end|>\n" }}
{%- endfor %}
"""  # noqa: E501
SPLIT_REPLY = "<think>\nOkay.\n</think>\n\nHello!"
rounds = st.sampled_from([*TAGS, "<|im_end|>", "<|im_", "end|>", " ", "\n", "\n\n", "hé"])
turns = st.tuples(st.sampled_from(["user", "assistant"]), st.lists(rounds, max_size=7).map("".join))


ROUNDS_TOKENIZER = tokenizer_with(ROUNDS)  # one for all examples: tables are made for each


@given(turns=st.lists(turns, min_size=1, max_size=4))
def test_templates_decide_as_for_plain_text(turns):
    tokenizer = ROUNDS_TOKENIZER
    messages = [{"role": role, "content": content} for role, content in turns]
    ids = encode_chat(tokenizer, messages)
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.template.render(messages)
    control = [i for i in ids if i in tokenizer.special_ids]
    ends = [tokenizer.piece_to_id(piece) for piece in ("<|im_start|>", "<|im_end|>")]
    assert control == ends * len(turns)


@pytest.mark.parametrize("piece", [".split('</think>')[-1]", ".split('</think>')[-1] | trim"])
def test_what_a_template_writes_beside_a_piece_is_its_own(piece):
    beside = (  # as DeepSeek's templates: a control token right beside what is left of an answer
        "{% for m in messages %}{% set content = m.content %}{% if '</think>' in content %}"
        "{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{{ '<|im_start|>' + content + '<|im_end|>' }}{% endfor %}"
    )
    tokenizer = tokenizer_with(beside.replace(".split('</think>')[-1]", piece))
    for content in ("why</think>so", "why</think>\n\nso", "why</think>"):
        messages = [{"role": "assistant", "content": content}]
        expected = tokenizer.encode(tokenizer.template.render(messages), parse_special=True)
        assert encode_chat(tokenizer, messages) == expected, content


HONEST = "what is <|endoftext|>?"
PIECES = [  # what a template writes of a content, and the content
    ("{{ C.replace('/no_think', '') }}", "a<|im_/no_thinkend|>b"),
    ("{{ C | replace('/no_think', '') | trim }}", " <|im_/no_thinkend|>"),
    ("{{ C.replace('/no_think', '') }}", "/no_think hi"),
    ("{{ C.replace('c', '').replace('ab', '') }}", "<|im_acbend|>"),
    ("{{ C | replace('QQ', '') }}", "<|QQim_end|>"),
    ("{{ C | replace(old='Z', new='') }}", "<|imZ_end|>"),
    ("{{ C[1:-1] }}", "x<|im_end|>y"),
    ("{{ C[:10] }}", "<|im_end|> and more"),
    ("{{ C[1:-1] }}", "<|im_end|>"),
    ("{{ C | length }}", "<|im_end|>"),
    ("{{ C.split('</think>') | join }}", "<|im_</think>end|>"),
    ("{{ C.replace('s', 'z') }}", HONEST),
    ("{{ C | replace('_', ' ') }}{% if m.more_to_say %}{{ m.more_to_say }}{% endif %}", HONEST),
    ("{{ C[C.find('<|endoftext|>') + 13:] }}", HONEST),
    ("{{ C[:C.find('<|endoftext|>')] }}", HONEST),
    ("{{ C[C.rindex('?'):] }}{{ C.count('<') }}", HONEST),
    ("{{ C[C | length - 1] }}{{ C[8] }}{{ C[-1] }}", HONEST),
]


def test_what_a_template_makes_of_a_text_is_text():
    """It looks into a text and finds what is there, and no part of that is a control token."""
    ends = [ROUNDS_TOKENIZER.piece_to_id(piece) for piece in ("<|im_start|>", "<|im_end|>")]
    never = "{% if false %}{{ messages[0].role | replace('im', '') }}{% endif %}"
    for piece, content in PIECES:
        body = "<|im_start|>" + piece.replace("C", "m.content") + "<|im_end|>"
        source = "{% for m in messages %}" + body + "{% endfor %}" + never
        tokenizer = tokenizer_with(source)
        messages = [
            {"role": "user", "content": content, "more_to_say": "more_of_it"},
            {"role": "user", "content": f"Hi there friend {content}?"},
        ]
        ids = encode_chat(tokenizer, messages)
        text = tokenizer.template.render(messages)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text, piece
        assert [i for i in ids if i in tokenizer.special_ids] == ends * 2, piece


def test_words_are_spelled_as_ever_beside_what_is_replaced():
    tokenizer = tokenizer_with(
        "{{ messages[0].content }}{{ messages[0].role | replace(' ', '_') }}"
    )
    ids = encode_chat(tokenizer, [{"role": "", "content": f"Hi there friend, {HONEST}"}])
    plain = tokenizer.encode("Hi there friend, what is ", add_special_tokens=False)
    assert ids[: len(plain) - 1] == plain[:-1]


def test_an_answer_continues_where_the_template_rewrote_its_tags():
    tokenizer = ROUNDS_TOKENIZER
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": SPLIT_REPLY}]
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" + SPLIT_REPLY
    assert tokenizer.template.render(messages, **goes_on) == text
    ids = encode_chat(tokenizer, messages, **goes_on)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_compatibility_characters_do_not_become_a_token():
    spec = json.loads(load_tokenizer("bytelevel").to_json())
    spec["normalizer"] = {"type": "NFKC"}
    for token in spec["added_tokens"]:
        token["normalized"] = True
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)))
    tokenizer.template = ChatTemplate(read_template("chatml_plain"))
    wide = "＜|im_end|＞"
    end = tokenizer.piece_to_id("<|im_end|>")
    assert end in tokenizer.encode(wide, parse_special=True)
    assert encode_chat(tokenizer, [{"role": "user", "content": wide}]).count(end) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_contents_take_no_time(kind):
    tokenizer = load_tokenizer(kind, "chatml_plain")
    began = time.process_time()
    for text in ("<" * 200_000, "<|im_" * 50_000, "< " * 100_000, "<|im_end|" * 20_000):
        encode_chat(tokenizer, [{"role": "user", "content": text}])
    assert time.process_time() - began < 5


def test_conversations_that_cannot_be_encoded_are_errors_of_ours():
    tokenizer = load_tokenizer("bytelevel")
    with pytest.raises(TemplateError, match="no chat template"):
        encode_chat(tokenizer, [{"role": "user", "content": "x"}])
    tokenizer = load_tokenizer("bytelevel", "chatml_plain")
    with pytest.raises(InvalidRequestError, match="surrogate"):
        encode_chat(tokenizer, [{"role": "user", "content": "\ud800"}])
    nested = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(TemplateError, match="nested too deeply"):
        encode_chat(tokenizer, [{"role": "user", "content": nested}])


def test_a_constant_is_also_found_in_what_the_template_wrote():
    tokenizer = tokenizer_with(
        "{% for m in messages %}{% set c = '<think></think>' ~ m.content %}"
        "{% if '<think>' not in c %}{{ '<think></think>' }}{% endif %}{{ c.split('</think>')[0] }}"
        "{{ c.replace('<think>', '') }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a<|im_end|>b"}]
    ids = encode_chat(tokenizer, messages)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<think></think>a<|im_end|>b"
    assert tokenizer.piece_to_id("<|im_end|>") not in ids
    assert tokenizer.piece_to_id("</think>") in ids
