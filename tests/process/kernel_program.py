"""A notebook's kernel, as far as a cluster knows it: starts one (kept, unless told otherwise), trains on it, and waits to be killed.

With `"attach": n` it takes over the one of that name, and says how many seconds the imports took, until it had the cluster,
and until n workers trained.

`python -m tests.process.kernel_program '{"name": …, "folder": …, "hosts": …, "options": {…}, "program": …, "arguments": {…}}'`
"""

from __future__ import annotations

import json
import sys
import time

import nbelastic as nbe
from tests.process import programs
from tests.process.script_training import MANY_STEPS, TRAIN


def main() -> None:
    said = json.loads(sys.argv[1])
    if said.get("attach"):
        start = time.monotonic()
        attach = nbe.Cluster.attach
        times = [time.monotonic() - start]
        cluster = attach(said["name"])
        times.append(time.monotonic() - start)
        cluster.wait(said["attach"], timeout=60)
        print(json.dumps([*times, time.monotonic() - start]), flush=True)
        sys.stdin.read()
        return
    options = {"keep": True, "cooldown": (0, 0), **said["options"]}
    cluster = nbe.Cluster(said["hosts"], name=said["name"], **options)
    cluster.start(timeout=60)
    if said["program"] == "script":
        cluster.run_script(TRAIN, said["folder"], MANY_STEPS, **said["arguments"])
    elif said["program"]:
        cluster.run(getattr(programs, said["program"]), said["folder"], **said["arguments"])
    print("ready", flush=True)
    sys.stdin.read()  # its end is an ordinary one of the kernel


if __name__ == "__main__":
    main()
