"""`pytest --jitter SEED`: event loops stall at random, and agents and workers start late.

A stall lasts up to 0.1 s; agents start up to 5 s late and workers up to 2.5 s, in every process that a test starts. In
the tests' own process the threads of links stall as well.
Each process draws its delays from the seed. The product knows nothing of it: Python imports `startup/sitecustomize.py`
as it starts.
"""

from __future__ import annotations

import importlib
import os
import sys

import pytest

from tests.support import startup


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--jitter", metavar="SEED", help="stall event loops and start agents and workers late, at random")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    seed = config.option.jitter
    if seed and os.environ.get("TESTS_JITTER") != seed:
        os.environ["TESTS_JITTER"] = seed
        startup.on_path()
        sys.path.insert(0, startup.FOLDER)
        sys.modules.pop("sitecustomize", None)
    if seed:
        importlib.import_module("sitecustomize").stall_links()


def pytest_report_header(config: pytest.Config) -> str | None:
    return f"jitter: --jitter {config.option.jitter}" if config.option.jitter else None
