"""`mlxinfer show`: the facts of a model and the memory it needs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UnsupportedModelError
from ..memory import human_bytes
from ._model import fetch, pooling_of
from ._options import complete_models, json_option
from ._output import emit_json, escaped, human_count, table

if TYPE_CHECKING:
    from ..memory.roofline import Machine
    from ..models.language import LanguageConfig
    from ..pooling.config import PoolingConfig
    from ._inspect import Summary, WeightSizes

KV_BITS = (16, 8, 4)
CONTEXTS = (4096, 32_768)
OF_CONFIG = {  # fact -> field of the config
    "definition": "definition",
    "verdict": "verdict",
    "compared": "compared",
    "alone_because": "alone_because",
    "layers": "num_layers",
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "experts": "num_experts",
    "context": "max_context",
}
OF_WEIGHTS = {
    "parameters": "parameters",
    "weight_bytes": "num_bytes",
    "bits_per_weight": "bits_per_weight",
    "expert_bytes": "expert_bytes",
    "active_expert_bytes": "active_expert_bytes",
    "tower_bytes": "tower_bytes",
    "table_bytes": "table_bytes",
    "heads": "heads",
}


@click.command()
@click.argument("name", default="demo", shell_complete=complete_models)
@click.option("--context", type=click.IntRange(min=1), help="Also show the memory for N tokens.")
@click.option(
    "--on", metavar="MAC", help='Also show how it would run on another Mac, such as "M4 Max 64GB".'
)
@click.option(
    "--mmproj", metavar="FILE", help="File of what sees pictures for a GGUF file, if not beside it."
)
@json_option
def command(
    name: str, context: int | None, on: str | None, mmproj: str | None, as_json: bool
) -> None:
    """Show a model's architecture, size and memory needs."""
    from ..memory.roofline import machine
    from ._inspect import summarise

    mac = None if on is None else machine(on)
    summary = summarise(fetch(name, download=False, mmproj=mmproj))
    facts = describe(name, summary, context, mac)
    if as_json:
        emit_json(facts)
    else:
        click.echo(render(facts, mac))
    if summary.problem is not None and summary.is_broken:
        raise summary.problem


def describe(
    name: str, summary: "Summary", context: int | None, mac: "Machine | None" = None
) -> dict[str, Any]:
    pooling = pooling_of(summary.folder, name)
    files = sorted(file for file in summary.folder.iterdir() if file.is_file())
    facts = {
        "name": name,
        "path": str(summary.folder),
        "supported": summary.problem is None,
        "problem": None if summary.problem is None else str(summary.problem),
        "task": "generate" if pooling is None else str(pooling.task),
        "pooling": _pooling(pooling),
        "architecture": summary.model_type,
        "chat_template": summary.chat_template,
        "thinking": list(summary.thinking),
        **dict.fromkeys((*OF_CONFIG, *OF_WEIGHTS)),
        **dict.fromkeys(("quantization", "kv_bytes_per_token", "fit", "on")),
        "memory": [],
        "files": [{"name": file.name, "size_bytes": file.stat().st_size} for file in files],
    }
    config, weights = summary.config, summary.weights
    if config is not None:
        facts |= {key: getattr(config, field) for key, field in OF_CONFIG.items()}
        facts["quantization"] = config.quantization and asdict(config.quantization.default)
    elif isinstance(summary.problem, UnsupportedModelError):
        facts["verdict"] = _verdict(summary.model_type)
    if weights is not None:
        facts |= {key: getattr(weights, field) for key, field in OF_WEIGHTS.items()}
    if config is not None and weights is not None:
        facts |= _needs(config, weights, summary.folder, context, mac)
    if pooling is not None:
        facts |= {"kv_bytes_per_token": None, "memory": []}
    return facts


def _verdict(model_type: str | None) -> str:
    from ..models.zoo.compared import ZooVerdict, verdict_of

    verdict = verdict_of(str(model_type))[0]
    return verdict if verdict is ZooVerdict.OUT_OF_SCOPE else ZooVerdict.REFUSED


def _needs(
    config: "LanguageConfig",
    weights: "WeightSizes",
    folder: Path,
    context: int | None,
    mac: "Machine | None",
) -> dict[str, Any]:
    """Return the memory of one sequence at some lengths, and what this and another Mac can do."""
    from ..memory import models_limit_bytes
    from ..memory.fit import fit_of, held_bytes, kv_bytes
    from ..memory.roofline import estimate

    num_bytes, longest = held_bytes(folder), config.max_context
    lengths = {n for n in (*CONTEXTS, longest) if n <= longest} | ({context} if context else set())
    needs: dict[str, Any] = {
        "kv_bytes_per_token": {str(bits): kv_bytes(config, 1, bits) for bits in KV_BITS},
        "memory": [
            {
                "context": length,
                "total_bytes": num_bytes + kv_bytes(config, length),
                "total_bytes_kv8": num_bytes + kv_bytes(config, length, 8),
            }
            for length in sorted(lengths)
        ],
        "fit": fit_of(config, num_bytes, models_limit_bytes(), folder=folder).as_dict(),
    }
    if mac is not None:
        length = context or min(CONTEXTS[0], longest)
        needs["on"] = estimate(config, num_bytes, weights.work, mac, length, folder=folder)
    return needs


