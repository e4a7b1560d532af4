"""A kernel as a program: it starts a cluster, trains on it, and waits to be killed.

The cluster is kept unless its options differ. With `engines` its workers are ipyparallel's engines. With `"attach": n` the kernel attaches to the cluster of that name. It then
prints the seconds until its imports were done, until it had the cluster, and until n workers trained.

`python -m tests.process.kernel_program '{"name": …, "folder": …, "hosts": …, "options": {…}, "program": …, "arguments": {…}, "engines": …}'`
"""

from __future__ import annotations

import json
import os
import sys
import time

import nbelastic as nbe
from nbelastic.client import driver_process
from tests.process import programs
from tests.process.script_training import MANY_STEPS, TRAIN


def main() -> None:
    driver_process.CODE = os.environ.get("TESTS_DRIVER", driver_process.CODE)  # see tests/support/warm_agents.py
    settings = json.loads(sys.argv[1])
    if settings.get("attach"):
        start = time.monotonic()
        attach = nbe.Cluster.attach
        times = [time.monotonic() - start]
        cluster = attach(settings["name"])
        times.append(time.monotonic() - start)
        cluster.wait(settings["attach"], timeout=60)
        print(json.dumps([*times, time.monotonic() - start]), flush=True)
        sys.stdin.read()
        return
    options = {"keep": True, "cooldown": (0, 0), **settings["options"]}
    cluster = nbe.Cluster(settings["hosts"], name=settings["name"], **options)
    cluster.start(timeout=60)
    if settings["engines"]:
        assert cluster.client.ids
    if settings["program"] == "script":
        cluster.run_script(TRAIN, settings["folder"], MANY_STEPS, **settings["arguments"])
    elif settings["program"]:
        cluster.run(getattr(programs, settings["program"]), settings["folder"], **settings["arguments"])
    print("ready", flush=True)
    sys.stdin.read()  # the kernel exits normally when its input ends


if __name__ == "__main__":
    main()
