"""Which GPU each worker gets, which GPUs are left out, and the back end of a job."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.protocol import events as ev
from nbelastic.protocol.exit_codes import GPU_LOST
from nbelastic.protocol.ids import Gpu, HostSpec
from tests.core.away import Away
from tests.core.fakes import wid
from tests.core.story import Story


def cluster(*hosts: str, gpus: dict[str, str], **limits) -> Story:
    """`cluster("a:2", gpus={"a": "A B"})`: the host `a` has the GPUs A and B."""
    story = Story(**limits)
    story.gpus = {host: tuple(Gpu(name) for name in names.split()) for host, names in gpus.items()}
    for host in hosts:
        story.add(host)
    return story.answer()


def allotted(story: Story) -> dict[str, str]:
    return {str(w): worker.gpu for w, worker in sorted(story.cluster.workers.items())}


def backend(story: Story) -> str:
    assert story.cluster.job is not None
    return story.cluster.job.backend


def test_each_worker_gets_a_gpu_of_its_own():
    story = cluster("a:2", "b:2", gpus={"a": "A B", "b": "C D"})
    assert allotted(story) == {"a/0#1": "A", "a/1#1": "B", "b/0#1": "C", "b/1#1": "D"}


def test_two_hosts_of_one_machine_share_no_gpu_while_one_is_free():
    """Both hosts report the machine's two GPUs; a third host has to share one."""
    story = cluster("a:1", "b:1", gpus={"a": "A B", "b": "A B", "c": "A B"})
    assert allotted(story) == {"a/0#1": "A", "b/0#1": "B"}
    story.add("c:1").answer()
    assert allotted(story)["c/0#1"] == "A"


def test_hosts_of_one_machine_that_start_workers_at_once_share_no_gpu():
    """A larger `max` lets the second and the third host each start a worker in one decision."""
    story = cluster("a:1", "b:1", "c:1", gpus=dict.fromkeys("abc", "A B C"), max=1)
    story.scale(1, 3).answer()
    assert allotted(story) == {"a/0#1": "A", "b/0#1": "B", "c/0#1": "C"}


def test_more_workers_than_gpus_share_them_evenly():
    story = cluster("a:4", gpus={"a": "A B"})
    assert list(allotted(story).values()) == ["A", "B", "A", "B"]


def test_a_replaced_worker_gets_the_gpu_of_the_lost_one():
    story = cluster("a:2", gpus={"a": "A B"})
    story.kill("a/0#1").answer()
    assert allotted(story) == {"a/0#2": "A", "a/1#1": "B"}


@pytest.mark.parametrize(
    ("gpus", "wanted", "chosen"),
    [
        ({"a": "A B"}, "auto", "nccl"),
        ({"a": "A B"}, "nccl", "nccl"),
        ({"a": "A B"}, "gloo", "gloo"),
        ({"a": "A"}, "auto", "gloo"),
        ({"a": "MIG-1 MIG-2"}, "auto", "gloo"),
        ({}, "auto", "gloo"),
    ],
)
def test_the_back_end_follows_the_gpus(gpus, wanted, chosen):
    """NCCL if each worker has a GPU of its own; gloo for all otherwise, and if it was asked for."""
    story = cluster("a:2", gpus=gpus, backend=wanted, min=2).submit("job").quiet(5.0)
    assert (story.cluster.phase, backend(story)) == ("running", chosen)


def test_hosts_with_and_without_gpus_use_gloo():
    """All members of a job have one back end: ranks with NCCL would wait for those without."""
    assert backend(cluster("a:1", "b:1", gpus={"a": "A"}, min=2).submit("job").quiet(5.0)) == "gloo"


@pytest.mark.parametrize(("gpus", "there"), [({"a": "A"}, 1), ({}, 0)])
def test_nccl_with_too_few_gpus_is_refused_with_both_numbers(gpus, there):
    story = cluster("a:2", gpus=gpus, backend="nccl", min=2).submit("job").quiet(5.0)
    reason = f"backend nccl needs one GPU per worker: there are {there} for 2 workers; use gloo or auto"
    assert (story.cluster.job.outcome, story.cluster.job.reason) == ("failed", reason)


