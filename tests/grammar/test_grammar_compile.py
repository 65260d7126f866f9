"""Grammars are compiled, kept, and refused with their place; what takes too much is killed."""

import json
import os
import signal
import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest
from grammar.grammar_tools import PADDING, allowed, compiler_of, matches, tokenizer_of

from mlxinfer import killable
from mlxinfer.errors import InvalidRequestError, OverloadedError, UnsupportedModelError
from mlxinfer.grammar import GrammarCompiler, check_process, compiled, compiler
from mlxinfer.grammar.compiled import CompiledGrammar
from mlxinfer.grammar.compiler import CheckProcess
from mlxinfer.grammar.spec import (
    GrammarSpec,
    choice,
    json_object,
    json_schema,
    lark,
    regex,
    tool_calls,
)
from mlxinfer.text.tools import Toolbox, ToolUse, tool_format
from tests.waiting import LIMIT_S, wait_until

SIZE = tokenizer_of("demo").vocab_size + PADDING
FULL = "[a-z ]{0,40}x[a-z]{0,20}y[0-9 ]{3,30}z[a-z]{3,40}"  # has many states
KINDS = ("demo", "bytelevel", "sentencepiece")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
SLOW = json_schema({"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijkl"]})

TEXTS: tuple[tuple[GrammarSpec, list[str], list[str]], ...] = (  # what matches, and what does not
    (
        json_schema(PERSON),
        ['{"name":"Ann"}', '{"name": "é\\n", "age": -12}', '{\n  "name": "",\n  "age": 0\n}'],
        ['{"name":"Ann"', '{"age":1}', '{"name":"too long a"}', '{"name":"a","x":1}', " {}"],
    ),
    (json_object(), ["{}", '{"a": [1, null, {"b": true}]}'], ["[]", "{} ", '{"a"}', ""]),
    (json_schema(True), ["1", '"x"', "[]", "null"], ["", "nul", "{"]),
    (regex("[a-c]+/[0-9]{2}"), ["ab/12", "c/00"], ["ab", "ab/1", "ab/123", "d/12"]),
    (choice(["yes", 'n"o', "nö\n", "yes!"]), ["yes", 'n"o', "nö\n", "yes!"], ["y", "yes!!", ""]),
    (lark('start: "a" num+\nnum: /[0-9]/ ";"'), ["a1;", "a1;2;"], ["a", "a1", "a12;"]),
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_matches_or_not(kind: str) -> None:
    for spec, right, wrong in TEXTS:
        assert [text for text in right if not matches(spec, text, kind)] == []
        assert [text for text in wrong if matches(spec, text, kind)] == []


def test_whitespace_is_not_without_end() -> None:
    assert matches(json_object(), '{\n\t\t"a": 1}')
    assert not matches(json_object(), '{  "a": 1}')
    assert not matches(json_object(), "{\n" + " " * 40 + '"a": 1}')


@pytest.mark.parametrize("kind", KINDS)
def test_ids_without_a_token_and_control_tokens_never_come(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    size = tokenizer.vocab_size + PADDING
    for spec in (regex("(?s:.*)"), json_schema({"type": "string"})):
        grammar = compiler_of(kind).start(spec)
        ids = allowed(grammar, size)
        assert ids
        assert max(ids) < tokenizer.vocab_size
        assert not tokenizer.special_ids & set(ids)
        assert not tokenizer.eos_token_ids & set(ids)


def test_control_tokens_come_where_a_grammar_names_them() -> None:
    tokenizer = tokenizer_of("demo")
    token_id = max(tokenizer.special_ids)
    name = tokenizer.id_to_piece(token_id)
    grammar = compiler_of().start(lark(f'start: <[{token_id}]> "a"'))
    assert allowed(grammar, tokenizer.vocab_size + PADDING) == [token_id]
    grammar.accept(token_id)
    assert not grammar.finished
    grammar.accept(tokenizer.encode_plain("a")[0])
    assert grammar.finished
    compiler_of().start(lark(f'start: {name} "a"'))
    with pytest.raises(InvalidRequestError, match="unknown special token"):
        compiler_of().start(lark("start: <|nobody|>"))


def test_a_vocabulary_without_ends_is_refused() -> None:
    compiler = GrammarCompiler(tokenizer_of("demo"), vocab_size=2048, end_ids=[5000])
    with pytest.raises(UnsupportedModelError, match="end token"):
        compiler.start(json_object())


def test_a_schema_that_cannot_be_kept_is_refused_with_its_place() -> None:
    not_kept: tuple[tuple[dict[str, object], str], ...] = (
        ({"type": "strng"}, "Invalid type"),
        ({"properties": {"a/b": {"items": {"contains": {}}}}}, "Unimpl"),
        ({"$defs": {"A": {"uniqueItems": True}}, "$ref": "#/$defs/A"}, "Unimpl"),
        ({"anyOf": [{"type": "null"}, {"pattern": "(?=a)"}]}, "regex(?s:.*)look-around"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "Unsatisfiable"),
        ({"$ref": "#"}, "no text satisfies"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"type": "integer", "multipleOf": 987654321}, "fuel"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "object", "properties": []}, "properties"),
        ({"type": "object", "required": "a"}, "required"),
    )
    for schema, words in not_kept:
        with pytest.raises(InvalidRequestError, match=words) as caught:
            compiler_of().start(json_schema(schema, place="here", strict=True))
        assert caught.value.param == "here"
        assert "<" not in str(caught.value).split(": ", 1)[1], "llguidance's marks, or its state"


