"""The driver snapshot of a kept cluster: complete or absent, private, and read by the next driver or refused."""

from __future__ import annotations

import asyncio
import json
import os
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from nbelastic.client.saved_arguments import arguments_to_attach, saved_arguments
from nbelastic.core import commands as cmd
from nbelastic.core.cluster_snapshot import snapshot_of
from nbelastic.core.state import ClusterState, Host, HostPhase, Job, Slot
from nbelastic.driver import snapshot_writer
from nbelastic.driver.driver import Driver
from nbelastic.driver.driver_snapshot import DriverSnapshot, SavedAgent, SavedJob
from nbelastic.driver.event_log import EventLog
from nbelastic.driver.snapshot_writer import OUTPUT, SnapshotWriter
from nbelastic.driver.telemetry import Telemetry
from nbelastic.errors import UsageError
from nbelastic.protocol import events as ev
from nbelastic.protocol import local_clusters
from nbelastic.protocol.cluster_limits import Limits
from nbelastic.protocol.ids import HostSpec, WorkerId
from nbelastic.protocol.local_clusters import SNAPSHOT_FILE, claim_name, clusters, find_run_folder
from nbelastic.protocol.messages import WorkerOutput
from nbelastic.protocol.run_folder import RunFolder
from nbelastic.protocol.worker_messages import Leave
from nbelastic.provision.discovery import source_of
from nbelastic.system.folder_paths import runs_folder
from nbelastic.system.process_identity import identity, is_alive
from nbelastic.transport.keys import Keys
from tests.driver.fakes import DriverWithFakes, FakeAgent, run_story, training

US = identity(os.getpid())


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def example(name: str = "train", process: str = US) -> DriverSnapshot:
    host = Host(HostSpec("a", 2), 0, (Slot(incarnation=1),), phase=HostPhase.UP)
    cluster = snapshot_of(ClusterState(Limits(), hosts={"a": host}, job=Job("job-1")))
    return DriverSnapshot(
        version="0.1.0",
        wire=local_clusters.fingerprint(),
        name=name,
        term=1,
        address="tcp://127.0.0.1:20001",
        keys=Keys.make(),
        arguments={},
        log_dir="/logs",
        cluster=cluster,
        agents={"a": SavedAgent(1, process)},
        processes=(process,),
        job=SavedJob("job-1"),
        hosts=("a",),
        slots=2,
        running="job-1",
    )


def cluster_without_driver(name: str = "train", process: str = US) -> RunFolder:
    """Make a cluster whose driver has ended."""
    run_folder = RunFolder(name)
    run_folder.acquire()
    run_folder.make()
    example(name, process).write(run_folder.path)
    run_folder.release(keep_folder=True)
    return run_folder


def test_a_kill_during_the_write_keeps_the_old_snapshot(monkeypatch):
    """The new snapshot is written beside the old one, so a kill during the write keeps the old one."""
    run_folder = cluster_without_driver()
    before = DriverSnapshot.read(run_folder.path)
    data = json.dumps({"any": "thing"}).encode()
    for cut in range(len(data)):
        (run_folder.path / f".{SNAPSHOT_FILE}.new").write_bytes(data[:cut])
        assert DriverSnapshot.read(run_folder.path) == before
    replace(before, term=2).write(run_folder.path)
    assert DriverSnapshot.read(run_folder.path).term == 2
    assert (run_folder.path / SNAPSHOT_FILE).stat().st_mode & 0o777 == 0o600


def test_a_file_of_another_user_is_refused(monkeypatch):
    """The snapshot of another user is refused: the cluster and its keys belong to that user."""
    run_folder = cluster_without_driver()
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(UsageError, match=f"belongs to another user .uid {owner}."):
        DriverSnapshot.read(run_folder.path)


def test_the_list_of_clusters():
    """The list has clusters with and without a driver, also damaged ones; folders of dead clusters are removed."""
    kept, dead, running, broken = (
        cluster_without_driver("kept"),
        cluster_without_driver("dead", "1@1"),
        RunFolder("running"),
        cluster_without_driver("broken"),
    )
    running.acquire()
    (broken.path / SNAPSHOT_FILE).write_text("{")
    found = {info.name: info for info in clusters()}
    assert found.keys() == {"kept", "running", "broken"}
    assert (found["kept"].driver, found["kept"].hosts, found["kept"].job) == (0, ("a",), "job-1")
    assert found["running"].driver == os.getpid()
    assert "damaged" in found["broken"].problem
    assert not dead.path.exists()
    assert not dead.lock.exists()
    assert kept.path.exists()
    running.release()


