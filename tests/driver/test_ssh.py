"""The command that starts an agent elsewhere, and what its failures mean."""

import asyncio
import os
import shlex
import subprocess
import sys

import pytest

from nbelastic.protocol.ids import HostSpec
from nbelastic.provision import ssh

GPU = HostSpec("gpu1", 4)
ALICE = HostSpec("gpu1", 4, "alice")


def test_nothing_is_asked_and_nothing_is_left():
    """No question, no forwarding, no master that outlives us; the host's name can be no option."""
    command = ssh.command(ALICE, None)
    assert command[0] == "ssh"
    assert {"-oBatchMode=yes", "-oClearAllForwardings=yes", "-oControlMaster=no"} <= set(command)
    assert command[command.index("-l") + 1] == "alice"
    assert command[-3:-1] == ["--", "gpu1"]


def there(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a login shell there does with the command."""
    return subprocess.run(
        ["/bin/sh", "-c", script], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_the_command_survives_a_shell(shell, tmp_path):
    """The interpreter may have blanks and quotes in its path; it gets our code as one argument."""
    python = tmp_path / "my 'own' python"
    python.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    python.chmod(0o755)
    script = ssh.command(GPU, str(python))[-1]
    done = subprocess.run([shell, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"-c|{ssh.AGENT}|"


def test_another_python_if_ours_is_not_there(tmp_path, monkeypatch):
    """Without a wish it is the notebook's own path, and `python3` where that is missing."""
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\necho python3 of the PATH\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "not" / "there"))
    assert there(ssh.command(GPU, None)[-1], PATH=str(tmp_path)).stdout == "python3 of the PATH\n"


def test_no_python_at_all(tmp_path):
    """It is said so, with what to do."""
    done = there(ssh.command(GPU, "no-such-python")[-1], PATH=str(tmp_path))
    assert done.returncode == ssh.NO_PYTHON
    said = ssh.explain_exit(GPU, done.returncode, done.stderr, "no-such-python")
    assert said == "there is no no-such-python on gpu1: install Python there or name it with --python"


@pytest.mark.parametrize(
    ("code", "said", "why"),
    [
        (
            255,
            "alice@gpu1: Permission denied (publickey,password).",
            "accepts none of your keys and would ask for a password",
        ),
        (255, "Host key verification failed.", "run `ssh alice@gpu1` once in a terminal"),
        (255, "ssh: Could not resolve hostname gpu1: Name or service not known", "alice@gpu1 is an unknown name"),
        (
            255,
            "ssh: connect to host gpu1 port 22: Connection refused",
            "cannot be reached by ssh (ssh: connect to host",
        ),
        (255, "", "cannot be reached by ssh (no message)"),
        (
            1,
            "Traceback …\nModuleNotFoundError: No module named 'nbelastic'",
            "nbelastic is not installed for its Python",
        ),
        (1, "the folder /x (cwd) cannot be entered here: No such file or directory", "the folder /x (cwd) cannot be"),
        (-9, "", "its agent ended with exit code -9"),
        (0, "whatever it said before", "its agent ended with exit code 0"),
    ],
)
def test_failures_are_explained_in_one_line(code, said, why):
    """Each says what is wrong and what to do."""
    text = ssh.explain_exit(ALICE, code, said, None)
    assert why in text
    assert "\n" not in text


def test_no_secret_is_in_the_command():
    """All that it holds is known beforehand: options, the host, the interpreter and two lines of code."""
    words = shlex.split(ssh.command(GPU, None)[-1])
    assert words[:3] == ["exec", "/bin/sh", "-c"]
    assert len(words) == 4


def test_a_name_that_nobody_waits_for_any_more_costs_no_process(tmp_path, monkeypatch):
    """The cluster is stopped while ssh looks the name up, which a `Match exec` may make long: that ssh ends too."""
    (tmp_path / "ssh").write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/new && mv {tmp_path}/new {tmp_path}/pid && exec sleep 1000\n"
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def story():
        asking = asyncio.create_task(ssh.real_name(GPU))
        while not (tmp_path / "pid").exists():  # noqa: ASYNC110  (another process makes it)
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(story())
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