@pytest.mark.parametrize("kind", ["gemma4", "lfm2"])
def test_a_parameter_that_only_fails_alone_is_refused(kind: str) -> None:
    """Formats that write parameters one by one compile each by itself."""
    never = {"type": "integer", "minimum": 5, "maximum": 1}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "n/a": never}}
    tools = Toolbox.of([{"name": "f", "parameters": schema}])
    use = ToolUse([], tools, tool_format(kind), must_call=True)
    grammar = use.grammar(tokenizer_of("demo"), None, [])
    assert grammar is not None
    with pytest.raises(InvalidRequestError) as caught:
        compiler_of().start(tool_calls(grammar, use.schemas))
    assert caught.value.param == "tools"
    assert "Unsatisfiable schema: minimum (5)" in str(caught.value)
    assert "%json" not in str(caught.value)


def test_the_schema_of_a_tool_is_named() -> None:
    schemas = [("tools[0]", PERSON), ("tools[1]", {"properties": {"p": {"type": "what"}}})]
    text = 'start: %json {"type": "object"} | %json {"properties": {"p": {"type": "what"}}}'
    with pytest.raises(InvalidRequestError, match=r"tools\[1\]: ") as caught:
        compiler_of().start(tool_calls(text, schemas))
    assert caught.value.param == "tools[1]"
    with pytest.raises(InvalidRequestError, match="unknown name"):
        compiler_of().start(tool_calls("start: nobody", schemas[:1]))


# -- limits ---------------------------------------------------------------------------------------


def test_a_slow_grammar_is_killed_and_the_next_one_compiles() -> None:
    checker = CheckProcess(max_seconds=0.001)
    with pytest.raises(InvalidRequestError, match=r"more than 0\.001 s"):
        checker.check(SLOW)
    checker.max_seconds = 20.0
    checker.check(json_object())
    assert checker.num_started == 2
    checker.check(json_object())
    assert checker.num_started == 2
    checker.close()


def test_a_large_grammar_is_killed_and_the_next_one_compiles() -> None:
    checker = CheckProcess(max_bytes=250 << 20)
    schema = json.dumps({"json_schema": {"enum": [f"value {i}" for i in range(400_000)]}})
    with pytest.raises(InvalidRequestError, match=r"more than .* 262 MB"):
        checker.check(GrammarSpec("here", schema))  # larger than any that json_schema lets pass
    checker.check(json_object())
    assert checker.num_started == 2
    checker.close()


