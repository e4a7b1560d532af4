"""An agent as a batch job on one node, submitted by any of ipyparallel's batch launchers.

The batch system receives a script without secrets. That script runs a second one (mode 0600), which sets the agent's
environment and starts it. The keys are in the agent's configuration (mode 0600). Both files are in the run folder, which
must be on a file system that the nodes share.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ipyparallel.cluster import launcher as ipp
from traitlets import List, TraitError, Unicode

from nbelastic.errors import DiscoveryError, UsageError
from nbelastic.provision import sbatch_options
from nbelastic.provision.job_cancellation import cancel
from nbelastic.provision.run_program import run_program
from nbelastic.provision.ssh import TUNNELLED_AGENT, quote_path
from nbelastic.system.private_files import make_private, replace_private
from nbelastic.system.processes import last_output

GROUP = "ipyparallel.engine_launchers"
SUBMIT_TIMEOUT = 60.0  # seconds that a submission may take
QUERY_TIMEOUT = 20.0  # seconds that a query of a job's state may take
LEAST_LEAD, LONGEST_LEAD = 60, 65535  # seconds between SIGUSR1 and the time limit; Slurm takes no more
POLL = 2.0  # seconds between two queries of the batch system's controller, which many users share

# ipyparallel's own templates start many engines with srun, whose step would have one CPU only. Requeueing is off: the
# driver would not know an agent that the batch system has started again. Before a time limit ends the job, the agent alone
# gets SIGUSR1, so that the driver submits a job that takes its place: `lead` seconds before, or up to a minute earlier.
# If the limit is shorter than that, the signal comes before the agent can handle it, and must not end the job.
_SLURM = """#!/bin/sh
#SBATCH --job-name={job_name}
#SBATCH --export=ALL
#SBATCH --nodes=1
#SBATCH --cpus-per-task={slots}
#SBATCH --no-requeue
#SBATCH --signal=B:USR1@{lead}
#SBATCH {options}
trap '' USR1
exec {program_and_args}
"""
_PBS = """#!/bin/sh
#PBS -V
#PBS -N {short_name}
#PBS -l nodes=1:ppn={slots}
#PBS -r n
exec {program_and_args}
"""
_SGE = """#!/bin/sh
#$ -V
#$ -S /bin/sh
#$ -N {job_name}
#$ -r n
#$ -j y
#$ -o {output_file}
exec {program_and_args}
"""
_LSF = """#!/bin/sh
#BSUB -env all
#BSUB -J {job_name}
#BSUB -n {slots}
#BSUB -R "span[hosts=1]"
#BSUB -rn
exec {program_and_args}
"""
_HTCONDOR = """universe = vanilla
executable = /bin/sh
transfer_executable = False
arguments = "{program_args}"
getenv = True
request_cpus = {slots}
output = {output_file}
error = {output_file}
"""
_TEMPLATES = {
    ipp.SlurmEngineSetLauncher: _SLURM,
    ipp.PBSEngineSetLauncher: _PBS,
    ipp.SGEEngineSetLauncher: _SGE,
    ipp.LSFEngineSetLauncher: _LSF,
    ipp.HTCondorEngineSetLauncher: _HTCONDOR,
}
_RESERVED = {
    "batch_file_name",
    "output_file",
    "environment",
    "engine_cmd",
    "engine_args",
    "output_limit",
    "stop_timeout",
}
# What a submission prints before the job's number. A site's own `sbatch` may print a banner with other numbers first.
_SUBMITTED = {ipp.SlurmLauncher: "Submitted batch job ", ipp.SGELauncher: "Your job "}
# Slurm's states of a job (manual page squeue), and what the dashboard shows for them
_UNFINISHED = {"PENDING": "queued", "REQUEUED": "queued", "CONFIGURING": "node starting", "RUNNING": "running"}
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"}
_ENDED |= {"OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"}


def launcher_class(name: str) -> type[Any]:
    """The batch launcher of ipyparallel with this entry point. UsageError if there is none, or it is of another kind."""
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in installed:
        try:
            cls: type[Any] = installed[name].load()
        except Exception as error:
            raise UsageError(f"the launcher {name!r} ({installed[name].value}) does not work: {error!r}.") from error
        if issubclass(cls, ipp.BatchSystemLauncher):
            return cls
    batch = []
    for entry in installed.values():
        with suppress(Exception):  # a third party's launcher that does not work is not offered
            if issubclass(entry.load(), ipp.BatchSystemLauncher):
                batch.append(entry.name)
    raise UsageError(f"{name!r} is not a batch launcher: choose one of {', '.join(sorted(batch))}.")


def check_options(launcher: str, options: Mapping[str, Any]) -> None:
    """UsageError for an unknown launcher, an unknown option, or an invalid value."""
    _make_launcher(launcher, options, output_file=os.devnull)


def _make_launcher(launcher: str, options: Mapping[str, Any], **reserved: Any) -> Any:
    cls = launcher_class(launcher)
    words: list[str] = []
    slurm = issubclass(cls, ipp.SlurmLauncher)
    if slurm:
        options, words = sbatch_options.split(options)
    traits = {name: trait for name, trait in cls.class_traits(config=True).items() if name not in _RESERVED}
    unknown = sorted(set(options) - set(traits))
    if unknown:
        names = sorted([*traits, *(sbatch_options.SBATCH if slurm else ())])
        raise UsageError(f"{launcher} has no option {unknown[0]!r}: choose among {', '.join(names)}.")
    values = {}
    try:
        for name, value in options.items():
            values[name] = _parse_option(traits[name], value) if isinstance(value, str) else value
        made = cls(**values, **reserved)
        if words:
            made.options = " ".join(filter(None, [made.options, *words]))
    except (TraitError, ValueError) as error:
        raise UsageError(f"{launcher}: {error}") from None
    for kind, text in _SUBMITTED.items():
        if isinstance(made, kind) and "job_id_regexp" not in values:
            made.job_id_regexp, made.job_id_regexp_group = rf"(?s)\A(?:.*{text})?\D*(\d+)", 1
    if not (made.batch_template or made.batch_template_file):
        made.default_template = _TEMPLATES.get(cls, made.default_template)
        if not made.default_template:
            raise UsageError(f"{launcher} has no template for its batch scripts: set batch_template.")
    if not (made.submit_command and made.submit_command[0]):
        raise UsageError(f"{launcher} has no command to submit jobs: set submit_command.")
    return made


def _parse_option(trait: Any, text: str) -> Any:
    """An option's value from the user's text."""
    if isinstance(trait, List):
        return shlex.split(text)
    return text if isinstance(trait, Unicode) else trait.from_string(text)


class BatchAgent:
    """An agent as a batch job. `on_stop(exit code or None)` is called once, in the loop's thread.

    It is called after a failed submission, after `kill()`, and by `state()` when the job has ended. Batch systems do not
    report that a job has ended; without `state()` the driver notices it when the agent's connection is lost.
    """

    def __init__(
        self,
        launcher: str,
        host: str,
        run_folder: Path,
        options: Mapping[str, Any],
        on_stop: Callable[[int | None], None],
        *,
        number: int,
    ) -> None:
        """`options`: traits of the launcher's class, as `queue`. UsageError as from `check_options`.

        `number`: unique among the cluster's agents: a host's next agent may start before this one's job has ended.
        """
        host = "".join(c if c.isascii() and (c.isalnum() or c in ".-_") else "_" for c in host)
        stem = f"agent-{host}-{number}"
        self._config, self._script, self._log = (run_folder / f"{stem}.{kind}" for kind in ("json", "sh", "log"))
        self._host, self._on_stop = host, on_stop
        self._launcher = _make_launcher(
            launcher,
            options,
            work_dir=str(run_folder),
            batch_file_name=f"{stem}.batch",
            output_file=str(self._log),
        )
        self.is_slurm = isinstance(self._launcher, ipp.SlurmLauncher)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self.job = ""  # its number, once it is submitted
        self._killed = self._ended = False
        self._error = ""  # from the batch system
        self.problem = ""  # what happened to the job before it could run, as "could not be submitted: …"
        self._state = ""
        self._asked_at = float("-inf")
        self._successor = 0.0  # seconds before the time limit at which the job's successor is submitted; 0: it has none

    # ---- in the loop's thread ----

    def start(
        self, config: Mapping[str, Any], environment: Mapping[str, str], python: str | None, cwd: str | None
    ) -> None:
        """Submit the job in another thread; return at once.

        `python`: the interpreter on the node, by default the path of this one. `cwd`: the agent's folder.
        """
        self._loop = asyncio.get_running_loop()
        variables = {"NBELASTIC_AGENT": str(self._config), **environment}
        lines = ["#!/bin/sh", *(f"export {name}={shlex.quote(value)}" for name, value in variables.items())]
        if cwd:
            lines.append(f"cd {shlex.quote(cwd)} || exit 1")
        lines.append(f"exec {quote_path(python or sys.executable)} -P -c {shlex.quote(TUNNELLED_AGENT)}")
        slots = str(config.get("settings", {}).get("slots") or 1)
        self._successor = config.get("successor", 0.0)
        self._lead = min(max(LEAST_LEAD, math.ceil(self._successor)), LONGEST_LEAD)
        texts = {self._config: json.dumps(config), self._script: "\n".join(lines) + "\n"}
        threading.Thread(target=self._submit, args=(texts, slots), name="nbelastic-submit").start()

    def adopt(self, job: str) -> None:
        """Take over a job that an earlier driver has submitted, instead of `start`."""
        self._loop = asyncio.get_running_loop()
        self.job = job

    def kill(self) -> None:
        """Cancel the job and return at once. Another process tries again, also if this one ends."""
        with self._lock:
            self._killed = True
            job = self.job
        if job and not self._ended:
            cancel(self._launcher.delete_command, job)
        self._remove_secrets()
        if self._loop is not None:
            self._loop.call_soon(self._end, None)

    def output(self) -> str:
        """The batch system's error if the job failed, and the last lines that the agent printed."""
        return "\n".join(filter(None, [self._error, *last_output(self._log).strip().splitlines()[-5:]]))

    async def state(self) -> str:
        """The job's state for people, as `queued (Resources)` or `running`; empty if it is not known.

        It is known for Slurm only, whose controller is queried at most every 2 s. Calls `on_stop` if the job has ended.
        """
        if not self.job or not self.is_slurm or self._ended or time.monotonic() < self._asked_at + POLL:
            return self._state
        self._asked_at = time.monotonic()
        try:
            code, out, err = await run_program(["scontrol", "-o", "show", "job", self.job], QUERY_TIMEOUT)
        except DiscoveryError:
            return self._state
        if code and "Invalid job id" not in err:  # the controller is busy or unreachable
            return self._state
        state = _field(out, "JobState") or "unknown to Slurm"
        reason = _field(out, "Reason").replace("_", " ")
        why = f" ({reason})" if reason not in ("", "None") else ""
        if code or state in _ENDED:
            self._state, self._error = "", f"Slurm job {self.job}: {state}{why}"
            self._remove_secrets()
            self._end(_exit_code(state, _field(out, "ExitCode")))
        elif self._successor and (advice := sbatch_options.too_short(_field(out, "TimeLimit"), self._successor)):
            self._refuse(f"its time limit is {_field(out, 'TimeLimit')}: {advice}")
        else:
            self._state = _UNFINISHED.get(state, state.lower()) + (why if state == "PENDING" else "")
        return self._state

    def _refuse(self, why: str) -> None:
        """Cancel the job before its agent has connected: it would be replaced at once, again and again."""
        self._state, self.problem = "", f"was cancelled by nbelastic: {why}"
        cancel(self._launcher.delete_command, self.job)
        self._remove_secrets()
        self._end(1)

    def _end(self, code: int | None) -> None:
        if not self._ended:
            self._ended = True
            self._on_stop(code)

    def _fail(self, error: str) -> None:
        self._error, self.problem = error, f"could not be submitted: {error}"
        self._end(1)

    # ---- in the submission's thread ----

    def _submit(self, texts: Mapping[Path, str], slots: str) -> None:
        job, failure = "", ""
        try:
            if not self._killed:
                for path, text in texts.items():
                    make_private(path.parent)
                    replace_private(path, [text.encode()])
                self._prepare(slots)
                job = str(self._launcher.start(1))
        except Exception as error:  # noqa: BLE001  (it may be a third party's launcher)
            failure = str(error) or repr(error)
        with self._lock:
            self.job = job
            killed = self._killed
        if killed and job:
            cancel(self._launcher.delete_command, job)
        if killed or failure:
            self._remove_secrets()
        if failure and self._loop is not None:
            with suppress(RuntimeError):  # the driver's loop is closed
                self._loop.call_soon_threadsafe(self._fail, failure)

    def _prepare(self, slots: str) -> None:
        """Set what the launcher writes into the batch script, and how it submits that."""
        made = self._launcher
        made.program, made.program_args = ["/bin/sh"], [str(self._script)]
        made._run_command = _run  # ipyparallel's prints error messages to the kernel's terminal
        made.namespace = {
            "slots": slots,
            "lead": str(self._lead),
            "job_name": f"nbelastic-{self._host}",
            "short_name": f"nb-{self._host}"[:15],  # PBS accepts at most 15 characters
            **made.namespace,
        }
        if self.is_slurm and not made.options:
            made.default_template = made.default_template.replace("#SBATCH {options}\n", "")
        if isinstance(made, (ipp.PBSLauncher, ipp.LSFLauncher)):
            made.job_array_template = ""  # not an array of one job, which has another name when it is cancelled
        if isinstance(made, ipp.LSFLauncher) and made.submit_command == ["bsub"]:
            # ipyparallel passes the command to a shell, and reads only the output.
            made.submit_command, made.job_id_regexp, made.job_id_regexp_group = ["bsub 2>&1 "], r"<(\d+)>", 1

    def _remove_secrets(self) -> None:
        """Remove the configuration, which holds keys, and the script: the environment in it may hold some."""
        for path in (self._config, self._script):
            with suppress(OSError):
                path.unlink()


