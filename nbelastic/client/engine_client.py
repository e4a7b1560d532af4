"""ipyparallel's client of a cluster, created on first use."""

from __future__ import annotations

import sys
from typing import Any

from nbelastic.client.driver_link import DriverLink
from nbelastic.errors import WaitTimeoutError
from nbelastic.protocol import requests

CONTROLLER_TIMEOUT = 30.0  # seconds in which ipyparallel's controller has to start, and its first engines to connect
WORKER_TIMEOUT = 0.1  # seconds more for each worker
ANSWER_TIMEOUT = 5.0  # seconds that the driver's answer may take after that


class EngineClient:
    """Holds the client. It outlives a driver, as ipyparallel's controller does."""

    def __init__(self, link: DriverLink) -> None:
        self._link = link
        self._client: Any = None
        self._information: dict[str, Any] = {}  # of the controller that the client is connected to

    def connected(self) -> Any:
        """Return the client when it knows the ready workers, which become engines when a client first asks for them.

        Workers that cannot become engines are printed. ClusterStoppedError if the cluster does not run; UsageError during a
        job, if the workers are not engines yet; HostError without a controller or engines; WaitTimeoutError.
        """
        timeout = CONTROLLER_TIMEOUT + WORKER_TIMEOUT * len(self._link.status().workers)
        found: requests.ControllerFound = self._link.ask(
            requests.FindController(timeout), timeout + ANSWER_TIMEOUT, "ipyparallel's controller", cancel=True
        )
        for worker, why in found.failed.items():
            print(f"{worker} is not an engine of ipyparallel: {why}", file=sys.stderr)
        if found.information != self._information:
            self.close()  # the client of an earlier controller
        if self._client is None:
            from nbelastic.ipp.client import connect  # importing ipyparallel is slow

            profile_dir = str(self._link.run_folder.path / "ipython")
            self._client = connect(found.information, self._link.name, profile_dir)
            self._information = found.information
        client = self._client
        if unknown := client.wait_for(found.engines.values(), timeout):
            missing = ", ".join(worker for worker, engine in found.engines.items() if engine in unknown)
            what = f"for ipyparallel's controller to reach {missing}"
            if not client.is_connected:
                what = "to connect to ipyparallel's controller"
            raise WaitTimeoutError(
                f"{timeout:g} s were not enough {what}: try again; %%elastic_px needs no controller."
            )
        return client

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
