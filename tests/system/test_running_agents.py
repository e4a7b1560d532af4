"""How `nbelastic drain` finds the agents of a machine, and sends them a notice of its end."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

from nbelastic.cli.main import main
from nbelastic.system import running_agents
from nbelastic.system.folder_paths import user_folder
from nbelastic.system.process_identity import identity

AGENT = """import signal, sys
from pathlib import Path
from nbelastic.system import running_agents
folder = Path(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
running_agents.register(folder, folder.name)
print("registered", flush=True)
signal.sigwait([signal.SIGTERM])
print(running_agents.read_notice(folder).within, running_agents.read_notice(folder))
"""


@pytest.fixture
def agents(tmp_path, monkeypatch):
    """Processes that register as the agents of the hosts a and b, and print the notice that they get."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = []
    for number, folder in enumerate(("run-x/agent-a", "runs/kept/agent-b")):
        (user_folder() / folder).mkdir(parents=True)
        command = [sys.executable, "-c", AGENT, str(user_folder() / folder)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[number].stdout.readline() == "registered\n"
    yield started
    for process in started:
        process.kill()
        process.communicate()


def test_all_agents_get_the_notice(agents, capsys):
    """Each learns the time once: a later SIGTERM without a notice is an ordinary one."""
    assert main(["drain", "--in", "12.5"]) == 0
    assert [process.communicate(timeout=20)[0] for process in agents] == ["12.5 None\n"] * 2
    text = "its workers leave at the next commit; it ends in 12.5 s.\n"
    assert capsys.readouterr().out == f"agent-a: {text}agent-b: {text}"


def test_an_agent_that_has_just_ended_is_left_out(agents, monkeypatch, capsys):
    """The others get the notice. Without any other, one line says that there is none."""
    found = running_agents.find()
    monkeypatch.setattr(running_agents, "find", lambda: found)
    agents[0].kill()
    agents[0].wait()
    assert main(["drain"]) == 0
    assert agents[1].communicate(timeout=20)[0] == "30.0 None\n"
    assert capsys.readouterr().out.startswith("agent-b: ")
    assert main(["drain"]) == 1
    assert "no agent of yours runs on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "nan"])
def test_a_wrong_time_is_refused(agents, capsys, seconds):
    """One line, and no agent gets a notice."""
    assert main(["drain", f"--in={seconds}"]) == 1
    assert f"--in={float(seconds):g}: give a number of seconds greater than 0" in capsys.readouterr().err
    assert [identity(process.pid) != "" for process in agents] == [True, True]
