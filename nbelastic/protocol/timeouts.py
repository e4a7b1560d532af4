"""How long each stage and each wait may last, in seconds."""

from __future__ import annotations

from msgspec import Struct

CONNECT_PER_MEMBER = 0.05  # added per member to the time in which all members must connect
DRIVER_START = 60.0  # a driver's process must be ready within this time
TAKEOVER_PER_WORKER = 0.02  # added per worker to `DRIVER_START` for a driver that takes over
LEASE = 60.0  # a process of a cluster that is not kept ends after so long a time without a driver
LEASE_WITH_SSH = 900.0  # the same for a cluster whose hosts are reached over ssh: the network may fail for minutes
OWNER_ENDED = 3.0  # when the owner has ended, an agent waits so long for the driver to end everything
LAST_CHECKPOINT = 60.0  # when its lease has expired, an agent gives its workers so long for a last checkpoint
STOP_AT_KERNEL_END = 0.5  # when the owner has ended, programs must end within this time
BATCH_QUEUE = 7 * 24 * 3600.0  # the default of `Timeouts.agent` for batch jobs, which may queue


class Timeouts(Struct, frozen=True):
    """Each field: what must happen within the time, and what the driver does otherwise. See Deadlines in the reference."""

    agent: float = 120.0  # a host's agent connects; else the host is lost, and tried again
    environment: float = 1800.0  # an environment for the requirements is made; else the host is lost, and tried again
    worker: float = 300.0  # a worker can run code; else it is replaced
    probe: float = 5.0  # agents report whether hosts reach one another; else a newcomer is left out
    store: float = 2.0  # at its host's new address a worker offers a store; else another worker becomes rank 0
    settle: float = 1.0  # other starting workers are ready, beside a newcomer; else it does not wait for them
    grace: float = 1.0  # a lost worker explains a broken connection; else the generation breaks without explanation
    program: float = 3600.0  # programs reach the elastic function, while other members wait there; else the job fails
    setup: float = 600.0  # a setup cell ends on a worker; else the worker is replaced
    silent: float = 600.0  # a silent worker that computes sends a message, if `stall` is None; else it is replaced
    silent_idle: float = 60.0  # the same for a process that uses no CPU time: it may be deadlocked
    prepare: float = 15.0  # the next group is prepared beside the training; else newcomers are left out: `prepare_for`
    ask: float = 10.0  # members report their commits; else the change is put off: `ask_for`
    reconnect: float = 60.0  # a host is connected again, while a change waits for it; else it is lost
    step: float = 3600.0  # members reach the leave point; else the generation breaks
    recover: float = 60.0  # a survivor leaves a broken generation, after the others; else it is replaced
    recover_working: float = 600.0  # the same for a survivor that computes
    form: float = 60.0  # a world forms, while no member computes or sends; else connections are tested: `form_for`
    sync: float = 3600.0  # the same while members compute or send
    stop: float = 60.0  # a program that holds the training state ends after its job; else its worker is killed
    leave: float = 5.0  # the same for a program that does not hold it
    node: float = 15.0  # a script's node on a host ends when asked to; else it counts as ended
    end: float = 30.0  # an agent reports the end of a worker that must end; else it counts as ended
    notice: float = 30.0  # an agent's workers leave after SIGTERM; else they end with it
    successor: float = 300.0  # before its time limit, a Slurm job's successor starts; else that job ends without it
    drain: float = 30.0  # before its host ends, the host's successor is up; else the host's workers leave without it
    checkpoint: float = 10.0  # before the last host ends, a checkpoint is written; half of a notice that is short
    close: float = 5.0  # agents end when the cluster is stopped; else the driver does not wait for them

    def prepare_for(self, size: int) -> float:
        """`prepare` for a group of `size` members: a larger one takes longer to connect."""
        return self.prepare + CONNECT_PER_MEMBER * size

    def ask_for(self, silence: float) -> float:
        """`ask`, or `silence` if that is longer: a member may be without a message for so long."""
        return max(self.ask, silence)

    def form_for(self, size: int) -> float:
        """`form` for a world of `size` members."""
        return self.form + CONNECT_PER_MEMBER * size
