"""Which tests run, and which skips fail a run."""

from __future__ import annotations

import re

import pytest

from tests.support.inner_pytest import ROOT, run_pytest

TESTS = """
import pytest

@pytest.mark.soak
@pytest.mark.parametrize("number", range(100))
def test_long(number): pass

def test_short(): pass
"""
HOURS = """
import pytest
from tests.support.soak import repetitions

@pytest.mark.soak(seconds=25)
@pytest.mark.parametrize("number", range(100))
def test_long(number): assert repetitions(50) == {repetitions}

@pytest.mark.soak(seconds={seconds})
def test_longest(): pass
"""
SKIPS = """
import pytest

@pytest.mark.gpu
def test_gpu(): pytest.skip("no GPU here")

@pytest.mark.skip(reason="no Slurm here")
def test_marked(): pass

@pytest.fixture
def browser(): pytest.skip("no browser here")

def test_fixture(browser): pass

@pytest.mark.xfail(strict=True)
def test_expected_failure(): assert False
"""


@pytest.fixture
def run(tmp_path):
    """Run pytest with the plug-ins on a file of this text: its exit code and what it prints."""

    def of(text: str, *arguments: str, file: str = "test_it.py") -> tuple[int, str]:
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    soak:\n    gpu:\n")
        (tmp_path / "test_it.py").write_text(text)
        plugins = ("-p", "_hypothesis_pytestplugin", "-p", "tests.support.soak", "-p", "tests.support.skips")
        return run_pytest("-v", *plugins, *arguments, str(tmp_path / file), cwd=ROOT)

    return of


def passed(output: str) -> set[str]:
    return set(re.findall(r"::(\S+) PASSED", output))


def test_a_tenth_of_the_soak_tests_runs_by_seed(run):
    """Short tests always run; the seed alone chooses among the others, and is printed."""
    code, first = run(TESTS, "--soak-seed=1")
    assert code == 0, first
    assert "--soak-seed 1" in first
    assert "test_short" in passed(first)
    assert 3 <= len(passed(first)) - 1 <= 15
    assert passed(run(TESTS, "--soak-seed=1")[1]) == passed(first)
    assert passed(run(TESTS, "--soak-seed=2")[1]) != passed(first)


def test_a_run_draws_a_minute_of_soak_tests(run):
    """Two that take 25 s, however many there are. A test that would never be drawn is an error."""
    code, output = run(HOURS.format(repetitions=10, seconds=60))
    assert code == 0, output
    assert len(passed(output)) == 2
    assert len(passed(run(HOURS.format(repetitions=50, seconds=60), "-m", "soak")[1])) == 101
    code, output = run(HOURS.format(repetitions=10, seconds=61))
    assert code != 0
    assert "test_it.py::test_longest takes 61 s, and a run draws 60 s of soak tests" in output


def test_some_run_in_every_second_run(run):
    """About half of those with a share of a half run; `-m soak` runs all of them."""
    half = TESTS.replace("@pytest.mark.soak", "@pytest.mark.soak(share=0.5)")
    assert 30 <= len(passed(run(half, "--soak-seed=1")[1])) - 1 <= 70
    assert len(passed(run(half, "-m", "soak")[1])) == 100


def test_a_share_is_a_part_of_the_runs(run):
    """A test whose share is not between 0 and 1 is an error, as a percentage would be."""
    code, output = run(TESTS.replace("mark.soak\n", "mark.soak(share=50)\n"), "--soak-seed=1")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "has soak(share=50): a part of the runs, more than 0 and less than 1" in output


def test_all_soak_tests_run_when_asked_for(run):
    """By their marker, or by name; the marker leaves out all other tests."""
    assert passed(run(TESTS, "-m", "soak")[1]) == {f"test_long[{number}]" for number in range(100)}
    assert passed(run(TESTS, "-m", "not soak")[1]) == {"test_short"}
    assert len(passed(run(TESTS, file="test_it.py::test_long")[1])) == 100


def test_a_failure_repeats_the_seed(run):
    code, output = run("def test_it(): assert False", "--soak-seed=77")
    assert code == 1
    assert output.count("--soak-seed 77") == 2


def test_skips_fail_the_run_if_asked_for(run):
    """All but those that need a GPU, with the reason; an expected failure is not a skip."""
    assert run(SKIPS)[0] == 0
    code, output = run(SKIPS, "--no-skips")
    assert code == 1
    assert len(re.findall(r"::\S+ (FAILED|ERROR)", output.partition("short test summary")[0])) == 2, output
    assert "no Slurm here. With --no-skips" in output
    assert "no browser here. With --no-skips" in output
    assert "test_gpu SKIPPED" in output


def test_a_file_that_skips_itself_fails_the_run_too(run):
    code, output = run("import pytest\npytest.skip('no module here', allow_module_level=True)", "--no-skips")
    assert code != 0
    assert "no module here. With --no-skips" in output