def test_nccl_on_slices_of_a_gpu_is_refused():
    """NCCL does not support them (MIG). A host that has only slices is left out of a job with NCCL."""
    story = cluster("a:2", gpus={"a": "MIG-1 MIG-2"}, backend="nccl", min=2).submit("job").quiet(5.0)
    reason = "backend nccl cannot use slices of GPUs (MIG): use gloo or auto"
    assert (story.cluster.job.outcome, story.cluster.job.reason) == ("failed", reason)
    story = cluster("a:2", gpus={"a": "A B", "b": "MIG-1"}, min=2).submit("job").quiet(5.0)
    story.add("b:1").quiet(5.0)
    assert (len(story.cluster.members), story.cluster.hosts["b"].reason.partition(",")[0]) == (
        2,
        "left out: the job uses NCCL",
    )


def test_workers_share_a_gpu_over_nccl_if_nccl_may():
    """`backend="nccl"` and NCCL's variable for it; a newcomer shares too. A worker without any GPU is still refused."""
    story = cluster("a:3", gpus={"a": "A"}, backend="nccl", shares_gpus=True, min=2).submit("job").quiet(5.0)
    assert (story.cluster.phase, backend(story), len(story.cluster.members)) == ("running", "nccl", 3)
    story.kill("a/2#1").quiet(5.0)
    assert allotted(story)["a/2#2"] == "A"
    for hosts in (("a:2",), ("a:1", "b:1")):
        without = cluster(*hosts, gpus={"b": "B"}, backend="nccl", shares_gpus=True, min=2).submit("job").quiet(5.0)
        assert without.cluster.job.outcome == "failed"


def test_a_host_that_cannot_use_nccl_is_left_out_of_the_job():
    """The job goes on without it, and the status has the reason. The next job uses it, and decides anew."""
    story = cluster("a:2", gpus={"a": "A B", "c": "A B"}, min=2).submit("job").quiet(5.0)
    story.add("b:1").add("c:1").quiet(5.0)
    assert [str(w) for w in story.cluster.members] == ["a/0#1", "a/1#1"]
    assert story.cluster.hosts["b"].reason == "left out: the job uses NCCL, and this host has no GPU"
    why = "left out: the job uses NCCL, and no GPU of its own is free here for another worker"
    assert story.cluster.hosts["c"].reason == why
    story.send(ev.JobStopRequested("job", "enough"))
    story.quiet(5.0)
    assert (story.cluster.hosts["b"].reason, story.cluster.hosts["c"].reason) == ("", "")
    story.submit("another").quiet(5.0)
    assert (len(story.cluster.members), backend(story)) == (4, "gloo")


def test_a_gpu_with_a_problem_keeps_its_slot_out():
    """A lost worker is not replaced on a sick GPU; when the problem is gone, it is. Workers that run there go on."""
    story = cluster("a:2", gpus={"a": "A B"}, min=1).submit("job").quiet(5.0)
    sick = (Gpu("A"), Gpu("B", "NVML has reported Xid 79"))
    story.send(ev.GpusReported("a", sick))
    text = "GPU B is left out: NVML has reported Xid 79"
    assert (len(story.cluster.members), story.cluster.hosts["a"].reason) == (2, text)
    story.kill("a/1#1").quiet(5.0)
    assert [str(w) for w in story.cluster.members] == ["a/0#1"]
    assert story.cluster.hosts["a"].reason == text
    assert cmd.Record("gpu-left-out", "a: GPU B: NVML has reported Xid 79", host="a") in story.said
    story.send(ev.GpusReported("a", (Gpu("A"), Gpu("B"))))
    story.quiet(5.0)
    assert (len(story.cluster.members), story.cluster.hosts["a"].reason) == (2, "")
    assert story.cluster.workers[wid("a/1#2")].gpu == "B"


def test_each_change_of_a_gpu_is_recorded_once():
    """A later report of another GPU repeats what is known of this one."""
    story = cluster("a:2", gpus={"a": "A B"})
    lost = "NVML reports: GPU is lost"
    for first, second in (("", lost), (lost, lost), (lost, ""), ("", "")):
        story.send(ev.GpusReported("a", (Gpu("A", first), Gpu("B", second))))
    assert story.records("gpu-left-out") == [f"a: GPU B: {lost}", f"a: GPU A: {lost}"]
    assert story.records("gpu-back") == ["a: GPU B can be used again", "a: GPU A can be used again"]


def test_a_shared_gpu_with_a_problem_keeps_its_share_of_the_slots_out():
    story = cluster("a:4", gpus={"a": "A B"})
    story.send(ev.GpusReported("a", (Gpu("A", "NVML reports: GPU is lost"), Gpu("B"))))
    story.kill("a/0#1").kill("a/2#1").quiet(5.0)
    assert allotted(story) == {"a/1#1": "B", "a/3#1": "B"}


