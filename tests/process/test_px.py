"""`%px`: interrupts, output, and a client that connects."""

from __future__ import annotations

import os
import threading
from typing import Any

import ipyparallel as ipp
import pytest

from nbelastic.ipp import client as client_module
from nbelastic.ipp.client import connect
from tests.support.processes import run_folder
from tests.support.waiting import until


@pytest.mark.parametrize("line", ["time.sleep(600)", "await asyncio.sleep(600)"])
def test_ctrl_c_interrupts_px_on_the_workers(make, tmp_path, line):
    """ipyparallel then sends SIGINT, and waits for the answer. The workers stay; while they run nothing they ignore it."""
    cluster = make("localhost:1", min=1)
    client, pids = cluster.client, [worker.pid for worker in cluster.workers]
    running = tmp_path / "running"
    client[:].execute(f"import asyncio, time\nopen({str(running)!r}, 'w').close()\n{line}")
    until(running.exists, what="the code to run")
    for _ in range(2):
        client.send_signal("SIGINT", block=False).result(timeout=20)
        assert client[:].apply_async(os.getpid).get(timeout=20) == pids


def test_a_call_that_is_sent_after_a_check_is_not_lost(make, monkeypatch):
    """The client looks for lost answers in another thread, while the user's thread is between counting a call and sending it."""
    client = make("localhost:1", min=1).client
    (uuid,) = client._engines.values()
    prepare, answered = client.create_message_futures, threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        client._io_loop.add_callback(client._fail_lost_calls, uuid)
        client._io_loop.call_later(1.0, answered.set)
        answered.wait(20)
        return prepare(*args, **options)

    monkeypatch.setattr(client, "create_message_futures", slow)
    assert client[:].apply_async(len, "ab").get(timeout=20) == [2]


def test_px_prints_after_a_registration_during_a_cell(make, tmp_path):
    """A newcomer becomes an engine while its setup cell awaits something. Afterwards it has the output of %px."""
    go = tmp_path / "go"
    source = f"import asyncio, os\nwhile not os.path.exists({str(go)!r}):\n    await asyncio.sleep(0.01)\n"
    source += "for _ in range(50):\n    await asyncio.sleep(0.01)"  # the controller's answer arrives
    go.touch()
    cluster = make("localhost:1", min=1)
    assert len(cluster.client.ids) == 1
    cluster.execute(source, setup=True, timeout=20)
    go.unlink()
    cluster.add_host("localhost:2")
    number = run_folder(cluster) / "ipython" / "log" / f"engines{cluster.name}.json"
    until(lambda: number.read_text() == "2", what="the controller to answer the newcomer")  # the next engine's number
    go.touch()
    cluster.wait(2, timeout=20)
    result = cluster.client[:].execute("print('here')\nfrom IPython.display import display\ndisplay(7)")
    result.get(timeout=20)
    until(lambda: result.stdout == ["here\n"] * 2 and all(result.outputs), what="the output of %px")
    assert [shown[0]["data"]["text/plain"] for shown in result.outputs] == ["7"] * 2


def test_ctrl_c_while_a_client_connects_leaves_nothing_open(monkeypatch, tmp_path):
    """The user presses Ctrl-C while it waits for the controller's answer."""
    sockets = []

    class RecordingContext(client_module.Context):
        def socket(self, *args: Any, **options: Any) -> Any:
            sockets.append(super().socket(*args, **options))
            return sockets[-1]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ipp.Client, "_connect", interrupted)
    monkeypatch.setattr(client_module, "Context", RecordingContext)
    names = ("control", "task", "mux", "iopub", "notification", "registration", "broadcast")
    information = {
        "interface": "tcp://127.0.0.1",
        "location": None,
        "ssh": "",
        "task_scheme": "leastload",
        "key": "key",
    }
    information |= {"pack": "json", "unpack": "json", "signature_scheme": "hmac-sha256"} | dict.fromkeys(names, 9)
    with pytest.raises(KeyboardInterrupt):
        connect(information, "nowhere", str(tmp_path))
    assert sockets
    assert all(socket.closed for socket in sockets)
