"""The options and fixtures that all tests have."""

from __future__ import annotations

import pytest

from tests.support import agents, jitter, parallel, skips, soak


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the plug-ins here: pytest then asks them for their options too."""
    for plugin in (jitter, soak, skips, agents, parallel):
        pluginmanager.register(plugin)
