"""What a dashboard of 64 hosts with 8 slots costs its kernel: `python -m tests.benchmarks.dashboard_kernel`.

A real kernel attaches to a process that sends it what a driver would, four updates per second, and shows the dashboard. The
figures are the kernel's CPU time in percent of one core: at rest, and with updates that change a quarter of the hosts, as
agents sample once per second, or all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import start_new_kernel
from msgspec.structs import replace

from nbelastic.protocol import client_messages as u
from nbelastic.protocol.report_history import ReportHistory
from nbelastic.protocol.status import DriverFacts, EventRecord, Status
from nbelastic.system import versions
from nbelastic.system.private_sockets import bind_in
from tests.benchmarks.dashboard import HOSTS, wide

PERIOD = 0.25  # seconds between two updates
ATTACH = """\
from pathlib import Path
import nbelastic as nbe
from nbelastic.client.connection import Connection
cluster = nbe.Cluster("localhost:1", name="wide")
cluster._link.attach(Connection(Path({folder!r})), {{}}, None, 10.0)
cluster.dashboard()
"""


def mixed(step: int, parts: int) -> Status:
    """The status in which one of `parts` of the hosts has news at each step."""
    news = [wide(step - (step - h) % parts) for h in range(parts)]
    hosts = tuple(news[h % parts].hosts[h] for h in range(HOSTS))
    workers = tuple(news[(w.rank or 0) // 8 % parts].workers[i] for i, w in enumerate(news[0].workers))
    return replace(news[0], hosts=hosts, workers=workers, step=step, time=1.7e9 + step / 4, report={"loss": 2.3 / step})


class Driver(asyncio.Protocol):
    """Greets a client, and sends updates to it."""

    def __init__(self, parts: int) -> None:
        self._parts, self._history = parts, ReportHistory()

    def connection_made(self, transport: Any) -> None:
        facts = DriverFacts(os.getpid(), time.time(), 1, None, versions.installed())
        transport.write(u.frame(u.DriverHello({}, "/tmp", "1", facts)))
        self._task = asyncio.get_running_loop().create_task(self._send(transport))

    async def _send(self, transport: Any) -> None:
        events = [EventRecord(1.7e9, "world-formed", "world of 512 at generation 3", generation=3)] * 12
        step, sent = 1000, ("", 0)
        while not transport.is_closing():
            step += 1
            self._history.add((step, 1.7e9 + step / 4, 3, 512), {"loss": 2.3 / step})
            rows = self._history.since(*sent)
            sent = rows.version, rows.start + len(rows.rows)
            status = u.encoded(mixed(step, self._parts) if self._parts else replace(wide(0), time=1.7e9))
            transport.write(u.frame(u.Update(status, 12, 1, events=events, known_jobs=["job-1"], reports=rows)))
            events = []
            await asyncio.sleep(PERIOD if self._parts else 3600)


def drive(folder: str, parts: int) -> None:
    async def serve() -> None:
        listener = bind_in(Path(folder), u.SOCKET)
        server = await asyncio.get_running_loop().create_unix_server(lambda: Driver(parts), sock=listener)
        await server.serve_forever()

    asyncio.run(serve())


def measure(parts: int, seconds: float) -> float:
    """The kernel's CPU time in percent of a core while it shows the dashboard."""
    with tempfile.TemporaryDirectory() as folder:
        server = mp.get_context("spawn").Process(target=drive, args=(folder, parts), daemon=True)
        server.start()
        while not (Path(folder) / u.SOCKET).exists():
            time.sleep(0.05)
        manager, client = start_new_kernel()
        try:
            reply = client.execute_interactive(ATTACH.format(folder=folder), output_hook=lambda _: None, timeout=60)
            assert reply["content"]["status"] == "ok", reply["content"]
            time.sleep(2.0)
            kernel = psutil.Process(manager.provisioner.process.pid)
            began = sum(kernel.cpu_times()[:2])
            time.sleep(seconds)
            return (sum(kernel.cpu_times()[:2]) - began) / seconds * 100
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
            server.kill()
            server.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for what, parts in (("at rest", 0), ("a quarter of the hosts per update", 4), ("all hosts per update", 1)):
        found = sorted(measure(parts, options.seconds) for _ in range(options.rounds))
        print(f"{what}: {', '.join(f'{value:.2f}' for value in found)} % of a core", flush=True)


if __name__ == "__main__":
    main()
