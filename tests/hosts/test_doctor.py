"""The doctor examines hosts that are reached by ssh."""

from __future__ import annotations

import sys

import pytest

from nbelastic.client.doctor import HERE, examine
from tests.hosts.conftest import ROOT


@pytest.fixture
def python(network):
    """A Python that imports nbelastic from this checkout."""
    path = network.folder / "python-of-checkout"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def wrong(hosts, python=None):
    """The wrong findings, without addresses and errors."""
    found = examine(hosts, python)
    return [(one.host, one.text.partition(" (")[0]) for one in found if one.state == "wrong"]


def test_hosts_that_reach_one_another_are_well(network, python):
    """Each host has a line with its versions and addresses."""
    found = examine(["h1", "h2"], python)
    assert [(one.host, one.state) for one in found if one.state != "warning"] == [
        (HERE, "ok"),
        ("h1", "ok"),
        ("h2", "ok"),
    ]
    assert all("eth0" in one.text for one in found if one.host == "h1" and one.state == "ok")


def test_a_cut_between_two_hosts_is_found(network, python):
    """Both reach this machine, as ssh does, and not each other."""
    network.cut_between("h1", "h2")
    assert wrong(["h1", "h2"], python) == [("h1", "it cannot connect to h2"), ("h2", "it cannot connect to h1")]


def test_a_host_without_that_python_says_so(network):
    """As a cluster would at its start."""
    text = "there is no /no/python on h1: install Python there or name it with --python."
    assert wrong(["h1"], "/no/python") == [("h1", text)]
