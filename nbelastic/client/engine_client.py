"""ipyparallel's client of a cluster, created on first use."""

from __future__ import annotations

from typing import Any

from nbelastic.client.driver_link import DriverLink
from nbelastic.protocol import requests

CONTROLLER_TIMEOUT = 30.0  # seconds in which ipyparallel's controller has to start, and to meet the engines


class EngineClient:
    """Holds the client. It outlives a driver, as ipyparallel's controller does."""

    def __init__(self, link: DriverLink) -> None:
        self._link = link
        self._client: Any = None

    def connected(self) -> Any:
        """Return the client when it knows the ready workers, which become engines when a client first asks for them.

        ClusterStoppedError if the cluster does not run; UsageError during a job, if the workers are not engines yet.
        """
        found: requests.ControllerFound
        found = self._link.ask(requests.FindController(), CONTROLLER_TIMEOUT, "ipyparallel's controller", cancel=True)
        if self._client is None:
            from nbelastic.ipp.client import connect  # importing ipyparallel is slow

            profile_dir = str(self._link.run_folder.path / "ipython")
            self._client = connect(found.information, self._link.name, profile_dir)
        client = self._client
        client.wait_for(found.engines, CONTROLLER_TIMEOUT)
        return client

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
