"""Agents in pods, one by one, without a driver: their containers only sleep."""

from __future__ import annotations

import asyncio
import gc

import pytest
from msgspec.structs import replace

from nbelastic.provision import kubernetes_api, pods
from nbelastic.provision.pods import PodAgent, close_pods
from tests.driver.fakes import settings_for
from tests.kubernetes.fake_kubelet import IMAGE
from tests.support.waiting import until_async

# After a refusal kr8s makes another session, and leaves the connections of the one before to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
CONFIG = {"settings": {"slots": "1"}, "keys": {"secret": "not-to-be-seen"}}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Agents that sleep; the driver tries again soon."""
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 1000\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(pods, "LONGEST_PAUSE", 0.1)
    monkeypatch.setattr(pods, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(pods, "CORDON_POLL", 0.1)
    made = settings_for(tmp_path, "one:1")
    options = {
        "launcher": "kubernetes",
        "launcher_options": {"image": IMAGE},
        "python": str(sleeper),
        "number": "0a1b2c3d",
    }
    return lambda: replace(made, **options)


class Observed:
    """A PodAgent and why it has stopped."""

    def __init__(self, settings, host="one", number=1):
        self.stops = []
        self.agent = PodAgent(host, settings, self.stops.append, number)
        self.pod = self.agent.job

    async def runs(self):
        await until_async(lambda: self.agent.view.state.startswith("running on node"))

    async def stopped(self):
        await until_async(lambda: self.stops)
        (why,) = self.stops
        return why


def run(story):
    """Run a story that gets no other pods of this loop; then all its pods are deleted."""

    async def whole():
        try:
            await story()
        finally:
            await close_pods()

    asyncio.run(whole())
    gc.collect()


def test_a_pod_is_created_and_deleted(nodes, settings):
    """The pod runs with its Secret until the agent is killed; then both go."""

    async def story():
        one = Observed(settings())
        one.agent.start(CONFIG)
        await one.runs()
        assert nodes.api.names() == nodes.api.names("secrets") == [one.pod]
        assert "not-to-be-seen" not in str(nodes.api.objects["pods"])
        one.agent.kill()
        assert await one.stopped() == "its pod was deleted"
        await until_async(lambda: not nodes.api.names() and not nodes.api.names("secrets"))

    run(story)


def test_a_pod_without_a_place_says_why(nodes, settings):
    """The state has the scheduler's reason until there is a place."""

    async def story():
        one = Observed(settings())
        for node in ("node1", "node2"):
            nodes.cordon(node)
        one.agent.start(CONFIG)
        reason = "queued (0/2 nodes are available: 2 Insufficient nvidia.com/gpu.)"
        await until_async(lambda: one.agent.view.state == reason)
        assert await one.agent.state() == reason
        nodes.api.call(nodes.api.change, "nodes", "node1", lambda node: node["spec"].clear())
        await one.runs()

    run(story)


def test_a_pod_that_is_killed_before_it_is_created(nodes, settings):
    """No pod is left, whenever the kill comes."""

    async def story():
        one = Observed(settings())
        one.agent.start(CONFIG)
        one.agent.kill()
        await one.stopped()
        await until_async(lambda: "POST pods" in nodes.api.requests and not nodes.api.names())

    run(story)


