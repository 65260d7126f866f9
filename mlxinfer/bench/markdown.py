"""A report in Markdown, as a README has it. Knows strings in rows."""

from .report import Report, Table


def as_text(report: Report) -> str:
    """Every table with its title and note, then the machine that measured it."""
    parts = [table_text(table) for table in report.tables]
    facts = "; ".join(f"{name}: {fact}" for name, fact in report.machine.items())
    return "\n\n".join([*parts, *([f"*{facts}*"] if facts else [])])


def table_text(table: Table) -> str:
    """Title, rows and note; the first column left, numbers right."""
    rules = [":--", *["--:"] * (len(table.columns) - 1)]
    lines = ["| " + " | ".join(_cell(c) for c in row) + " |" for row in table.rows]
    head = ["| " + " | ".join(row) + " |" for row in (table.columns, rules)]
    parts = [f"**{table.title}**", "\n".join([*head, *lines])]
    return "\n\n".join([*parts, *([table.note] if table.note else [])])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
