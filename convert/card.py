"""README.md of a converted model: what it is, how it was made, what it lost."""

from pathlib import Path
from typing import Any

from ..memory import human_bytes
from .files import write_file
from .logitcheck import LogitCheck
from .plots import BITS, ERRORS, available, plot_tensors
from .read import Source
from .report import Report

NO_PLOTS = 'Figures need matplotlib: pip install "mlxinfer[plots]"'
_WORST = 5


def write_card(folder: Path, report: Report, source: Source, *, draw: bool) -> None:
    """README.md and, if asked for and where matplotlib is installed, its figures."""
    figures: list[str] = []
    if draw and available():
        figures = plot_tensors(folder, report.tensors)
    elif draw:
        report.notes.append(NO_PLOTS)
    text = "\n".join([*_front(report, source), *_body(report), *_figures(figures)])
    write_file(folder / "README.md", text.encode())


def _front(report: Report, source: Source) -> list[str]:
    """What the hub reads."""
    lines = ["---", "library_name: mlx", "pipeline_tag: text-generation", "tags:", "- mlx"]
    if _is_repo(report.source):
        lines.append(f"base_model: {report.source.partition('@')[0]}")
    license_id = source.config.get("license")
    if isinstance(license_id, str):
        lines.append(f"license: {license_id}")
    return [*lines, "---", ""]


def _body(report: Report) -> list[str]:
    lines = [
        f"# {Path(report.source).name}, {report.recipe}",
        "",
        f"Converted from {report.source_format} by mlxinfer, for MLX: "
        f"{report.bits_per_weight:.3f} bits per weight, {human_bytes(report.num_bytes)}.",
        "",
        "```sh",
        "mlxinfer run -m FOLDER 'Why is the sky blue?'",
        "mlx_lm.generate --model FOLDER --prompt 'Why is the sky blue?'",
        "```",
        "",
        "| tensors | |",
        "|---|---|",
        *(f"| {status} | {count} |" for status, count in report.counts.items()),
        "",
    ]
    if report.logits:
        lines += _logits(report.logits)
    lossy = sorted(report.tensors, key=lambda t: -t["relative"])[:_WORST]
    if lossy and lossy[0]["relative"] > 0:
        lines += ["Largest relative errors:", "", "| tensor | format | rms |", "|---|---|---|"]
        lines += [_row(tensor) for tensor in lossy]
        lines.append("")
    return lines + [f"{note}\n" for note in report.notes]


def _logits(checks: list[LogitCheck]) -> list[str]:
    return [
        "Logits against the source's, layer by layer in full precision:",
        "",
        "| context | KL mean | KL p99 | same top-1 | perplexity | of the source |",
        "|---|---|---|---|---|---|",
        *(
            f"| {c.context} | {c.kl_mean:.5f} | {c.kl_p99:.5f} | {c.top1:.2%} | "
            f"{c.perplexity:.3f} | {c.source_perplexity:.3f} |"
            for c in checks
        ),
        "",
    ]


def _row(tensor: dict[str, Any]) -> str:
    return f"| {tensor['name']} | {tensor['format']} | {tensor['relative']:.4f} |"


def _figures(names: list[str]) -> list[str]:
    captions = {BITS: "Bits per weight by layer", ERRORS: "Relative error by tensor"}
    return [f"![{captions[name]}]({name})\n" for name in names]


def _is_repo(label: str) -> bool:
    return label.count("/") == 1 and not label.startswith((".", "/", "~"))
