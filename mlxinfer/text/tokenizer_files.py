"""The small files beside a checkpoint's tokenizer.json, read into one form.

Those are tokenizer_config.json, config.json, generation_config.json and the chat templates.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, InvalidRequestError
from ..files import read_json

MAX_TEMPLATE_BYTES = 1 << 20  # the longest in use have some tens of kilobytes
OWN_TEMPLATES = Path(__file__).parent / "templates"  # of models that publish none
NAMED_TOKENS = tuple(f"{name}_token" for name in ["bos", "eos", "unk", "sep", "pad", "cls", "mask"])


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The content of the files beside tokenizer.json, in one form.

    Attributes:
        named: {"bos_token": text, "eos_token": ...}, the names that templates use.
        added: (token as JSON, is special) in the order of their ids.
        eos_ids: of generation_config.json, else of config.json.
        bos_id: of generation_config.json, else of config.json.
        templates: {name: jinja source} of the chat templates.
    """

    named: Mapping[str, str] = field(default_factory=dict)
    added: tuple[tuple[dict[str, Any], bool], ...] = ()
    eos_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    templates: Mapping[str, str] = field(default_factory=dict)


def read_tokenizer_files(folder: Path, chat_template: str | Path | None = None) -> TokenizerFiles:
    """Read the files beside tokenizer.json; a missing file counts as empty."""
    config = read_json(folder / "tokenizer_config.json")
    model = read_json(folder / "config.json")
    generation = read_json(folder / "generation_config.json")
    if "added_tokens_decoder" not in config:
        config = {**config, **read_json(folder / "special_tokens_map.json")}
    return TokenizerFiles(
        named=_named_tokens(config),
        added=_added_tokens(config, folder),
        eos_ids=_eos_ids(generation) or _eos_ids(model),
        bos_id=_bos_id({**model, **generation}),
        templates=_given(chat_template) if chat_template else _templates(folder, config, model),
    )


def _template(path: Path) -> str:
    size = path.stat().st_size
    if size > MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"{path} has {size} bytes; at most {MAX_TEMPLATE_BYTES} are read.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from None


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {name: _token_text(config.get(name)) for name in NAMED_TOKENS}
    return {name: text for name, text in named.items() if text is not None}


def _token_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _added_tokens(config: dict[str, Any], folder: Path) -> tuple[tuple[dict[str, Any], bool], ...]:
    entries = config.get("added_tokens_decoder", {})
    if not isinstance(entries, dict):
        raise CheckpointError(f"{folder}: added_tokens_decoder is not a JSON object.")
    sound = [
        (int(index), entry)
        for index, entry in entries.items()
        if index.isdecimal() and isinstance(entry, dict) and _token_text(entry)
    ]
    return tuple(
        (entry, bool(entry.get("special"))) for _, entry in sorted(sound, key=lambda pair: pair[0])
    )


def _eos_ids(config: dict[str, Any]) -> frozenset[int]:
    value = config.get("eos_token_id")
    if value is None and isinstance(config.get("text_config"), dict):
        value = config["text_config"].get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if type(v) is int and v >= 0)


def _bos_id(config: dict[str, Any]) -> int | None:
    value = config.get("bos_token_id")
    return value if type(value) is int and value >= 0 else None


def _templates(folder: Path, config: dict[str, Any], model: dict[str, Any]) -> dict[str, str]:
    """Return {name: source}.

    What mlx-lm calls `chat_template_type` comes first, then the checkpoint's own templates. Models
    that publish no template are known by their `model_type`.
    """
    return (
        _own(config.get("chat_template_type"))
        or _published(folder, config)
        or _own(model.get("model_type"))
    )


def _own(kind: object) -> dict[str, str]:
    names = [path.stem for path in OWN_TEMPLATES.glob("*.jinja")]
    if kind not in names:
        return {}
    return {"default": _template(OWN_TEMPLATES / f"{kind}.jinja")}


def _published(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return {name: source} with the precedence of transformers' tokenizer and processor classes.

    Template files come first, then chat_template.json, then tokenizer_config.json.
    """
    templates = {
        path.name.removesuffix(".jinja"): _template(path)
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates = {"default": _template(single), **templates}
    if templates:
        return templates
    legacy = read_json(folder / "chat_template.json").get("chat_template")
    return _as_templates(legacy) or _as_templates(config.get("chat_template"))


def _given(chat_template: str | Path) -> dict[str, str]:
    path = Path(chat_template).expanduser()
    if not path.is_file():
        raise InvalidRequestError(
            f"chat_template is {str(chat_template)!r}, and there is no such file; name one with a "
            "jinja template.",
            param="chat_template",
        )
    return {"default": _template(path)}


def _as_templates(value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return {k: v for k, v in value.items() if isinstance(v, str)}
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        pairs = [(entry.get("name"), entry.get("template")) for entry in entries]
        return {k: v for k, v in pairs if isinstance(k, str) and isinstance(v, str)}
    return {}
