"""A worker becomes an ipyparallel engine, or reports why it cannot."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

from nbelastic.programs import program
from nbelastic.programs.program import Runner
from nbelastic.protocol import cell_messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.worker.worker_report import WorkerFacts

W = WorkerId("a", 0, 1)


def test_a_tunnel_that_does_not_answer_delays_no_cell(monkeypatch):
    """A cell runs meanwhile. Then the driver gets the error, and the worker tries again when it is asked to."""
    sent, stalled = [], threading.Event()

    def engine_connection(*_):
        stalled.wait()
        raise TimeoutError("timed out")

    async def story():
        arrived = asyncio.Queue()
        session = SimpleNamespace(
            worker=W,
            relay=Path(),
            facts=WorkerFacts(),
            link=SimpleNamespace(send=arrived.put_nowait),
            cell_ended=arrived.put_nowait,
            cell_pieces=SimpleNamespace(put=None),
        )
        runner = Runner(session, "", "")
        serving = asyncio.create_task(runner.serve())
        for message in (worker_messages.ConnectEngine("{}"), cell_messages.Cell(3, "1")):
            runner.take(message)
        sent.append(await arrived.get())
        stalled.set()
        sent.append(await arrived.get())
        runner.take(worker_messages.ConnectEngine("{}"))
        sent.append(await arrived.get())
        serving.cancel()

    async def run(worker, cell, *_):
        return cell_messages.CellResult(worker, cell.number, "", "", "", "")

    monkeypatch.setattr(program.cells, "run", run)
    monkeypatch.setattr(program, "get_ipython", lambda: SimpleNamespace(user_ns={}))
    monkeypatch.setattr(program, "engine_connection", engine_connection)
    asyncio.run(asyncio.wait_for(story(), 20))
    assert isinstance(sent[0], cell_messages.CellResult)
    assert sent[1:] == [worker_messages.EngineConnected(W, "", "TimeoutError: timed out")] * 2
