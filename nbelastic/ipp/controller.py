"""Entry of the controller's process: ipyparallel's controller, ending when no driver comes any more."""

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
from ipyparallel.controller import app, heartmonitor
from ipyparallel.controller import hub as hubs
from traitlets import Set
from traitlets.config import Config

from nbelastic.protocol.saved_cluster import sweep
from nbelastic.system.files import replace_private
from nbelastic.system.presence import Presence, outlast
from nbelastic.system.processes import die_with_parent, kill_group


def main() -> None:
    """`argv[1]` is JSON: `files` (stem of our files), `ready` (a descriptor, closed when it can be spoken to) and
    `presence`. What comes after is ipyparallel's.

    CURVE keeps strangers out; the messages are signed as well, which ipyparallel leaves out then. One that is started
    again has the ports and keys of the one before: engines and clients come back to it by themselves.
    """
    options = json.loads(sys.argv[1])
    threading.excepthook = _fall  # a controller without one of its threads is none, and the next one may be
    presence = Presence(*options["presence"])
    threading.Thread(target=_outlast, args=[presence], name="nbelastic-outlast", daemon=True).start()
    stem = options["files"]
    keys = _keys(Path(f"{stem}.keys"))
    app.Hub, app.start_heartmonitor = Hub, start_heartmonitor
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
    Controller.launch_instance(argv=sys.argv[2:], config=config)


def _keys(file: Path) -> dict[str, str]:
    """Those of the controller before, if there was one."""
    try:
        found: dict[str, str] = json.loads(file.read_text())
    except FileNotFoundError:
        public, secret = zmq.curve_keypair()
        found = {"public": public.decode(), "secret": secret.decode(), "key": secrets.token_hex(32)}
        replace_private(file, [json.dumps(found).encode()])
    return found


def _outlast(presence: Presence) -> None:
    """Nobody comes: what the cluster has written, keys among it, goes as well.

    Without the kernel that owns it all that it has here ends at once, and with it the lines of ssh; else workers may write a last
    checkpoint.
    """
    outlast(presence)
    sweep(presence.name, presence.number, kill=not presence.owned)
    kill_group(os.getpgrp())


def _fall(args: threading.ExceptHookArgs) -> None:
    threading.__excepthook__(args)
    kill_group(os.getpgrp())


class Controller(app.IPController):  # type: ignore[misc]
    """ipyparallel's, which says when it is there and does not stay without its heart monitor."""

    ready: int

    def start(self) -> None:
        os.write(self.ready, b".")
        os.close(self.ready)  # before the heart monitor is forked: who waits at the other end sees this process end
        super().start()

    def init_signal(self) -> None:
        """The last step of the start."""
        super().init_signal()
        threading.Thread(target=self._watch, name="nbelastic-heart-monitor", daemon=True).start()

    def _watch(self) -> None:
        self.heartmonitor_process.join()
        kill_group(os.getpgrp())


def start_heartmonitor(*args: Any, **options: Any) -> None:
    """The heart monitor's process, which holds the ports of the controller's: it must not outlive it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    die_with_parent(parent=parent.pid or 0)
    heartmonitor.HeartMonitor.handle_pong = _hear
    heartmonitor.start_heartmonitor(*args, **options)


def _hear(monitor: Any, message: list[bytes]) -> None:
    """Any answer is a heartbeat. To ipyparallel those of far engines, with a round trip of two of its periods, are all too old."""
    monitor.responses.add(message[0])


class Hub(hubs.Hub):  # type: ignore[misc]
    """ipyparallel's, to which engines that knew the one before say again who they are, with the number they had.

    Those that have died meanwhile do not: ipyparallel's own way, a list of the engines in a file, keeps them for ever. An
    engine's heart may be heard before its word.
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
            return  # it was answered: engines say it whenever their connections are new
        super().register_engine(reg, msg)
        self._save_engine_state()
        if heart in self.beating:
            self.finish_registration(heart)

    def _save_engine_state(self) -> None:
        """No number is given twice."""
        if self.engine_state_file:
            replace_private(Path(self.engine_state_file), [str(self._idcounter).encode()])

    def _load_engine_state(self) -> None:
        file = Path(self.engine_state_file)
        if file.exists():
            self._idcounter = int(file.read_text())
