"""A real Slurm on this machine: munged, slurmctld and three slurmd, on loopback and in a temporary folder."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from tests.support.waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "setpriv")
NODES = ("n1", "n2", "g1")  # Slurm takes two files for GPUs of the last one
CONF = """
ClusterName=nbelastic
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=10000,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=3
GresTypes=gpu
NodeName=n[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=4
NodeName=g1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[3]} CPUs=4 Gres=gpu:2
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
PartitionName=gpu Nodes=g1 MaxTime=INFINITE State=UP
PartitionName=short Nodes=n[1-2] DefaultTime=3 MaxTime=4 State=UP
"""


def free_ports() -> list[int]:
    """One port for the controller, and three successive ones.

    Each process has a range of its own, below the ports that the system gives to connections: the daemons do not listen yet.
    """
    while True:
        with ExitStack() as sockets:
            for first in range(20000 + os.getpid() % 3000 * 4, 32768, 4):
                try:
                    for port in range(first, first + 4):
                        sockets.enter_context(closing(socket.create_server(("127.0.0.1", port))))
                except OSError:
                    sockets.close()
                else:
                    return list(range(first, first + 4))


class Slurm:
    """What tests do with Slurm, as administrators and as users."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def __call__(self, *command: str) -> str:
        """Run one of Slurm's commands; return its output."""
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=30, check=False)
        assert result.returncode == 0, f"{command}: {result.stderr or result.stdout}"
        return result.stdout

    def states(self) -> dict[str, str]:
        return dict(line.split() for line in self("sinfo", "-hN", "-o", "%N %T").splitlines())

    def jobs(self) -> list[str]:
        """The numbers of the jobs that wait, run or end."""
        return self("squeue", "-h", "-o", "%i").split()

    def idle(self) -> bool:
        return not self.jobs() and set(self.states().values()) == {"idle"}

    @contextmanager
    def allocation(self, *options: str, every: float = 0.0) -> Iterator[Any]:
        """In an allocation with these options: `find_hosts()` returns SlurmDiscovery's hosts there, as `["n1:4"]`."""
        code = (
            "import asyncio\n"
            "from nbelastic.provision.slurm import SlurmDiscovery\n"
            "async def main():\n"
            f"    found = SlurmDiscovery(every={every})\n"
            "    while True:\n"
            "        input()\n"
            "        try: print(*(f'{h.name}:{h.slots}' for h in await found.hosts()), flush=True)\n"
            "        except Exception as error: print(repr(error), flush=True)\n"
            "try: asyncio.run(main())\n"
            "except EOFError: pass\n"
        )
        with subprocess.Popen(
            ["salloc", "-Q", *options, sys.executable, "-c", code],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:

            def find_hosts() -> list[str]:
                print(file=process.stdin, flush=True)
                return process.stdout.readline().split()

            yield find_hosts
            process.stdin.close()


@contextmanager
def daemon(name: str, command: list[str], environment: dict[str, str], folder: Path) -> Iterator[None]:
    """A child process, killed at the end by its pid; Linux kills it too if this process is killed."""
    with open(folder / f"{name}.log", "w") as log:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield
    finally:
        process.kill()  # after SIGTERM a daemon that has run jobs takes more than 10 s
        process.wait()


def ready(slurm: Slurm) -> bool:
    ping = subprocess.run(["scontrol", "ping"], env=slurm.environment, capture_output=True, text=True, check=False)
    return " is UP" in ping.stdout and slurm.idle()


def find_programs() -> dict[str, str | None]:
    """The paths of Slurm's programs; None for those that are not installed."""
    return {name: shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") for name in PROGRAMS}


@contextmanager
def running_slurm(programs: Mapping[str, str]) -> Iterator[Slurm]:
    """All nodes are idle. AssertionError with the daemons' logs if they do not become idle."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as name:  # sockets need short paths
        folder = Path(name)
        slurm = Slurm(folder)
        for part in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / part).mkdir()
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, ports=free_ports(), user=getpass.getuser()))
        (folder / "gres.conf").write_text("NodeName=g1 Name=gpu File=/dev/tty[0-1]\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o400)
        munge = ["--key-file=munge.key", "--socket=munge.socket", "--pid-file=munge.pid", "--seed-file=munge.seed"]
        munge = [option.replace("=", f"={folder}/") for option in munge]
        with ExitStack() as running:
            start = lambda name, *command: running.enter_context(
                daemon(name, [programs[command[0]], *command[1:]], slurm.environment, folder)
            )
            start("munged", "munged", "-F", "-f", f"--log-file={folder}/munged.log", *munge)
            until((folder / "munge.socket").exists, what="munged")
            start("slurmctld", "slurmctld", "-D")
            for node in NODES:
                start(f"slurmd-{node}", "slurmd", "-D", "-N", node)
            try:
                until(lambda: ready(slurm), 30, "Slurm's nodes to be idle")
            except AssertionError as error:
                logs = "".join(f"\n{log.name}:\n{log.read_text()[-1500:]}" for log in folder.glob("*.log"))
                raise AssertionError(f"{error}{logs}") from None
            yield slurm
