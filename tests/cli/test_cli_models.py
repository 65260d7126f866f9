"""Which models `mlxinfer serve` has: -m and the config file, with nothing of either ignored."""

from pathlib import Path

import click
import pytest
from click.core import ParameterSource

from benchmarks.experts import SMALL as MIXTURE
from mlxinfer.cli._configuration import RequestedModel, requested_models
from mlxinfer.cli.config import serve_context
from mlxinfer.cli.serve import registry
from mlxinfer.config.file import read_config_file
from mlxinfer.memory import weights_bytes
from mlxinfer.models import ExpertOptions
from mlxinfer.models.weights.files import expert_bytes
from mlxinfer.server.slots import RegistryEntry
from mlxinfer.session.options import EngineOptions

FILE = """
[serve]
ttl = "1h"
kv-bits = "8"
max-memory = "900MB"

[models.chat]
source = "demo"
aliases = ["gpt-4o-mini", "gpt-4o"]
pin = true
kv-bits = 4
kv-window = 256

[models.draft]
source = "demo-draft"
ttl = "90s"
max-memory = "30MB"
tool-format = "hermes"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(FILE)
    return path


def wanted(path: Path, *given: str) -> list[RequestedModel]:
    return requested_models(given or ("demo",), read_config_file(path), by_default=not given)


def entries(path: Path, *given: str) -> tuple[list[RegistryEntry], int]:
    params = serve_context(["--config", str(path)]).params
    models = registry(wanted(path, *given), dict(params))
    return [slot.entry for slot in models.slots()], models.limit_bytes


def engine(entry: RegistryEntry) -> tuple[EngineOptions, str]:
    """Return the options that a model would be opened with."""
    _, _, options, served = entry.load.args  # type: ignore[attr-defined]  # a partial
    return options, served["tool_format"]


@pytest.mark.parametrize(
    ("arguments", "models"),
    [
        ([], ("demo",)),
        (["demo-draft"], ("demo-draft",)),
        (["--max-batch", "2", "-m", "b=demo", "a=demo-draft"], ("a=demo-draft", "b=demo")),
    ],
)
def test_arguments_are_models(
    tmp_path: Path, arguments: list[str], models: tuple[str, ...]
) -> None:
    (empty := tmp_path / "empty.toml").touch()
    ctx = serve_context(["--config", str(empty), *arguments])
    assert ctx.params["models"] == models
    by_default = ctx.get_parameter_source("models") is ParameterSource.DEFAULT
    assert by_default is (not arguments)


def test_everything_in_the_file_counts(config: Path) -> None:
    (chat, draft), limit = entries(config)
    assert limit == 900 * 10**6
    assert (chat.name, chat.aliases, chat.pinned) == ("chat", ("gpt-4o-mini", "gpt-4o"), True)
    assert (chat.ttl_s, draft.ttl_s) == (3600.0, 90.0)
    assert (chat.kv_bytes, draft.kv_bytes) == (None, 30 * 10**6)
    assert (chat.preload, draft.preload) == (False, False)
    (options, form), (second, hermes) = engine(chat), engine(draft)
    assert (options.kv.bits, options.kv.window, form) == ((4, 4), 256, "auto")
    assert (second.kv.bits, second.kv.window, hermes) == ((8, 8), None, "hermes")
    assert second.max_memory == "30MB"
    assert options.max_memory is None


def test_experts_in_memory_are_said_by_model(tmp_path: Path) -> None:
    folder = MIXTURE.write(tmp_path / "mixture", split=True)
    half = expert_bytes(folder) // 2
    file = tmp_path / "config.toml"
    table = f'[models.mixture]\nsource = "{folder}"\nexpert-memory = {half}\nslow-experts = true\n'
    file.write_text(table)
    (entry,), _ = entries(file)
    assert engine(entry)[0].experts == ExpertOptions(half, slow=True)
    assert entry.weights_bytes == weights_bytes(folder) - half


def test_what_m_names_comes_first_and_is_loaded(config: Path) -> None:
    (draft, mine, chat), _ = entries(config, "draft", "mine=demo")
    assert [e.name for e in (draft, mine, chat)] == ["draft", "mine", "chat"]
    assert [e.preload for e in (draft, mine, chat)] == [True, True, False]
    assert draft.ttl_s == 90.0
    assert engine(mine)[0].kv.bits == (8, 8)


def test_without_models_in_the_file_there_is_the_demo(tmp_path: Path) -> None:
    empty = tmp_path / "empty.toml"
    empty.write_text("[serve]\nport = 1\n")
    assert [(w.name, w.preload) for w in wanted(empty)] == [("demo", True)]


@pytest.mark.parametrize("given", [("a=demo", "a=demo-draft"), ("chat=demo",), ("draft", "draft")])
def test_two_of_one_name_are_refused(config: Path, given: tuple[str, ...]) -> None:
    with pytest.raises(click.UsageError, match="Two models have one name"):
        wanted(config, *given)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("kv-bitz = 8", "Did you mean kv-bits?"),
        ("kv-bits = 5", "kv_bits is 5; expected"),
        ("kv-window = 'x'", "kv_window is 'x'"),
        ("kv-sinks = 4", "kv_sinks goes with kv_window"),
        ("kv-bits = true", "kv_bits is True; expected"),
        ("max-memory = 'much'", "max_memory is 'much'"),
        ("pin = true\nttl = 5", "a pinned model is never unloaded"),
        ("port = 8080", "has no option port"),
    ],
)
def test_a_mistake_names_its_place(config: Path, line: str, said: str) -> None:
    config.write_text(f'[models.chat]\nsource = "demo"\n{line}\n')
    with pytest.raises(click.UsageError) as refused:
        entries(config)
    assert f"{config}, models.chat" in refused.value.message
    assert said in refused.value.message


def test_models_that_contradict_each_other_are_refused(config: Path) -> None:
    between = [
        ('[models.a]\nsource = "demo"\naliases = ["b"]\n[models.b]\nsource = "demo"', "called b"),
        ('[serve]\nttl = "soon"', "no duration"),
        ('[serve]\nmax-memory = "3MB"', "demo does not fit"),
    ]
    for text, said in between:
        config.write_text(text)
        with pytest.raises(click.UsageError, match=said):
            entries(config)
