"""A script's node: what it still sends at its end."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from nbelastic.protocol import agent_messages, node_messages
from nbelastic.protocol import script_events as sev
from nbelastic.torchrun import external_node, output, rendezvous
from nbelastic.torchrun.elastic_agent import ElasticAgent, worker_spec
from nbelastic.torchrun.external_node import ExternalRendezvous
from nbelastic.torchrun.node import Node
from nbelastic.transport.client import Client

SETTINGS = {"host": "a", "number": 1, "heartbeat": 0.5, "home": ("127.0.0.1", "lo")}


def test_the_last_output_is_sent_once(tmp_path, monkeypatch):
    """A node whose script ends while the output is being read sends each part of it once, and then that it has left."""
    sent, begun, both = [], threading.Event(), threading.Barrier(2)

    def open_slowly(*arguments):
        file = open(*arguments)  # noqa: SIM115  (the reader closes it)
        begun.set()
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # a second thread that reads would find the same text
        return file

    def run(agent):
        agent._logs.reify({0: {}})
        (tmp_path / "a-0-0.out").write_text("the end\n")
        assert begun.wait(20)

    monkeypatch.setattr(output, "open", open_slowly, raising=False)
    monkeypatch.setattr(ElasticAgent, "run", run)
    monkeypatch.setattr(Client, "send", lambda _, message: sent.append(message))
    monkeypatch.chdir(tmp_path)
    node = Node({**SETTINGS, "relay": str(tmp_path)}, agent_messages.Script("job-1", "script.py", cold=True), tmp_path)
    assert not node.run()
    *outputs, left = [message for message in sent if not isinstance(message, sev.NodeReady)]
    assert [message.text for message in outputs] == ["the end\n"]
    assert left == sev.NodeLeft("a", "it has ended")


@pytest.mark.parametrize(("state", "has_succeeded"), [("SUCCEEDED", True), ("FAILED", False), ("UNHEALTHY", False)])
def test_a_node_succeeds_with_all_its_workers(tmp_path, monkeypatch, state, has_succeeded):
    """Torch's agent gives up workers that it calls unhealthy, in uninterruptible sleep. The next driver would take them for ended well."""
    monkeypatch.setattr(ElasticAgent, "run", lambda _: RunResult(WorkerState[state]))
    monkeypatch.setattr(Client, "send", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    node = Node({**SETTINGS, "relay": str(tmp_path)}, agent_messages.Script("job-1", "script.py", cold=True), tmp_path)
    assert node.run() is has_succeeded


def test_workers_have_their_time_to_save_though_a_node_is_ended_twice(tmp_path, monkeypatch):
    """The driver ends a node by a message and by its agent's SIGTERM, which may come while torch's agent ends the workers."""
    ended = []

    def end_workers(_agent, timeout):
        os.kill(os.getpid(), signal.SIGTERM)
        ended.append(timeout)

    monkeypatch.setattr(
        ElasticAgent, "_invoke_run", lambda agent, _: agent._worker_group.spec.rdzv_handler.num_nodes_waiting()
    )
    monkeypatch.setattr(ElasticAgent, "_shutdown", end_workers)
    node = Node({**SETTINGS, "relay": str(tmp_path)}, agent_messages.Script("job-1", "script.py", cold=True), tmp_path)
    node._rendezvous.receive(node_messages.EndNode("job-1 stopped", error=True))
    before = signal.signal(signal.SIGTERM, _terminate_process_handler)
    try:
        assert not node.run()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == [30]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # torch leaves its log files open then
@pytest.mark.parametrize(("program", "error"), [("missing", "No such file"), ("train.sh", "Permission denied")])
def test_a_program_that_cannot_be_executed(tmp_path, monkeypatch, program, error):
    """It is a failure of the script as any other, not of the host, which would be tried again without an end."""
    (tmp_path / "train.sh").touch(0o600)
    sent, rounds = [], []
    script = agent_messages.Script("job-1", str(tmp_path / program), no_python=True)

    def rendezvous_once(agent, group):
        if rounds:
            raise SystemExit  # the driver ends the job
        rounds.append(1)
        group.store, group.group_rank, group.group_world_size = object(), 0, 1
        group.workers = [Worker(local_rank=0, global_rank=3, role_rank=3, world_size=4, role_world_size=4)]
        group.master_addr, group.master_port = "127.0.0.1", 4000

    monkeypatch.setattr(ElasticAgent, "_rendezvous", rendezvous_once)
    handler = SimpleNamespace(use_agent_store=True, get_run_id=lambda: "job-1", shutdown=lambda: True)
    agent = ElasticAgent(
        worker_spec(script, handler, ()), script, output.WorkerLogs(tmp_path, "a", "0", "0"), sent.append
    )
    with pytest.raises(SystemExit):
        agent._invoke_run()
    assert [(type(event), event.failures[0].rank) for event in sent] == [(sev.NodeFailed, 3)]
    assert error in sent[0].failures[0].error


@pytest.mark.parametrize("left", ["", "{", "[]", '{"message": {}}', '{"message": "no", "timestamp": "soon"}'])
def test_an_error_file_that_torch_cannot_read_is_set_aside(tmp_path, monkeypatch, left):
    """The disk was full when a worker wrote it: the worker has failed, and torch's agent goes on."""
    path = tmp_path / "a-0-1.error.json"
    path.write_text(left)
    agent = object.__new__(ElasticAgent)
    agent._start_error = ""
    agent._logs = SimpleNamespace(error_files={0: path})
    agent._pcontext = SimpleNamespace(_pc=SimpleNamespace(processes=[SimpleNamespace(exitcode=1)]))
    monkeypatch.setattr(
        LocalElasticAgent,
        "_monitor_workers",
        lambda *_: ProcessFailure(0, 1, 1, str(path)) and RunResult(WorkerState.HEALTHY),
    )
    agent._monitor_workers(None)
    assert (tmp_path / "a-0-1.error.unreadable").read_text() == left


@pytest.mark.parametrize("stack", ["null", '["train.py"]', '"train.py"'])
def test_an_error_file_with_other_values_than_texts(tmp_path, stack):
    """The script wrote it itself, with a number as the error, which torch prints too."""
    error = f'{{"message": {{"message": 404, "extraInfo": {{"timestamp": "1", "py_callstack": {stack}}}}}}}'
    (tmp_path / "a-0-1.error.json").write_text(error)
    agent = object.__new__(ElasticAgent)
    agent._logs = SimpleNamespace(error_files={0: tmp_path / "a-0-1.error.json"})
    assert agent._failure(0, 0, 1).error == "404"


def test_a_long_traceback_of_a_new_interpreter(tmp_path):
    """A cold script's traceback through a model's many layers is in the error from its first frame on."""
    frames = ["Traceback (most recent call last):", *[f'  File "model.py", line {n}, in forward' for n in range(200)]]
    text = "\n".join([*frames, "ValueError: shape"])
    (tmp_path / "a-0-1.err").write_text(f"starts\n{text}")
    agent = object.__new__(ElasticAgent)
    agent._logs = SimpleNamespace(error_files={0: tmp_path / "a-0-1.error.json"})
    assert agent._failure(0, 0, 1).traceback == text


def test_torchs_agent_may_run_in_a_thread(monkeypatch):
    """`elastic_launch` in a notebook's thread: only the main thread may set signal handlers, so none is set there."""
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT")
    node = SimpleNamespace(_leave=None)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(ExternalRendezvous._wrap_signal_handlers, node).result(10)


def test_a_node_waits_for_a_driver_that_is_away(monkeypatch):
    """It does not repeat without end that it is ready: its host's agent would keep all of that for the next driver."""

    class EnoughError(Exception):
        pass

    class AwayDriver:
        def __init__(self):
            self.messages, self.looks = [], 0

        def connect(self, _):
            return self

        def start(self):
            pass

        def send(self, message):
            self.messages.append(message)

        @property
        def congested(self):
            self.looks += 1
            if self.looks == 20:
                raise EnoughError
            return len(self.messages) >= 3

    monkeypatch.setattr(rendezvous, "REPEAT_READY", 0.001)
    driver, ready = AwayDriver(), sev.NodeReady("a", 0, "", "default")
    node = rendezvous.DriverRendezvous(driver.connect, ready, ("127.0.0.1", "lo"), timeout=60.0)
    with pytest.raises(EnoughError):
        node.next_rendezvous()
    assert len(driver.messages) == 3


def test_torchruns_of_two_containers_are_two_nodes(monkeypatch):
    """Both are process 7 of their container, and the containers have the name of their machine."""
    found = SimpleNamespace(address="127.0.0.1:1", keys=None, name="c")
    monkeypatch.setattr(external_node.cluster_file, "find", lambda *_: found)
    for name in ("_home", "check_connection"):
        monkeypatch.setattr(external_node, name, lambda *_: None)
    monkeypatch.setattr(external_node, "ExternalRendezvous", lambda _, ready, *__, **___: ready.host)
    parameters = RendezvousParameters("nbelastic", "the connection file", "none", 1, 1)
    assert external_node.create(parameters) != external_node.create(parameters)
