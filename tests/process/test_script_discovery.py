"""Hosts that a script names: the list changes, the script breaks, and the training goes on."""

import os

import pytest

import nbelastic as nbe
from tests.process.observing import until


@pytest.fixture
def script(tmp_path):
    """A discovery script; `say(hosts)` changes what it prints, `fail()` breaks it."""

    class Script:
        path = tmp_path / "hosts.sh"

        def write(self, text):
            other = self.path.with_suffix(".new")
            other.write_text(f"#!/bin/sh\n{text}\n")
            other.chmod(0o755)
            other.rename(self.path)

        def say(self, *hosts):
            self.write("\n".join(f"echo {host}" for host in hosts))

        def fail(self):
            self.write("echo 'the inventory is down' >&2; exit 7")

    return Script()


def test_hosts_come_and_go_as_the_script_says(trains, script):
    """A new line adds a host, a missing one drains it, another number changes its slots."""
    script.say("localhost:1")
    training = trains(None, discovery=str(script.path), min=1)
    training.runs(1)
    script.say("localhost:1", "127.0.0.2")
    training.runs(1 + (os.cpu_count() or 1))
    script.say("localhost:1", "127.0.0.2:1")
    training.runs(2)
    script.say("127.0.0.2:1")
    training.runs(1)
    assert [w.host for w in training.cluster.workers if w.rank is not None] == ["127.0.0.2"]
    training.finish()
    assert not [event for event in training.cluster.events if event.kind in ("world-broken", "host-lost")]


def test_a_script_that_fails_later_is_warned_about_once(trains, script):
    """The last good answer is kept, and the script tried again."""
    script.say("localhost:1", "127.0.0.2:1")
    training = trains(None, discovery=str(script.path), min=1)
    training.runs(2)
    failures = lambda: [event.text for event in training.cluster.events if event.kind == "discovery-failed"]
    script.fail()
    (text,) = until(failures)
    assert "exit code 7" in text
    assert "the inventory is down" in text
    script.write("echo localhost:x")
    until(lambda: len(failures()) == 2)
    assert "localhost:x" in failures()[1]
    training.runs(2)
    script.say("localhost:1")
    training.runs(1)
    assert len(failures()) == 2
    training.finish()


def test_a_script_that_fails_at_first(script):
    """`start()` raises at once, with the exit code and what the script said."""
    script.fail()
    cluster = nbe.Cluster(discovery=str(script.path))
    with pytest.raises(nbe.ClusterStoppedError, match=r"exit code 7: the inventory is down"):
        cluster.start(timeout=20)
    cluster.stop()


def test_a_script_that_is_not_there(tmp_path):
    """The error names it and what to check."""
    with pytest.raises(nbe.ClusterStoppedError, match=r"nowhere.sh cannot be run: No such file.*check its path"):
        nbe.Cluster(discovery=str(tmp_path / "nowhere.sh")).start(timeout=20)
