"""bench peak: the peak is above the cache, and fewer bits take less of both."""

from tests.bench.bench_reports import check
from tests.bench.peak import run


def test_fewer_bits_take_less() -> None:
    report = run(context=1024, layers=4)
    check(report)
    plain, eight, mixed, four = report.data["formats"]
    for peak in (plain, eight, mixed, four):
        assert peak["peak"] > peak["cache"] > 0
    assert plain["cache"] > eight["cache"] > mixed["cache"] > four["cache"]
    assert plain["peak"] > eight["peak"] > four["peak"]
