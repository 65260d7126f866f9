"""One notebook, run by a kernel: what is shown, how short errors are, what they keep alive."""

import asyncio
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ci

REQUIRED = "MLXINFER_REQUIRE_WEB"  # environment variable: tests of optional parts are not skipped
EXAMPLE = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
SAVED = "MLXINFER_NOTEBOOK_HTML"  # environment variable: a file for the notebook as HTML

ENGINES = """
import gc, threading
import mlx.core as mx
gc.collect()
names = [thread.name for thread in threading.enumerate()]
print(names.count("mlxinfer-engine"), mx.get_active_memory())
"""
PICTURE = """
from PIL import Image, ImageDraw
drawing = Image.new("RGB", (900, 600), "white")
ImageDraw.Draw(drawing).ellipse((250, 100, 650, 500), fill="red")
with LLM("demo-vision") as seeing:
    answer = seeing.chat("What is in this picture?", images=[drawing], temperature=0)
answer
"""
CELLS = {
    "first": "import mlxinfer\nmlxinfer.pull('org/nothing')",
    "load": "from mlxinfer import LLM\nllm = LLM('demo')",
    "engines": ENGINES,
    "model": "display(llm)",
    "info": "llm.model_info",
    "chat": "llm.chat('Give me JSON for a user named Grace aged 47', temperature=0)",
    "batch": "llm.generate(['A page', 'A token', '<script>alert(1)</script>'], max_tokens=12)",
    "bars": "import mlxinfer\nLLM('demo', progress=True).generate(['A'] * 3, max_tokens=2);",
    "table": "_.to_pandas().columns.tolist()",
    "stats": "llm.stats()",
    "show": "llm.show('What is a KV cache?', temperature=0)",
    "heat": "llm.heat(llm.chat('What is 47 + 38', max_tokens=8, logprobs=2))",
    "missing": "LLM('org/nothing')",
    "too long": "llm.generate('word ' * 9000)",
    "misspelt": "llm.generate('A', max_token=5)",
    "interrupted stream": """
for delta in llm.stream('A page', max_tokens=100, ignore_eos=True):
    raise KeyboardInterrupt
""",
    "interrupted": """
import _thread, threading
threading.Timer(0.5, _thread.interrupt_main).start()
llm.generate('A page', max_tokens=None, ignore_eos=True, logit_bias={300: 1e6})
""",
    "magic": "%load_ext mlxinfer\n%llm What is 17 + 25?",
    "magic cell": "%%llm temperature=0 max_tokens=12\nWhat is a KV cache?",
    "magic goes on": "%%llm -c temperature=0\nAnd what is that good for?",
    "magic misspelt": "%%llm -n demo\nHello",
    "again": "llm = LLM('demo')",
    "engines again": ENGINES,
    "failed again": "llm.chat('A', chat_template_kwargs={'nothing': 1})",
    "closed": "del llm",
    "engines at the end": ENGINES,
    "picture": PICTURE,
}
FAILING = {
    "first",
    "missing", "too long", "misspelt", "failed again", "magic misspelt",
    "interrupted", "interrupted stream",
}  # fmt: skip


def missing(what: str) -> None:
    message = f'there is no {what}; pip install -e ".[notebook,test]" installs it'
    if os.environ.get(REQUIRED):
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outputs of each cell, by its name."""
    for name in ("nbclient", "nbformat", "ipykernel", "pandas", "nh3"):
        if importlib.util.find_spec(name) is None:
            missing(name)
    home = tmp_path_factory.mktemp("home")
    with in_home(home):
        notebook = run_notebook(home, allow_errors=True)
    if SAVED in os.environ:
        save(notebook, Path(os.environ[SAVED]))
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}


@contextmanager
def in_home(home: Path) -> Iterator[None]:
    """Kernels that start meanwhile keep their files there, and find this checkout."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of jupyter's packages
        patch.setenv("IPYTHONDIR", str(home))
        patch.setenv("JUPYTER_DATA_DIR", str(home))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(home))
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        yield


def run_notebook(home: Path, file: Path | None = None, *, allow_errors: bool = False) -> Any:
    """The notebook of a file after a run, or one of CELLS."""
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from nbclient import NotebookClient

    spec = home / "kernels" / "here"
    spec.mkdir(parents=True)
    command = f'["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    (spec / "kernel.json").write_text(
        f'{{"argv": {command}, "display_name": "here", "language": "python"}}'
    )
    if file is None:
        notebook = nbformat.v4.new_notebook()
        notebook.cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
    else:
        notebook = nbformat.read(file, as_version=4)
    client = NotebookClient(notebook, kernel_name="here", allow_errors=allow_errors, timeout=120)
    client.create_kernel_manager().kernel_spec_manager = KernelSpecManager(
        kernel_dirs=[str(home / "kernels")]
    )
    asyncio.run(client.async_execute())
    return notebook


