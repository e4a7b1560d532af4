"""A notebook's kernel, as far as a cluster knows it: starts one that is kept, trains on it, and waits to be killed.

`python -m tests.process.kernel '{"name": …, "folder": …, "hosts": …, "options": {…}, "program": …, "arguments": {…}}'`
"""

from __future__ import annotations

import json
import sys

import nbelastic as nbe
from tests.process import programs


def main() -> None:
    said = json.loads(sys.argv[1])
    cluster = nbe.Cluster(said["hosts"], name=said["name"], keep=True, cooldown=(0, 0), **said["options"])
    cluster.start(timeout=60)
    if said["program"]:
        cluster.run(getattr(programs, said["program"]), said["folder"], **said["arguments"])
    print("ready", flush=True)
    sys.stdin.read()  # its end is an ordinary one of the kernel


if __name__ == "__main__":
    main()
