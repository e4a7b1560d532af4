"""A kernel with a controller that outlives it. `python kept_kernel.py <folder> <lease>`; prints the controller's process.

On the first engine that comes it runs a program, which waits for `<folder>/go`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from nbelastic.driver.engines import Engines
from nbelastic.presence import identity

PROGRAM = """
import time
from pathlib import Path
x = 5
Path({folder!r}, "begun").touch()
while not Path({folder!r}, "go").exists():
    time.sleep(0.01)
y = 7
y
"""


async def main(folder: Path, lease: float) -> None:
    (folder / "driver").write_text(identity(os.getpid()))
    there: asyncio.Queue[str] = asyncio.Queue()
    engines = Engines(str(folder / "ipython"), "kept", 8.0, there.put_nowait, keep=(folder / "driver", lease))
    await engines.start()
    (folder / "connection").write_text(engines.connection)
    print(engines.process, flush=True)
    engines.run_cell(await there.get(), "job-1", str(folder), (PROGRAM.format(folder=str(folder)), None), print)
    await asyncio.sleep(1000)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
