"""The integrations, for tests of one process."""

import warnings
from importlib import import_module

import pytest


def import_integration(framework, name):
    """Imported late, because the frameworks take seconds; their warnings are their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(framework)
        return import_module(f"nbelastic.integrations.{name}")
