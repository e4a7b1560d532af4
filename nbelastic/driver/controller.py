"""Entry of the controller's process: ipyparallel's controller, ending with the process that started it."""

from __future__ import annotations

import secrets
from typing import Any

from nbelastic.processes import follow_parent


def main() -> None:
    """CURVE keeps strangers out; the messages are signed as well, which ipyparallel leaves out then."""
    follow_parent()

    from ipyparallel.controller import heartmonitor
    from ipyparallel.controller.app import IPController
    from traitlets.config import Config

    heartmonitor.HeartMonitor.handle_pong = _hear
    config = Config({"IPController": {"enable_curve": True}, "Session": {"key": secrets.token_hex(32).encode()}})
    IPController.launch_instance(config=config)


def _hear(monitor: Any, message: list[bytes]) -> None:
    """Any answer is a heartbeat. To ipyparallel those of far engines, with a round trip of two of its periods, are all too old."""
    monitor.responses.add(message[0])
