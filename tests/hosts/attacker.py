"""An attacker without any key: `attacker.py '{"do": ..., "endpoints": [[address, port], ...], "count": ...}'`.

It prints its result as one line of JSON, and holds connections open until its standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import selectors
import socket
import struct
import sys
from typing import Any

TIMEOUT = 0.5  # seconds that a connection may take; packets here need less than a millisecond
VALID = b"\x00" + struct.pack("<I", 0x3C85F7CE)  # how a client of torch's store begins
KEYS = b"\x07"  # the request for the number of keys in the store
TUNNEL = b"\x00nbelastic tunnel 1\x00"  # how a host's connection to the TCP proxy begins
Endpoint = tuple[str, int]


def greeting(mechanism: bytes, version: bytes = b"\x03\x01") -> bytes:
    """ZMTP's first 64 bytes."""
    return b"\xff" + bytes(8) + b"\x7f" + version + mechanism.ljust(20, b"\0") + bytes(32)


def broken_message(number: int, rng: random.Random) -> bytes:
    """A broken message, which must have no effect at any endpoint."""
    noise = rng.randbytes(rng.randrange(1, 400))
    match number % 14:
        case 0:
            return noise
        case 1:
            return greeting(b"CURVE")[: rng.randrange(64)]
        case 2:  # without any key
            return greeting(b"NULL") + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER" + noise
        case 3:
            return greeting(b"PLAIN") + b"\x04\x0c\x05HELLO\x02me\x02me" + noise
        case 4:  # a hello without a valid key
            return greeting(b"CURVE") + b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + rng.randbytes(120)
        case 5:  # a frame of 2^63 - 1 bytes
            return greeting(b"CURVE") + b"\x06" + b"\x7f" + b"\xff" * 7 + noise
        case 6:
            return greeting(b"CURVE", b"\x01") + b"\x00\x01" + noise
        case 7:
            return b"GET /?" + noise.hex().encode() + b" HTTP/1.1\r\nHost: there\r\n\r\n"
        case 8:  # a key and a value that would need 2^62 bytes
            return VALID + b"\x01" + struct.pack("<Q", 1 << 62) + noise
        case 9:  # many values
            return VALID + b"\x0b" + struct.pack("<Q", (1 << 64) - 1) + noise
        case 10:  # gloo's connections begin with a small number
            return struct.pack("<q", number % 64) + noise
        case 11:  # a tunnel that sends frames instead of an answer to the proxy's challenge
            return TUNNEL + struct.pack(">BIIi", 1, 1, 4, number % 65536) + struct.pack(">BII", 2, 7, 0) * 1000
        case 12:  # a handshake of a megabyte
            return greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 1 << 20) + bytes(1 << 20)
        case _:
            return bytes(1 << 16)


def connect(endpoint: Endpoint) -> socket.socket | None:
    """A connection to the endpoint, or None if that fails."""
    try:
        return socket.create_connection(endpoint, timeout=TIMEOUT)
    except OSError:
        return None


def junk(endpoints: list[Endpoint], count: int) -> dict[str, Any]:
    """Send `count` broken messages, each on a new connection; wait for an answer on every second connection."""
    rng, sent, failures = random.Random(3), 0, dict.fromkeys(endpoints, 0)
    for number in range(count):
        endpoint = endpoints[number % len(endpoints)]
        if failures[endpoint] >= 3:  # it accepts no connection
            continue
        one = connect(endpoint)
        failures[endpoint] = 0 if one else failures[endpoint] + 1
        if one is None:
            continue
        with one, contextlib.suppress(OSError):
            sent += 1
            one.settimeout(0.005)
            one.sendall(broken_message(number // len(endpoints), rng))
            if number % 2:
                one.recv(1 << 16)
    return {"sent": sent, "closed": sorted(endpoint for endpoint in endpoints if failures[endpoint] >= 3)}


def flood(endpoints: list[Endpoint], count: int) -> dict[str, Any]:
    """Hold `count` connections to each endpoint, without sending anything."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held: dict[Endpoint, list[socket.socket]] = {endpoint: [] for endpoint in endpoints}
    for _ in range(count):
        for endpoint in endpoints:
            one = socket.socket(socket.AF_INET6 if ":" in endpoint[0] else socket.AF_INET)
            one.setblocking(False)
            one.connect_ex(endpoint)
            held[endpoint].append(one)
    return {"held": held}


def is_open(one: socket.socket) -> bool:
    """Whether this connection is established and was not closed since."""
    try:
        one.getpeername()
        return one.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def store(endpoints: list[Endpoint], count: int) -> dict[str, Any]:
    """Ask each endpoint as a client of torch's store; return the endpoints that answer."""
    answered = set()
    for endpoint in endpoints:
        for _ in range(count):
            one = connect(endpoint)
            if one is None:
                break
            with one, contextlib.suppress(OSError):
                one.sendall(VALID + KEYS)
                answer = one.recv(8)
                if len(answer) == 8 and answer[0] != 0xFF:  # 0xFF begins ZeroMQ's greeting
                    answered.add(endpoint)
    return {"answered": sorted(answered)}


def foreign_peers(endpoints: list[Endpoint], count: int) -> dict[str, Any]:
    """Send a worker's message with the CURVE keys of another cluster; return how many peers get an answer."""
    import zmq

    with zmq.Context() as context:
        peers = [context.socket(zmq.DEALER) for _ in range(count) for _ in endpoints]
        server, _ = zmq.curve_keypair()
        for one, endpoint in zip(peers, endpoints * count, strict=True):
            one.linger = 0
            one.ipv6 = True
            one.identity = b"agent/h1~1"
            one.curve_publickey, one.curve_secretkey = zmq.curve_keypair()
            one.curve_serverkey = server
            one.connect(
                f"tcp://[{endpoint[0]}]:{endpoint[1]}" if ":" in endpoint[0] else f"tcp://{endpoint[0]}:{endpoint[1]}"
            )
            one.send(b'{"type":"WorkerExited","worker":{"host":"h1","slot":0,"incarnation":1},"code":1}')
        poller = zmq.Poller()
        for one in peers:
            poller.register(one, selectors.EVENT_READ)
        answers = len(poller.poll(2000))
        for one in peers:
            one.close()
    return {"answers": answers}


def main() -> None:
    options = json.loads(sys.argv[1])
    endpoints = [(str(address), int(port)) for address, port in options["endpoints"]]
    result = {"junk": junk, "flood": flood, "store": store, "foreign_peers": foreign_peers}[options["do"]](
        endpoints, options["count"]
    )
    held = result.pop("held", None)
    print(json.dumps(result), flush=True)
    for _ in sys.stdin if held is not None else ():  # each input line is answered with the open connections
        print(json.dumps([[endpoint, sum(map(is_open, ones))] for endpoint, ones in held.items()]), flush=True)


if __name__ == "__main__":
    main()
