"""torch's `LocalElasticAgent`, which tells the driver what becomes of its workers and leaves the counting to it."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from nbelastic.protocol import agent_messages, node_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.exit_codes import exit_text
from nbelastic.system.processes import kill_group
from nbelastic.torchrun.output import JobLogs
from nbelastic.torchrun.rendezvous import DriverRendezvous
from nbelastic.torchrun.warm import own_part, run

TAIL = 4000  # bytes of a worker's stderr that are told where it left no error file


def worker_spec(script: agent_messages.Script, rendezvous: DriverRendezvous, known: tuple[str, ...]) -> WorkerSpec:
    """What torch's agent is to start: a script in forks of the template, or a command."""
    entrypoint: Callable[..., None] | str
    arguments: tuple[Any, ...]
    if script.no_python:
        entrypoint, arguments = script.target, script.arguments
    elif script.cold:
        module = ("-m",) if script.module else ()
        entrypoint = os.environ.get("PYTHON_EXEC", sys.executable)
        arguments = ("-u", *module, script.target, *script.arguments)
    else:
        entrypoint, arguments = run, (script.target, script.module, known, *script.arguments)
    return WorkerSpec(
        role=script.role,
        local_world_size=1,  # until a round says how many
        entrypoint=entrypoint,
        args=arguments,
        rdzv_handler=rendezvous,
        max_restarts=script.max_restarts + 1,  # it always comes back to ask: the driver counts
        monitor_interval=script.monitor_interval,
    )


class JobAgent(LocalElasticAgent):  # type: ignore[misc]  # torch carries no types here
    """`tell` sends to the driver. Everything but `workers` belongs to the main thread."""

    def __init__(
        self, spec: WorkerSpec, script: agent_messages.Script, logs: JobLogs, tell: Callable[[ev.Event], None]
    ) -> None:
        super().__init__(
            spec,
            logs,
            start_method="forkserver",
            exit_barrier_timeout=script.exit_barrier,
            shutdown_timeout=int(script.shutdown),
        )
        self._script, self._logs, self._tell = script, logs, tell
        self._host = ""
        self._number = 0
        self.workers: tuple[tuple[int, ...], int] = ((), 0)  # pids by local rank, and their round

    def begin(self, order: node_messages.Round) -> None:
        """A round in which this node is: it is told how many workers to start, and how often there was a restart."""
        spec = self._worker_group.spec
        seat = order.assignments[order.rank]
        self._host, self._number, self._logs.round = seat.host, order.round, order.round
        spec.local_world_size = seat.workers
        self._remaining_restarts = spec.max_restarts - order.restarts

    def _set_local_rank_env(self, worker_env: dict[str, str], local_rank: int, spec: WorkerSpec) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        worker_env["TORCHELASTIC_MAX_RESTARTS"] = str(self._script.max_restarts)
        for name, value in os.environ.items():  # a fork of the template has the template's
            worker_env.setdefault(name, value)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self.workers = (tuple(pids[rank] for rank in sorted(pids)), self._number)
        self._tell(sev.NodeStarted(self._host, self._number, self.workers[0]))
        return pids

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        del worker_group
        self._shutdown(timeout=self._shutdown_timeout)
        self.kill_groups()

    def kill_groups(self) -> None:
        """What the workers had started, too; and torch's own notes of what they raised."""
        pids, number = self.workers
        for pid in pids:
            kill_group(pid)
        self.workers = ((), number)
        for path in getattr(getattr(self._pcontext, "_pc", None), "error_files", ()):
            Path(path).unlink(missing_ok=True)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._note_quiet_ends()
        result = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._tell(sev.NodeFailed(self._host, self._number, self._failures(result)))
        return result

    def _note_quiet_ends(self) -> None:
        """A fork that ended with `os._exit(0)` brings no value, and torch would wait for it for ever."""
        context = self._pcontext
        started = getattr(context, "_pc", None)
        if started is None:
            return
        for local_rank, process in enumerate(started.processes):
            if process.exitcode == 0 and context._ret_vals[local_rank].empty():
                context._return_values.setdefault(local_rank, None)

    def _exit_barrier(self) -> None:
        self._tell(sev.NodeSucceeded(self._host, self._number))
        super()._exit_barrier()

    def _failures(self, result: RunResult) -> tuple[sev.Failure, ...]:
        """Of all workers of this node that have not ended well."""
        first = self._worker_group.workers[0].global_rank
        codes = self._codes()
        for rank, failure in result.failures.items():
            codes[rank - first] = failure.exitcode
        return tuple(self._failure(first, local_rank, code) for local_rank, code in sorted(codes.items()) if code) or (
            sev.Failure(first, 0, 1, f"the worker group is {result.state.name}"),
        )

    def _codes(self) -> dict[int, int]:
        context = self._pcontext
        if hasattr(context, "subprocess_handlers"):
            return {rank: each.proc.poll() or 0 for rank, each in context.subprocess_handlers.items()}
        return {rank: process.exitcode or 0 for rank, process in enumerate(context._pc.processes)}

    def _failure(self, first: int, local_rank: int, code: int) -> sev.Failure:
        path = self._logs.error_files[local_rank]
        error, text, ago = exit_text(code), "", 0.0
        try:
            ago = max(0.0, time.time() - path.stat().st_mtime)
            path.chmod(0o600)
            said = json.loads(path.read_text())["message"]
            error, text = (said, "") if isinstance(said, str) else (said["message"], said["extraInfo"]["py_callstack"])
        except (OSError, ValueError, KeyError, TypeError):  # it left none, or one of its own making
            if code > 0:
                text = _last_traceback(path.with_name(path.name.replace(".error.json", ".err")))
        return sev.Failure(first + local_rank, local_rank, code, _line(error), own_part(text), ago)


def _line(text: str) -> str:
    first = (text.strip().splitlines() or ["an error without a message"])[0]
    return first if len(first) < 500 else f"{first[:500]}…"


def _last_traceback(path: Path) -> str:
    """What a fresh interpreter printed at its end."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            said = file.read().decode(errors="replace")
    except OSError:
        return ""
    said = re.sub(r"^\[rank\d+\]: ", "", said, flags=re.MULTILINE)  # torch's mark, where a process group stands
    begin = said.rfind("Traceback (most recent call last):")
    return said[begin:] if begin >= 0 else ""
