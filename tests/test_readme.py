"""README and docs/ are true: programs, commands, links, the annotated tree, CI."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from benchmarks.__main__ import bench
from mlxinfer import LLM
from mlxinfer.cli._commands import cli
from mlxinfer.models.registry import SUPPORTED

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
INDEX = {"docs/README.md": DOCS.pop("README.md")}
TEXTS = {path.name: path.read_text() for path in sorted(ROOT.glob("*.md"))} | DOCS | INDEX
EVERYTHING = "\n".join(TEXTS.values())


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def shell_lines(text: str) -> list[str]:
    return [line for block in blocks(text, "sh") for line in block.splitlines() if line]


# -- the demo ----------------------------------------------------------------------------------


@pytest.mark.ci
def test_the_demo_says_what_it_is_said_to_say() -> None:
    transcript = DOCS["demo_model.md"].split("```\n> ")[1].partition("```")[0]
    with LLM("demo") as demo:
        for exchange in re.split(r"\n> ", transcript.strip()):
            question, _, answer = exchange.partition("\n")
            assert demo.chat(question, temperature=0).text.split() == answer.split(), question


# -- files ------------------------------------------------------------------------------------


def folders_of_the_tree() -> Iterator[str]:
    for line in blocks(DOCS["architecture.md"], "")[0].splitlines():
        match = re.match(r"( *)([\w/]+/) ", line)
        assert match is not None, line
        yield f"mlxinfer/{match[2]}" if match[1] else match[2]


def exists(path: str) -> bool:
    """In a checkout, or in an sdist, which has the folders beside mlxinfer/ inside of it."""
    return any((place / path).exists() for place in (ROOT, ROOT / "mlxinfer"))


def test_the_tree_names_every_folder_of_the_library() -> None:
    named = list(folders_of_the_tree())
    assert [path for path in named if not exists(path)] == []
    assert len(named) == len(set(named))
    folders = {path.parent for path in (ROOT / "mlxinfer").glob("*/__init__.py")}
    shipped = {f"mlxinfer/{path.name}/" for path in folders if not path.is_symlink()}
    assert shipped - set(named) == set()


def test_links_and_files_in_the_text_are_there() -> None:
    for name, text in TEXTS.items():
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        files = re.findall(r"`([\w/]+/\w+\.py)`", prose)
        assert [file for file in files if not exists(file)] == [], name
        here = ROOT / "docs" if name in DOCS | INDEX else ROOT
        links = re.findall(r"\]\((?!http)([^)#]+)\)", prose)
        assert [link for link in links if not (here / link).exists()] == [], name


def test_anchors_of_links_are_headings() -> None:
    anchors = {
        name: {anchor_of(line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
        for name, text in TEXTS.items()
    }
    for name, text in TEXTS.items():
        for file, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", text):
            assert anchor in anchors[Path(file).name or name], (name, file, anchor)


def anchor_of(heading: str) -> str:
    """As GitHub makes it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.lower())
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def test_the_readme_is_short_and_its_index_leads_to_every_page() -> None:
    assert len(README.splitlines()) <= 160
    assert "](docs/README.md)" in README
    [index] = INDEX.values()
    assert [name for name in DOCS if f"]({name}" not in index] == []


def test_every_architecture_has_its_row() -> None:
    table = DOCS["models.md"].partition("## Native families")[2].partition("\n## ")[0]
    assert [name for name in SUPPORTED if f"`{name}`" not in table] == []


# -- commands ---------------------------------------------------------------------------------