def render(facts: dict[str, Any], on: "Machine | None" = None) -> str:
    rows = [("model", facts["name"]), ("path", facts["path"])]
    if facts["problem"]:
        rows.append(("cannot run", facts["problem"]))
    elif facts["definition"]:
        rows.append(("runs", _runs(facts)))
    rows += [("verdict", facts["verdict"])] if facts["verdict"] else []
    rows += [("gives", _gives(facts))] if facts["task"] != "generate" else []
    rows += [
        ("architecture", _architecture(facts)),
        ("parameters", _parameters(facts)),
        ("context", f"{facts['context']:,} tokens" if facts["context"] else "?"),
        ("chat template", "yes" if facts["chat_template"] else "no"),
    ]
    rows += [("thinking", ", ".join(facts["thinking"]))] if facts["thinking"] else []
    if facts["tower_bytes"]:
        size = human_bytes(facts["tower_bytes"])
        rows.append(("sees", f"pictures, with {size} of the weights"))
    if facts["table_bytes"]:
        size = human_bytes(facts["table_bytes"])
        rows.append(("n-grams", f"a table of {size}, which stays in its files"))
    if facts["heads"]:
        rows.append(("brings", facts["heads"]))
    if facts["active_expert_bytes"]:
        rows.append(("experts", _experts(facts)))
    rows += _memory(facts)
    if facts["fit"]:
        rows.append(("this machine", facts["fit"]["text"]))
    if facts["on"]:
        rows += _limits(facts["on"])
    elif on:
        rows.append((f"on {on.name}", "not known: the config or the weights cannot be read"))
    rows += [("file", f"{f['name']}  {human_bytes(f['size_bytes'])}") for f in facts["files"]]
    return table([(label, escaped(value)) for label, value in rows])


def _memory(facts: dict[str, Any]) -> list[tuple[str, str]]:
    alone, rows = facts["alone_because"], []
    if per_token := facts["kv_bytes_per_token"]:
        formats = KV_BITS[:1] if alone else KV_BITS
        sizes = ", ".join(f"{human_bytes(per_token[str(bits)])} at {bits} bit" for bits in formats)
        rows.append(("KV per token", sizes))
    for step in facts["memory"]:
        at_8 = "" if alone else f"; {human_bytes(step['total_bytes_kv8'])} with --kv-bits 8"
        whole = human_bytes(step["total_bytes"])
        rows.append((f"at {step['context']:,}", f"{whole} (weights and 16-bit KV{at_8})"))
    return rows


def _experts(facts: dict[str, Any]) -> str:
    whole, active = facts["expert_bytes"], facts["active_expert_bytes"]
    rest = facts["weight_bytes"] - whole - facts["table_bytes"]
    return (
        f"{human_bytes(whole)}, of which a token reads {human_bytes(active)}; with --expert-memory "
        f"SIZE weights take {human_bytes(rest)} + SIZE, from {human_bytes(rest + active)} on"
    )


def _runs(facts: dict[str, Any]) -> str:
    if facts["definition"] == "native":
        return "natively, batched"
    because = facts["alone_because"]
    how = f"one sequence after another: {because}" if because else "batched"
    return (
        f"by {facts['definition']}'s definition ({facts['compared']}), checked when it is loaded, "
        f"{how}"
    )


def _limits(estimated: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of an estimate. A range covers the configurations sold under the chip's name."""

    def rate(key: str) -> str:
        low, high = (
            f"{round(bound):,}" if bound >= 10 else f"{bound:g}" for bound in estimated[key]
        )
        return high if low == high else f"{low} to {high}"

    return [
        (f"on {estimated['machine']}", estimated["fit"]["text"]),
        ("", f"answers: at most {rate('decode_tokens_per_s')} tokens/s at "
         f"{estimated['context']:,} tokens of context (bandwidth)"),
        ("", f"prompts: at most {rate('prefill_tokens_per_s')} tokens/s (arithmetic)"),
        ("", "an estimate from the chip's specifications; nothing was measured"),
    ]  # fmt: skip


def _pooling(pooling: "PoolingConfig | None") -> dict[str, Any] | None:
    if pooling is None or pooling.head is not None:
        return None
    return {
        "modes": list(pooling.modes),
        "prompts": dict(pooling.prompts),
        "max_tokens": pooling.max_tokens,
    }


def _gives(facts: dict[str, Any]) -> str:
    if facts["task"] == "score":
        return "scores of pairs of texts: /v1/rerank, /v1/score, LLM(...).rerank"
    prompts = facts["pooling"]["prompts"]
    named = f"; prompts: {', '.join(prompts)}" if prompts else ""
    modes = ", ".join(facts["pooling"]["modes"])
    return f"vectors of texts ({modes}): /v1/embeddings, LLM(...).embed{named}"


def _architecture(facts: dict[str, Any]) -> str:
    parts = [facts["architecture"] or "?"]
    if facts["layers"]:
        parts.append(f"{facts['layers']} layers of {facts['hidden_size']}")
    if facts["experts"]:
        parts.append(f"{facts['experts']} experts")
    return ", ".join(parts)


def _parameters(facts: dict[str, Any]) -> str:
    if not facts["parameters"]:
        return "?"
    text = f"{human_count(facts['parameters'])}, {facts['bits_per_weight']:g} bits each"
    if quantization := facts["quantization"]:
        text += f" ({quantization['mode']}, groups of {quantization['group_size']})"
    return f"{text}, {human_bytes(facts['weight_bytes'])}"
