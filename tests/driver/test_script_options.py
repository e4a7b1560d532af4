"""Which options of a script are refused before anything is sent."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import nbelastic as nbe
from nbelastic.client.script_options import script_request


def request(*arguments, **options):
    settings = SimpleNamespace(cwd=None, environment={})
    return script_request(__file__, arguments, options, settings)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_restarts": "3"}, "max_restarts must be a whole number, not a str"),
        ({"nproc": 1.5}, "nproc must be a whole number, not a float"),
        ({"env": ["A=1"]}, "env must be a dict, not a list"),
        ({"role": 5}, "role must be text"),
        ({"shutdown_timeout": -1}, "shutdown_timeout=-1: at least 0 seconds"),
        ({"shutdown_timeout": float("inf")}, "shutdown_timeout=inf: at least 0 seconds, and finite"),
        ({"exit_barrier_timeout": float("inf")}, "exit_barrier_timeout=inf: at least 0 seconds, and finite"),
        ({"monitor_interval": float("inf")}, "monitor_interval: more than 0 seconds, and finite"),
        ({"env": {"LR=": "1"}}, "env: 'LR=' cannot be a variable"),
        ({"env": {"": "1"}}, "env: '' cannot be a variable"),
        ({"env": {"KEY": "1\0"}}, "env: 'KEY' cannot be a variable"),
        ({"env": {1: "1"}}, "env: 1 cannot be a variable"),
    ],
)
def test_wrong_options_are_one_line(options, text):
    """A wrong type, a negative time, and a variable that no process can have: else each host's node would fail for it."""
    with pytest.raises(nbe.UsageError, match=text):
        request(**options)


def test_an_argument_that_no_process_can_have():
    """It is refused, as are such variables. Empty ones, and ones with spaces, are passed on."""
    with pytest.raises(nbe.UsageError, match="an argument of the script has a zero byte"):
        request("--name", "a\0b")
    assert request("", "a b", 1.5).script.arguments == ("", "a b", "1.5")


def test_right_options():
    """None is the default of `nproc` and `env`; a variable may be empty, and numbers become text."""
    script = request(nproc=None, env={"A": 1, "B": ""}, shutdown_timeout=0).script
    assert script.environment == {"A": "1", "B": ""}
    assert request(env=None, nproc=2).terms.nproc == 2
    assert script.target == str(Path(__file__).absolute())


def test_the_variables_of_a_cluster():
    """They are checked as those of a script, before a driver starts: else no agent could start."""
    with pytest.raises(nbe.UsageError, match="env: 'LR=' cannot be a variable"):
        nbe.Cluster(hosts="localhost:1", min=1, env={"LR=": "1"})
