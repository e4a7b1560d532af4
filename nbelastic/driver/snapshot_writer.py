"""Writes down, while a cluster runs, what its next driver is to find; and reads it as that one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from nbelastic.core.recovery import SavedCluster, summary
from nbelastic.core.state import ClusterState, is_same
from nbelastic.driver.agents import Fleet
from nbelastic.driver.run import Run
from nbelastic.driver.snapshot import Saved, SavedJob
from nbelastic.driver.telemetry import SavedTelemetry, Telemetry
from nbelastic.protocol import messages
from nbelastic.protocol.encoding import encode
from nbelastic.protocol.run_directory import RunDir
from nbelastic.protocol.saved_cluster import fingerprint
from nbelastic.protocol.settings import Settings
from nbelastic.system import versions
from nbelastic.system.files import append_private, replace_private
from nbelastic.transport.keys import Keys

LIVE = "live.json"
OUTPUT = "output.jsonl"
EVERY = 1.0  # seconds between two writings of what changes all the time
MOST = 4 << 20  # bytes of output in a file; there are two of them


class SnapshotWriter:
    """Lives in the driver's thread. `found`: what the driver before this one has left; None: this is the first.

    From `begin` on it saves.
    """

    def __init__(self, run_dir: RunDir, arguments: Mapping[str, Any], found: Saved | None = None) -> None:
        self.found = found
        self.submitted = found.submitted if found is not None else 0
        self.job = found.job if found is not None else None
        self._run_dir, self.arguments = run_dir, dict(arguments)
        self._last: Saved | None = None
        self._of: tuple[ClusterState, SavedCluster] | None = None
        self._output: Any = None
        self._live_at = 0.0
        self._begun = False

    def begin(
        self,
        *,
        cluster: Callable[[], ClusterState],
        settings: Settings,
        term: int,
        address: str,
        keys: Keys,
        fleet: Fleet,
    ) -> None:
        """The driver has a world now. It is the cluster's driver number `term`, and listens at `address`."""
        self._cluster, self._settings, self._fleet = cluster, settings, fleet
        self._term, self._address, self._keys = term, address, keys
        self._begun = True

    @property
    def saved(self) -> bool:
        """Whether there is anything for a next driver."""
        return self.found is not None or self._last is not None

    def submit(self, job: SavedJob) -> None:
        """Save a new job, and forget the last one. OSError if it cannot be saved; then the last one stays."""
        last, self.job = self.job, job
        self.submitted += 1
        try:
            self.save()
        except OSError:
            self.job = last
            self.submitted -= 1
            raise
        for path in self._outputs():
            path.unlink(missing_ok=True)
        if self._output is not None:
            self._output.close()
            self._output = None

    def job_goes_on(self, **news: Any) -> None:
        """Something of a script that is to be written down."""
        if self.job is not None:
            self.job = replace(self.job, **news)

    def save(self) -> None:
        """Write it down if it has changed."""
        if not self._begun:
            return
        cluster, settings, fleet = self._cluster(), self._settings, self._fleet
        if self._of is None or not is_same(self._of[0], cluster, but=("script", "external_nodes")):
            self._of = (cluster, summary(cluster))
        agents, gates = fleet.agents(), fleet.doors.saved
        started = (fleet.controller, *(gate.process for gate in gates), *(a.process for a in agents.values()))
        summed_up, job = self._of[1], self.job
        is_over = job is None or job.over is not None or (summed_up.job == job.name and summed_up.outcome)
        saved = Saved(
            version=versions.ours(),
            wire=fingerprint(),
            name=settings.name,
            term=self._term,
            address=self._address,
            keys=self._keys,
            arguments=self.arguments,
            log_dir=str(settings.log_dir),
            cluster=summed_up,
            agents=agents,
            controller=fleet.controller,
            gates=gates,
            doors=fleet.doors.links,
            started=fleet.started,
            submitted=self.submitted,
            processes=tuple(filter(None, started)),
            job=job,
            number=settings.number,
            owner=settings.owner,
            hosts=tuple(host.spec.name for host in summed_up.hosts),
            slots=sum(host.spec.slots for host in summed_up.hosts),
            running="" if job is None or is_over else job.name,
        )
        if saved != self._last:
            saved.write(self._run_dir.path)
            self._last = saved

    def live(self, now: float) -> None:
        """Curves and the like, now and then."""
        if now - self._live_at > EVERY:
            self._live_at = now
            replace_private(self._run_dir.path / LIVE, [encode(self._fleet.live.saved())])

    def output(self, message: messages.WorkerOutput) -> None:
        """What a worker has printed."""
        if self._output is None:
            self._output = os.fdopen(append_private(self._run_dir.path / OUTPUT), "ab")
        self._output.write(encode(message) + b"\n")
        self._output.flush()
        if self._output.tell() > MOST:
            self._output.close()
            self._output = None
            new, old = self._outputs()[::-1]
            new.replace(old)

    def _outputs(self) -> tuple[Path, Path]:
        path = self._run_dir.path / OUTPUT
        return path.with_suffix(".old"), path

    def recall(self, runs: Mapping[str, Run], live: Telemetry) -> None:
        """As the next driver: what was printed so far, and how the curves went."""
        for message in self._printed():
            if message.job in runs:
                runs[message.job].hear(message)
        with suppress(OSError, msgspec.DecodeError):
            live.recall(msgspec.json.decode((self._run_dir.path / LIVE).read_bytes(), type=SavedTelemetry))

    def _printed(self) -> Iterator[messages.WorkerOutput]:
        decoder = msgspec.json.Decoder(messages.WorkerOutput)
        for path in self._outputs():
            with suppress(OSError), open(path, "rb") as file:
                for line in file:
                    with suppress(msgspec.DecodeError):  # the last one may have been cut off
                        yield decoder.decode(line)

    def close(self) -> None:
        if self._output is not None:
            self._output.close()
