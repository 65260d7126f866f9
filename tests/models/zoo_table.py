"""How mlx-lm's definitions run: `python -m tests.models.zoo_table`.

Builds a small model of each that is not native with random weights, runs the check that loading
runs, and prints a Markdown table for docs/models.md. With `generating` it builds nothing: it writes
docs/model_types.md, the page of transformers' types, and types that became native leave the
verdicts and that table.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxinfer.errors import MlxinferError
from mlxinfer.models.registry import ENCODERS, SUPPORTED
from mlxinfer.models.zoo.choice import Formats, build, choose, quantise
from mlxinfer.models.zoo.compared import (
    UNSUPPORTED,
    VERDICTS,
    ZooVerdict,
    unsupported,
    verdict_of,
    verdicts,
)
from mlxinfer.models.zoo.definitions import Definition, architectures, module_of
from mlxinfer.models.zoo.running import AloneModel, FlatModel

from .zoo_configs import small_config

FLOATS = (mx.float32, mx.bfloat16, mx.float16)
LINEAR = ("Linear", "SwitchLinear")  # layers of mlx.nn, and of mlx-lm's
HOW = ("batched", "alone", "refused", "not checked")
NOT_HERE = ("No Metal back-end", "Hadamard pack")  # errors of this machine, or of small configs
PAGE = Path(__file__).parents[2] / "docs/model_types.md"
MODELS = PAGE.with_name("models.md")
HEAD = """# Types of models

transformers {version} generates text with {count} types of models. The type is the `model_type`
of config.json, and `mlxinfer show MODEL` says what runs a model of it. [models.md](models.md) says
how mlx-lm's definitions run, and how they were compared with transformers.
`python -m tests.models.zoo_table generating` writes this page.

| verdict | types | what it means |
|---|---|---|"""
MORE = """
## parts that are not read

List of 30 November 2026:

- The draft of Inkling 2 Mini: no source states its config. `ngram` and draft models speculate.
- `hy_v4_flash`, `muse_spark_open` and `mistral_large3`, which transformers does not list: there is
  no definition of them here.
- Texts alone are read of models that see and have no row in [models.md](models.md#models-that-see).
"""
MEANING = {
    ZooVerdict.NATIVE: "a family of mlxinfer, with the logits of transformers",
    ZooVerdict.COMPARED: "mlx-lm's definition; its logits are those of transformers",
    ZooVerdict.NOT_COMPARABLE: "mlx-lm's definition, which is only compared with itself",
    ZooVerdict.REFUSED: "it does not load; the error names the reason",
    ZooVerdict.OUT_OF_SCOPE: "no model that answers texts with texts",
}


@dataclass(frozen=True, slots=True)
class Row:
    """What runs one architecture."""

    name: str
    how: str  # one of HOW
    because: str = ""


def small_model(name: str, *, quantized: bool = False) -> FlatModel | AloneModel:
    """The model of a small config with random weights, checked as a loaded one is.

    A quantised one gives the same bits in any batch.
    """
    module = module_of(name)
    assert module is not None, name
    config, definition = choose(small_config(name, module), {})
    randomise(definition)
    formats: Formats = {}
    if quantized:
        formats = {
            path: {"group_size": 32, "bits": 4, "mode": "affine"}
            for path, layer in definition.model.named_modules()
            if type(layer).__name__ in LINEAR and layer.weight.shape[-1] % 32 == 0
        }
        quantise(definition.model, formats)
    return build(config, definition, formats)


def randomise(definition: Definition) -> None:
    """Give a definition the weights of `random_parameters`."""
    definition.model.update(random_parameters(definition.model))


def random_parameters(model: nn.Module) -> Any:
    """Random numbers for every parameter of a model, which keep activations in range."""
    rng = np.random.default_rng(0)
    leaves = tree_flatten(model.parameters())
    return tree_unflatten([(n, _random(n, a, rng)) for n, a in leaves if a.dtype in FLOATS])


def _random(name: str, like: mx.array, rng: np.random.Generator) -> mx.array:
    values = rng.normal(size=like.shape).astype(np.float32)
    if like.ndim > 1:
        return mx.array(values * like.shape[-1] ** -0.5)
    return mx.array(values * 0.3 + (1 if name.endswith("weight") else 0))


def row(name: str) -> Row | None:
    """What runs an architecture; None: a native family, or the file holds parts only."""
    try:
        if name in SUPPORTED or module_of(name) is None:
            return None
        because = small_model(name).config.alone_because
        return Row(name, "alone", because) if because else Row(name, "batched", other_design(name))
    except MlxinferError as error:
        here = not any(said in str(error) for said in NOT_HERE)
        return Row(name, "refused" if here else "not checked", str(error))


def other_design(name: str) -> str:
    """Why transformers' type of this name is refused; "": it is not."""
    stated = unsupported().get(name)
    return f"transformers' type of this name is refused: {stated[1]}" if stated else ""


def rows() -> list[Row]:
    """All that no native family builds, batched ones first."""
    entry = [entry for name in architectures() if (entry := row(name)) is not None]
    return sorted(entry, key=lambda row: HOW.index(row.how))


def table(actual: list[Row]) -> str:
    """Markdown: a line for each way to run and reason."""
    names: dict[tuple[str, str], list[str]] = {}
    for row in actual:
        names.setdefault((row.how, row.because), []).append(f"`{row.name}`")
    lines = ["| runs | architecture | why |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| {how} | {', '.join(of)} | {why} |" for (how, why), of in names.items())]
    )