def save(notebook: Any, path: Path) -> None:
    from nbconvert import HTMLExporter

    path.write_text(HTMLExporter().from_notebook_node(notebook)[0])


def html(outputs: dict[str, Any], cell: str) -> str:
    return "".join(output.get("data", {}).get("text/html", "") for output in outputs[cell])


def text(outputs: dict[str, Any], cell: str) -> str:
    return "".join(output.get("text", "") for output in outputs[cell])


def error(outputs: dict[str, Any], cell: str) -> Any:
    (result,) = [output for output in outputs[cell] if output.output_type == "error"]
    return result


def test_only_the_cells_that_fail_by_intention_fail(outputs: dict[str, Any]) -> None:
    failed = {
        name: value[0].get("evalue")
        for name, value in outputs.items()
        if any(item.output_type == "error" for item in value)
    }
    assert set(failed) == FAILING, failed


@pytest.mark.usefixtures("outputs")  # which says what is missing
def test_the_notebook_of_the_examples_runs(tmp_path: Path) -> None:
    with in_home(tmp_path):
        notebook = run_notebook(tmp_path, EXAMPLE)
    outputs = {c.id: c.outputs for c in notebook.cells if c.cell_type == "code"}
    assert "Grace" in html(outputs, "cell-8")
    assert sum("text/html" in output.get("data", {}) for o in outputs.values() for output in o) >= 5


def test_answers_models_and_lists_are_cards(outputs: dict[str, Any]) -> None:
    assert "temperature 0.3, top_p 0.9" in html(outputs, "model")
    assert "2,048 tokens" in html(outputs, "info")
    assert "Grace" in html(outputs, "chat")
    assert "tok/s" in html(outputs, "chat")
    table = html(outputs, "batch")
    assert table.count("<tr>") == 4
    assert "<script" not in table
    assert "kv bytes cached" in html(outputs, "stats")
    assert html(outputs, "stats").partition("<details")[0].count("<tr>") == 5
    assert "rgba(230,70,40" in html(outputs, "heat")
    assert "im_end" not in html(outputs, "heat")


def test_an_answer_about_a_picture_shows_it(outputs: dict[str, Any]) -> None:
    card = html(outputs, "picture")
    assert card.count("<img src='data:image/png;base64,") == 1
    assert "answer tokens" in card


def test_a_list_of_answers_is_a_data_frame(outputs: dict[str, Any]) -> None:
    assert "'finish_reason'" in outputs["table"][0]["data"]["text/plain"]


def test_an_answer_that_is_shown_grows_in_one_place(outputs: dict[str, Any]) -> None:
    (shown,) = [item for item in outputs["show"] if item.output_type != "stream"]
    assert shown.output_type == "display_data"
    assert "answer tokens" in shown.data["text/html"]


def test_bars_are_drawn_where_they_are_asked_for(outputs: dict[str, Any]) -> None:
    bars = [bar["data"]["text/plain"] for bar in outputs["bars"]]
    assert bars
    assert all("100%" in bar for bar in bars)  # a saved notebook shows how they ended


def test_a_magic_asks_the_notebooks_model(outputs: dict[str, Any]) -> None:
    assert "42" in html(outputs, "magic")
    assert "12 answer tokens" in html(outputs, "magic cell")
    shorter, longer = (
        int(re.findall(r"([\d,]+) prompt", html(outputs, cell))[0].replace(",", ""))
        for cell in ("magic cell", "magic goes on")
    )
    assert longer > shorter + 12


@pytest.mark.alike
@pytest.mark.parametrize(
    ("cell", "kind", "words"),
    [
        ("magic misspelt", "InvalidRequestError", "-n is no argument of %%llm"),
        ("first", "DownloadError", "HF_HUB_OFFLINE forbids requests"),
        ("missing", "ModelNotFoundError", "org/nothing is not on this disk"),
        ("too long", "PromptTooLongError", "context"),
        ("misspelt", "UnknownArgumentError", "Did you mean 'max_tokens'"),
        ("interrupted", "KeyboardInterrupt", ""),
    ],
)
def test_errors_are_short(outputs: dict[str, Any], cell: str, kind: str, words: str) -> None:
    actual = error(outputs, cell)
    assert actual.ename == kind
    assert words in actual.evalue
    plain = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(actual.traceback))
    assert len(plain.splitlines()) < 25, plain


@pytest.mark.parametrize(("cell", "left"), [("engines again", 1), ("engines at the end", 0)])
def test_replaced_models_are_freed(outputs: dict[str, Any], cell: str, left: int) -> None:
    """IPython keeps the last traceback: no frame of it may hold an engine."""
    threads, num_bytes = map(int, text(outputs, "engines").split())
    now, bytes_now = map(int, text(outputs, cell).split())
    assert threads == 1
    assert now == left
    assert bytes_now < 1.5 * num_bytes * left + 100_000
