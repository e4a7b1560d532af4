"""An agent as a batch job: one job, one node, one agent, by any of ipyparallel's batch launchers.

The batch system gets a script with no secret in it. That script runs another, 0600, which sets the agent's environment
and starts it; the keys are in the agent's configuration, 0600 too. Both lie in the run folder, which the nodes must see.
"""

from __future__ import annotations

import asyncio
import json
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
from nbelastic.provision.discovery import finish
from nbelastic.provision.ssh import AGENT
from nbelastic.system.private_files import make_private, replace_private
from nbelastic.system.processes import last_output

GROUP = "ipyparallel.engine_launchers"
SUBMIT = 60.0  # seconds that a submission may take
ASK = 20.0  # seconds that a question for a job's state may take
EVERY = 2.0  # seconds between two of them; the controller is shared by many people

# Beside ipyparallel's own, which are made for many engines with srun: a step of srun would have one CPU only, and a job
# that the batch system starts again by itself would be an agent that nobody expects.
_SLURM = """#!/bin/sh
#SBATCH --job-name={job_name}
#SBATCH --export=ALL
#SBATCH --nodes=1
#SBATCH --cpus-per-task={slots}
#SBATCH --no-requeue
#SBATCH {options}
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
_OURS = {"batch_file_name", "output_file", "environment", "engine_cmd", "engine_args", "output_limit", "stop_timeout"}
_CANCEL = 'for i in 1 2 3; do "$@" && exit; sleep 2; done >/dev/null 2>&1 </dev/null &'
# Slurm's words for a job's state (squeue's manual), and ours
_ALIVE = {"PENDING": "queued", "REQUEUED": "queued", "CONFIGURING": "node starting", "RUNNING": "running"}
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"}
_ENDED |= {"OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"}


def launcher_class(name: str) -> type[Any]:
    """A batch launcher of ipyparallel by its entry point. UsageError if there is none, or if it is no batch launcher."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in found:
        try:
            cls: type[Any] = found[name].load()
        except Exception as error:
            raise UsageError(f"the launcher {name!r} ({found[name].value}) does not work: {error!r}.") from error
        if issubclass(cls, ipp.BatchSystemLauncher):
            return cls
    batch = []
    for entry in found.values():
        with suppress(Exception):  # another one's trouble
            if issubclass(entry.load(), ipp.BatchSystemLauncher):
                batch.append(entry.name)
    raise UsageError(f"{name!r} is no batch launcher: choose one of {', '.join(sorted(batch))}.")


def check_options(launcher: str, options: Mapping[str, Any]) -> None:
    """UsageError for an unknown launcher, an unknown option of it, or a value that the option cannot have."""
    _make(launcher, options, output_file=os.devnull)


def _make(launcher: str, options: Mapping[str, Any], **ours: Any) -> Any:
    cls = launcher_class(launcher)
    traits = {name: trait for name, trait in cls.class_traits(config=True).items() if name not in _OURS}
    unknown = sorted(set(options) - set(traits))
    if unknown:
        raise UsageError(f"{launcher} has no option {unknown[0]!r}: choose among {', '.join(sorted(traits))}.")
    values = {}
    try:
        for name, value in options.items():
            values[name] = _parsed(traits[name], value) if isinstance(value, str) else value
        made = cls(**values, **ours)
    except (TraitError, ValueError) as error:
        raise UsageError(f"{launcher}: {error}") from None
    if not (made.batch_template or made.batch_template_file):
        made.default_template = _TEMPLATES.get(cls, made.default_template)
        if not made.default_template:
            raise UsageError(f"{launcher} has no template for its batch scripts: give it as batch_template.")
    if not (made.submit_command and made.submit_command[0]):
        raise UsageError(f"{launcher} has no command for submitting: give it as submit_command.")
    return made


def _parsed(trait: Any, text: str) -> Any:
    """An option's value as people write it."""
    if isinstance(trait, List):
        return shlex.split(text)
    return text if isinstance(trait, Unicode) else trait.from_string(text)


