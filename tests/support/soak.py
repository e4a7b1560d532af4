"""The marker `soak` is for tests that take long by nature: floods, slow hosts, chaos, thousands of generated examples.

`pytest -m soak` runs all of them. Without `-m soak` a random minute of them runs, and never more than a tenth of them:
`soak(seconds=20)` says how long a test takes there. One of some seconds has `soak(share=0.2)`: it runs in two of
ten runs, and is not part of that minute. `--soak-seed` chooses which, and seeds hypothesis. The header of the
run and its summary of failures print the seed, so that a failure can be repeated. Naming a test on the command line
(`file.py::test`) always runs it. Tests that only repeat themselves do so less often without `-m soak`: `repetitions`.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, is_hypothesis_test, settings

SHARE = 0.1  # of the soak tests, in every run; the minute is less: about 3 % of them in November 2026
MOST_SECONDS = 60.0  # of them, in every run
TYPICAL = 4.0  # seconds of a soak test that does not say how long it takes
TIMES = 20  # as many generated examples in a soak as in other runs
FEWER = 5  # times as few repetitions in other runs as in a soak

settings.register_profile("nbelastic", deadline=None, print_blob=True, database=None)
settings.register_profile("unshrunk", settings.get_profile("nbelastic"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("nbelastic")

_soaking = False
_seed = 0


def examples(few: int) -> int:
    """The number of examples that hypothesis generates: `few`, and many more with `-m soak`."""
    return few * TIMES if _soaking else few


def repetitions(many: int) -> int:
    """How often a long test repeats itself: `many` times with `-m soak`, else a fifth of that."""
    return many if _soaking else max(1, many // FEWER)


def chances(*names: object) -> random.Random:
    """The random choices of a long test: others in each run, and the same for the same `--soak-seed`."""
    return random.Random(f"{_seed} {names}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-seed",
        type=int,
        metavar="N",
        help="choose the soak tests of this run, and seed hypothesis (default: a random number, printed)",
    )


@pytest.hookimpl(tryfirst=True)  # hypothesis reads its seed in its own hook
def pytest_configure(config: pytest.Config) -> None:
    global _soaking, _seed
    _soaking = config.option.markexpr == "soak"
    if hasattr(config, "workerinput"):  # of pytest-xdist: its workers must choose the same tests
        config.option.soak_seed = config.workerinput["soak_seed"]
    elif config.option.soak_seed is None:
        config.option.soak_seed = random.SystemRandom().randrange(1_000_000)
    _seed = config.option.soak_seed
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(config.option.soak_seed)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Hand the seed to a worker of pytest-xdist."""
    node.workerinput["soak_seed"] = node.config.option.soak_seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"soak: {'all' if _soaking else 'a random minute'}, --soak-seed {config.option.soak_seed}"


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _soaking:
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker("soak")
                item.add_marker(pytest.mark.timeout(TIMES * 120))
        return
    if "soak" in config.option.markexpr or any("::" in argument for argument in config.args):
        return
    seed, marked = config.option.soak_seed, [item for item in items if item.get_closest_marker("soak")]
    often = {item.nodeid: share for item in marked if (share := _share(item)) > SHARE}
    long = {item.nodeid: _seconds(item) for item in marked if item.nodeid not in often}
    left_out = long.keys() - _drawn(long, seed) | {name for name, share in often.items() if _lot(name, seed) >= share}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


def _share(item: pytest.Item) -> float:
    """The part of the runs that include the test; the smallest, if several markers name one."""
    share = min(marker.kwargs.get("share", SHARE) for marker in item.iter_markers("soak"))
    if not 0 < share < 1:
        raise pytest.UsageError(
            f"{item.nodeid} has soak(share={share:g}): a part of the runs, more than 0 and less than 1."
        )
    return share


def _lot(name: str, seed: int) -> float:
    return random.Random(f"{seed} {name}").random()


def _seconds(item: pytest.Item) -> float:
    """How long a soak test takes without `-m soak`."""
    seconds = max(marker.kwargs.get("seconds", TYPICAL) for marker in item.iter_markers("soak"))
    if seconds > MOST_SECONDS:
        raise pytest.UsageError(
            f"{item.nodeid} takes {seconds:g} s, and a run draws {MOST_SECONDS:g} s of soak tests: "
            "it would never be drawn. Shorten it without -m soak: see tests.support.soak.repetitions."
        )
    return seconds


def _drawn(seconds: dict[str, float], seed: int) -> set[str]:
    """In random order, as many tests of a random tenth as there is time for. The order and the tenth follow from the names."""
    lots = {name: _lot(name, seed) for name in seconds}
    drawn, left = set[str](), MOST_SECONDS
    for name in sorted(lots, key=lots.__getitem__):
        if lots[name] < SHARE and seconds[name] <= left:
            drawn.add(name)
            left -= seconds[name]
    return drawn


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(
            f"To choose the same soak tests and examples again: --soak-seed {config.option.soak_seed}"
        )
