"""The error tree. Every message says what happened, with numbers, and what to do next."""

from __future__ import annotations


class NbelasticError(Exception):
    """Base of every error that nbelastic raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message. Where in our code it was raised helps nobody."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(NbelasticError):
    """What was asked for cannot be done as it was asked: a wrong argument, a wrong moment."""


class AnotherDriverError(UsageError):
    """The cluster of this name has a driver already."""


class HostError(NbelasticError):
    """A host could not be reached, started or understood."""


class DiscoveryError(HostError):
    """Where hosts come from gave no usable answer."""


class WaitTimeoutError(NbelasticError, TimeoutError):
    """Time ran out; the message names what was waited for."""


class ClusterStoppedError(NbelasticError):
    """The cluster was stopped, or is not running yet."""


class DriverLostError(ClusterStoppedError):
    """The driver has died before it answered; another one has taken over, and can be asked again."""


class JobError(NbelasticError):
    """The training program failed; `remote_traceback` is the failing rank's own.

    Attributes: `rank` (int or None), `worker` (str), `remote_traceback` (str).
    """

    def __init__(self, message: str, *, rank: int | None = None, worker: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.worker = worker
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        text = str(self.args[0])
        return f"{text}\n\n{self.remote_traceback.rstrip()}" if self.remote_traceback else text


class JobStoppedError(JobError):
    """The job was stopped, by a person or because it could not go on; the message says which."""


class NoWorldError(NbelasticError):
    """`rank()` and its kin were asked for outside an elastic function, where there is no world."""


class StateError(NbelasticError):
    """The training state cannot be committed, restored or synchronised."""
