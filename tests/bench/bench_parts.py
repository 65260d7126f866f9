"""What every report must hold."""

import json

from mlxinfer.bench.report import Report, markdown


def check(report: Report) -> None:
    assert json.loads(json.dumps(report.as_dict()))["benchmark"] == report.benchmark
    for table in report.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}
    text = markdown(report)
    assert all(f"**{table.title}**" in text for table in report.tables)
