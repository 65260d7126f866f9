"""Compare mlx-lm's definitions, as they run here, with transformers, on tiny random checkpoints.

Needs torch, transformers and mlx-lm, which nothing else here does together:

    python tests/data/zoo/compare.py [TYPE ...]

Every type that both define and no native family builds is compared: as it is by default, in both
spellings of config.json, and with every switch, factor, activation, window and rope of its config
changed. transformers writes the checkpoint, so its names are those of the hub. The verdicts go to
mlxinfer/models/zoo/verdicts.json, by which the product refuses what a definition gets wrong.
"""

import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from cases import BY_NAME, CHANGES, NOT_PUBLISHED, OLD_NAMES, changes  # noqa: E402
from models.zoo_configs import SIZES  # noqa: E402
from models.zoo_table import verdicts_text  # noqa: E402

from mlxinfer.errors import MlxinferError  # noqa: E402
from mlxinfer.models import zoo  # noqa: E402
from mlxinfer.models.registry import SUPPORTED  # noqa: E402
from mlxinfer.models.zoo import choice  # noqa: E402
from mlxinfer.models.zoo.compared import VERDICTS, scaling_kind  # noqa: E402
from mlxinfer.models.zoo.definitions import architectures, installed, module_name  # noqa: E402

LENGTH = 40  # tokens
TOLERANCE = 1e-3  # of the spread of the logits
SEEDS = 3  # a tie of experts, which rounding decides, is in one of them only


def tiny_config(kind: str, changes: dict[str, Any]) -> transformers.PretrainedConfig:
    """transformers' config of a type, small; changes of a multimodal one are its text model's."""
    read = CONFIG_MAPPING[kind]
    sizes = small(read().to_dict())
    fields = {**CHANGES.get(kind, {}), **changes}
    if "text_config" in sizes:
        return read(**{**sizes, "text_config": {**sizes["text_config"], **fields}})
    return read(**{**sizes, **fields})


