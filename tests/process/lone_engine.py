"""An engine without agent and driver: it outlives every kernel, until its standard input ends.

`python lone_engine.py <file with the connection information> <profile>`; prints its uuid.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from nbelastic.ipp.engine import NO_TIMEOUTS, Engine


def main(connection: str, profile: str) -> None:
    def follow() -> None:
        os.read(0, 1)
        os._exit(0)

    threading.Thread(target=follow, daemon=True).start()
    os.environ["IPP_CONNECTION_INFO"] = Path(connection).read_text()
    Engine.registered = staticmethod(lambda _id: None)
    app: Any = Engine.instance(log_level=40)
    app.initialize([f"--profile-dir={profile}", "--IPEngine.enable_nanny=False", *NO_TIMEOUTS, "--log-level=40"])
    print(app.ident, flush=True)
    app.start()


if __name__ == "__main__":
    main(*sys.argv[1:])
