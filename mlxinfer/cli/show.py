"""`mlxinfer show`: the facts of a model and the memory it needs."""

from typing import TYPE_CHECKING, Any

import click

from .. import hub
from ..memory import human_bytes
from ._model import pooling_of
from ._options import complete_models, json_option
from ._output import emit_json, escaped, human_count, table

if TYPE_CHECKING:
    from ..pooling.config import PoolingConfig
    from ..roofline import Machine
    from ._inspect import Summary

KV_BITS = (16, 8, 4)
CONTEXTS = (4096, 32_768)


@click.command()
@click.argument("name", default="demo", shell_complete=complete_models)
@click.option("--context", type=click.IntRange(min=1), help="Also the memory at N tokens.")
@click.option("--on", metavar="MAC", help='On another machine, such as "M4 Max 64GB".')
@json_option
def command(name: str, context: int | None, on: str | None, as_json: bool) -> None:
    """Show a model's architecture, size and memory needs."""
    from ..roofline import machine
    from ._inspect import summarise

    mac = None if on is None else machine(on)
    summary = summarise(hub.resolve(name, download=False))
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
    """Return all facts as plain data; keys are stable, unknown values None."""
    config, weights = summary.config, summary.weights
    pooling = pooling_of(summary.folder, name)
    quantization = config.quantization.default if config and config.quantization else None
    files = sorted(file for file in summary.folder.iterdir() if file.is_file())
    return {
        "name": name,
        "path": str(summary.folder),
        "supported": summary.problem is None,
        "problem": None if summary.problem is None else str(summary.problem),
        "definition": config.definition if config else None,
        "alone_because": config.alone_because if config else None,
        "task": "generate" if pooling is None else str(pooling.task),
        "pooling": _pooling(pooling),
        "architecture": summary.model_type,
        "parameters": weights.parameters if weights else None,
        "weight_bytes": weights.num_bytes if weights else None,
        "bits_per_weight": round(weights.bits_per_weight, 2) if weights else None,
        "quantization": quantization
        and {
            "bits": quantization.bits,
            "group_size": quantization.group_size,
            "mode": quantization.mode,
        },
        "layers": config.num_layers if config else None,
        "hidden_size": config.hidden_size if config else None,
        "vocab_size": config.vocab_size if config else None,
        "experts": config.num_experts if config else None,
        "expert_bytes": weights.expert_bytes if weights else None,
        "active_expert_bytes": weights.active_expert_bytes if weights else None,
        "context": config.max_context if config else None,
        "chat_template": summary.chat_template,
        "kv_bytes_per_token": _kv_bytes(summary) if pooling is None else None,
        "memory": _memory(summary, context) if pooling is None else [],
        "fit": _fit(summary),
        "on": _estimate(summary, context, mac) if mac else None,
        "files": [{"name": file.name, "size_bytes": file.stat().st_size} for file in files],
    }


def render(facts: dict[str, Any], on: "Machine | None" = None) -> str:
    """describe()'s data for people; `on`: the machine that was asked about."""
    rows = [("model", facts["name"]), ("path", facts["path"])]
    if facts["problem"]:
        rows.append(("cannot run", facts["problem"]))
    elif facts["definition"]:
        rows.append(("runs", _runs(facts)))
    rows += [("gives", _gives(facts))] if facts["task"] != "generate" else []
    rows += [
        ("architecture", _architecture(facts)),
        ("parameters", _parameters(facts)),
        ("context", f"{facts['context']:,} tokens" if facts["context"] else "?"),
        ("chat template", "yes" if facts["chat_template"] else "no"),
    ]
    if facts["active_expert_bytes"]:
        rows.append(("experts", _experts(facts)))
    if per_token := facts["kv_bytes_per_token"]:
        kept = KV_BITS[:1] if facts["alone_because"] else KV_BITS
        sizes = ", ".join(f"{human_bytes(per_token[str(bits)])} at {bits} bit" for bits in kept)
        rows.append(("KV per token", sizes))
    rows += [
        (
            f"at {step['context']:,}",
            f"{human_bytes(step['total_bytes'])} (weights and 16-bit KV"
            + (
                ")"
                if facts["alone_because"]
                else f"; {human_bytes(step['total_bytes_kv8'])} with --kv-bits 8)"
            ),
        )
        for step in facts["memory"]
    ]
    if facts["fit"]:
        rows.append(("this machine", facts["fit"]["text"]))
    if facts["on"]:
        rows += _limits(facts["on"])
    elif on:
        rows.append((f"on {on.name}", "not known: the config or the weights cannot be read"))
    rows += [("file", f"{f['name']}  {human_bytes(f['size_bytes'])}") for f in facts["files"]]
    return table([(label, escaped(value)) for label, value in rows])


