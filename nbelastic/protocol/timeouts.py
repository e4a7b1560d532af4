"""How long each stage and each wait may take."""

from __future__ import annotations

from msgspec import Struct

A_MEMBER = 0.05  # seconds that each member adds to what all of them connect for


class Timeouts(Struct, frozen=True):
    """In seconds. What is done at each deadline is in `docs/reference.md`, section Deadlines."""

    agent: float = 120.0  # a host's agent says that it is there; then the host is lost, and tried again
    worker: float = 300.0  # a worker's engine takes code; then it is replaced
    settle: float = 1.0  # a ready newcomer waits so long for others that are starting
    grace: float = 1.0  # a broken connection waits so long for the news of a death
    program: float = 3600.0  # programs come to the elastic function, while others wait in theirs; then the job fails
    setup: float = 600.0  # a setup cell runs on a worker; then that one is killed and replaced
    silent: float = 600.0  # a worker whose process computes may be silent for so long, unless `stall` says otherwise
    silent_idle: float = 60.0  # the same if its process uses no CPU time: it may be deadlocked
    prepare: float = 15.0  # the next group is built beside the training; then newcomers are left out
    ask: float = 10.0  # members say at which commit they are; then the change is put off: see `ask_for`
    step: float = 3600.0  # members come to the commit at which they leave; then the generation is broken
    recover: float = 60.0  # a survivor leaves a broken generation after the last other did; then it is replaced
    recover_working: float = 600.0  # the same, of a survivor that is seen to compute
    form: float = 60.0  # members connect, while nobody is seen to compute or send state; then they are told apart
    sync: float = 3600.0  # the same, however much they compute and send
    stop: float = 60.0  # a program that holds the training state ends when its job is over: it may write a checkpoint
    leave: float = 5.0  # the same, of a program that does not hold it; then they are killed
    node: float = 15.0  # the torch agent of a script ends on a host, when it was told to; then it counts as ended
    end: float = 30.0  # a worker ends that was told to, which its agent reports; then it counts as ended
    close: float = 5.0  # agents end when the cluster is stopped; then they are not waited for any more

    def prepare_for(self, size: int) -> float:
        """A larger group takes longer to connect."""
        return self.prepare + A_MEMBER * size

    def ask_for(self, silence: float) -> float:
        """A member that is not heard may answer as long as `silence` allows: how long it may be silent has one rule."""
        return max(self.ask, silence)

    def form_for(self, size: int) -> float:
        """The same for the group that they wait for."""
        return self.form + A_MEMBER * size
