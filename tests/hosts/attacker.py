"""Somebody on the network without any key, as a program: `attacker.py '{"do": ..., "doors": [[address, port], ...], ...}'`.

It says what came of it as one line of JSON. What it holds open it holds until its standard input ends.
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

PATIENCE = 0.5  # seconds that a door gets to open; packets here need no millisecond
VALID = b"\x00" + struct.pack("<I", 0x3C85F7CE)  # how a client of torch's store begins
KEYS = b"\x07"  # it asks the store how many keys it has
Door = tuple[str, int]


def greeting(mechanism: bytes, version: bytes = b"\x03\x01") -> bytes:
    """ZMTP's first 64 bytes."""
    return b"\xff" + bytes(8) + b"\x7f" + version + mechanism.ljust(20, b"\0") + bytes(32)


def nonsense(number: int, rng: random.Random) -> bytes:
    """What no door should mind."""
    noise = rng.randbytes(rng.randrange(1, 400))
    match number % 12:
        case 0:
            return noise
        case 1:
            return greeting(b"CURVE")[: rng.randrange(64)]
        case 2:  # without any key
            return greeting(b"NULL") + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER" + noise
        case 3:
            return greeting(b"PLAIN") + b"\x04\x0c\x05HELLO\x02me\x02me" + noise
        case 4:  # a hello that no key has made
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
        case _:
            return bytes(1 << 16)


def call(door: Door) -> socket.socket | None:
    """A connection, or None where nobody opens."""
    try:
        return socket.create_connection(door, timeout=PATIENCE)
    except OSError:
        return None


def junk(doors: list[Door], count: int) -> dict[str, Any]:
    """`count` broken messages, each on a connection of its own; every other one stays to hear an answer."""
    rng, sent, deaf = random.Random(3), 0, dict.fromkeys(doors, 0)
    for number in range(count):
        door = doors[number % len(doors)]
        if deaf[door] >= 3:  # it lets nobody in
            continue
        one = call(door)
        deaf[door] = 0 if one else deaf[door] + 1
        if one is None:
            continue
        with one, contextlib.suppress(OSError):
            sent += 1
            one.settimeout(0.005)
            one.sendall(nonsense(number // len(doors), rng))
            if number % 2:
                one.recv(1 << 16)
    return {"sent": sent, "shut": sorted(door for door in doors if deaf[door] >= 3)}


def flood(doors: list[Door], count: int) -> dict[str, Any]:
    """`count` connections to each door, which are held and say nothing."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held: dict[Door, list[socket.socket]] = {door: [] for door in doors}
    for _ in range(count):
        for door in doors:
            one = socket.socket(socket.AF_INET6 if ":" in door[0] else socket.AF_INET)
            one.setblocking(False)
            one.connect_ex(door)
            held[door].append(one)
    return {"held": held}


def stands(one: socket.socket) -> bool:
    """Whether this connection came about and was not closed since."""
    try:
        one.getpeername()
        return one.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def store(doors: list[Door], count: int) -> dict[str, Any]:
    """Ask each door as a client of torch's store; the doors that answer."""
    answered = set()
    for door in doors:
        for _ in range(count):
            one = call(door)
            if one is None:
                break
            with one, contextlib.suppress(OSError):
                one.sendall(VALID + KEYS)
                answer = one.recv(8)
                if len(answer) == 8 and answer[0] != 0xFF:  # that is how ZeroMQ greets
                    answered.add(door)
    return {"answered": sorted(answered)}


def strangers(doors: list[Door], count: int) -> dict[str, Any]:
    """Peers with good CURVE keys of another cluster, who say what its workers and agents say."""
    import zmq

    with zmq.Context() as context:
        ours = [context.socket(zmq.DEALER) for _ in range(count) for _ in doors]
        server, _ = zmq.curve_keypair()
        for one, door in zip(ours, doors * count, strict=True):
            one.linger = 0
            one.ipv6 = True
            one.identity = b"agent/h1~1"
            one.curve_publickey, one.curve_secretkey = zmq.curve_keypair()
            one.curve_serverkey = server
            one.connect(f"tcp://[{door[0]}]:{door[1]}" if ":" in door[0] else f"tcp://{door[0]}:{door[1]}")
            one.send(b'{"type":"WorkerExited","worker":{"host":"h1","slot":0,"incarnation":1},"code":1}')
        poller = zmq.Poller()
        for one in ours:
            poller.register(one, selectors.EVENT_READ)
        heard = len(poller.poll(2000))
        for one in ours:
            one.close()
    return {"heard": heard}


def main() -> None:
    order = json.loads(sys.argv[1])
    doors = [(str(address), int(port)) for address, port in order["doors"]]
    result = {"junk": junk, "flood": flood, "store": store, "strangers": strangers}[order["do"]](doors, order["count"])
    held = result.pop("held", None)
    print(json.dumps(result), flush=True)
    for _ in sys.stdin if held is not None else ():  # whoever asks is told how many stand by now
        print(json.dumps([[door, sum(map(stands, ones))] for door, ones in held.items()]), flush=True)


if __name__ == "__main__":
    main()