def test_grammars_wait_for_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A slow start, as on a cold disk, takes longer than a grammar may."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nsleep 2\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    checker = CheckProcess(max_seconds=1.0)
    with ThreadPoolExecutor(3) as threads:
        checks = [threads.submit(checker.check, choice([f"yes{i}", "no"])) for i in range(3)]
        for check in checks:
            check.result()
    assert (checker.num_started, checker.num_jobs) == (1, 0)
    checker.close()


def test_a_wait_for_the_checker_ends_with_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    checker, has_left = CheckProcess(), threading.Event()
    with checker._turn, ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(killable, "MAX_WAITING", 0)
        check = threads.submit(checker.check, json_object(), abandoned=has_left.is_set)
        wait_until(lambda: checker.num_jobs)
        with pytest.raises(OverloadedError):
            checker.check(json_object())
        has_left.set()
        with pytest.raises(CancelledError):
            check.result(LIMIT_S)
    assert checker.num_started == 0


def test_a_process_that_died_is_replaced() -> None:
    checker = CheckProcess()
    checker.check(json_object())
    checker._process.kill()
    checker._process.wait()
    checker.check(json_object())
    assert checker.num_started == 2
    process = checker._process
    del checker
    assert process.poll() is not None, "it goes with its owner"


def test_the_checking_process_ignores_ctrl_c() -> None:
    checker = CheckProcess()
    checker.check(json_object())
    os.kill(checker._process.pid, signal.SIGINT)
    checker.check(regex("a"))
    assert checker.num_started == 1
    checker.close()


@pytest.mark.alike
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_ended_from_outside_is_started_again(number: int) -> None:
    checker = CheckProcess()
    checker.check(json_object())
    os.kill(checker._process.pid, signal.SIGSTOP)  # so that it ends with the job in its hands
    ending = threading.Timer(0.2, lambda pid: end(pid, number), [checker._process.pid])
    ending.start()
    checker.check(regex("a"))
    assert checker.num_started == 2
    checker.close()


def end(pid: int, number: int) -> None:
    os.kill(pid, number)
    os.kill(pid, signal.SIGCONT)  # else only SIGKILL would be heard


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", OverloadedError),
        ("os.abort()", InvalidRequestError),
        ("sys.exit(77)", InvalidRequestError),
    ],
)
def test_a_process_that_ends_every_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, error: type[Exception]
) -> None:
    program = tmp_path / "ends.py"
    program.write_text(f"import os, signal, sys\n{code}\n")
    monkeypatch.setattr(compiler, "PROGRAM", program.stem)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ending = CheckProcess()
    with pytest.raises(error):
        ending.check(json_object())
    assert ending.num_started == (2 if error is OverloadedError else 1)
    ending.close()


# -- the cache ------------------------------------------------------------------------------------


def fresh_compiler(**options: int) -> GrammarCompiler:
    tokenizer = tokenizer_of("demo")
    return GrammarCompiler(
        tokenizer,
        vocab_size=SIZE,
        end_ids=tokenizer.eos_token_ids,
        checker=compiler_of()._checker,
        **options,
    )


def test_a_grammar_is_compiled_once_and_answers_have_states_of_their_own() -> None:
    compiler = fresh_compiler()
    first = compiler.compile(regex("[ab]c"))
    assert compiler.compile(regex("[ab]c")) is first
    one, other = first.start(), first.start()
    one.accept(tokenizer_of("demo").encode_plain("a")[0])
    assert set(allowed(one, SIZE)) < set(allowed(other, SIZE)) | {
        tokenizer_of("demo").encode_plain("c")[0]
    }
    assert one.problem is other.problem is None


