"""Ports that are reserved for a later listener."""

from __future__ import annotations

import errno

import pytest
import zmq

from nbelastic.system import ports

ADDRESSES = ("127.0.0.1", "127.0.0.2", "::1")


def test_a_reserved_port_is_kept_from_other_processes_at_each_address():
    """Also at those where nothing listens yet. ZeroMQ can listen there. An address that the machine lacks is left out."""
    with zmq.Context() as context, ports.reserved_port((*ADDRESSES, "192.0.2.77")) as port:
        for address in ADDRESSES:
            assert not ports.is_free(address, port)
            with context.socket(zmq.ROUTER) as listener:
                listener.setsockopt(zmq.IPV6, 1)
                listener.bind(f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}")
    assert all(ports.is_free(address, port) for address in ADDRESSES)


def test_a_port_that_is_in_use_at_one_address_is_not_chosen(monkeypatch):
    """Another one is tried; after many the error says why."""
    bind_all, tries = ports._bind_all, []

    def bind_late(addresses, held):
        tries.append(addresses)
        if len(tries) < 3:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return bind_all(addresses, held)

    monkeypatch.setattr(ports, "_bind_all", bind_late)
    with ports.reserved_port(ADDRESSES[:2]) as port:
        assert len(tries) == 3
        assert not ports.is_free(ADDRESSES[1], port)
    monkeypatch.setattr(ports, "ATTEMPTS", 2)
    tries.clear()
    with pytest.raises(OSError, match="in use"), ports.reserved_port(ADDRESSES):
        pass