def _memory(summary: "Summary", context: int | None) -> list[dict[str, int]]:
    """Return weights and KV of one sequence at some lengths up to the model's own."""
    from ..fit import kv_bytes

    config, weights = summary.config, summary.weights
    if config is None or weights is None:
        return []
    lengths = {n for n in (*CONTEXTS, config.max_context) if n <= config.max_context}
    return [
        {
            "context": length,
            "total_bytes": weights.num_bytes + kv_bytes(config, length),
            "total_bytes_kv8": weights.num_bytes + kv_bytes(config, length, 8),
        }
        for length in sorted(lengths | ({context} if context else set()))
    ]


def _experts(facts: dict[str, Any]) -> str:
    whole, active = facts["expert_bytes"], facts["active_expert_bytes"]
    rest = facts["weight_bytes"] - whole
    return (
        f"{human_bytes(whole)}, of which a token reads {human_bytes(active)}; with --expert-memory "
        f"SIZE weights take {human_bytes(rest)} + SIZE, from {human_bytes(rest + active)} on"
    )


def _runs(facts: dict[str, Any]) -> str:
    if facts["definition"] == "native":
        return "natively, batched"
    because = facts["alone_because"]
    how = f"one sequence after another: {because}" if because else "batched"
    return f"by {facts['definition']}'s definition, checked when it is loaded, {how}"


def _fit(summary: "Summary") -> dict[str, Any] | None:
    """Return the verdict for this machine, None where the config or the weights are unknown."""
    from ..fit import fit_of, models_limit_bytes

    if summary.config is None or summary.weights is None:
        return None
    limit, num_bytes = models_limit_bytes(), summary.weights.num_bytes
    return fit_of(summary.config, num_bytes, limit, folder=summary.folder).as_dict()


def _estimate(summary: "Summary", context: int | None, mac: "Machine") -> dict[str, Any] | None:
    """Return what a machine can do at most, None where the config or the weights are unknown."""
    from ..roofline import estimate

    config, weights = summary.config, summary.weights
    if config is None or weights is None:
        return None
    length = context or min(CONTEXTS[0], config.max_context)
    return estimate(config, weights.num_bytes, weights.work, mac, length, folder=summary.folder)


def _limits(estimated: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of an estimate; a range is that of the configurations sold under the chip's name."""

    def rate(key: str) -> str:
        low, high = (f"{round(each):,}" if each >= 10 else f"{each:g}" for each in estimated[key])
        return high if low == high else f"{low} to {high}"

    return [
        (f"on {estimated['machine']}", estimated["fit"]["text"]),
        ("", f"answers: at most {rate('decode_tokens_per_s')} tokens/s at "
         f"{estimated['context']:,} tokens of context (bandwidth)"),
        ("", f"prompts: at most {rate('prefill_tokens_per_s')} tokens/s (arithmetic)"),
        ("", "an estimate from the chip's specifications; nothing was measured"),
    ]  # fmt: skip


def _kv_bytes(summary: "Summary") -> dict[str, int] | None:
    """Return bytes of the KV cache per token by its bits, None where the config is unknown."""
    from ..fit import kv_bytes

    config = summary.config
    if config is None:
        return None
    return {str(bits): kv_bytes(config, 1, bits) for bits in KV_BITS}


def _pooling(pooling: "PoolingConfig | None") -> dict[str, Any] | None:
    """Return how vectors are made, None for models that give none."""
    if pooling is None or pooling.head is not None:
        return None
    return {
        "modes": list(pooling.modes),
        "prompts": dict(pooling.prompts),
        "max_tokens": pooling.max_tokens,
    }


def _gives(facts: dict[str, Any]) -> str:
    """Describe the output of a model that generates no text."""
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
