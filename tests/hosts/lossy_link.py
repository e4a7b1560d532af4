"""A slow, lossy wire in user space: frames that come in at one interface leave by another, later or never.

`python relay.py A B DELAY LOSS SEED` joins the interfaces A and B of its network namespace. It ends when it is killed; the process
that was started ends as soon as the wire works and prints the number of the one that stays. The kernel's netem would do the
same, where it is built in.
"""

from __future__ import annotations

import heapq
import os
import random
import select
import socket
import sys
import time

_ETH_P_ALL = 3
_SOL_PACKET = 263
_PACKET_ADD_MEMBERSHIP = 1
_PACKET_MR_PROMISC = 1
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_LARGEST = 1 << 17  # a frame that the kernel has not cut into packets yet is up to 64 KiB


def tap(interface: str) -> socket.socket:
    """All frames that arrive at an interface; what is sent leaves by it."""
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    # Between two namespaces of one machine, checksums and the cutting into packets are left to a card that never comes: the header
    # of virtio keeps what is still to be done beside each frame. Without it the receiver would drop them as damaged.
    raw.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    raw.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    raw.bind((interface, _ETH_P_ALL))
    index = socket.if_nametoindex(interface)
    promiscuous = index.to_bytes(4, sys.byteorder) + _PACKET_MR_PROMISC.to_bytes(2, sys.byteorder) + bytes(10)
    raw.setsockopt(_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, promiscuous)
    raw.setblocking(False)
    return raw


def carry(left: socket.socket, right: socket.socket, delay: float, loss: float, chance: random.Random) -> None:
    """Forever: each frame, `delay` seconds later, unless chance loses it."""
    across = {left: right, right: left}
    due: list[tuple[float, int, socket.socket, bytes]] = []
    number = 0
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        ready, _, _ = select.select([left, right], [], [], wait)
        now = time.monotonic()
        for source in ready:
            while True:
                try:
                    frame = source.recv(_LARGEST)
                except BlockingIOError:
                    break
                except OSError:  # the interface was down for a moment: it says so once
                    continue
                number += 1  # frames due at the same time keep their order
                if chance.random() >= loss:
                    heapq.heappush(due, (now + delay, number, across[source], frame))
        while due and due[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(due)
            try:
                target.send(frame)
            except OSError:  # a full or downed interface loses frames, as wires do
                continue


def main() -> None:
    left, right = tap(sys.argv[1]), tap(sys.argv[2])
    delay, loss, seed = float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    pid = os.fork()
    if pid:
        print(pid)
        return
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    carry(left, right, delay, loss, random.Random(seed))


if __name__ == "__main__":
    main()
