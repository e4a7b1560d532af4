"""The notice of a cloud that this machine will end, from the metadata server that AWS, Google Cloud and Azure have.

A thread asks the server. On a machine whose firmware names none of these clouds there is no thread, and nothing is asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from nbelastic.system.backoff import Backoff
from nbelastic.system.log_line import log_line
from nbelastic.system.running_agents import Notice

DMI = Path("/sys/class/dmi/id")  # what the firmware says about the machine
SERVER = "169.254.169.254"  # the same address in all three clouds; it leads to the machine's own hypervisor
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0  # seconds between two questions to a server that keeps failing
TIMEOUT = 10.0  # seconds in which the server answers
LEAST = 10.0  # seconds: the end may come later than announced, and without any time no worker can leave
LONGEST_ANSWER = 1 << 20  # bytes


class Event(NamedTuple):
    """What a cloud announces. `id` is the same in each answer about it. `within`: seconds until the machine ends."""

    id: str
    within: float
    reason: str


class Answer(NamedTuple):
    """`now`: the server's time."""

    status: int
    body: bytes
    etag: str
    now: datetime


class Cloud(Protocol):
    """How one cloud announces the end of a machine. `pause`: seconds between two questions."""

    pause: float

    def ask(self, server: str) -> Event | None:
        """Ask the metadata server once. OSError, HTTPException or ValueError if it has no valid answer."""


class _SpotAction(msgspec.Struct):
    action: str  # terminate, stop or hibernate
    time: datetime


class Aws:
    """EC2 ends a spot instance after two minutes' notice.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """

    pause = 5.0

    def ask(self, server: str) -> Event | None:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        token = request(server, "/latest/api/token", lifetime, method="PUT").body.decode("ascii")
        answer = request(server, "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
        if answer.status == 404:
            return None
        found = msgspec.json.decode(answer.body, type=_SpotAction)
        return Event(str(found.time), _seconds_until(found.time, answer), f"AWS (spot instance: {found.action})")


class GoogleCloud:
    """Compute Engine gives 30 s before it preempts a machine, a minute before maintenance, and an hour with GPUs.

    https://cloud.google.com/compute/docs/instances/preemptible, https://cloud.google.com/compute/docs/gpus/gpu-host-maintenance
    """

    PREEMPTION, MAINTENANCE, MAINTENANCE_WITH_GPUS = 30.0, 60.0, 3600.0
    WAIT = 5  # seconds in which the server answers; at once if the machine is preempted
    pause = 1.0

    def __init__(self, *, gpus: bool) -> None:
        self._maintenance = self.MAINTENANCE_WITH_GPUS if gpus else self.MAINTENANCE
        self._etag = ""  # of the last answer

    def ask(self, server: str) -> Event | None:
        flavor, folder = {"Metadata-Flavor": "Google"}, "/computeMetadata/v1/instance"
        wait = f"?wait_for_change=true&timeout_sec={self.WAIT}&last_etag={self._etag}" if self._etag else ""
        answer = request(server, f"{folder}/preempted{wait}", flavor)
        self._etag = answer.etag
        if answer.body == b"TRUE":
            return Event("preempted", self.PREEMPTION, "Google Cloud (preempted)")
        if request(server, f"{folder}/maintenance-event", flavor).body == b"TERMINATE_ON_HOST_MAINTENANCE":
            return Event("maintenance", self._maintenance, "Google Cloud (host maintenance)")
        return None


class _ScheduledEvent(msgspec.Struct, rename="pascal"):
    event_id: str
    event_type: str
    event_status: str
    not_before: str
    resources: list[str] = []  # names of machines: the list is the same for all machines of a scale set


class _ScheduledEvents(msgspec.Struct, rename="pascal"):
    events: list[_ScheduledEvent]


class Azure:
    """Scheduled events are known 30 s before an eviction, and some minutes before others.

    https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
    """

    ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")  # not Freeze: a pause of some seconds
    pause = 2.0

    def ask(self, server: str) -> Event | None:
        header = {"Metadata": "true"}
        answer = request(server, "/metadata/scheduledevents?api-version=2020-07-01", header)
        events = msgspec.json.decode(answer.body, type=_ScheduledEvents).events
        # Not those that have started: after a reboot its own event is still listed.
        events = [each for each in events if each.event_type in self.ENDS and each.event_status == "Scheduled"]
        if not events:
            return None
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        name = request(server, path, header).body.decode()
        ends = [
            Event(
                each.event_id,
                _seconds_until(parsedate_to_datetime(each.not_before), answer),
                f"Azure ({each.event_type})",
            )
            for each in events
            if name in each.resources
        ]
        return min(ends, key=lambda end: end.within, default=None)


def request(server: str, path: str, headers: Mapping[str, str], *, method: str = "GET") -> Answer:
    """The metadata server's answer. HTTPException for a status other than 200 and 404."""
    connection = HTTPConnection(server, timeout=TIMEOUT)  # no proxy: the address means another machine there
    try:
        connection.request(method, path, headers=dict(headers))
        response = connection.getresponse()
        body = response.read(LONGEST_ANSWER)
    finally:
        connection.close()
    if response.status not in (200, 404) or (response.status == 404 and method != "GET"):
        raise HTTPException(f"{path.partition('?')[0]}: {response.status} {response.reason}")
    date = response.headers.get("Date")
    now = parsedate_to_datetime(date) if date else datetime.now(UTC)
    return Answer(response.status, body.strip(), response.headers.get("ETag", ""), now)


def _seconds_until(time: datetime, answer: Answer) -> float:
    """By the server's clock: the machine's own may be wrong. A time without a zone is UTC."""
    return (
        time.replace(tzinfo=time.tzinfo or UTC) - answer.now.replace(tzinfo=answer.now.tzinfo or UTC)
    ).total_seconds()


def this_cloud(dmi: Path | None = None) -> Cloud | None:
    """The cloud that this machine belongs to, as its firmware says; None if it is of no known cloud."""

    def says(name: str) -> str:
        try:
            return (dmi or DMI).joinpath(name).read_text("utf-8", "replace").strip()
        except OSError:
            return ""

    if says("sys_vendor") == "Amazon EC2" or says("bios_version").endswith(".amazon"):
        return Aws()
    if says("product_name") == "Google Compute Engine":
        return GoogleCloud(gpus=Path("/proc/driver/nvidia/gpus").exists())
    if says("chassis_asset_tag") == "7783-7084-3265-9085-8269-3286-77":  # of all machines of Azure
        return Azure()
    return None


def watch(cloud: Cloud, on_notice: Callable[[Notice], object], *, server: str | None = None) -> None:
    """Ask without end, and call `on_notice` once for each event."""
    seen: set[str] = set()
    backoff, failed = Backoff(FIRST_PAUSE, LONGEST_PAUSE), False
    while True:
        pause = cloud.pause
        try:
            event = cloud.ask(server or SERVER)
        except (OSError, HTTPException, ValueError) as error:
            if not failed:
                log_line(f"nbelastic: the cloud's metadata server has no answer: {error!r}")
            failed, pause = True, backoff.next()
        else:
            failed = False
            backoff.reset()
            if event is not None and event.id not in seen:
                seen.add(event.id)
                on_notice(Notice(max(event.within, LEAST), event.reason))
        time.sleep(pause)


def start(on_notice: Callable[[Notice], object]) -> None:
    """Watch in a daemon thread, if this machine is of a known cloud. `on_notice` is called there."""
    cloud = this_cloud()
    if cloud is not None:
        threading.Thread(target=watch, args=(cloud, on_notice), name="nbelastic-cloud", daemon=True).start()
