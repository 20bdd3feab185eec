"""A switch of network interfaces that holds every frame for a time: latency, where the kernel has no netem.

    ip netns exec NAME python bench/_delay.py --seconds 0.04 v0 v1

Frames keep the kernel's segmentation and checksum notes (PACKET_VNET_HDR), so that 64 KiB cross it as one frame, and a
busy gigabit costs some thousand frames a second. `_net.Links(..., round_trip=0.08)` starts it in place of a bridge.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import select
import signal
import socket
import time
from collections.abc import Sequence

ETH_P_ALL = 3
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23  # <linux/if_packet.h>
HEADER = 10  # bytes of struct virtio_net_hdr, in front of a frame
LARGEST = HEADER + 14 + 2**16
BUFFER = 2**26  # bytes that wait for this process; 80 ms at 1 Gbit/s are 10 MB


def open_interface(name: str) -> socket.socket:
    """Return a socket that reads and writes the frames of an interface."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    opened.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    opened.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (33, 32):  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
        opened.setsockopt(socket.SOL_SOCKET, option, BUFFER)
    opened.bind((name, 0))
    opened.setblocking(False)
    return opened


def forward(names: Sequence[str], seconds: float) -> None:
    """Pass frames between the interfaces, each after so many seconds, until the process is ended."""
    ports = [open_interface(name) for name in names]
    print("ready", flush=True)
    known: dict[bytes, socket.socket] = {}  # the interface behind which an address is
    held: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        readable, _, _ = select.select(ports, [], [], wait)
        for port in readable:
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):  # then look at the clock again
                    frame = port.recv(LARGEST)
                    known[frame[HEADER + 6 : HEADER + 12]] = port
                    held.append((time.monotonic() + seconds, port, frame))
        while held and held[0][0] <= time.monotonic():
            _, source, frame = held.popleft()
            found = known.get(frame[HEADER : HEADER + 6])
            for port in ports if found is None else [found]:
                if port is not source:
                    with contextlib.suppress(OSError):  # its queue is full: dropped, as by a router
                        port.send(frame)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pass frames between interfaces, each after a time.")
    parser.add_argument("names", nargs="+", metavar="INTERFACE")
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run that started it ends it
    forward(options.names, options.seconds)


if __name__ == "__main__":
    main()