def test_a_slot_of_a_sick_gpu_moves_to_no_gpu_of_another_host():
    story = cluster("a:1", "b:1", gpus={"a": "A B", "b": "A B"})
    for host in "ab":
        story.send(ev.GpusReported(host, (Gpu("A", "NVML reports: GPU is lost"), Gpu("B"))))
    story.kill("a/0#1").quiet(5.0)
    assert allotted(story) == {"b/0#1": "B"}


def test_a_worker_whose_gpu_failed():
    """The job goes on without it. Its slot rests first: else the next worker starts before NVML reports the problem."""
    story = cluster("a:2", gpus={"a": "A B"}, min=1, cooldown=(5.0, 300.0)).submit("job").quiet(5.0)
    story.kill("a/1#1", code=GPU_LOST).quiet(1.0)
    assert [str(w) for w in story.cluster.members] == ["a/0#1"]
    assert "after 1 failures: a/1#1 ended, as its GPU B failed" in story.cluster.hosts["a"].reason
    story.quiet(10.0)
    assert [str(w) for w in story.cluster.members] == ["a/0#1", "a/1#2"]


@pytest.mark.parametrize(
    "error",
    [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "AcceleratorError: CUDA error: uncorrectable ECC error encountered",
    ],
)
def test_a_newcomer_that_cannot_use_its_gpu_is_started_once_more(error):
    """The driver may not have freed the memory of an ended worker yet, or the GPU has failed. Then it is the program."""
    story = cluster("a:1", gpus={"a": "A", "b": "B"}, min=1).submit("job").quiet(5.0)
    story.add("b:1").hear(ev.AgentReady).hear(ev.WorkerStarted).hear(ev.WorkerRegistered)
    story.ended("b/0#1", error=error)
    assert str(wid("b/0#2")) in map(str, story.cluster.workers)
    story.hear(ev.WorkerStarted).hear(ev.WorkerRegistered)
    story.ended("b/0#2", error=error)
    assert story.cluster.workers[wid("b/0#2")].state == "failed"


@pytest.mark.parametrize("text", ["device-side assert triggered", "an illegal memory access was encountered"])
def test_an_error_of_the_gpu_ends_the_job_and_then_its_worker(text):
    """It is the program's own error, with its traceback. The process cannot use the GPU any more, so it is replaced."""
    story = cluster("a:2", gpus={"a": "A B"}, min=2).submit("job").quiet(5.0)
    error = f"AcceleratorError: CUDA error: {text}"
    story.raised("a/1#1", error)
    assert story.cluster.job.outcome == "failed"
    story.ended("a/1#1", error=error)
    story.quiet(5.0)
    assert allotted(story) == {"a/0#1": "A", "a/1#2": "B"}
    assert story.cluster.hosts["a"].slots[1].failures == 0


@pytest.mark.parametrize(("gpus", "slots"), [("A B C", 3), ("A", 1), ("", 2)])
def test_a_host_without_a_number_has_as_many_slots_as_gpus(gpus, slots):
    """Also when it is listed or added again. Without GPUs it keeps the default."""
    story = cluster(gpus={"a": gpus})
    spec = HostSpec("a", 2, follows_gpus=True)
    story.send(ev.HostsDiscovered((spec,)))
    story.answer()
    said = len(story.said)
    story.send(ev.HostsDiscovered((spec,)))
    assert len(story.cluster.workers) == story.cluster.hosts["a"].spec.slots == slots
    assert story.said[said:] == []
    story.send(ev.HostAdded(spec, "a test"))
    assert len(story.cluster.workers) == slots


def test_a_healthy_gpu_takes_its_share_beside_a_bad_one():
    """Two of four slots are its share: both workers use it."""
    story = Story()
    story.gpus = {"a": (Gpu("A"), Gpu("B", "Xid 79"))}
    assert allotted(story.add("a:4").answer()) == {"a/0#1": "A", "a/1#1": "A"}


def test_a_number_of_slots_wins_over_the_gpus():
    assert len(allotted(cluster("a:2", gpus={"a": "A B C"}))) == 2


def test_a_new_driver_knows_gpus_and_back_end():
    """The job keeps its back end, and a lost worker's successor gets the GPU that is free."""
    story = cluster("a:2", gpus={"a": "A B"}, min=1).submit("job").quiet(5.0)
    before = allotted(story)
    Away(story).new_driver().answer()
    assert (allotted(story), backend(story), story.cluster.phase) == (before, "nccl", "running")
    story.kill("a/0#1").quiet(5.0)
    assert allotted(story) == {"a/0#2": "A", "a/1#1": "B"}
