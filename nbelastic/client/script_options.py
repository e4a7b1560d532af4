"""Checks the options of `Cluster.run_script` and makes the request of them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from nbelastic.protocol import agent_messages
from nbelastic.protocol.requests import SubmitScript
from nbelastic.protocol.script_events import Terms
from nbelastic.protocol.settings import NCCL_DEFAULTS, NCCL_ENVIRONMENT, Settings, check, check_environment
from nbelastic.system.argument_types import SECONDS, TABLE, TEXT, WHOLE, check_kind, check_optional, user_path

_STREAMS = re.compile(r"[0123]|(\d+:[0123],)*\d+:[0123]")  # as torchrun accepts them: 3, or 0:1,1:2
_KINDS = {
    "max_restarts": WHOLE,
    **dict.fromkeys(("monitor_interval", "exit_barrier_timeout", "shutdown_timeout"), SECONDS),
    "role": TEXT,
}


class ScriptOptions(TypedDict, total=False):
    """The options of `Cluster.run_script`."""

    module: bool
    no_python: bool
    cold: bool
    max_restarts: int
    monitor_interval: float
    nproc: int | None
    role: str
    redirects: str
    tee: str
    env: Mapping[str, str] | None
    exit_barrier_timeout: float
    shutdown_timeout: float


def script_request(
    path: str | os.PathLike[str],
    arguments: Sequence[Any],
    options: ScriptOptions,
    settings: Settings,
) -> SubmitScript:
    """Return the request that submits a script; the driver adds the job's name. UsageError, in one line, for wrong options."""
    given: dict[str, Any] = dict(options)
    for name in _KINDS.keys() & given.keys():
        check_kind(name, given[name], _KINDS[name])
    for name, kind in (("nproc", WHOLE), ("env", TABLE)):
        check_optional(name, given.get(name), kind)
    environment = {name: str(value) for name, value in (given.pop("env", None) or {}).items()}
    nproc, restarts = given.pop("nproc", None), given.get("max_restarts", 0)
    check(not (given.get("module") and given.get("no_python")), "module and no_python exclude each other.")
    check(restarts >= 0, f"max_restarts={restarts}: at least 0.")
    check(nproc is None or nproc >= 1, f"nproc={nproc}: at least 1.")
    check(0 < given.get("monitor_interval", 1) < math.inf, "monitor_interval: more than 0 seconds, and finite.")
    for name in ("exit_barrier_timeout", "shutdown_timeout"):
        check(0 <= given.get(name, 0) < math.inf, f"{name}={given.get(name)}: at least 0 seconds, and finite.")
    words = tuple(str(each) for each in arguments)
    check(
        not any("\0" in word for word in words), "an argument of the script has a zero byte: no process can have one."
    )
    check_environment(environment)
    for name in ("redirects", "tee"):
        text = given[name] = str(given.get(name, "0"))
        check(_STREAMS.fullmatch(text) is not None, f"{name}={text!r}: as for torchrun, 0 to 3 or 0:1,1:2.")
    shutdown = float(given.pop("shutdown_timeout", 30.0))
    ours = NCCL_ENVIRONMENT.keys() | (NCCL_DEFAULTS.keys() - os.environ.keys())
    script = agent_messages.Script(
        "",
        _target(path, bool(given.get("module")), bool(given.get("no_python"))),
        words,
        environment=environment,
        cwd=settings.cwd or os.getcwd(),
        exit_barrier=float(given.pop("exit_barrier_timeout", 300.0)),
        shutdown=shutdown,
        unset=tuple(sorted(ours - settings.environment.keys())),
        **given,
    )
    return SubmitScript(script, Terms(max_restarts=restarts, nproc=nproc, leave=shutdown + 5.0))


def _target(path: str | os.PathLike[str], module: bool, no_python: bool) -> str:
    """Return the script. The path of a file is made absolute, as the workers may have another working folder."""
    text = os.fspath(path)
    if module or (no_python and os.sep not in text):
        return text
    file = user_path(text)
    check(file.is_file(), f"there is no file {text!r}.")
    return str(file.absolute())
