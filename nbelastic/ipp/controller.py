"""The controller's process: ipyparallel's controller, which ends when its cluster has no driver any more."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import sys
import threading
from pathlib import Path
from typing import Any

import zmq
from ipyparallel import util
from ipyparallel.controller import app, heartmonitor
from ipyparallel.controller import hub as hubs
from traitlets import Set
from traitlets.config import Config

from nbelastic.protocol.local_clusters import remove_without_driver
from nbelastic.system.driver_lease import DriverLease, wait_for_lease_expiry
from nbelastic.system.private_files import replace_private
from nbelastic.system.processes import die_with_parent, kill_group

HANDSHAKE = 10_000  # milliseconds in which a connection has to prove its key; many engines may connect at once
SMALL = 1 << 20  # bytes; ports for requests and heartbeats close a connection that announces a longer message


def main() -> None:
    """`argv[1]` is JSON: `files` (stem of the controller's files), `ready` (a descriptor, written to when it can serve) and
    `driver_lease`. The other arguments are ipyparallel's.

    Connections need a CURVE key. Messages are signed as well, which ipyparallel does not do by itself with CURVE. A restarted
    controller has the same ports and keys, so engines and clients reconnect by themselves.
    """
    options = json.loads(sys.argv[1])
    threading.excepthook = _end  # a controller that has lost a thread does not work: let it be restarted
    driver_lease = DriverLease(*options["driver_lease"])
    threading.Thread(target=_outlast, args=[driver_lease], name="nbelastic-lease", daemon=True).start()
    stem = options["files"]
    keys = _keys(Path(f"{stem}.keys"))
    app.Hub, app.Process, app.start_heartmonitor = Hub, Process, start_heartmonitor
    config = Config(
        {
            "Controller": {
                "enable_curve": True,
                "curve_publickey": keys["public"].encode(),
                "curve_secretkey": keys["secret"].encode(),
                "reuse_files": True,
                "restore_engines": True,
            },
            "Session": {"key": keys["key"].encode()},
        }
    )
    Controller.ready = options["ready"]
    zmq.Context.instance().setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE)  # of all its sockets
    Controller.launch_instance(argv=sys.argv[2:], config=config)


def _keys(file: Path) -> dict[str, str]:
    """The keys of the controller before, if there was one, else new ones."""
    try:
        found: dict[str, str] = json.loads(file.read_text())
    except FileNotFoundError:
        public, secret = zmq.curve_keypair()
        found = {"public": public.decode(), "secret": secret.decode(), "key": secrets.token_hex(32)}
        replace_private(file, [json.dumps(found).encode()])
    return found


def _outlast(driver_lease: DriverLease) -> None:
    """When the lease has expired, remove the cluster's files, and end."""
    wait_for_lease_expiry(driver_lease)
    remove_without_driver(driver_lease)
    kill_group(os.getpgrp())


def _end(args: threading.ExceptHookArgs) -> None:
    threading.__excepthook__(args)
    kill_group(os.getpgrp())


class Process(multiprocessing.Process):
    """The heart monitor's process, which `Controller` starts before ipyparallel would."""

    def start(self) -> None:
        if self.pid is None:
            super().start()


class Controller(app.IPController):  # type: ignore[misc]
    """Writes to `ready` when it can serve, and ends with its heart monitor.

    ZeroMQ reads messages into memory also before a connection has proved its key. So each port has a limit but those for
    calls, results and output, which contain the user's arrays.
    """

    ready: int

    def bind(self, socket: Any, url: str) -> Any:
        """Bind the hub's sockets: for queries, for notifications, and the monitor, which gets copies of all messages."""
        if url != self.monitor_url:
            socket.setsockopt(zmq.MAXMSGSIZE, SMALL)
        return super().bind(socket, url)

    def init_schedulers(self) -> None:
        super().init_schedulers()
        for queue in self.children:
            if queue.name in ("IOPubScheduler", "ControlScheduler"):
                queue.setsockopt_out(zmq.MAXMSGSIZE, SMALL)  # clients subscribe to output here
            if queue.name == "ControlScheduler":
                queue.setsockopt_in(zmq.MAXMSGSIZE, SMALL)

    def start(self) -> None:
        os.write(self.ready, b".")
        os.close(self.ready)  # before the heart monitor is forked, which would keep the pipe open
        self.heartmonitor_process.start()  # before the threads: a lock that one holds at the fork would never be free in it
        super().start()

    def init_signal(self) -> None:
        """ipyparallel calls this as the last step of the start."""
        super().init_signal()
        threading.Thread(target=self._watch, name="nbelastic-heart-monitor", daemon=True).start()

    def _watch(self) -> None:
        self.heartmonitor_process.join()
        kill_group(os.getpgrp())


def start_heartmonitor(*args: Any, **options: Any) -> None:
    """Runs in the heart monitor's process, which shares the controller's ports and so must not outlive it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    die_with_parent(parent=parent.pid or 0)
    heartmonitor.HeartMonitor.handle_pong = _accept_pong
    heartmonitor.bind = _bind_heartbeat
    heartmonitor.start_heartmonitor(*args, **options)


def _bind_heartbeat(socket: Any, url: str, **keys: Any) -> Any:
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE)
    socket.setsockopt(zmq.MAXMSGSIZE, SMALL)
    return util.bind(socket, url, **keys)


def _accept_pong(monitor: Any, message: list[bytes]) -> None:
    """Count each answer as a heartbeat: ipyparallel drops answers that take longer than two periods, as on slow networks."""
    monitor.responses.add(message[0])


class Hub(hubs.Hub):  # type: ignore[misc]
    """Engines of the controller before register again, with the number they had.

    ipyparallel would read a list of engines from a file, and never drop those that have died meanwhile. An engine's heartbeat
    may arrive before its registration.
    """

    beating = Set()

    def handle_new_heart(self, heart: bytes) -> None:
        self.beating.add(heart)
        super().handle_new_heart(heart)

    def handle_stopped_heart(self, heart: bytes) -> None:
        self.beating.discard(heart)
        super().handle_stopped_heart(heart)

    def register_engine(self, reg: bytes, msg: dict[str, Any]) -> None:
        heart = msg["content"]["uuid"].encode()
        if heart in self.by_ident or heart in self.incoming_registrations:
            return  # answered already: engines send this whenever they have reconnected
        super().register_engine(reg, msg)
        self._save_engine_state()
        if heart in self.beating:
            self.finish_registration(heart)

    def _purge_stalled_registration(self, heart: bytes) -> None:
        """Keep it, though no heartbeat came within 30 s: the engine may have been stopped meanwhile, and sends it only once."""

    def _save_engine_state(self) -> None:
        """Save the next number, so that none is used twice."""
        if self.engine_state_file:
            replace_private(Path(self.engine_state_file), [str(self._idcounter).encode()])

    def _load_engine_state(self) -> None:
        file = Path(self.engine_state_file)
        if file.exists():
            self._idcounter = int(file.read_text())
