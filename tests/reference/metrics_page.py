"""docs/metrics.md: the names of /metrics, from the families that an idle server has."""

from mlxinfer.server.metrics import ServerMetrics

TABLE = """| name | kind | labels | meaning |
|---|---|---|---|
"""


def page() -> str:
    """docs/metrics.md."""
    nothing = ServerMetrics(
        request_metrics={}, key_metrics={}, engine_stats={}, slots=(), limit_bytes=0
    )
    rows = []
    for family in nothing.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = ", ".join(getattr(family, "_labelnames", ()))
        rows.append((name, family.type, labels, family.documentation))
    lines = [
        f"| `{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in sorted(rows)
    ]
    return TABLE + "\n".join(lines) + "\n"
