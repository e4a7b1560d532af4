"""The template of workers: the fork server imports this module once, and forks each worker from it.

The template has one thread and never uses CUDA: threads and CUDA contexts do not survive a fork. It imports
`torch._dynamo` because the first optimizer would (0.9 s and more). The garbage collector is off during the imports, which
saves a fifth of the time. `gc.freeze` then keeps collections in the workers from copying the shared pages.

A preloaded module may start a thread or use CUDA. Then the template starts again without that module.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import signal
import sys
import threading
import traceback
from typing import NoReturn

gc.disable()

from nbelastic.system.log_line import log_line  # noqa: E402
from nbelastic.system.processes import children_of, die_with_parent, kill_group  # noqa: E402


def _end(*_: object) -> None:
    """The agent has died: kill the workers and the processes that they started. Only their parent knows the workers."""
    children = children_of(os.getpid())
    of_nodes = children_of(*children)  # new interpreters of a script, each in a group of its own
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # a new fork leads no process group yet
    for pid in (*children, *of_nodes):
        kill_group(pid)
    os._exit(1)


# In a process group of its own: if the agent's group is killed, this process must live to kill the workers' groups.
os.setpgid(0, 0)
signal.signal(signal.SIGTERM, _end)
AGENT_PID = os.environ.pop("NBELASTIC_AGENT_PID", "0")
die_with_parent(signal.SIGTERM, int(AGENT_PID))
PID = os.getpid()
REFUSED = os.environ.pop("NBELASTIC_REFUSED", "")  # which modules an earlier start has refused, and why

# ipyparallel, debugpy and IPython set these when an engine starts, while torch's threads read the environment. Adding a
# variable moves the environment, and the reader crashes. Replacing a variable that exists already moves nothing.
os.environ.update(TERM="xterm-color", CLICOLOR="1", CLICOLOR_FORCE="1", FORCE_COLOR="1", PAGER="cat", GIT_PAGER="cat")
for name, value in (
    ("MPLBACKEND", "module://matplotlib_inline.backend_inline"),
    ("PYDEVD_DISABLE_FILE_VALIDATION", "1"),
    ("PYDEVD_USE_FRAME_EVAL", "NO"),
):
    os.environ.setdefault(name, value)

PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    # tqdm.auto chooses between text and a widget when it is imported. A worker's widget would not be visible. Before the
    # engine imports IPython, the choice is text. Torch imports tqdm itself if it is installed.
    *(("tqdm.auto",) if importlib.util.find_spec("tqdm") else ()),
    "nbelastic.torchrun.node",
    "nbelastic.programs.boot",
    "nbelastic.programs.elastic",
    "nbelastic.ipp.engine",
    "nbelastic.programs.program",
    "nbelastic.programs.refused_forks",
    "nbelastic.state.sampler",
    "nbelastic.worker.name_lookups",
    "nbelastic.worker.warm_up",
)
OF_USER = [name for name in os.environ.get("NBELASTIC_PRELOAD", "").split(",") if name]


def _harm() -> str:
    """Why forks of this process would not work; empty if they do.

    NVML opens `/dev/nvidiactl` and harms nothing; CUDA also opens `/dev/nvidia-uvm`. Threads of C libraries are not
    counted: OpenBLAS ends its own before a fork.
    """
    if threading.active_count() > 1:
        return f"starts the thread {next(t.name for t in threading.enumerate() if t is not threading.main_thread())!r}"
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia-uvm"):
                return "uses CUDA"
    return "uses CUDA" if sys.modules["torch"].cuda.is_initialized() else ""


def _refused(text: str) -> str:
    """`REFUSED` and this, once."""
    return REFUSED if text in REFUSED else "; ".join(filter(None, (REFUSED, text)))


def _start_again_without(module: str, harm: str) -> NoReturn:
    text = f"the module {module!r} of preload {harm} when it is imported: each worker imports it itself"
    os.environ["NBELASTIC_PRELOAD"] = ",".join(name for name in OF_USER if name != module)
    os.environ.update(NBELASTIC_REFUSED=_refused(text), NBELASTIC_AGENT_PID=AGENT_PID)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  (the server's descriptors stay open)


def _preload(module: str) -> str:
    """Import a module; returns why that is impossible, or nothing."""
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (the worker will fail on it with its traceback)
        log_line(f"nbelastic: preloading {module!r} failed:\n{traceback.format_exc().rstrip()}")
        return f"{type(error).__name__}: {error}"
    return ""


for name in PRELOAD:
    _preload(name)
# The user's modules are in the working folder: as in kernels, after Python's own, before installed ones.
if "" not in sys.path:
    installed = (i for i, path in enumerate(sys.path) if path.endswith(("site-packages", "dist-packages")))
    sys.path.insert(next(installed, len(sys.path)), "")
sys.modules["nbelastic.worker.name_lookups"].end_name_lookups()
OURS = frozenset(sys.modules)
for name in OF_USER:
    if failure := _preload(name):
        REFUSED = _refused(f"the module {name!r} of preload cannot be imported ({failure})")
    if harm := _harm():
        _start_again_without(name, harm)

# A worker imports the user's modules again that have changed since.
IMPORTED = sys.modules["nbelastic.programs.user_code"].own_modules(OURS) if OF_USER else {}

sys.modules["nbelastic.programs.refused_forks"].survive_refused_forks()
gc.enable()
gc.freeze()