class BatchAgent:
    """An agent as a job. `on_stop(exit code or None)` is called in the loop's thread, once.

    It comes after a failed submission, after `kill()`, and from `state()` when the job is found to have ended. What
    happens to a running agent otherwise is not told by batch systems: the link has to notice.
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
        """`options`: traits of the launcher's class, like `queue`. UsageError if it or they are not to be had.

        `number` is another one for each: a host's next agent may start before this one's job has gone.
        """
        stem = "".join(c if c.isascii() and (c.isalnum() or c in ".-_") else "_" for c in host)
        own = f"agent-{stem}-{number}"
        self._config, self._script, self._log = (run_folder / f"{own}.{kind}" for kind in ("json", "sh", "log"))
        self._stem, self._on_stop = stem, on_stop
        self._launcher = _make(
            launcher,
            options,
            work_dir=str(run_folder),
            batch_file_name=f"{own}.batch",
            output_file=str(self._log),
        )
        self._slurm = isinstance(self._launcher, ipp.SlurmLauncher)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self.job = ""  # its number, once it is submitted
        self._killed = self._over = False
        self._said = ""  # of the batch system
        self._state = ""
        self._asked_at = float("-inf")

    # ---- in the loop's thread ----

    def start(
        self, config: Mapping[str, Any], environment: Mapping[str, str], python: str | None, cwd: str | None
    ) -> None:
        """Submit the job, in a thread of its own: returns at once.

        `python` is the nodes' interpreter (by default this one's path), `cwd` the agent's folder.
        """
        self._loop = asyncio.get_running_loop()
        variables = {"NBELASTIC_AGENT": str(self._config), **environment}
        lines = ["#!/bin/sh", *(f"export {name}={shlex.quote(value)}" for name, value in variables.items())]
        if cwd:
            lines.append(f"cd {shlex.quote(cwd)} || exit 1")
        lines.append(f"exec {shlex.join([python or sys.executable, '-c', AGENT])}")
        slots = str(config.get("settings", {}).get("slots") or 1)
        texts = {self._config: json.dumps(config), self._script: "\n".join(lines) + "\n"}
        threading.Thread(target=self._submit, args=(texts, slots), name="nbelastic-submit").start()

    def adopt(self, job: str) -> None:
        """Instead of `start`: the job is there, by an earlier driver."""
        self._loop = asyncio.get_running_loop()
        self.job = job

    def kill(self) -> None:
        """Cancel the job, wherever it is, and return at once. It is tried three times, even if this process ends."""
        with self._lock:
            self._killed = True
            job = self.job
        if job and not self._over:
            self._cancel(job)
        self._clean()
        if self._loop is not None:
            self._loop.call_soon(self._end, None)

    def output(self) -> str:
        """What the batch system said if the job failed, and the last lines of what the agent printed."""
        return "\n".join(filter(None, [self._said, *last_output(self._log).strip().splitlines()[-5:]]))

    async def state(self) -> str:
        """A word for people: `queued (Resources)`, `running`; empty if it is not known (yet, or in this batch system).

        With Slurm the controller is asked, at most every 2 s, and if the job has ended `on_stop` is called.
        """
        if not self.job or not self._slurm or self._over or time.monotonic() < self._asked_at + EVERY:
            return self._state
        self._asked_at = time.monotonic()
        try:
            code, out, err = await finish(["scontrol", "-o", "show", "job", self.job], ASK)
        except DiscoveryError:
            return self._state
        if code and "Invalid job id" not in err:  # the controller is busy or away
            return self._state
        word = _field(out, "JobState") or "forgotten by Slurm"
        reason = _field(out, "Reason").replace("_", " ")
        why = f" ({reason})" if reason not in ("", "None") else ""
        if code or word in _ENDED:
            self._state, self._said = "", f"Slurm job {self.job}: {word}{why}"
            self._clean()
            self._end(_exit_code(word, _field(out, "ExitCode")))
        else:
            self._state = _ALIVE.get(word, word.lower()) + (why if word == "PENDING" else "")
        return self._state

    def _end(self, code: int | None) -> None:
        if not self._over:
            self._over = True
            self._on_stop(code)

    def _fail(self, said: str) -> None:
        self._said = said
        self._end(1)

    # ---- in the thread of the submission ----

    def _submit(self, texts: Mapping[Path, str], slots: str) -> None:
        job, said = "", ""
        try:
            if not self._killed:
                for path, text in texts.items():
                    make_private(path.parent)
                    replace_private(path, [text.encode()])
                self._prepare(slots)
                job = str(self._launcher.start(1))
        except Exception as error:  # noqa: BLE001  (it may be a third party's launcher)
            said = str(error) or repr(error)
        with self._lock:
            self.job = job
            killed = self._killed
        if killed and job:
            self._cancel(job)
        if killed or said:
            self._clean()
        if said and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended: nobody is interested
                self._loop.call_soon_threadsafe(self._fail, said)

    def _prepare(self, slots: str) -> None:
        """What the launcher shall write and run."""
        made = self._launcher
        made.program, made.program_args = ["/bin/sh"], [str(self._script)]
        made._run_command = _run  # ipyparallel's lets the message go to the kernel's terminal
        made.namespace = {
            "slots": slots,
            "job_name": f"nbelastic-{self._stem}",
            "short_name": f"nb-{self._stem}"[:15],  # PBS takes no longer ones
            **made.namespace,
        }
        if self._slurm and not made.options:
            made.default_template = made.default_template.replace("#SBATCH {options}\n", "")
        if isinstance(made, (ipp.PBSLauncher, ipp.LSFLauncher)):
            made.job_array_template = ""  # a job, not an array of one: those are cancelled by other names
        if isinstance(made, ipp.LSFLauncher) and made.submit_command == ["bsub"]:
            # ipyparallel hands this to a shell and looks at nothing but the output.
            made.submit_command, made.job_id_regexp, made.job_id_regexp_group = ["bsub 2>&1 "], r"<(\d+)>", 1

    def _cancel(self, job: str) -> None:
        """In a process that does not end with us and that nobody has to wait for."""
        command = ["/bin/sh", "-c", _CANCEL, "sh", *self._launcher.delete_command, job]
        subprocess.run(command, stdin=subprocess.DEVNULL, start_new_session=True, check=False)

    def _clean(self) -> None:
        """There are keys in the configuration, and the environment may hold some."""
        for path in (self._config, self._script):
            with suppress(OSError):
                path.unlink()


def _run(command: list[str], **settings: Any) -> str:
    """Run a command of the batch system. LauncherError with what it says if it fails."""
    name = command[0]
    try:
        done: subprocess.CompletedProcess[bytes] = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SUBMIT,
            check=False,
            start_new_session=True,  # Ctrl-C in the notebook is not meant for it
            **settings,
        )
    except subprocess.TimeoutExpired:
        raise ipp.LauncherError(f"{name} did not answer within {SUBMIT:g} s") from None
    except OSError as error:
        raise ipp.LauncherError(
            f"{name} cannot be run: {error.strerror}; is its batch system installed here?"
        ) from None
    out, err = (part.decode(errors="replace").strip() for part in (done.stdout, done.stderr))
    if done.returncode:
        raise ipp.LauncherError(err or out or f"{name} failed with exit code {done.returncode}")
    return out


def _field(text: str, name: str) -> str:
    """A field of `scontrol -o show job`."""
    match = re.search(rf"(?<!\S){name}=(\S*)", text)
    return match[1] if match else ""


def _exit_code(word: str, field: str) -> int:
    """Slurm's `code:signal` as one number, as Python has it; 0 only for a job that has done well."""
    code, _, signal = field.partition(":")
    if signal.isdigit() and int(signal):
        return -int(signal)
    return int(code) if code.isdigit() and int(code) else int(word != "COMPLETED")
