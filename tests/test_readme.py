"""What the README says can be done can be: its programs run, its names are there."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mlxinfer import LLM
from mlxinfer.cli._commands import cli

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
TREE = TEXT.partition("## How it is built")[2].split("```")[1]
NAMES = re.compile(r"( *)((?:[\w/]+(?:\.py|/)(?: +|$))+)")  # of a line: indent, files and folders
TRANSCRIPT = TEXT.partition("## The demo model")[2].split("```\n> ")[1].partition("```")[0]


def test_the_programs_run_as_cells_of_one_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(PROGRAMS)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    answer, batch, form = done.stdout.split("\n", 1)[0], *done.stdout.rsplit("\n", 2)[:2]
    assert answer.startswith("A KV cache keeps the keys and values")
    assert batch
    assert '"name": ' in form


def paths_of_the_tree() -> Iterator[str]:
    folder = ""
    for line in TREE.splitlines():
        found = NAMES.match(line)
        if found is None:
            continue
        indent, names = len(found[1]), found[2].split()
        if indent == 0:
            yield names[0]
            continue
        if indent == 2:
            folder = names.pop(0) if names[0].endswith("/") else ""
            yield f"mlxinfer/{folder}"
        yield from (f"mlxinfer/{folder}{name}" for name in names)


def test_the_tree_is_the_tree() -> None:
    paths = list(paths_of_the_tree())
    assert len(paths) > 40
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_files_in_the_text_and_links_are_there() -> None:
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    files = re.findall(r"`([\w/]+/\w+\.py)`", prose)
    links = re.findall(r"\]\((?!http)([^)#]+)\)", prose)
    assert files
    assert links
    places = (ROOT, ROOT / "mlxinfer")
    assert [f for f in files if not any((place / f).exists() for place in places)] == []
    assert [link for link in links if not (ROOT / link).exists()] == []


def commands(command: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """((name, ...), options) of a command and all below it."""
    yield path, {option for each in command.params for option in each.opts}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, *path, name)


def test_every_command_and_option_is_there() -> None:
    known = dict(commands(cli))
    options = {"--help", "--steps"}.union(*known.values())  # steps: of examples.demo_model
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT)) <= options
    named = {tuple(found.split()) for found in re.findall(r"mlxinfer ((?:\w+)(?: \w+)?)", TEXT)}
    first = {path[0] for path in known if path}
    lines = [path for path in named if path[0] in first]
    assert len(lines) > 20
    groups = {path[0] for path in known if len(path) > 1}
    assert [path for path in lines if path[0] in groups and path not in known] == []


@pytest.mark.parametrize("exchange", re.split(r"\n> ", TRANSCRIPT.strip()))
def test_the_demo_says_what_it_is_said_to_say(exchange: str, demo: LLM) -> None:
    question, _, answer = exchange.partition("\n")
    said = demo.chat([{"role": "user", "content": question}]).text
    assert said.split() == answer.split()


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("demo") as llm:
        yield llm
