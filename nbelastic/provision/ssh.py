"""The ssh command that starts an agent on another machine, and explanations of its failures.

Its standard input first carries the configuration with the keys: no key is in a command line or on the host's disk. Then it
carries the connections of the host: see `nbelastic.tunnel`.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from contextlib import suppress

from nbelastic.protocol.exit_codes import AGENT_GONE, CONNECTION_LOST
from nbelastic.protocol.ids import HostSpec
from nbelastic.system.terminal_text import remove_controls

CONNECT_TIMEOUT = 10  # seconds
SSH_FAILED = 255  # ssh's exit code for its own errors, as opposed to the command's
NO_PYTHON = 127
MOST_SHOWN = 300  # characters of a host's own words in a reason
OPTIONS = (
    "-Tax",  # no terminal, no forwarding of the agent or of X11
    "-oBatchMode=yes",  # fail instead of asking for a password
    f"-oConnectTimeout={CONNECT_TIMEOUT}",
    "-oControlMaster=no",  # use the user's master connection, but do not become one that outlives the agent
    "-oClearAllForwardings=yes",
    "-oPermitLocalCommand=no",
    "-oRemoteCommand=none",  # ssh refuses a command beside one of the user's configuration, such as tmux
    "-oServerAliveInterval=15",  # end a client whose connection is dead, also if nothing else does
)
AGENT = "from nbelastic.agent.start import main; main()"
TUNNELLED_AGENT = "from nbelastic.agent.start import main as agent; from nbelastic.tunnel.host import main; main(agent)"
TUNNEL = "from nbelastic.tunnel.driver_end import main; main()"
_SCRIPT = (
    'p={python}; command -v "$p" >/dev/null 2>&1 || p={otherwise}; command -v "$p" >/dev/null 2>&1 || '
    '{{ echo "no $p here" >&2; exit 127; }}; export PYTHONSAFEPATH=1; exec "$p" -c {code}'
)


def command(spec: HostSpec, python: str | None, code: str = TUNNELLED_AGENT) -> list[str]:
    """The ssh command that runs `code` there. Without `python` the host uses this interpreter's path if it has that, else `python3`."""
    script = _SCRIPT.format(
        python=quote_path(python or sys.executable),
        otherwise=quote_path(python or "python3"),
        code=shlex.quote(code),
    )
    user = ["-l", spec.user] if spec.user else []
    return ["ssh", *OPTIONS, *user, "--", spec.name, f"exec /bin/sh -c {shlex.quote(script)}"]


def quote_path(path: str) -> str:
    """The path for a shell, which replaces `~/` by the home folder there."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def explain_exit(spec: HostSpec, code: int | None, output: str, python: str | None) -> str:
    """Why the agent ended and what to do, in one line. `output`: the last lines of ssh and the agent."""
    target = f"{spec.user}@{spec.name}" if spec.user else spec.name
    output = remove_controls(output)
    last = output.strip().splitlines()[-1].strip() if output.strip() else "no message"
    last = last if len(last) <= MOST_SHOWN else f"…{last[-MOST_SHOWN:]}"
    if code == SSH_FAILED:
        return _explain_ssh_error(target, output, last)
    if code == CONNECTION_LOST:
        return f"the ssh connection to {target} has ended ({last})"
    if code == AGENT_GONE:
        return f"the ssh connection to {target} had ended, and its agent has ended since"
    if code == NO_PYTHON:
        return f"there is no {python or 'python3'} on {spec.name}: install Python there or name it with --python"
    if "No module named 'nbelastic'" in output:
        return f"nbelastic is not installed for {python or 'its Python'} on {spec.name}: install it there or name another with --python"
    return f"its agent ended with exit code {code}" + (f": {last}" if code and output.strip() else "")


def _explain_ssh_error(target: str, output: str, last: str) -> str:
    if "Permission denied" in output:
        return (
            f"{target} accepts none of your keys and would ask for a password ({last}): "
            f"`ssh-copy-id {target}`, or load the key into your ssh agent"
        )
    if "Host key verification failed" in output:
        return f"the host key of {target} is not known or has changed: run `ssh {target}` once in a terminal"
    if "Could not resolve hostname" in output:
        return f"{target} is an unknown name ({last}): check it, or add it to ~/.ssh/config"
    if "exchange_identification" in output:  # before the login: a server or jump host with too many logins at once
        return f"{target} cannot be reached by ssh ({last})"
    if "closed by remote host" in output or "client_loop:" in output or "not responding" in output:  # after the login
        return f"the ssh connection to {target} has ended ({last})"
    return f"{target} cannot be reached by ssh ({last})"


async def real_name(spec: HostSpec) -> str:
    """The name or address to which ssh connects for `spec.name`, from ~/.ssh/config."""
    process = await asyncio.create_subprocess_exec(
        "ssh", "-G", *(["-l", spec.user] if spec.user else []), "--", spec.name,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        out, _ = await process.communicate()
    except asyncio.CancelledError:  # the cluster stops while ssh runs, for instance a `Match exec` of the user
        if process.returncode is None:
            process.kill()
        with suppress(TimeoutError):  # a process that ssh has started may keep the pipe open
            await asyncio.wait_for(process.communicate(), 1.0)
        raise
    finally:
        process._transport.close()  # type: ignore[attr-defined]  # also if the end of the loop cancels this once more
    for line in out.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        if key == "hostname":
            return value.strip()
    return spec.name
