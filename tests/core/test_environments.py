"""Hosts that make an environment for the user's requirements before they start workers."""

from __future__ import annotations

from nbelastic.core import commands as cmd
from nbelastic.core.state import HostPhase
from nbelastic.protocol import events as ev
from nbelastic.protocol.connection_events import EnvironmentReported
from nbelastic.protocol.timeouts import Timeouts
from tests.core.story import Story


def kinds(story: Story) -> list[str]:
    return [record.kind for record in story.commands(cmd.Record)]


def test_the_cluster_waits_for_an_environment_and_says_how_far_it_is():
    """A host that makes an environment has `environment` seconds instead of `agent`, and the reason has its words."""
    story = Story("a:1", min=1, timeouts=Timeouts(agent=10.0, environment=600.0)).submit()
    hello = [answer for answer in story.answers if isinstance(answer, ev.AgentReady)]
    story.send(EnvironmentReported("a", "begins"))
    story.wait(300.0)
    story.send(EnvironmentReported("a", "uv: Downloading timm (2 GiB)"))
    story.wait(299.0)
    assert story.cluster.hosts["a"].phase is HostPhase.STARTING
    assert story.reason == (
        "0 of min 1 workers ready; waiting for a: makes an environment for the requirements: uv: Downloading timm (2 GiB)"
    )
    assert kinds(story).count("environment-begun") == 1
    story.send(*hello)
    assert (story.cluster.hosts["a"].phase, story.cluster.hosts["a"].reason) == (HostPhase.UP, "")


def test_an_environment_that_takes_too_long_is_a_loss_with_its_last_words():
    """The host is tried again after its back-off, and has the usual time for its agent then."""
    story = Story("a:1", min=1, cooldown=(5.0, 5.0), timeouts=Timeouts(agent=10.0, environment=600.0)).submit()
    story.send(EnvironmentReported("a", "uv: Building flash-attn"))
    story.wait(600.1)
    host = story.cluster.hosts["a"]
    assert host.phase is HostPhase.LOST
    assert host.reason == (
        "it was not ready within 600 s: makes an environment for the requirements: uv: Building flash-attn"
    )
    story.wait(5.0)
    assert story.cluster.hosts["a"].phase is HostPhase.STARTING
    story.wait(10.1)
    assert story.cluster.hosts["a"].reason == "its agent has sent nothing for 10 s"


def test_an_environment_delays_no_other_host():
    """While a host makes its environment for an hour, another one is lost after two minutes."""
    story = Story("a:1", "b:1", min=1)
    story.send(EnvironmentReported("a", "uv: Building flash-attn"))
    story.wait(story.cluster.limits.timeouts.agent)
    assert [host.phase for host in story.cluster.hosts.values()] == ["starting", "lost"]


def test_late_news_of_an_environment_changes_nothing():
    """A report that comes after the host was admitted, lost or removed is dropped."""
    story = Story("a:1", "b:1", min=1).submit().quiet(2.0)
    story.lose_host("b", "its cable was cut")
    before = story.cluster
    story.send(*(EnvironmentReported(name, "begins") for name in ("a", "b", "c")))
    assert story.cluster == before
