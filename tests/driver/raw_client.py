"""How tests act on a driver that runs in a thread: call it, send it any message as a raw client, and end its jobs."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import nbelastic as nbe
from nbelastic.core import commands as cmd
from nbelastic.protocol import client_messages as u
from nbelastic.protocol import events as ev
from nbelastic.protocol import messages
from nbelastic.system import pickling
from nbelastic.system.private_files import replace_private
from nbelastic.system.private_sockets import connect_in
from tests.core.story import wid
from tests.support import driver_thread
from tests.support.processes import run_folder


def driver_of(cluster):
    return driver_thread.driver_threads[cluster.name].driver


def in_driver(cluster, act):
    """Return the result of `act(driver)`, called in the driver's thread."""
    done: Future[Any] = Future()
    thread = driver_thread.driver_threads[cluster.name]

    def run() -> None:
        try:
            done.set_result(act(thread.driver))
        except Exception as error:
            done.set_exception(error)

    thread._loop.call_soon_threadsafe(run)
    return done.result(10)


class RawClient:
    """A client that sends any message."""

    def __init__(self, cluster: nbe.Cluster) -> None:
        self.socket = connect_in(run_folder(cluster), u.SOCKET)
        self.socket.settimeout(10)
        self._frames, self._messages = u.Frames(u.FROM_DRIVER), []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, message: u.ToDriver) -> None:
        self.socket.sendall(u.frame(message))

    def receive(self) -> u.ToClient | None:
        """Return the next message, or None if the driver has closed the connection."""
        while not self._messages:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._messages += self._frames.feed(data)
        return self._messages.pop(0)


def end_job(cluster, job, outcome):
    """End the job with this outcome of its only worker."""

    def end(driver):
        run = driver.runs[job.name]
        run.add_outcome(wid("a/0#1"), outcome)
        run.end(
            cmd.EndJob(job.name, "failed" if outcome.error else "succeeded", "it failed", (wid("a/0#1"),), wid("a/0#1"))
        )
        driver.post(ev.JobStopRequested(job.name, "the test has ended it"))  # so that the world ends too
        driver._pending.check_and_publish()

    in_driver(cluster, end)


def blob(value, path: Path | None = None) -> messages.Blob:
    packed = pickling.pack(value)
    if path is None:
        return messages.Blob(pickling.size(packed), b"".join(packed))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_private(path, packed)
    return messages.Blob(pickling.size(packed), path=str(path))