def test_a_name_belongs_to_one_cluster():
    """A name is taken while its cluster lives, with a driver or without, and free afterwards."""
    run_folder = cluster_without_driver()
    with pytest.raises(UsageError, match="runs without a driver: attach to it"):
        claim_name(RunFolder("train"), "n")
    example(process="1@1").write(run_folder.path)
    again = RunFolder("train")
    claim_name(again, "n")
    with pytest.raises(UsageError, match=f"running already .process {os.getpid()}."):
        RunFolder("train").acquire()
    assert list(again.path.iterdir()) == []
    again.release()
    assert list(runs_folder().iterdir()) == []


def test_a_cluster_is_found_by_name_or_folder():
    """A cluster is found by its name, by its folder, or without either if it is the only one."""
    with pytest.raises(UsageError, match="you have no cluster"):
        find_run_folder(None)
    run_folder = cluster_without_driver("one")
    assert find_run_folder(None) == find_run_folder("one") == find_run_folder(str(run_folder.path)) == run_folder.path
    cluster_without_driver("two")
    with pytest.raises(UsageError, match="say which cluster: one, two"):
        find_run_folder(None)


def test_saved_arguments_work_in_another_folder(tmp_path, monkeypatch):
    """Saved arguments are JSON with absolute paths, so that a process in another folder can use them."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\\necho a")
    script.chmod(0o755)
    given = {"min": 2, "max": None, "hosts": None, "discovery": "./hosts.sh gpu", "preload": ("numpy",), "name": None}
    kept = saved_arguments(given, source_of("./hosts.sh gpu", None, None, 1))
    assert kept == {"min": 2, "discovery": f"{script} gpu", "preload": ["numpy"]}
    fixed = saved_arguments(
        {"discovery": None, "env": {"A": 1}, "log_dir": Path("logs")}, source_of(None, "u@h:2,[fd00::1]:1", None, 1)
    )
    assert fixed == {"hosts": ["u@h:2", "[fd00::1]:1"], "env": {"A": "1"}, "log_dir": str(tmp_path / "logs")}
    assert json.loads(json.dumps([kept, fixed])) == [kept, fixed]


def test_a_discovery_object_is_not_saved():
    """A discovery object is not saved: an attach passes it again, or the hosts stay as they are."""

    class Mine:
        async def hosts(self):
            return ()

    mine = Mine()
    kept = saved_arguments({"discovery": mine}, source_of(mine, None, None, 1))
    again = partial(arguments_to_attach, "train", "/logs", kept)
    assert again(None) == {"name": "train", "log_dir": "/logs"}
    assert again(mine) == {"name": "train", "log_dir": "/logs", "discovery": mine}


def test_a_process_is_identified_by_pid_and_start_time():
    """A process is identified by its pid and start time, because pids are used again."""
    assert is_alive(US)
    assert not is_alive(US + "0")
    assert not is_alive("")
    assert identity(2**22 + 1) == ""


def test_a_snapshot_that_is_no_text_is_named(tmp_path):
    """Clients get one line, and the list of clusters has the other ones."""
    folder = cluster_without_driver("broken").path
    cluster_without_driver("whole")
    data = (folder / SNAPSHOT_FILE).read_bytes()
    (folder / SNAPSHOT_FILE).write_bytes(data.replace(b'"/logs"', b'"/\xe2\x82"'))
    with pytest.raises(UsageError, match="is damaged"):
        DriverSnapshot.read(folder)
    listed = {info.name: info.problem for info in clusters()}
    assert set(listed) == {"broken", "whole"}
    assert "is damaged" in listed["broken"]


def test_a_line_of_output_that_was_cut_off_costs_no_other():
    """A driver is killed in the middle of a character. Each next driver loads all other lines of the workers' output."""
    run_folder = RunFolder("cut")
    run_folder.make()
    worker = WorkerId("a", 0, 1)

    def driver():
        return SnapshotWriter(run_folder, {})

    def printed(text):
        return WorkerOutput(worker, "out", text, len(text), "job-1")

    first = driver()
    first.append_output(printed("one"))
    first.append_output(printed("75 % █████"))
    first.close()
    path = run_folder.path / OUTPUT
    path.write_bytes(path.read_bytes().rpartition("█".encode())[0] + "█".encode()[:2])
    for number in range(2):
        after = driver()
        assert [message.text for message in after._load_output()] == ["one", "two", "two"][: 1 + number]
        after.append_output(printed("two"))
        after.close()
    lines = path.read_bytes().splitlines()
    assert len(lines) == 4