def small(defaults: dict[str, Any]) -> dict[str, Any]:
    """The sizes among the keys of a config, small; switches keep their defaults."""
    sizes = {**SIZES, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    del sizes["sliding_window"]
    by_name = {
        k: sizes[k] for k in defaults if k in sizes and not isinstance(sizes[k], (bool, str))
    }
    for key, inner in defaults.items():
        if isinstance(inner, dict) and "model_type" in inner:
            by_name[key] = {"model_type": inner["model_type"], **small(inner)}
    return by_name


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Random numbers for every parameter and buffer that a checkpoint holds; none is trivial."""
    rng = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=rng)
        if tensor.ndim < 2 or name.endswith(("A_log", "bias")):
            tensor += 0.3 * noise
        elif "embed" in name or "wte" in name:
            tensor.copy_(0.4 * noise)
        else:
            tensor.copy_(noise * tensor.shape[-1] ** -0.5)


def model_class(kind: str) -> Any:
    """transformers' class that gives logits of text."""
    if kind in BY_NAME:
        return getattr(transformers, BY_NAME[kind])
    for names in mappings():
        if kind in names:
            return getattr(transformers, names[kind])
    raise KeyError(kind)


def mappings() -> list[dict[str, str]]:
    """Of types to classes that generate text."""
    return [
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    ]


def reference(kind: str, changes: dict[str, Any], seed: int, folder: Path) -> np.ndarray:
    """Save a random checkpoint in `folder`; transformers' logits (LENGTH, vocab_size) of it."""
    torch.manual_seed(seed)
    config = tiny_config(kind, changes)
    config._attn_implementation = "eager"
    model = model_class(kind)._from_config(config).eval()
    with torch.no_grad():
        randomise(model, seed)
        model.tie_weights()
        result = model(torch.tensor(token_ids(seed))[None]).logits[0].numpy()
    model.save_pretrained(folder)
    if kind in NOT_PUBLISHED:
        path = folder / "model.safetensors"
        kept = {k: v for k, v in load_file(path).items() if not re.search(NOT_PUBLISHED[kind], k)}
        save_file(kept, path, metadata={"format": "pt"})
    return result


def token_ids(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, SIZES["vocab_size"], LENGTH)


def old_spelling(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """The config as it was published for transformers 4."""
    old = {**config}
    if "text_config" in old:
        old["text_config"] = old_spelling("", old["text_config"])
    rope = old.pop("rope_parameters", None)
    if rope is not None:
        inner = rope.get("full_attention", rope)
        old |= {k: inner[k] for k in ("rope_theta", "partial_rotary_factor") if k in inner}
        if inner.get("rope_type", "default") != "default":
            old["rope_scaling"] = {**inner, "type": inner["rope_type"]}
        if inner is not rope:
            old["rope_parameters_by_kind"] = rope
    return OLD_NAMES.get(kind, dict)({**old, "torch_dtype": old.pop("dtype", None)})


def published_before(kind: str) -> bool:
    """Whether configs of a type may be in the spelling of transformers 4."""
    rope = CONFIG_MAPPING[kind]().to_dict().get("rope_parameters") or {}
    return kind in OLD_NAMES or not any(isinstance(value, dict) for value in rope.values())


@dataclass(frozen=True)
class Outcome:
    """Of one config: it agrees, differs or is refused.

    Attributes:
        error: root mean square over the vocabulary, the worst token's, by the logits' spread.
        why: the message, or where the first wrong token is.
    """

    how: str
    error: float = 0.0
    why: str = ""


def compare(kind: str, changes: dict[str, Any], *, old: bool) -> Outcome:
    """Compare one config; where transformers cannot run it, the outcome is "impossible"."""
    actual = Outcome("")
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            try:
                expected = reference(kind, changes, seed, folder)
            except Exception as error:
                return Outcome("impossible", why=f"{type(error).__name__}: {error}")
            config = folder / "config.json"
            if old:
                config.write_text(json.dumps(old_spelling(kind, json.loads(config.read_text()))))
            try:
                definition = zoo.load(folder).definition
            except MlxinferError as error:
                how = "impossible" if "No Metal" in str(error) else "refused"
                return Outcome(how, why=str(error))
            ids = mx.array(token_ids(seed).astype(np.int32))[None]
            logits = np.array(definition(ids, definition.own_caches())[0])
        errors = np.sqrt(((logits[:, : expected.shape[1]] - expected) ** 2).mean(-1))
        errors /= expected.std()
        wrong, worst = errors > TOLERANCE, float(errors.max())
        if not wrong.any():
            return Outcome("agrees", worst)
        if not actual.how or worst < actual.error:
            actual = Outcome("differs", worst, f"first at token {wrong.argmax()} of {LENGTH}")
        if wrong.sum() > LENGTH / 2:
            break
    return actual


def verdict(kind: str) -> dict[str, Any]:
    """The row of a type."""
    outcomes = [compare(kind, {}, old=old) for old in (False, True)[: 1 + published_before(kind)]]
    report(kind, "", outcomes)
    base = next((o for o in outcomes if o.how == "agrees"), outcomes[-1])
    row: dict[str, Any] = {"verdict": base.how, "error": float(f"{base.error:.1g}")}
    if len(outcomes) > 1 and outcomes[0].how != outcomes[1].how:
        row["spelling"] = "old" if outcomes[1] is base else "new"
    if base.how != "agrees":
        return {**row, "why": short(base.why)}
    wrong = ignored_keys(kind, old=outcomes[0].how != "agrees")
    return {**row, "wrong": wrong} if wrong else row


def ignored_keys(kind: str, *, old: bool) -> dict[str, list[Any]]:
    """The keys of a config that the definition gets wrong, with the values that it gets right."""
    known = tiny_config(kind, {}).to_dict()
    known = known.get("text_config", known)
    rope = known.get("rope_parameters") or {}
    right = {**known, **rope.get("full_attention", rope), "sliding_window": None}
    result: dict[str, dict[Any, bool]] = {"rope_scaling": {scaling_kind(right): True}}
    for key, change in changes(kind, known):
        outcome = compare(kind, change, old=old)
        report(kind, f"{key} {next(iter(change.values()))}"[:60], [outcome])
        changed = change.get("rope_parameters", {})
        scaling = scaling_kind(changed.get("full_attention", changed))
        value = scaling if key == "rope_scaling" else right.get(key)
        if outcome.how in ("agrees", "differs"):
            result.setdefault(key, {})[value] = outcome.how == "agrees"
    return {
        key: [v for v, agrees in item.items() if v is not None and (agrees or key in right)]
        for key, item in result.items()
        if not all(item.values())
    }


def report(kind: str, what: str, outcomes: list[Outcome]) -> None:
    result = "; ".join(f"{o.how} {o.error:.1g} {short(o.why)}" for o in outcomes)
    print(f"{kind:16} {what:40} {result}", flush=True)


def short(why: str) -> str:
    return re.sub(r"\s+", " ", why)[:300]


def compared_types() -> list[str]:
    """What transformers and mlx-lm define, and no native family does."""
    theirs = {kind for names in mappings() for kind in names}
    return sorted(kind for kind in theirs if kind not in SUPPORTED and defined(kind))


def defined(kind: str) -> bool:
    return module_name(kind) in architectures()


def main() -> None:
    choice.refuse_wrong = lambda config: None  # what was found before does not count
    choice.refuse_unread = lambda config, fields: None
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    table = json.loads(VERDICTS.read_text()) if VERDICTS.exists() else {"types": {}}
    table["transformers"], table["mlx-lm"] = transformers.__version__, installed()
    table["generating"] = sorted({kind for names in mappings() for kind in names})
    for kind in sys.argv[1:] or compared_types():
        table["types"][kind] = verdict(kind)
        rows = {k: table["types"][k] for k in sorted(table["types"]) if k in compared_types()}
        VERDICTS.write_text(verdicts_text({**table, "types": rows}))


if __name__ == "__main__":
    main()
