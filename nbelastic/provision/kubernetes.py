"""Hosts that are pods which others have made: those that are Ready and have certain labels."""

from __future__ import annotations

from nbelastic.errors import DiscoveryError, UsageError
from nbelastic.protocol.ids import HostSpec
from nbelastic.provision.kubernetes_api import ApiError, KubernetesApi, check_installed
from nbelastic.provision.pod_states import is_usable, slots_in


class PodDiscovery:
    """The pods that match a label selector and are Ready: `PodDiscovery(None, "app=trainer")`.

    Without `slots` a pod has one slot per GPU that it may use, else one. A pod that will end is left out: its workers leave
    at the next commit. So is one on a node that is cordoned, if this account may list nodes.
    """

    def __init__(self, slots: int | None = None, selector: str = "") -> None:
        """UsageError without kr8s, or without a selector: it would take all pods of the namespace."""
        if "=" not in selector:
            raise UsageError("name the pods by a label: --discover kubernetes:app=trainer.")
        check_installed()
        self._slots, self._selector = slots, selector
        self._api = KubernetesApi()
        self._may_list_nodes = True

    async def hosts(self) -> tuple[HostSpec, ...]:
        """DiscoveryError if the API does not answer or refuses."""
        try:
            listed = await self._api.request("GET", "pods", labelSelector=self._selector)
            cordoned = await self._cordoned()
        except ApiError as error:
            raise DiscoveryError(str(error)) from None
        return tuple(
            HostSpec(pod["metadata"]["name"], self._slots or slots_in(pod))
            for pod in listed["items"]
            if is_usable(pod) and pod["spec"].get("nodeName") not in cordoned
        )

    async def _cordoned(self) -> set[str]:
        if not self._may_list_nodes:
            return set()
        try:
            return await self._api.cordoned_nodes()
        except ApiError as error:
            if error.status != 403:
                raise
        self._may_list_nodes = False
        return set()