def commands(command: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """((name, ...), options) of a command and all below it."""
    yield (
        path,
        {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
        | {"--help"},
    )
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, *path, name)


COMMANDS = dict(commands(cli))
OURS = {"mlxinfer": COMMANDS, "python -m benchmarks": dict(commands(bench))}
CALLS = [
    (program, line.partition(program)[2])
    for line in [
        *(line for text in TEXTS.values() for line in shell_lines(text)),
        *re.findall(r"`((?:mlxinfer|python -m benchmarks) [^`]+)`", EVERYTHING),
    ]
    for program in OURS
    if f"{program} " in line and not line.startswith("pip")
]


def test_every_command_and_option_is_there() -> None:
    for program, arguments in CALLS:
        words = shlex.split(arguments.partition("#")[0])
        known, path = OURS[program], ()
        while words and (*path, words[0]) in known:
            path = (*path, words.pop(0))
        assert path, f"{program} has no command {words[:1]}" if "--" not in arguments[:4] else ""
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= known[path], (program, arguments)


def test_options_in_the_text_belong_to_some_command() -> None:
    options = {"--steps"}.union(*(result for known in OURS.values() for result in known.values()))
    prose = re.sub(r"```.*?```", "", EVERYTHING, flags=re.DOTALL)
    assert set(re.findall(r"`(--[a-z][a-z-]+)", prose)) <= options


def test_modules_that_are_run_are_there() -> None:
    modules = set(re.findall(r"python -m ((?:tests|benchmarks|examples)[\w.]*)", EVERYTHING))
    assert {"benchmarks", "tests.lint"} <= modules
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_ci_runs_what_the_readme_says() -> None:
    """Nothing that was never run: each line stands in the README or in .ci/run."""
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    ours = [line for line in shell_lines(README) if line.startswith(("python3 -m venv", ".venv"))]
    on_mac, *on_linux = ours
    assert on_mac == on_linux[0].replace('".[cpu]"', ".")
    assert len(on_linux) == 2
    assert [line for line in script if line in ours] == on_linux
    (lint,) = [i for i, line in enumerate(script) if "python -m tests.lint" in line]
    assert lint > script.index(on_linux[1])
    path = ROOT / ".github" / "workflows" / "ci.yml"
    jobs = yaml.safe_load(path.read_text())["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert set(jobs) == {"linux", "macos"}
    on_a_gpu = ".venv/bin/mlxinfer doctor --report report.json"
    apart = [run for run in runs if run not in (*script, *ours, ".ci/run", on_a_gpu)]
    compiled, packaged = apart
    assert compiled.endswith("-m metal_cpu.apple libraries")
    assert "briefcase package" in packaged  # see tests/app/test_app_bundle.py
    assert runs.index(apart[0]) < runs.index(on_mac) < runs.index(on_a_gpu), "it compiles first"


def test_every_variable_of_the_environment_is_on_the_page_of_places() -> None:
    """But for those that a process of ours sets for another one."""
    said = DOCS["places.md"]
    names = {
        name
        for path in (ROOT / "mlxinfer").rglob("*.py")
        for name in re.findall(r"\"((?:MLXINFER|XDG|HF)_[A-Z_]*[A-Z])\"", path.read_text())
    }
    between_processes = {name for name in names if "RANKS" in name or name.endswith("LISTENERS")}
    missing = {name for name in names - between_processes if f"`{name}" not in said}
    assert missing <= {"HF_HUB_VERBOSITY", "HF_TOKEN_PATH", "MLXINFER_COMPLETE"}


def test_every_error_of_the_page_of_errors_is_one_of_ours() -> None:
    """Its parts, between what differs from case to case, stand in one text of the code."""
    texts = [
        text.replace("\\", "")
        for path in (ROOT / "mlxinfer").rglob("*.py")
        for text in strings_of(ast.parse(path.read_text()))
    ]
    page = DOCS["troubleshooting.md"].partition("## While it runs")[0]
    said = re.findall(r"^\| `([^|]+)` \|", page, re.MULTILINE)
    assert len(said) > 20
    for error in said:
        parts = [part.strip() for part in error.split("…") if part.strip(" :.")]
        assert any(all(part in text for part in parts) for text in texts), error


def strings_of(tree: ast.AST) -> Iterator[str]:
    """The texts of a module, with … in the places of values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
