"""`%elastic_chaos`: its options, what it prints, and its report."""

from __future__ import annotations

import pytest
from magic_output import output_of

from nbelastic.client.chaos_report import report


@pytest.fixture
def chaos(cluster, monkeypatch):
    """The arguments with which the cluster's chaos was called."""
    given = []

    def run(**arguments):
        given.append(arguments)
        print("12:00:00 kill a/0#1: next step after 0.06 s, 0 steps lost")
        facts = {"withheld": 0, "withheld_because": "", "ended": "600 s are over", "steps_known": True}
        return report([], cluster="fake", seed=4, begun=0.0, end=600.0, **facts)

    monkeypatch.setattr(cluster, "chaos", run, raising=False)
    return given


def test_only_given_options_are_passed(ip, capsys, chaos):
    """Times may have units; kinds have commas between them. The report is shown after the lines."""
    text = output_of(ip, capsys, "%elastic_chaos --every 30 --kinds kill,host --for 10m --seed 4 --below-min")
    assert chaos == [
        {
            "every": 30.0,
            "kinds": ["kill", "host"],
            "duration": 600.0,
            "seed": 4,
            "below_min": True,
            "by": "%elastic_chaos",
        }
    ]
    assert text.splitlines()[0].endswith("0 steps lost")
    assert "chaos on fake: 0 of 0 faults survived in 10 min (seed 4)" in text


def test_the_report_can_be_kept(ip, capsys, chaos):
    """With --out the variable gets the report, which is not shown."""
    text = output_of(ip, capsys, "%elastic_chaos --out found")
    assert "chaos on" not in text
    assert ip.user_ns["found"].goodput == 1.0
    assert chaos == [{"every": 60.0, "below_min": False, "by": "%elastic_chaos"}]


@pytest.mark.parametrize("line", ["--every soon", "--for 10d", "--out 1x"])
def test_wrong_options_give_one_line(ip, capsys, chaos, line):
    """Nothing is injected."""
    assert "UsageError: " in output_of(ip, capsys, f"%elastic_chaos {line}")
    assert chaos == []


def test_the_cluster_is_started_with_chaos(ip, magics):
    """`%elastic_start --chaos` allows it."""
    ip.run_cell("%elastic_start --chaos --no-dashboard")
    assert magics.cluster.options["chaos"] is True