def test_a_new_job_begins_without_the_progress_of_the_last_one():
    """The driver is killed before the first step of a second job: the next one shows no steps, reports or curves of the first."""
    run_folder = RunFolder("second")
    run_folder.make()
    writer, progress = SnapshotWriter(run_folder, {}), Telemetry()
    writer.save_new_job(SavedJob("job-1"))
    progress.add_commit(5000, 1.0)
    progress.add_report({"loss": 0.5, "total": 5000.0})
    progress.history.add((5000, 1.0, 1, 2), {"loss": 0.5})

    def of_the_next_driver():
        found = Telemetry()
        SnapshotWriter(run_folder, {}).load_output_and_telemetry({}, found)
        return found.step, found.total, found.report, len(found.history.rows)

    writer.save_telemetry(progress, 100.0)
    assert of_the_next_driver() == (5000, 5000, {"loss": 0.5}, 1)
    writer.save_new_job(SavedJob("job-2"))
    assert of_the_next_driver() == (0, None, {}, 0)
    writer.save_telemetry(Telemetry(step=1), 100.1)
    assert of_the_next_driver()[0] == 1


def test_a_cluster_stops_although_its_disk_is_full(tmp_path, monkeypatch):
    """What workers have printed last cannot be saved. The driver does not take that for a failure of its own, after which the cluster goes on."""
    monkeypatch.setattr(snapshot_writer, "append_private", lambda _: os.open("/dev/full", os.O_WRONLY))

    async def story():
        async with training(tmp_path, "a:1", min=1) as fakes:
            (worker,) = fakes.workers.values()
            worker.send(WorkerOutput(worker.id, "out", "the end", 7, job="job-1"))
            await fakes.settle()
            assert "driver-error" in fakes.kinds()
        assert fakes.driver.why_ended == "the test is over"

    run_story(story)


def test_the_event_log_continues(tmp_path):
    """The next driver's event log has the earlier records, although the last one was cut off."""
    path = tmp_path / "events.jsonl"
    first = EventLog(path)
    first.record(cmd.Record("job-started", "one"), 1.0, 2)
    first.close()
    with path.open("a") as file:
        file.write('{"at": 2, "record": {"time": 1, "kind": "cut')
    second = EventLog(path, append=True)
    second.record(cmd.Record("job-ended", "two"), 3.0, 2)
    second.close()
    assert [record.text for record in second.kept()[0]] == ["one", "two"]
    third = EventLog(path, append=True)
    assert [record.text for record in third.kept()[0]] == ["one", "two"]
    third.close()


def test_a_start_of_many_agents_is_saved_a_few_times_but_before_each(tmp_path, monkeypatch):
    """The next driver never uses the number of an agent again, which may still run. Two saves for each of 1,250 hosts took 7 s."""
    folder, starts, saves = tmp_path / "run", [], []
    start, save = FakeAgent.start, SnapshotWriter.save

    def noted_start(agent, config):
        starts.append(agent._number <= DriverSnapshot.read(folder).agents_started)
        start(agent, config)

    def noted_save(writer):
        saves.append(len(starts))
        save(writer)

    monkeypatch.setattr(FakeAgent, "start", noted_start)
    monkeypatch.setattr(SnapshotWriter, "save", noted_save)

    async def story():
        async with DriverWithFakes(tmp_path, ",".join(f"h{number}:1" for number in range(50))) as fakes:
            await fakes.advance_time(1)
            assert set(DriverSnapshot.read(folder).agents) == {f"h{number}" for number in range(50)}
            assert len(saves) < 25

    run_story(story)
    assert starts == [True] * 50


def test_an_announced_end_is_as_far_for_the_next_driver(tmp_path):
    """The driver's process was stopped for 10 minutes, then a host's end was announced: the next driver ends it no earlier."""
    left = []

    async def story():
        async with training(tmp_path, "a:1,b:1", min=1) as fakes:
            asyncio.get_running_loop().now += 600.0
            fakes.lost.add(("b/0#1", Leave))  # it makes no commit meanwhile
            fakes.driver.post(ev.HostRemoved("b", by="the cloud", within=120.0))
            await fakes.settle()
            previous = DriverSnapshot.read(tmp_path / "run")
            after = Driver(
                fakes.driver.settings,
                RunFolder("fake"),
                SnapshotWriter(RunFolder("fake"), {}, previous),
                fakes._dependencies(),
            )
            left.append(previous.cluster.ending["b"].at - after._clock.now())
            after.event_log.close()

    run_story(story)
    assert left == [pytest.approx(120.0, abs=1.0)]
