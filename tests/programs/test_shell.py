"""The IPython in which a worker runs programs."""

from __future__ import annotations

import subprocess
import sys

SHOW = """
import sys, warnings
from IPython import get_ipython
from IPython.display import clear_output, display
from nbelastic.programs.shell import make_shell, printed_displays
make_shell(sys.argv[1])
shell = get_ipython()
engine = shell.display_pub = object()
with printed_displays(shell):
    display("shown")
    clear_output()
assert shell.display_pub is engine
assert not any(shell.history_manager.outputs.values()), "what a long training displays would fill the memory"
for name in ("exit", "quit"):
    try:
        eval(name, shell.user_ns)(3)
    except SystemExit as end:
        print(name, end.code)
with warnings.catch_warnings(action="ignore"):  # IPython says how to leave it
    assert isinstance(shell.run_cell("exit()").error_in_exec, SystemExit)
"""


def test_programs_print_what_they_display_and_exit_as_in_python(tmp_path):
    """Whether the worker is an engine or not: `display` prints text and keeps nothing, and `exit` raises SystemExit."""
    done = subprocess.run([sys.executable, "-c", SHOW, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("'shown'\nexit 3\nquit 3\n", "")
