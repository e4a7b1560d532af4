"""A slow, lossy link in user space: frames that arrive at one interface leave by another, late or never.

`python lossy_link.py A B DELAY LOSS SEED` joins the interfaces A and B of its network namespace. The command prints the pid of
the process that carries the frames until it is killed. Linux's netem does the same, but not every kernel has it.
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
_LARGEST = 1 << 17  # a frame that Linux has not segmented yet has up to 64 KiB


def tap(interface: str) -> socket.socket:
    """A socket that receives all frames of an interface, and sends by it."""
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    # Linux leaves checksums and segmentation to network cards, and between two namespaces there are none. The virtio header
    # of a frame keeps what is still to be done. Without this header the receiver drops the frame as damaged.
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
    """Without end, forward each frame `delay` seconds later, unless chance loses it."""
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
                except OSError:  # the interface was down for a moment, which gives one error
                    continue
                number += 1  # frames due at the same time keep their order
                if chance.random() >= loss:
                    heapq.heappush(due, (now + delay, number, across[source], frame))
        while due and due[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(due)
            try:
                target.send(frame)
            except OSError:  # an interface that is full or down loses frames
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
