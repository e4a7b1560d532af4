"""What /proc says of processes and threads."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from nbelastic.system.processes import children_of, kill_group, stat_of
from nbelastic.worker.hang_detector import read_stat

CUT = "обучение-модели".encode()[:15]  # Linux cuts a name after 15 bytes: this one in the middle of a letter


def test_the_name_of_a_process_may_end_in_the_middle_of_a_letter():
    """A program names its process in its own alphabet: agents and templates go on, and know it as before."""
    name_itself = f"open('/proc/self/comm', 'wb').write({CUT}); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", name_itself], stdin=-1, stdout=-1) as child:
        assert child.stdout.readline()
        assert stat_of(child.pid)[1] == str(os.getpid())
        assert child.pid in children_of(os.getpid())
        child.communicate()


def test_the_name_of_a_thread_may_end_in_the_middle_of_a_letter():
    """The worker that looks for hangs reads it."""
    states = []

    def look_at_itself():
        task = threading.get_native_id()
        Path(f"/proc/self/task/{task}/comm").write_bytes(CUT)
        states.append(read_stat(task)[0])

    thread = threading.Thread(target=look_at_itself)
    thread.start()
    thread.join()
    assert states == ["R"]


def test_of_an_unknown_process_nobody_is_killed():
    """The pid of an unknown process is 0, which means the own group to Linux: the process that asks lives on."""
    program = "from nbelastic.system.processes import kill_group; kill_group(0); print('lives')"
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, process_group=0)
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr
    with subprocess.Popen(["sleep", "600"], process_group=0) as other:
        kill_group(other.pid)
        assert other.wait(60) < 0
