"""What the forkserver imports once, so that a worker is a fork and not a fresh interpreter.

It stays single-threaded and never touches CUDA: both would break its children. `torch._dynamo` is in the list because
making the first optimizer imports it (0.9 s and more). The garbage collector is off meanwhile, which saves a fifth of
the time, and what is loaded is frozen, so that collections in the workers do not copy the shared pages.
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
    """The agent is gone: the workers are killed, and what they have started. Only from here is it known what that is."""
    for pid in children_of(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # one that was just forked leads no group yet
        kill_group(pid)
    os._exit(1)


os.setpgid(
    0, 0
)  # who kills the agent's group is not to kill this process as well: nobody would end the workers' groups
signal.signal(signal.SIGTERM, _end)
die_with_parent(signal.SIGTERM, int(os.environ.pop("NBELASTIC_AGENT_PID", "0")))
PID = os.getpid()

# ipyparallel, debugpy and IPython set these when an engine starts, beside threads in which torch reads the environment.
# Adding a variable moves all of it, and the reader crashes; one that is there already is replaced in its place.
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
    # Once, when it is imported, tqdm.auto chooses between text and a widget, which nobody would see. Before the engine
    # imports IPython the choice is text. Torch has imported tqdm itself where it is installed.
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
    except Exception:  # noqa: BLE001  (the user's module; the worker itself will fail on it with its own traceback)
        print(f"nbelastic: preloading {name!r} failed:", file=sys.stderr)
        traceback.print_exc()

gc.enable()
gc.freeze()
