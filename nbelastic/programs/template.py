"""The template of workers: the fork server imports this module once, and forks each worker from it.

The template has one thread and never uses CUDA: threads and CUDA contexts do not survive a fork. It imports
`torch._dynamo` because the first optimizer would (0.9 s and more). The garbage collector is off during the imports, which
saves a fifth of the time. `gc.freeze` then keeps collections in the workers from copying the shared pages.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import signal
import sys
import traceback

gc.disable()

from nbelastic.system.processes import children_of, die_with_parent, kill_group  # noqa: E402


def _end(*_: object) -> None:
    """The agent has died: kill the workers and the processes that they started. Only their parent knows the workers."""
    for pid in children_of(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # a new fork leads no process group yet
        kill_group(pid)
    os._exit(1)


# In a process group of its own: if the agent's group is killed, this process must live to kill the workers' groups.
os.setpgid(0, 0)
signal.signal(signal.SIGTERM, _end)
die_with_parent(signal.SIGTERM, int(os.environ.pop("NBELASTIC_AGENT_PID", "0")))
PID = os.getpid()

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
    "nbelastic.state.sampler",
    "nbelastic.worker.warm_up",
    *filter(None, os.environ.get("NBELASTIC_PRELOAD", "").split(",")),
)

for name in PRELOAD:
    try:
        importlib.import_module(name)
    except Exception:  # noqa: BLE001  (the user's module: the worker will fail on it with its traceback)
        print(f"nbelastic: preloading {name!r} failed:", file=sys.stderr)
        traceback.print_exc()

gc.enable()
gc.freeze()
