"""The options and fixtures that all tests have."""

from __future__ import annotations

import signal

import pytest

from tests.support import decisions, jitter, less_work, parallel, skips, soak, warm_agents


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the plug-ins here: pytest then asks them for their options too."""
    # A shell has its background jobs ignore SIGINT, and so would all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for plugin in (decisions, jitter, less_work, soak, skips, warm_agents, parallel):
        pluginmanager.register(plugin)
