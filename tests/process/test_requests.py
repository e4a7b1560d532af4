"""Requests of clients are carried out on a real training, and their records, stacks and events are shown."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

import nbelastic as nbe
from tests.support.waiting import until


def requests_of(cluster):
    return {request.id: (request.word, request.why) for request in cluster.status().orders}


def test_a_client_restarts_a_worker(trains):
    """A requested restart replaces one worker without a lost step or a failure of its slot."""
    training = trains("localhost:3", min=1, max=3)
    victim = training.wait_for_world(3)[1]
    training.cluster.order({"order": "restart", "worker": victim.id, "id": "mine"}, by="a test")
    until(lambda: requests_of(training.cluster).get("mine", ("",))[0] == "done")
    assert requests_of(training.cluster)["mine"][1] == f"{victim.id.removesuffix('1')}2 has replaced it"
    ranks = training.wait_for_world(3)
    assert victim.pid not in {w.pid for w in ranks}
    training.finish()
    texts = [event.text for event in training.cluster.events]
    assert f"{victim.id} was restarted by a test" in texts
    assert not [event for event in training.cluster.events if event.kind == "slot-backoff"]


def test_a_refused_request_has_its_reason(make):
    """A refused request has its reason in the status and in the event log."""
    cluster = make("localhost:1")
    cluster.order({"order": "remove_host", "host": "gpu7", "id": "x"}, by="dashboard")
    until(lambda: requests_of(cluster).get("x", ("",))[0] == "refused")
    why = "there is no host 'gpu7'; the hosts are localhost."
    assert requests_of(cluster)["x"] == ("refused", why)
    refused = lambda: [event.text for event in cluster.events if event.kind == "order-refused"]
    assert until(refused) == [f"dashboard: {why}"]


def test_too_many_requests_at_once_are_refused(make):
    """The driver carries out some of hundreds of requests and refuses the others; the list in the status stays short."""
    cluster = make("localhost:1", cooldown=(60, 300))
    for n in range(300):
        cluster.order({"order": "add_host", "host": f"nowhere{n}.invalid", "id": f"o{n}"}, by="a test")
    until(lambda: len([e for e in cluster.events if "requests are under way" in e.text]) >= 200)
    assert len(cluster.status().orders) <= 40
    cluster.order({"order": "stop", "id": "end"}, by="a test")
    until(lambda: requests_of(cluster).get("end", ("",))[0] == "done")
    until(lambda: {word for word, _ in requests_of(cluster).values()} == {"refused", "done"}, what="all to have ended")


def test_a_request_stops_the_cluster(make):
    """A request to stop the cluster is done when everything has ended."""
    cluster = make("localhost:1")
    cluster.order({"order": "stop", "id": "last"}, by="dashboard")
    until(lambda: cluster.status().phase == "finished")
    until(lambda: requests_of(cluster)["last"][0] == "done")
    with pytest.raises(nbe.ClusterStoppedError, match="stopped by dashboard"):
        cluster.order({"order": "stop", "id": "again"}, by="dashboard")


def hang(folder):
    """Rank 1 sleeps in its third step until a file lets it go on; the others wait for it in their all_reduce."""
    import torch
    import torch.distributed as dist

    state = nbe.ObjectState(step=0)

    def load():
        while not os.path.exists(f"{folder}/go"):
            time.sleep(0.05)

    @nbe.elastic
    def loop(state):
        while state.step < 5:
            if nbe.rank() == 1 and state.step == 3:
                load()
            dist.all_reduce(torch.ones(1))
            state.step += 1
            state.commit()

    loop(state)


def test_stacks_show_why_a_training_hangs(make, tmp_path):
    """When one rank sleeps in the user's function and the others wait in all_reduce, each stack dump shows that."""
    cluster = make("localhost:3", min=3, silence=2)
    job = cluster.run(hang, str(tmp_path))
    cluster.wait(3)
    where = ("all_reduce", "time.sleep(0.05)", "all_reduce")
    hangs = lambda found: len(found) == 3 and all(a in stack.text for a, stack in zip(where, found, strict=True))
    stacks = until(lambda: hangs(found := cluster.stacks()) and found, what="the hang")
    assert [stack.rank for stack in stacks] == [0, 1, 2]
    assert "in load" in stacks[1].place
    assert stacks[1].text.splitlines()[-1].strip() == "time.sleep(0.05)"
    assert all("ipykernel" not in stack.text and "elastic.py" not in stack.text for stack in stacks)
    until(lambda: [w.behind for w in cluster.workers] == [0, 1, 0], what="rank 1 to be marked")
    assert f"behind at commit 3, in {Path(__file__).name}" in cluster.workers[1].reason
    assert "behind at commit 3" in cluster.stacks()[1].note
    (tmp_path / "go").touch()
    job.result(timeout=30)


def test_a_stopped_process_has_no_stack_and_the_others_are_shown(make):
    """A stack dump names the worker that does not answer in time, and shows the others."""
    cluster = make("localhost:2", min=2)
    stopped, other = cluster.workers
    until(lambda: all(stack.text for stack in cluster.stacks()))
    os.kill(stopped.pid, signal.SIGSTOP)
    shown_stacks = lambda: {stack.worker: stack.text for stack in cluster.stacks(timeout=0.05)}
    # A process stops when Linux next runs one of its threads: on a busy machine it may answer once more.
    shown = until(
        lambda: (found := shown_stacks())[other.id] and not found.get(stopped.id) and found, what="one answer of two"
    )
    assert shown[other.id] == "no user code is running\n"


def test_a_recovery_logs_how_long_each_part_took(trains):
    """The log has the milliseconds of each part of a recovery: detect, abort, form, transfer, first step."""
    explained = {"grace": 20}  # seconds: the loss is the reason, even if the agent reports it late
    training = trains("localhost:3", min=1, cooldown=(60, 60), timeouts=explained)
    victim = training.wait_for_world(3)[0]
    training.signal_worker(victim)  # the first failure restarts at once
    replacement = next(w for w in training.wait_for_world(3) if w.slot == victim.slot)
    training.signal_worker(replacement)  # its slot is in back-off now, so no newcomer joins
    training.wait_for_world(2)
    training.finish()
    events = lambda kind: [event for event in training.cluster.events if event.kind == kind]
    _, broken = events("world-broken")
    assert (broken.size, "SIGKILL" in broken.text) == (2, True)
    (first,) = until(lambda: [event for event in events("training") if event.generation == broken.generation + 1])
    assert list(first.took)[:2] == ["detect", "abort"]
    assert {"detect", "abort", "form", "sync", "first step", "all"} <= first.took.keys()
    assert 0 <= first.took["detect"] < first.took["all"]
    assert first.size == 2
    trace = json.loads(json.dumps(training.cluster.trace()))
    assert {e["name"] for e in trace["traceEvents"]} >= {"detect", "abort", "form", "sync", "first step"}
