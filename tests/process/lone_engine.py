"""An engine without agent and driver: it outlives every kernel, and ends when its standard input ends.

`python lone_engine.py CONNECTION_FILE PROFILE` prints the uuid of the engine.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from nbelastic.ipp.engine import NO_TIMEOUTS, Engine


def main(connection: str, profile: str) -> None:
    def exit_with_input() -> None:
        os.read(0, 1)
        os._exit(0)

    threading.Thread(target=exit_with_input, daemon=True).start()
    os.environ["IPP_CONNECTION_INFO"] = Path(connection).read_text()
    Engine.registered = staticmethod(lambda _id: None)
    app: Any = Engine.instance(log_level=40)
    app.initialize([f"--profile-dir={profile}", "--IPEngine.enable_nanny=False", *NO_TIMEOUTS, "--log-level=40"])
    print(app.ident, flush=True)
    app.start()


if __name__ == "__main__":
    main(*sys.argv[1:])
