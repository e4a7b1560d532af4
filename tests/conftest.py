"""The order of the tests, and the options that all of them have."""

from __future__ import annotations

import pytest

from tests.support import skips, soak


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the plug-ins here: pytest then asks them for their options too."""
    for plugin in (soak, skips):
        pluginmanager.register(plugin)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Browser tests come last: playwright keeps an event loop running in this thread, and a browser, until the end."""
    items.sort(key=lambda item: item.get_closest_marker("browser") is not None)
