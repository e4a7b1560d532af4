"""`--no-skips`: a test that is skipped fails, unless it is marked `gpu`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test fails, unless it is marked gpu")


@pytest.hookimpl(
    wrapper=True, tryfirst=True
)  # pytest itself decides about skips and expected failures in such wrappers
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("gpu") is None:
        _refuse(item.config, report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    if report.skipped:
        _refuse(collector.config, report)
    return report


def _refuse(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    if config.option.no_skips:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{reason}. With --no-skips only tests marked gpu may be skipped."
