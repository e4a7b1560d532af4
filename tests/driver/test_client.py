"""The notebook's ipyparallel client forgets calls that are over."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

from nbelastic.ipp.client import Client


def test_a_call_is_forgotten_once_it_is_answered():
    """The client forgets a call only after its answer: for a pending call ipyparallel raises."""
    forgotten = []
    loop = SimpleNamespace(add_callback=lambda call, result: call(result))
    client = SimpleNamespace(_io_loop=loop, purge_local_results=forgotten.append)
    answer = Future()
    Client._forget(client, answer)
    assert forgotten == []
    answer.set_result(None)
    assert forgotten == [answer]
    Client._forget(client, answer)
    assert forgotten == [answer, answer]