def test_the_end_of_the_notebooks_pod_ends_all(nodes, settings, tmp_path, monkeypatch):
    """Pods and Secrets are owned by the pod in which the notebook runs: Kubernetes removes them with it."""
    (tmp_path / "namespace").write_text(nodes.api.namespace)
    monkeypatch.setattr(kubernetes_api, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setattr(pods.socket, "gethostname", lambda: "notebook-0")
    notebook = {
        "metadata": {"name": "notebook-0"},
        "spec": {"containers": []},
        "status": {"podIPs": [{"ip": "127.0.0.1"}]},
    }
    notebook["status"]["phase"] = "Running"
    notebook["spec"]["nodeName"] = "elsewhere"
    nodes.api.call(nodes.api.put, "pods", notebook)
    nodes._lost.add("elsewhere")  # its kubelet is none of the test's

    async def story():
        one = Observed(settings())
        one.agent.start(CONFIG)
        await one.runs()
        nodes.api.call(nodes.api.remove, "pods", "notebook-0")  # and nothing of the driver's is done
        await until_async(lambda: not nodes.api.names("secrets") and not nodes.running())

    run(story)


async def two_that_run(settings):
    one, two = Observed(settings(), "one", 1), Observed(settings(), "two", 2)
    for each in (one, two):
        each.agent.start(CONFIG)
        await each.runs()
    return one, two


def test_an_outage_of_the_api(nodes, settings):
    """Agents are not disturbed; the state says what is wrong. What happened meanwhile is seen later."""

    async def story():
        one, two = await two_that_run(settings)
        nodes.api.down()
        await until_async(lambda: "the Kubernetes API cannot be used" in pods.pods_of(settings()).problem)
        assert "running on node" in await one.agent.state()
        assert "cannot be used" in await one.agent.state()
        nodes.api.call(nodes.api.remove, "pods", two.pod)
        nodes.api.call(nodes.api.forget_changes)
        nodes.api.up()
        assert await two.stopped() == "its pod is gone"
        assert not one.stops
        assert await one.agent.state() == one.agent.view.state

    run(story)


def test_a_watch_that_is_too_old(nodes, settings):
    """After `410 Gone` the driver lists the pods again, and misses nothing."""

    async def story():
        one = Observed(settings())
        one.agent.start(CONFIG)
        await one.runs()
        nodes.api.down()
        nodes.api.call(
            nodes.api.change,
            "pods",
            one.pod,
            lambda pod: pod["metadata"].update(labels={**pod["metadata"]["labels"], "a": "b"}),
        )
        nodes.api.call(nodes.api.forget_changes)
        nodes.api.up()
        nodes.evict(one.pod, grace=20)
        await until_async(lambda: one.agent.returns)
        assert one.agent.take_notice().at > 0
        assert one.agent.take_notice() is None

    run(story)


def test_a_pod_on_a_cordoned_node_is_announced(nodes, settings):
    """At first the time of its end is not known; its eviction names one."""

    async def story():
        one = Observed(settings())
        one.agent.start(CONFIG)
        await one.runs()
        nodes.cordon(nodes.node_of(one.pod))
        await until_async(lambda: one.agent.returns)
        assert one.agent.take_notice() == pods.Notice("the cordon of its node", None)
        nodes.evict(one.pod, grace=20)
        notice = await until_async(one.agent.take_notice)
        assert notice.why == "EvictionByEvictionAPI of its pod"
        assert notice.at is not None

    run(story)


def test_another_driver_adopts_a_pod(nodes, settings):
    """It knows the pod by its name: one that runs, and one that has gone meanwhile."""

    async def first():
        one, two = await two_that_run(settings)
        await close_pods()  # nothing is deleted, as when the driver is killed
        return one.pod, two.pod

    kept, gone = asyncio.run(first())
    nodes.api.call(nodes.api.remove, "pods", gone)

    async def second():
        one, two = Observed(settings(), "one", 1), Observed(settings(), "two", 2)
        one.agent.adopt(kept)
        two.agent.adopt(gone)
        await one.runs()
        assert await two.stopped() == "its pod is gone"
        one.agent.kill()
        await until_async(lambda: not nodes.api.names())

    run(second)


def test_a_pod_without_its_secret_is_given_up_by_the_next_driver(nodes, settings, monkeypatch):
    """The driver was killed after it had made the pod: the pod would wait without end."""
    monkeypatch.setattr(pods, "ADOPTED_START", -1.0)

    async def story():
        one = Observed(settings())
        nodes.api.rules = [rule for rule in nodes.api.rules if "secrets" not in rule["resources"]]
        monkeypatch.setattr(one.agent, "_end", lambda why: None)  # the driver is killed here
        one.agent.start(CONFIG)
        await until_async(lambda: one.agent.view.state.startswith("starting on node"))
        two = Observed(settings())
        two.agent.adopt(one.pod)
        nodes.api.call(nodes.api.change, "pods", one.pod, lambda pod: pod["metadata"].update(annotations={"a": "b"}))
        assert (await two.stopped()).startswith("its pod has not started within")
        await until_async(lambda: not nodes.api.names())

    run(story)


def test_a_pod_that_the_api_refuses(nodes, settings):
    """A Secret that may not be made ends the agent with the reason, and its pod with it."""
    nodes.api.rules = [rule for rule in nodes.api.rules if "secrets" not in rule["resources"]]

    async def story():
        one = Observed(settings())
        one.agent.start(CONFIG)
        assert 'cannot create resource "secrets"' in await one.stopped()
        await until_async(lambda: not nodes.api.names())

    run(story)


def check_one_pod_is_made(nodes, settings):
    """The agent runs in one pod, with one Secret."""

    async def story():
        one = Observed(settings())
        one.agent.start(CONFIG)
        await one.runs()
        assert (nodes.api.names("pods"), nodes.api.names("secrets")) == ([one.pod], [one.pod])
        assert not one.stops

    run(story)


def test_an_api_that_is_overloaded(nodes, settings):
    """It delays a pod. One that the API has made, though it answered with an error, is not made twice."""
    busy, lost = (429, "too many requests"), (504, "the server was unable to return a response in time", "done")
    nodes.api.failures = {"POST pods": [busy, (500, "failed calling webhook"), lost], "POST secrets": [busy, lost]}
    check_one_pod_is_made(nodes, settings)


def test_a_quota_that_another_request_changes_at_that_moment(nodes, settings):
    """The API refuses both with the status of an object that exists. Pod and Secret are made a moment later."""
    text = 'Operation cannot be fulfilled on resourcequotas "q": the object has been modified; please try again'
    nodes.api.failures = {"POST pods": [(409, text)], "POST secrets": [(409, text), (409, text)]}
    check_one_pod_is_made(nodes, settings)


def test_an_api_that_stays_overloaded(nodes, settings, monkeypatch):
    """The agent ends with the reason."""
    monkeypatch.setattr(pods, "CREATE_TIMEOUT", 0.2)
    nodes.api.failures = {"POST pods": [(503, "the server is currently unable to handle the request")] * 1000}

    async def story():
        one = Observed(settings())
        one.agent.start(CONFIG)
        assert "currently unable to handle the request" in await one.stopped()

    run(story)


def test_answers_that_are_not_those_of_kubernetes(nodes, settings):
    """As of a proxy. A pod whose creation is answered so ends with the reason; cordons are seen later."""
    nodes.api.failures = {"POST pods": [(200, "please log in")], "GET nodes": [(200, "please log in")] * 2}

    async def story():
        one, two = Observed(settings()), Observed(settings(), "two", 2)
        one.agent.start(CONFIG)
        assert "the Kubernetes API has sent something else: KeyError('metadata')" in await one.stopped()
        two.agent.start(CONFIG)
        await two.runs()
        await until_async(lambda: not nodes.api.failures["GET nodes"])
        nodes.cordon(nodes.node_of(two.pod))
        await until_async(lambda: two.agent.returns)

    run(story)


def test_what_is_forbidden_not_by_a_role_is_named(nodes, settings):
    """A quota and a security standard forbid pods with the same status as a missing Role, which is not to blame then."""
    refusal = (403, 'pods "x" is forbidden: exceeded quota: small, requested: pods=1')
    nodes.api.failures = {"POST pods": [refusal] * 10}  # kr8s asks again with new credentials

    async def story():
        one = Observed(settings())
        one.agent.start(CONFIG)
        why = await one.stopped()
        assert "exceeded quota: small" in why
        assert "Role" not in why

    run(story)