def test_the_cache_keeps_to_its_bytes_and_to_what_was_used_last() -> None:
    size = compiler_of().compile(regex("a1")).num_bytes
    compiler = fresh_compiler(cache_bytes=3 * size)
    kept = [compiler.compile(regex(f"a{i}")) for i in range(3)]
    assert compiler.compile(regex("a0")) is kept[0]
    compiler.compile(regex("a3"))
    assert compiler.compile(regex("a0")) is kept[0]
    assert compiler.compile(regex("a1")) is not kept[1]
    huge = compiler.compile(choice([f"{i} and more of it" for i in range(500)]))
    assert compiler.compile(huge.spec) is huge, "the newest stays, whatever it takes"
    assert len(compiler._cache) == 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="says resident memory on Linux")
def test_used_grammars_are_counted_with_about_what_they_take() -> None:
    """Else a server that meets a new grammar with each request keeps them all."""

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    table, kept = compiler_of().table(), []
    before = resident_bytes()
    for i in range(80):
        kept.append(CompiledGrammar(table, regex(f"[a-z]{{1,{i + 300}}} x{i} [0-9]+")))
        grammar = kept[-1].start()
        for letter in tokenizer_of("demo").encode_plain("the letters of a text")[:20]:
            allowed(grammar, SIZE)
            grammar.accept(letter)
    assert resident_bytes() - before < 2 * sum(one.num_bytes for one in kept)


def test_threads_may_compile_at_once() -> None:
    specs = [regex(f"[a-{c}]+") for c in "bcdb"]
    with ThreadPoolExecutor() as pool:
        assert len(list(pool.map(fresh_compiler().start, specs))) == 4


# -- lexers ---------------------------------------------------------------------------------------


def test_a_lexer_that_was_used_much_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MAX_USES", 3)
    made = fresh_compiler().compile(regex("[ab]{9}"))
    token = tokenizer_of("demo").encode_plain("a")[0]
    grammar, prototype = made.start(), made._prototype
    for _ in range(4):
        grammar.accept(token)
    other = made.start()
    assert made._prototype is not prototype
    assert made.num_uses == 0
    assert allowed(grammar, SIZE)
    assert token in allowed(other, SIZE)


def test_a_lexer_that_is_full_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check_process.LIMITS, "max_lexer_states", 375)
    made = CompiledGrammar(compiler_of().table(), regex(FULL))
    tokenizer = tokenizer_of("demo")
    started_afresh = False
    for word in (
        "a bc dxay 0 123z",
        "dcbxabcy12345",
        "b d axxxy88 88 z",
        "a axy1 1zfff",
        "cdxy0 00zx",
    ):
        grammar = made.start()
        for token in tokenizer.encode_plain(word):
            assert token in allowed(grammar, SIZE)
            assert grammar.problem is None
            grammar.accept(token)
        started_afresh |= grammar._is_afresh
    assert started_afresh, "the limit was never met: this test shows nothing"


def test_a_token_that_is_not_allowed_is_a_problem() -> None:
    grammar = compiler_of().start(regex("[0-9]+"))
    grammar.accept(tokenizer_of("demo").encode_plain("x")[0])
    assert grammar.problem
    assert not grammar.finished
    allowed(grammar, SIZE)
    assert grammar.problem


def test_many_masks_in_parallel_are_those_of_one_at_a_time() -> None:
    import numpy as np

    tokenizer = tokenizer_of("demo")
    specs = [regex("[a-z]+"), json_schema(PERSON), choice(["one <|im_end|>"]), json_object()] * 8
    grammars = [compiler_of().start(spec) for spec in specs]
    masks = np.zeros((40, -(-(tokenizer.vocab_size + PADDING) // 32)), dtype=np.uint32)
    rows = list(range(3, 35))
    assert len(rows) >= compiled.PARALLEL_FROM
    compiled.TokenGrammar.fill_masks(grammars, rows, masks)
    for grammar, row in zip(grammars, rows, strict=True):
        bits = np.unpackbits(masks[row].view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == allowed(grammar, tokenizer.vocab_size + PADDING)
    assert not masks[:3].any()
    assert not masks[35:].any()