def _run(command: list[str], **settings: Any) -> str:
    """Run a command of the batch system and return its output. LauncherError with its message if it fails."""
    name = command[0]
    try:
        done: subprocess.CompletedProcess[bytes] = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SUBMIT_TIMEOUT,
            check=False,
            start_new_session=True,  # an interrupt of the notebook must not reach it
            **settings,
        )
    except subprocess.TimeoutExpired:
        raise ipp.LauncherError(f"{name} did not answer within {SUBMIT_TIMEOUT:g} s") from None
    except OSError as error:
        raise ipp.LauncherError(
            f"{name} cannot be run: {error.strerror}; is its batch system installed here?"
        ) from None
    out, err = (part.decode(errors="replace").strip() for part in (done.stdout, done.stderr))
    if done.returncode:
        raise ipp.LauncherError(err or out or f"{name} failed with exit code {done.returncode}")
    return out


def _field(text: str, name: str) -> str:
    """A field in the output of `scontrol -o show job`."""
    match = re.search(rf"(?<!\S){name}=(\S*)", text)
    return match[1] if match else ""


def _exit_code(state: str, field: str) -> int:
    """Slurm's `code:signal` as Python's exit code, negative for a signal; 0 only for a completed job."""
    code, _, signal = field.partition(":")
    if signal.isdigit() and int(signal):
        return -int(signal)
    return int(code) if code.isdigit() and int(code) else int(state != "COMPLETED")
