"""The marker `soak` is for tests that take long by nature: floods, slow hosts, chaos, thousands of generated examples.

`pytest -m soak` runs all of them. Without `-m soak` a random tenth of them runs: `--soak-seed` chooses which, and seeds
hypothesis. The header of the run and its summary of failures print the seed, so that a failure can be repeated.
Naming a test on the command line (`file.py::test`) always runs it.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, is_hypothesis_test, settings

SHARE = 0.1  # of the soak tests, in every run
TIMES = 20  # as many generated examples in a soak as in other runs

settings.register_profile("nbelastic", deadline=None, print_blob=True, database=None)
settings.register_profile("unshrunk", settings.get_profile("nbelastic"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("nbelastic")

_soaking = False


def examples(few: int) -> int:
    """The number of examples that hypothesis generates: `few`, and many more with `-m soak`."""
    return few * TIMES if _soaking else few


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-seed",
        type=int,
        metavar="N",
        help="choose the soak tests of this run, and seed hypothesis (default: a random number, printed)",
    )


@pytest.hookimpl(tryfirst=True)  # hypothesis reads its seed in its own hook
def pytest_configure(config: pytest.Config) -> None:
    global _soaking
    _soaking = config.option.markexpr == "soak"
    if hasattr(config, "workerinput"):  # of pytest-xdist: its workers must choose the same tests
        config.option.soak_seed = config.workerinput["soak_seed"]
    elif config.option.soak_seed is None:
        config.option.soak_seed = random.SystemRandom().randrange(1_000_000)
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(config.option.soak_seed)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Hand the seed to a worker of pytest-xdist."""
    node.workerinput["soak_seed"] = node.config.option.soak_seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"soak: {'all' if _soaking else 'a random tenth'}, --soak-seed {config.option.soak_seed}"


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _soaking:
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker("soak")
        return
    if "soak" in config.option.markexpr or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("soak") and not _chosen(config, item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _chosen(config: pytest.Config, item: pytest.Item) -> bool:
    """Whether this run's tenth includes the test: by its name alone, so that other tests do not change the choice."""
    return random.Random(f"{config.option.soak_seed} {item.nodeid}").random() < SHARE


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(
            f"To choose the same soak tests and examples again: --soak-seed {config.option.soak_seed}"
        )
