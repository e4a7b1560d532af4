"""torch's `LocalElasticAgent`, which reports its workers' ends to the driver. The driver counts restarts."""

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
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from nbelastic.protocol import agent_messages, node_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.exit_codes import exit_text
from nbelastic.system.processes import kill_group
from nbelastic.torchrun.forked_script import run_script
from nbelastic.torchrun.output import WorkerLogs
from nbelastic.torchrun.rendezvous import DriverRendezvous
from nbelastic.torchrun.tracebacks import first_line, user_traceback

TAIL = 1 << 16  # bytes of a worker's stderr that are searched for a traceback if it left no error file


def worker_spec(script: agent_messages.Script, rendezvous: DriverRendezvous, variables: tuple[str, ...]) -> WorkerSpec:
    """Have torch's agent start the script in forks of the template, or as a command. `variables`: see `run_script`."""
    entrypoint: Callable[..., None] | str
    arguments: tuple[Any, ...]
    if script.no_python:
        entrypoint, arguments = script.target, script.arguments
    elif script.cold:
        module = ("-m",) if script.module else ()
        entrypoint = os.environ.get("PYTHON_EXEC", sys.executable)
        arguments = ("-u", *module, script.target, *script.arguments)
    else:
        entrypoint, arguments = run_script, (script.target, script.module, variables, *script.arguments)
    return WorkerSpec(
        role=script.role,
        local_world_size=1,  # until a round begins
        entrypoint=entrypoint,
        args=arguments,
        rdzv_handler=rendezvous,
        max_restarts=script.max_restarts
        + 1,  # so that the agent always asks for another round: the driver counts restarts
        monitor_interval=script.monitor_interval,
    )


class ElasticAgent(LocalElasticAgent):  # type: ignore[misc]  # torch carries no types here
    """`send` sends to the driver. Other threads may read `workers` only."""

    def __init__(
        self, spec: WorkerSpec, script: agent_messages.Script, logs: WorkerLogs, send: Callable[[ev.Event], None]
    ) -> None:
        super().__init__(
            spec,
            logs,
            start_method="forkserver",
            exit_barrier_timeout=script.exit_barrier,
            shutdown_timeout=int(script.shutdown),
        )
        self._script, self._logs, self._send = script, logs, send
        self._host = ""
        self._round = 0
        self._start_error = ""  # why the script's command could not be executed in this round
        self.workers: tuple[tuple[int, ...], int] = ((), 0)  # pids by local rank, and their round

    def begin_round(self, new_round: node_messages.Round) -> None:
        """Set the number of workers to start, and the number of restarts so far."""
        spec = self._worker_group.spec
        assignment = new_round.assignments[new_round.rank]
        self._host, self._round, self._logs.round = assignment.host, new_round.round, new_round.round
        spec.local_world_size = assignment.workers
        self._remaining_restarts = spec.max_restarts - new_round.restarts

    def _set_local_rank_env(self, worker_env: dict[str, str], local_rank: int, spec: WorkerSpec) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        worker_env["TORCHELASTIC_MAX_RESTARTS"] = str(self._script.max_restarts)
        for name, value in os.environ.items():  # a fork inherits the template's environment, not this process's
            worker_env.setdefault(name, value)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._start_error = ""
        try:
            pids: dict[int, Any] = super()._start_workers(worker_group)
        except OSError as error:
            if error.filename != worker_group.spec.entrypoint:
                raise
            self._start_error = first_line(str(error))  # a failure of the script: the next try would end as this one
            return {}
        self.workers = (tuple(pids[rank] for rank in sorted(pids)), self._round)
        self._send(sev.NodeStarted(self._host, self._round, self.workers[0]))
        return pids

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        del worker_group
        self._shutdown(timeout=self._shutdown_timeout)
        self.kill_groups()

    def kill_groups(self) -> None:
        """Kill the workers' process groups, and remove the error files of torch."""
        pids, round_number = self.workers
        for pid in pids:
            kill_group(pid)
        self.workers = ((), round_number)
        for path in getattr(getattr(self._pcontext, "_pc", None), "error_files", ()):
            Path(path).unlink(missing_ok=True)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._start_error:
            failure = sev.Failure(worker_group.workers[0].global_rank, 0, 1, self._start_error)
            self._send(sev.NodeFailed(self._host, self._round, (failure,)))
            return RunResult(WorkerState.FAILED)
        self._note_ends_without_value()
        self._set_aside_unreadable_error_files()
        result = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._send(sev.NodeFailed(self._host, self._round, self._failures(result)))
        return result

    def _note_ends_without_value(self) -> None:
        """Add the value of a fork that has ended well: torch would wait for it without end. Forks do not send one."""
        context = self._pcontext
        forks = getattr(context, "_pc", None)
        if forks is None:
            return
        for local_rank, process in enumerate(forks.processes):
            if process.exitcode == 0 and context._ret_vals[local_rank].empty():
                context._return_values.setdefault(local_rank, None)

    def _set_aside_unreadable_error_files(self) -> None:
        """Rename error files that torch's agent cannot read, as after a full disk: it would end by that, and no failure counted."""
        for local_rank, code in self._exit_codes().items():
            path = self._logs.error_files[local_rank]
            if code:
                try:
                    ProcessFailure(local_rank, 0, code, str(path))
                except Exception:  # noqa: BLE001  (whatever torch stumbles over; it logs that)
                    path.rename(path.with_suffix(".unreadable"))

    def _exit_barrier(self) -> None:
        self._send(sev.NodeSucceeded(self._host, self._round))
        super()._exit_barrier()

    def _failures(self, result: RunResult) -> tuple[sev.Failure, ...]:
        """The failures of this node's workers."""
        first_rank = self._worker_group.workers[0].global_rank
        codes = self._exit_codes()
        for rank, failure in result.failures.items():
            codes[rank - first_rank] = failure.exitcode
        failed = [(local_rank, code) for local_rank, code in sorted(codes.items()) if code]
        return tuple(self._failure(first_rank, local_rank, code) for local_rank, code in failed) or (
            sev.Failure(first_rank, 0, 1, f"the worker group is {result.state.name}"),
        )

    def _exit_codes(self) -> dict[int, int]:
        context = self._pcontext
        if hasattr(context, "subprocess_handlers"):
            return {rank: handler.proc.poll() or 0 for rank, handler in context.subprocess_handlers.items()}
        return {rank: process.exitcode or 0 for rank, process in enumerate(context._pc.processes)}

    def _failure(self, first_rank: int, local_rank: int, code: int) -> sev.Failure:
        path = self._logs.error_files[local_rank]
        error, text, ago = exit_text(code), "", 0.0
        try:
            ago = max(0.0, time.time() - path.stat().st_mtime)
            path.chmod(0o600)
            message = json.loads(path.read_text())["message"]
            if isinstance(message, str):
                error = message
            else:
                error, text = str(message["message"]), str(message["extraInfo"]["py_callstack"] or "")
        except (OSError, ValueError, KeyError, TypeError):  # the worker left no error file, or one in another format
            pass
        if code > 0 and not text:
            text = _last_traceback(path.with_name(path.name.replace(".error.json", ".err")))
        return sev.Failure(first_rank + local_rank, local_rank, code, first_line(error), user_traceback(text), ago)


def _last_traceback(path: Path) -> str:
    """The last traceback in a worker's stderr; empty if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    text = re.sub(r"^\[rank\d+\]: ", "", text, flags=re.MULTILINE)  # torch's prefix while a process group exists
    begin = text.rfind("Traceback (most recent call last):")
    return text[begin:] if begin >= 0 else ""
