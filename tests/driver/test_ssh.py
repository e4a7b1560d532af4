"""The command that starts an agent on another host by ssh, and the explanations of its failures."""

import asyncio
import errno
import os
import shlex
import shutil
import socket
import subprocess
import sys

import pytest

from nbelastic.protocol.ids import HostSpec
from nbelastic.provision import host_location, ssh

GPU = HostSpec("gpu1", 4)
ALICE = HostSpec("gpu1", 4, "alice")


def test_ssh_asks_nothing_and_leaves_no_process():
    """ssh asks no question, forwards nothing and leaves no master process; a host's name is never an option."""
    command = ssh.command(ALICE, None)
    assert command[0] == "ssh"
    assert {"-oBatchMode=yes", "-oClearAllForwardings=yes", "-oControlMaster=no"} <= set(command)
    assert command[command.index("-l") + 1] == "alice"
    assert command[-3:-1] == ["--", "gpu1"]


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
def test_a_remote_command_of_the_configuration_is_left_out(tmp_path):
    """A user whose ssh opens tmux on each host can have workers there. Here ssh comes as far as the proxy command."""
    config = tmp_path / "config"
    config.write_text("Host gpu1\n RemoteCommand tmux new -A\n RequestTTY yes\n ProxyCommand exit 1\n")
    words = ssh.command(GPU, None)
    done = subprocess.run(
        [words[0], "-F", str(config), *words[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == ssh.SSH_FAILED
    assert "Cannot execute command-line and remote command" not in done.stderr


def run_in_shell(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a login shell on the host does."""
    return subprocess.run(
        ["/bin/sh", "-c", script], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_the_command_survives_a_shell(shell, tmp_path):
    """The path of the interpreter may have spaces and quotes, and our code arrives as one argument."""
    python = tmp_path / "my 'own' python"
    python.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    python.chmod(0o755)
    script = ssh.command(GPU, str(python))[-1]
    done = subprocess.run([shell, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"-c|{ssh.TUNNELLED_AGENT}|"


def test_python3_is_used_if_the_notebook_s_python_is_missing(tmp_path, monkeypatch):
    """Without a choice the command uses the notebook's path of Python, or `python3` where that is missing."""
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\necho python3 of the PATH\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "not" / "there"))
    assert run_in_shell(ssh.command(GPU, None)[-1], PATH=str(tmp_path)).stdout == "python3 of the PATH\n"


def test_a_python_in_the_home_folder_of_the_host(tmp_path):
    """`--python ~/venv/bin/python`: the home folder is that of the host."""
    python = tmp_path / "my venv" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho python of the home folder\n")
    python.chmod(0o755)
    done = run_in_shell(ssh.command(GPU, "~/my venv/python")[-1], HOME=str(tmp_path))
    assert done.stdout == "python of the home folder\n"


def test_a_host_s_words_are_short_and_change_no_terminal():
    """What a host has printed last is shown without control characters, and only the end of a long line."""
    text = ssh.explain_exit(GPU, 3, "\x1b]0;title\x07\x1b[2J" + "a" * 4000 + " no space\r\n", None)
    assert text.startswith("its agent ended with exit code 3: …aaa")
    assert text.endswith("a no space")
    assert text.isprintable()
    assert len(text) < 400


def test_a_missing_python_is_reported(tmp_path):
    """A host without the chosen Python is reported with advice."""
    done = run_in_shell(ssh.command(GPU, "no-such-python")[-1], PATH=str(tmp_path))
    assert done.returncode == ssh.NO_PYTHON
    text = ssh.explain_exit(GPU, done.returncode, done.stderr, "no-such-python")
    assert text == "there is no no-such-python on gpu1: install Python there or name it with --python"


@pytest.mark.parametrize(
    ("code", "stderr", "explanation"),
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
            255,
            "kex_exchange_identification: Connection closed by remote host",
            "cannot be reached by ssh (kex_exchange_identification: Connection closed",
        ),
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
def test_failures_are_explained_in_one_line(code, stderr, explanation):
    """Each failure is explained in one line, with advice."""
    text = ssh.explain_exit(ALICE, code, stderr, None)
    assert explanation in text
    assert "\n" not in text


def test_no_secret_is_in_the_command():
    """The command holds only options, the host, the interpreter and fixed code."""
    words = shlex.split(ssh.command(GPU, None)[-1])
    assert words[:3] == ["exec", "/bin/sh", "-c"]
    assert len(words) == 4


def test_a_cancelled_name_lookup_leaves_no_process(tmp_path, monkeypatch):
    """If the cluster stops while ssh resolves a name, that ssh ends too: a `Match exec` may take long."""
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


def test_the_name_behind_an_alias_may_be_no_name_of_dns(tmp_path, monkeypatch):
    """A ProxyCommand may know a HostName with a part of more than 63 characters: ssh connects, and this machine needs no address."""
    program = tmp_path / "ssh"
    program.write_text(f"#!/bin/sh\necho hostname {'x' * 70}.proxy\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    local, towards = asyncio.run(host_location.locate(HostSpec("gpu.invalid", 1), "ssh"))
    assert (local, bool(towards)) == ("", True)


@pytest.mark.parametrize(("route", "address"), [("2001:db8::1", "fd00::2"), ("", "192.0.2.7")], ids=["IPv6", "none"])
def test_jobs_reach_a_login_node_without_a_default_route_of_ipv4(route, address, monkeypatch):
    """The node has an IPv6 route only, or is in a closed network: then its name leads to its address. Jobs do not dial themselves."""

    def towards(target):
        if target != route:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        return "fd00::2"

    monkeypatch.setattr(host_location, "address_towards", towards)
    monkeypatch.setattr(socket, "gethostname", lambda: "192.0.2.7")
    assert asyncio.run(host_location.locate(HostSpec("s0", 1), "slurm")) == ("", address)
