"""An agent on another machine: the ssh command that starts it, and what a failure of it means.

One ssh client per host stays for as long as the agent runs. Its standard input carries the configuration, keys
included, and then nothing more: when it ends, by the client's death too, the agent ends. So there is no key in a
command line, none on the host's disk, and the end of an agent is known the moment its client exits.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from contextlib import suppress

from nbelastic.protocol.ids import HostSpec

CONNECT = 10  # seconds that a host has to answer
UNREACHED = 255  # ssh's own exit code for what went wrong before the command ran
NO_PYTHON = 127
OPTIONS = (
    "-Tax",  # no terminal, no forwarding of the agent or of X11
    "-oBatchMode=yes",  # a question would wait for an answer that nobody can give
    f"-oConnectTimeout={CONNECT}",
    "-oControlMaster=no",  # a master that the user has is used; we do not become one that outlives us
    "-oClearAllForwardings=yes",
    "-oPermitLocalCommand=no",
)
AGENT = "from nbelastic.agent.start import main; main()"
_SCRIPT = (
    'p={python}; command -v "$p" >/dev/null 2>&1 || p={otherwise}; command -v "$p" >/dev/null 2>&1 || '
    '{{ echo "no $p here" >&2; exit 127; }}; exec "$p" -c {code}'
)


def command(spec: HostSpec, python: str | None) -> list[str]:
    """What to run here. Without `python` it is the notebook's own path if the host has it, else `python3`."""
    script = _SCRIPT.format(
        python=shlex.quote(python or sys.executable),
        otherwise=shlex.quote(python or "python3"),
        code=shlex.quote(AGENT),
    )
    user = ["-l", spec.user] if spec.user else []
    return ["ssh", *OPTIONS, *user, "--", spec.name, f"exec /bin/sh -c {shlex.quote(script)}"]


def explain(spec: HostSpec, code: int | None, said: str, python: str | None) -> str:
    """Why the agent ended, in one line that says what to do. `said`: the last lines of what came out."""
    target = f"{spec.user}@{spec.name}" if spec.user else spec.name
    last = said.strip().splitlines()[-1].strip() if said.strip() else "no message"
    if code == UNREACHED:
        return _unreached(target, said, last)
    if code == NO_PYTHON:
        return f"there is no {python or 'python3'} on {spec.name}: install Python there or name it with --python"
    if "No module named 'nbelastic'" in said:
        return f"nbelastic is not installed for {python or 'its Python'} on {spec.name}: install it there or name another with --python"
    return f"its agent ended with exit code {code}" + (f": {last}" if code and said.strip() else "")


def _unreached(target: str, said: str, last: str) -> str:
    if "Permission denied" in said:
        return (
            f"{target} takes none of your keys and would ask for a password ({last}): "
            f"`ssh-copy-id {target}`, or load the key into your ssh agent"
        )
    if "Host key verification failed" in said:
        return f"the host key of {target} is not known or has changed: run `ssh {target}` once in a terminal"
    if "Could not resolve hostname" in said:
        return f"{target} is an unknown name ({last}): check it, or add it to ~/.ssh/config"
    if "closed by remote host" in said or "client_loop:" in said or "not responding" in said:  # after the login
        return f"the ssh connection to {target} has ended ({last})"
    return f"{target} cannot be reached by ssh ({last})"


async def real_name(spec: HostSpec) -> str:
    """The name or address behind `spec.name`, as ~/.ssh/config has it."""
    process = await asyncio.create_subprocess_exec(
        "ssh", "-G", *(["-l", spec.user] if spec.user else []), "--", spec.name,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        out, _ = await process.communicate()
    except asyncio.CancelledError:  # the cluster stops meanwhile: a `Match exec` may take as long as it likes
        if process.returncode is None:
            process.kill()
        with suppress(TimeoutError):  # a process that ssh has started may hold its output open
            await asyncio.wait_for(process.communicate(), 1.0)  # its transport closes, though ssh may have ended by now
        raise
    for line in out.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        if key == "hostname":
            return value.strip()
    return spec.name
