"""A kernel whose controller outlives it: `python controller_kernel.py FOLDER LEASE` prints the controller's process."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from nbelastic.ipp.supervisor import Supervisor
from tests.support.driver_lease import named


async def main(folder: Path, lease: float) -> None:
    controller = Supervisor(folder / "ipython", "kept", 8.0, named(folder, lease))
    await controller.start()
    (folder / "connection").write_text(controller.connection)
    print(controller.process, flush=True)
    await asyncio.sleep(1000)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
