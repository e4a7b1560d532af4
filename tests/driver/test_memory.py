"""The driver's memory stays bounded, however long the driver runs and however often workers die."""

from __future__ import annotations

import gc
import os
import weakref

from nbelastic.core import commands as cmd
from nbelastic.driver import job_run
from nbelastic.driver.job_run import JobRun
from nbelastic.driver.results import Outcome
from nbelastic.driver.telemetry import Telemetry
from nbelastic.protocol import agent_messages, messages, output_buffer
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import HostSpec
from nbelastic.system import versions
from tests.core.story import wid
from tests.driver.fakes import DriverWithFakes, run_story
from tests.support import driver_thread
from tests.support.waiting import until


def output_of(worker, text, end=None):
    return messages.WorkerOutput(wid(worker), "out", text, len(text) if end is None else end)


def test_lines_of_lost_workers_are_dropped_first(monkeypatch):
    """In a crash loop the lines of the oldest processes are dropped first; those of a worker that still prints stay."""
    monkeypatch.setattr(output_buffer, "MOST", 100)
    run = JobRun("job", None)
    position = 0
    for incarnation in range(1, 50):
        run.add_output(output_of(f"a/0#{incarnation}", "line\n" * 10))
        position += len("alive\n")
        run.add_output(output_of("b/0#1", "alive\n", position))
    kept = {str(w): len(lines) for w, lines in run.output.lines.items()}
    assert sum(kept.values()) == run.output._kept <= 100
    assert kept["b/0#1"] == 49
    assert list(kept)[:-1] == [f"a/0#{i}" for i in range(50 - len(kept) + 1, 50)]
    assert len(run.output._unfinished) + len(kept) == len(run._received_to) == len(kept)
    assert [line.text for _, line in run.output.since(0, "b/0#1")] == ["alive"] * 49


def test_only_the_last_outcomes_of_failed_programs_are_kept(monkeypatch):
    """Of many failed newcomers only the last outcomes are kept, with the values of workers that succeeded."""
    monkeypatch.setattr(job_run, "KEPT_ERRORS", 3)
    run = JobRun("job", None)
    run.add_outcome(wid("b/0#1"), Outcome(value=messages.Blob(2, b"42")))
    for incarnation in range(1, 10):
        run.add_outcome(wid(f"a/0#{incarnation}"), Outcome("ValueError: no", "traceback"))
    assert [str(w) for w in run.outcomes] == ["b/0#1", "a/0#7", "a/0#8", "a/0#9"]
    run.end(cmd.EndJob("job", "succeeded", "", (wid("b/0#1"),)))
    run.add_outcome(wid("a/0#9"), Outcome(value=messages.Blob(1, b"1")))
    assert (run.future.result(), run.outcomes) == ([messages.Blob(2, b"42")], {})


def test_jobs_that_are_over_are_forgotten(start_hostless):
    """An ended job is forgotten unless it is the last one or the notebook holds it; its name is not used again."""
    cluster = start_hostless()
    names, runs = [], []
    for _ in range(5):
        job = cluster.run(os.getpid)
        names.append(job.name)
        driver = driver_thread.driver_threads[cluster.name].driver
        runs.append((weakref.ref(job._copy), weakref.ref(driver.runs[job.name])))
        job.stop()
        job.wait(timeout=20)
        assert driver.runs[job.name].program is None
    assert names == [f"job-{number}" for number in range(1, 6)]
    assert cluster.job is job
    gc.collect()
    assert [(copy() is None, run() is None) for copy, run in runs] == [(True, True)] * 3 + [(False, False)] * 2


def test_a_sample_of_a_lost_worker_is_dropped():
    """A sample of a lost worker is dropped, because no later event would remove it."""
    telemetry = Telemetry()
    sample = agent_messages.AgentSample("a", 1.0, 2, {"a/0#1": (1.0, 2), "a/0#2": (3.0, 4)}, 5, ())
    telemetry.add_sample(sample, {wid("a/0#2")}, 1.0)
    assert telemetry.worker_samples == {"a/0#2": (3.0, 4)}


def test_requests_without_an_id_get_different_ids(start_hostless):
    """Two requests without an id get different ids, so that the outcome of one is not shown for the other."""
    cluster = start_hostless()
    for most in (3, 4):
        cluster.order({"order": "scale", "max": most}, "a page")
    until(lambda: cluster.status().max == 4)
    assert len({order.id for order in cluster.status().orders}) == 2
    until(lambda: [order.word for order in cluster.status().orders] == ["done", "done"], what="both to be done")


def test_a_host_that_has_left_is_not_compared_and_not_remembered(tmp_path):
    """Packages of a new host are compared with those of the present hosts. Nothing is kept of the environment of one that left."""

    def reports(fakes, host, version):
        agent = next(agent for agent in fakes.agents.values() if agent.spec.name == host and agent.is_alive)
        hello = agent_messages.AgentHello(host, agent._number, versions.installed(), packages={"numpy": version})
        agent.send(hello)

    async def story():
        async with DriverWithFakes(tmp_path, "a:1", min=1) as fakes:
            for number in range(5):
                fakes.driver.post(ev.HostAdded(HostSpec(f"b{number}", 1), "you"))
                await fakes.advance_time(1.0)
                reports(fakes, f"b{number}", f"{number}.0")
                await fakes.settle()
                fakes.driver.post(ev.HostRemoved(f"b{number}", now=True, by="you"))
                await fakes.advance_time(5.0)
            reports(fakes, "a", "9.0")
            await fakes.settle()
            assert fakes.kinds().count("environment-ready") == 6
            assert "environment-differs" not in fakes.kinds()
            received = fakes.driver._components.received_messages
            assert [*received._packages] == [*received._environments] == ["a"]

    run_story(story)