def less_native(text: str) -> str:
    """A page with that table, less the architectures that became native since."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line.startswith(tuple(f"| {how} | `" for how in HOW)):
            _, how, names, why, _ = line.split("|")
            left = [n for n in names.strip().split(", ") if n.strip("`") not in SUPPORTED]
            lines[number] = f"| {how.strip()} | {', '.join(left)} | {why.strip()} |"
    return "\n".join(lines)


def in_full(kinds: list[str]) -> str:
    """Names in lines of a page."""
    return fill(", ".join(f"`{kind}`" for kind in kinds), 100, break_on_hyphens=False)


def limits(kind: str) -> str:
    """The settings of a definition with which alone it agrees."""
    wrong = verdicts()["types"][kind].get("wrong", {})
    said = [f"`{key}`: {' or '.join(map(str, right)) or 'none'}" for key, right in wrong.items()]
    return "; ".join(said) or "any config"


def generating_page() -> str:
    """docs/model_types.md: what runs each type of transformers' lists for text generation."""
    of: dict[ZooVerdict, list[str]] = {verdict: [] for verdict in ZooVerdict}
    for kind in verdicts()["generating"]:
        of[ZooVerdict.NATIVE if kind in SUPPORTED else verdict_of(kind)[0]].append(kind)
    lines = [
        HEAD.format(count=len(verdicts()["generating"]), version=verdicts()["transformers"]),
        *(f"| {verdict} | {len(of[verdict])} | {MEANING[verdict]} |" for verdict in ZooVerdict),
        "\n## native\n",
        in_full([kind for kind in of[ZooVerdict.NATIVE] if kind not in ENCODERS]),
        "\nEncoders, which give vectors:\n",
        in_full([kind for kind in of[ZooVerdict.NATIVE] if kind in ENCODERS]),
        "\n## mlx-lm, compared\n\n| type | runs only with |\n|---|---|",
        *(f"| `{kind}` | {limits(kind)} |" for kind in of[ZooVerdict.COMPARED]),
    ]
    for verdict in (ZooVerdict.NOT_COMPARABLE, ZooVerdict.REFUSED, ZooVerdict.OUT_OF_SCOPE):
        because: dict[str, list[str]] = {}
        for kind in of[verdict]:
            because.setdefault(verdict_of(kind)[1], []).append(kind)
        lines.append(f"\n## {verdict}")
        for why, kinds in sorted(because.items(), key=lambda item: -len(item[1])):
            lines.append(f"\nBecause {why}:\n\n{in_full(kinds)}")
    others = sorted({*SUPPORTED} - {*verdicts()["generating"]}, key=str.lower)
    lines.append(f"\n## native, beside that list\n\n{in_full(others)}")
    return "\n".join([*lines, MORE])


def forget_native() -> None:
    """Leave types that a native family builds out of the files of verdicts."""
    content = json.loads(VERDICTS.read_text())
    rows = {kind: row for kind, row in content["types"].items() if kind not in SUPPORTED}
    VERDICTS.write_text(verdicts_text({**content, "types": rows}))
    stated = json.loads(UNSUPPORTED.read_text())
    parts = []
    for verdict, reasons in stated.items():
        left = {why: [k for k in kinds if k not in SUPPORTED] for why, kinds in reasons.items()}
        rows = [f"  {json.dumps(why)}: {json.dumps(kinds)}" for why, kinds in left.items() if kinds]
        parts.append(f"{json.dumps(verdict)}: {{\n" + ",\n".join(rows) + "\n}")
    UNSUPPORTED.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def verdicts_text(table: dict[str, Any]) -> str:
    """The text of verdicts.json: a line for each type."""
    rows = [f"  {json.dumps(kind)}: {json.dumps(row)}" for kind, row in table["types"].items()]
    head = {key: value for key, value in sorted(table.items()) if key != "types"}
    text = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    return "{\n" + "\n".join(text) + '\n"types": {\n' + ",\n".join(rows) + "\n}\n}\n"


if __name__ == "__main__":
    names = sys.argv[1:]
    if names == ["generating"]:
        forget_native()
        verdicts.cache_clear()
        unsupported.cache_clear()
        PAGE.write_text(generating_page())
        MODELS.write_text(less_native(MODELS.read_text()))
    else:
        print(table([row(name) for name in names] if names else rows()))  # type: ignore[misc]
