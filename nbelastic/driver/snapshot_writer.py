"""Saves the driver snapshot, telemetry and output while a cluster runs, and loads them in its next driver."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from nbelastic.core.cluster_snapshot import Saved, SavedCluster, is_saved, snapshot_of
from nbelastic.core.state import ClusterState
from nbelastic.driver.agents import Agents
from nbelastic.driver.clock import Clock
from nbelastic.driver.driver_snapshot import DriverSnapshot, SavedJob
from nbelastic.driver.engines import Engines
from nbelastic.driver.job_run import JobRun
from nbelastic.driver.telemetry import SavedReports, SavedTelemetry, Telemetry
from nbelastic.protocol import messages
from nbelastic.protocol.json_encoding import DECODE_ERRORS, encode
from nbelastic.protocol.local_clusters import fingerprint
from nbelastic.protocol.run_folder import RunFolder
from nbelastic.protocol.settings import Settings
from nbelastic.system import versions
from nbelastic.system.private_files import append_private, replace_private
from nbelastic.system.processes import machine
from nbelastic.transport.keys import Keys

TELEMETRY = "live.json"
REPORTS = "reports.json"
OUTPUT = "output.jsonl"
TELEMETRY_INTERVAL = 1.0  # seconds between two saves of the telemetry, which changes all the time
REPORTS_INTERVAL = 10.0  # the same for the history of the reports, which is larger
MAX_OUTPUT_SIZE = 4 << 20  # bytes in a file; there are two of them


class SnapshotWriter:
    """Lives in the driver's thread. `previous`: the snapshot of the previous driver; None: this is the cluster's first driver.

    Nothing is saved before `start_saving`.
    """

    def __init__(
        self, run_folder: RunFolder, arguments: Mapping[str, Any], previous: DriverSnapshot | None = None
    ) -> None:
        self.previous = previous
        self.term = previous.term + 1 if previous is not None else 1  # the number of this driver of the cluster
        self.submitted = previous.submitted if previous is not None else 0
        self.job = previous.job if previous is not None else None
        self.code = previous.code if previous is not None else ()
        self._run_folder, self.arguments = run_folder, dict(arguments)
        self._last: DriverSnapshot | None = None
        self._summary: Saved | None = None  # the newest, and what it was made from
        self._output: Any = None
        self._telemetry_saved_at = self._reports_saved_at = 0.0
        self._is_saving = False

    def start_saving(
        self,
        *,
        cluster: Callable[[], ClusterState],
        clock: Clock,
        settings: Settings,
        address: str,
        keys: Keys,
        agents: Agents,
        engines: Engines,
    ) -> None:
        """Save from now on, as the driver that listens at `address`."""
        self._cluster, self._clock = cluster, clock
        self._settings, self._agents, self._engines = settings, agents, engines
        self._address, self._keys = address, keys
        self._is_saving = True

    @property
    def has_snapshot(self) -> bool:
        """Whether a next driver can take over."""
        return self.previous is not None or self._last is not None

    def save_new_job(self, job: SavedJob) -> None:
        """Save a new job in place of the last one. OSError if it cannot be saved; then the last one stays."""
        last, self.job = self.job, job
        self.submitted += 1
        try:
            self.save()
        except OSError:
            self.job = last
            self.submitted -= 1
            raise
        folder = self._run_folder.path
        for path in (*self._output_paths(), folder / TELEMETRY, folder / REPORTS):  # they are of the last job
            path.unlink(missing_ok=True)
        self._telemetry_saved_at = self._reports_saved_at = 0.0
        self.close()

    def update_job(self, **fields: Any) -> None:
        """Change fields of the saved job. The next `save` writes them."""
        if self.job is not None:
            self.job = replace(self.job, **fields)

    def save(self) -> None:
        """Write the snapshot if it has changed."""
        if not self._is_saving:
            return
        cluster = self._cluster()
        summary = self._summary
        if summary is None or summary[0].workers is not cluster.workers or not is_saved(summary[0], cluster):
            self._summary = summary = (cluster, snapshot_of(cluster, summary))
        snapshot = self._snapshot(summary[1])
        if snapshot != self._last:
            snapshot.write(self._run_folder.path)
            self._last = snapshot

    def _snapshot(self, cluster: SavedCluster) -> DriverSnapshot:
        settings, job, proxies = self._settings, self.job, self._agents.tcp_proxies
        agents, saved_proxies, controller = self._agents.saved(), proxies.saved, self._engines.controller_process
        processes = (
            controller,
            *(proxy.process for proxy in saved_proxies),
            *(agent.process for agent in agents.values()),
        )
        is_over = job is None or job.over is not None or (cluster.job == job.name and cluster.outcome)
        return DriverSnapshot(
            version=versions.nbelastic_version(),
            wire=fingerprint(),
            name=settings.name,
            term=self.term,
            address=self._address,
            keys=self._keys,
            arguments=self.arguments,
            log_dir=str(settings.log_dir),
            cluster=cluster,
            agents=agents,
            controller=controller,
            proxies=saved_proxies,
            agents_started=self._agents.started_count,
            submitted=self.submitted,
            processes=tuple(filter(None, processes)),
            tunnels=tuple(agent.process for agent in agents.values() if agent.is_tunnelled and agent.process),
            job=job,
            number=settings.number,
            machine=machine(),
            owner=settings.owner,
            hosts=tuple(host.spec.name for host in cluster.hosts),
            slots=sum(host.spec.slots for host in cluster.hosts),
            running="" if job is None or is_over else job.name,
            code=self.code,
            skipped=self._clock.skipped,
        )

    def save_telemetry(self, telemetry: Telemetry, now: float) -> None:
        """Save the curves and the progress, at most once per `TELEMETRY_INTERVAL`, and the reports less often."""
        if now - self._telemetry_saved_at > TELEMETRY_INTERVAL:
            self._telemetry_saved_at = now
            replace_private(self._run_folder.path / TELEMETRY, [encode(telemetry.saved())])
        if now - self._reports_saved_at > REPORTS_INTERVAL:
            self._reports_saved_at = now
            replace_private(self._run_folder.path / REPORTS, [encode(telemetry.saved_reports())])

    def append_output(self, message: messages.WorkerOutput) -> None:
        """Save what a worker has printed."""
        if self._output is None:
            path = self._run_folder.path / OUTPUT
            is_cut_off = _is_cut_off(path)
            self._output = os.fdopen(append_private(path), "ab")
            self._output.write(b"\n" if is_cut_off else b"")
        self._output.write(encode(message) + b"\n")
        self._output.flush()
        if self._output.tell() > MAX_OUTPUT_SIZE:
            self.close()
            new, old = self._output_paths()[::-1]
            new.replace(old)

    def _output_paths(self) -> tuple[Path, Path]:
        path = self._run_folder.path / OUTPUT
        return path.with_suffix(".old"), path

    def load_output_and_telemetry(self, runs: Mapping[str, JobRun], telemetry: Telemetry) -> None:
        """As the next driver: load what was printed so far, and the curves."""
        for message in self._load_output():
            if message.job in runs:
                runs[message.job].add_output(message)
        with suppress(OSError, *DECODE_ERRORS):
            telemetry.load(msgspec.json.decode((self._run_folder.path / TELEMETRY).read_bytes(), type=SavedTelemetry))
        with suppress(OSError, *DECODE_ERRORS):
            saved = (self._run_folder.path / REPORTS).read_bytes()
            telemetry.load_reports(msgspec.json.decode(saved, type=SavedReports))

    def _load_output(self) -> Iterator[messages.WorkerOutput]:
        decoder = msgspec.json.Decoder(messages.WorkerOutput)
        for path in self._output_paths():
            with suppress(OSError), open(path, "rb") as file:
                for line in file:
                    with suppress(*DECODE_ERRORS):  # the last one may have been cut off
                        yield decoder.decode(line)

    def close(self) -> None:
        """Close the file for output. What a full disk has not taken of it is lost."""
        if self._output is not None:
            with suppress(OSError):
                self._output.close()
            self._output = None


def _is_cut_off(path: Path) -> bool:
    """Whether the last line of a file is incomplete: a driver was killed, or the disk was full."""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)  # OSError for an empty file
        return file.read() != b"\n"
    return False
