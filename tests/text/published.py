"""The chat templates of two published packages: trl, and the sources of llama-cpp-python.

Nothing of them is in this repository. MLXINFER_TEMPLATE_FOLDER names llama.cpp's templates;
trl is installed. Where MLXINFER_REQUIRE_TEMPLATES is set, a missing one is an error.
"""

import importlib.util
import os
from functools import cache
from pathlib import Path

import pytest

from mlxinfer.text import ChatTemplate
from mlxinfer.text.samples import TemplateFacts, probe

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
# They cannot be rendered without tools, in transformers neither: models have a second template.
FOR_TOOLS_ONLY = (
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "fireworks-ai-llama-3-firefunction-v2",
)


@cache
def sources() -> dict[str, str]:
    """{name: jinja source}; skips the test where the packages are missing."""
    folders = [Path(os.environ.get("MLXINFER_TEMPLATE_FOLDER", "/nowhere"))]
    spec = importlib.util.find_spec("trl")
    folders += [Path(place) for place in (spec.submodule_search_locations or ()) if spec]
    result = [
        (path.stem, path.read_text()) for folder in folders for path in folder.rglob("*.jinja")
    ]
    missing = spec is None or not folders[0].is_dir()
    if missing and os.environ.get("MLXINFER_REQUIRE_TEMPLATES"):
        pytest.fail("trl or the folder MLXINFER_TEMPLATE_FOLDER is missing")
    if not result:
        pytest.skip("neither trl nor MLXINFER_TEMPLATE_FOLDER is there")
    return dict(sorted(result))


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, variables=VARIABLES)


@cache
def probed(source: str) -> tuple[ChatTemplate, TemplateFacts]:
    """The template and what is found out about it, once for all tests."""
    chosen = template(source)
    return chosen, probe(chosen)
