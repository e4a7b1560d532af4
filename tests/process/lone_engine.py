"""An engine without agent and driver: it outlives every kernel, and ends when its standard input ends.

`python lone_engine.py CONNECTION_FILE PROFILE` prints the uuid of the engine.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path

from nbelastic.ipp.engine import connect_engine
from nbelastic.programs.shell import make_shell


def main(connection: str, profile: str) -> None:
    def exit_with_input() -> None:
        os.read(0, 1)
        os._exit(0)

    threading.Thread(target=exit_with_input, daemon=True).start()
    make_shell(profile)

    information = Path(connection).read_text()

    async def serve() -> None:
        await connect_engine(
            information, profile, lambda engine: print(engine, file=sys.__stdout__, flush=True), asyncio.Lock()
        )
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main(*sys.argv[1:])
