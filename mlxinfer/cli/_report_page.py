"""The page of Markdown of a report of `doctor --report`, to be pasted into an issue."""

from collections.abc import Callable, Mapping
from typing import Any

from ..bench.report import Report, Table, markdown
from ..memory import human_bytes

Data = Mapping[str, Any]
MAX_MESSAGE = 400  # characters of a remark: an issue takes 65,536


def page(report: Data) -> str:
    """Every part as a table; the facts of the machine at the end."""
    parts = report["parts"]
    tables = [_overview(report)]
    for name, entry in parts.items():
        if "data" in entry:
            kind = name.partition(" of ")[0]
            tables += TABLES[kind](name, entry["data"]) if kind in TABLES else []
    text = markdown(Report("doctor", tables, {}, dict(report["about"])))
    return f"# A report of mlxinfer\n\n{text}\n"


def _overview(report: Data) -> Table:
    rows = [
        [name, entry["status"], f"{entry['seconds']:.0f} s", _short(entry.get("error", ""))]
        for name, entry in report["parts"].items()
    ]
    running = report["running"]
    said = f"The report ended while this part was running: {running}." if running else ""
    return Table("Parts", ["part", "result", "time", "error"], rows, said)


def _machine(name: str, data: Data) -> list[Table]:
    rows = [
        [check["name"], check["status"], _short(check["detail"]), _short(check["advice"])]
        for check in data["checks"]
    ]
    device = "; ".join(f"{key}: {value}" for key, value in data["device"].items())
    note = f"{data['system']}. {device}. Command buffers: {data['command_buffer']}."
    return [Table("Machine", ["check", "result", "found", "advice"], rows, note)]


def _kernels(name: str, data: Data) -> list[Table]:
    rows = [
        [
            row["variant"],
            row["status"],
            *(_figure(row[key]) for key in ("error", "tolerance", "first_run_s", "speed")),
            "; ".join(f"{load}: {a:.0f} / {b:.0f}" for load, (a, b) in row["times_us"].items()),
            _short(row["detail"]),
        ]
        for row in data["kernels"]
    ]
    columns = ["kernel", "verdict", "error", "allowed", "first run (s)", "x MLX", "us / MLX", ""]
    return [Table("Kernels", columns, rows, data["about"])]


def _tokens(name: str, data: Data) -> list[Table]:
    keys = ("way", "prompt", "step", "tokens", "most_probable")
    rows = [[str(each[key]) for key in keys] for each in data["differences"]]
    times = ", ".join(f"{way} {seconds:.1f} s" for way, seconds in data["seconds"].items())
    found = "The first difference of each answer stands above." if rows else "All tokens are equal."
    note = f"{data['steps']} greedy tokens of each answer: {times}. Kernels: {data['kernels']}. "
    columns = ["with", "prompt", "step", "token, plain MLX's", "log-probabilities of plain MLX"]
    return [Table("Tokens with kernels and of plain MLX", columns, rows, note + found)]


def _speed(name: str, data: Data) -> list[Table]:
    rows = [_speed_row(cell) for cell in data["cells"]]
    limits = [cell["limits"] for cell in data["cells"] if "limits" in cell]
    unknown = {f"Limits are unknown: {each['unknown']}." for each in limits if "unknown" in each}
    note = (
        f"{data['model']['quantization']}, {human_bytes(data['model']['weights_bytes'])} of "
        f"weights, loaded in {data['load_seconds']:.1f} s, kernels {data['kernels']}. "
        "A share is the rate as a part of what the largest chip of this name allows. "
    )
    columns = [
        *("prompt x requests", "prompt tok/s", "share", "answer tok/s", "share", "first token (s)"),
        *("peak memory", "steps", "pages sealed", "copied a step"),
    ]
    return [Table(name[0].upper() + name[1:], columns, rows, note + " ".join(unknown))]


def _speed_row(cell: Data) -> list[str]:
    size = f"{cell['context']:,} x {cell['batch']}"
    if "left_out" in cell:
        return [size, cell["left_out"], *[""] * 8]
    counters = cell["counters"]
    rates = []
    for name in ("prompt_tokens_per_s", "generation_tokens_per_s"):
        most = cell["limits"].get(name)
        rates += [f"{cell[name]:,.1f}", f"{cell[name] / most[1]:.0%}" if most else "-"]
    return [
        *(size, *rates, f"{cell['first_token_s']:.3f}", human_bytes(cell["peak_bytes"])),
        *(str(counters["steps"]), str(counters["pages_sealed"])),
        human_bytes(counters["bytes_copied"] / max(counters["steps"], 1)),
    ]


def _soak(name: str, data: Data) -> list[Table]:
    rows = [
        [f"{each['seconds']:.1f}", str(each["requests"])]
        + [human_bytes(each[f"{kind}_bytes"]) for kind in ("active", "cache", "peak")]
        for each in data["samples"]
    ]
    note = f"Counters of the whole run: {data['counters']}."
    return [Table("Memory of MLX", ["second", "answers", "active", "cache", "peak"], rows, note)]


TABLES: dict[str, Callable[[str, Data], list[Table]]] = {
    "machine": _machine,
    "kernels": _kernels,
    "tokens": _tokens,
    "speed": _speed,
    "soak": _soak,
}


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _short(text: str) -> str:
    """One line of a cell, in which `<float>` is no HTML."""
    line = " ".join(text.split()).replace("<", "&lt;")
    return line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]} ..."
