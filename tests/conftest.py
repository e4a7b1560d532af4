"""The order of the tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Browser tests come last: playwright keeps an event loop running in this thread, and a browser, until the end."""
    items.sort(key=lambda item: item.get_closest_marker("browser") is not None)
