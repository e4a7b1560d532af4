"""The error classes. Each message says what happened, with numbers, and what to do next."""

from __future__ import annotations

from html import escape


class NbelasticError(Exception):
    """Base of every error that nbelastic raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Have IPython show only the message: a traceback within nbelastic does not help users."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(NbelasticError):
    """A wrong argument, or a call at a wrong moment."""


class AnotherDriverError(UsageError):
    """The cluster of this name has a driver already."""


class HostError(NbelasticError):
    """A host could not be reached or started, or its answer is not valid."""


class DiscoveryError(HostError):
    """The discovery gave no usable answer."""


class WaitTimeoutError(NbelasticError, TimeoutError):
    """The timeout expired; the message names what the call waited for."""


class ClusterStoppedError(NbelasticError):
    """The cluster was stopped, or is not running yet."""


class DriverLostError(ClusterStoppedError):
    """The driver died before it answered. Another one has taken over: try again."""


class JobError(NbelasticError):
    """The training program failed; `remote_traceback` is that of the failing rank.

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

    def _repr_html_(self) -> str:
        traceback = f"<pre>{escape(self.remote_traceback.rstrip())}</pre>" if self.remote_traceback else ""
        return f"<div><strong>{type(self).__name__}</strong>: {escape(str(self.args[0]))}</div>{traceback}"


class JobStoppedError(JobError):
    """The job was stopped, by a user or because it could not go on; the message says which."""


class NoWorldError(NbelasticError):
    """`rank()` or a similar function was called outside an elastic function, where there is no world."""


class StateError(NbelasticError):
    """The training state cannot be committed, restored or synchronised."""
