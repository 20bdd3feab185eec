"""How long ranks of a quorum wait: for an exchange, for connections, and for a store whose process
may be gone.

``FaultTolerant`` (``torchft``) makes and adapts them.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import time
from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch


class AdaptiveTimeout:
    """The seconds that an exchange may take: the median of the last ones, and ``factor`` times
    their spread, which is the median distance from it.

    ``first``: until five are known. ``least``: the smallest time-out.
    """

    def __init__(self, first: float, least: float = 5.0, factor: float = 10.0):
        self.first, self.least, self.factor = first, least, factor
        self._seconds: deque[float] = deque(maxlen=50)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float:
        if len(self._seconds) < 5:
            return self.first
        middle = median(self._seconds)
        spread = median(abs(s - middle) for s in self._seconds)
        return min(self.first, max(self.least, 2 * middle + self.factor * spread))


class ConnectTimeout:
    """The seconds in which the ranks of a quorum have to connect: five times the longest of the
    last connects, and after each that failed the double. Who has died in between is waited for.

    ``first``: until one is known. ``least`` and ``most``: the smallest and the largest time-out.
    """

    def __init__(self, most: float, first: float = 5.0, least: float = 1.2):
        self.most, self.first, self.least = most, first, least
        self._seconds: deque[float] = deque(maxlen=20)
        self._failures = 0

    @property
    def seconds(self) -> float:
        usual = max(self.least, 5 * max(self._seconds)) if self._seconds else self.first
        return min(self.most, usual * 2.0**self._failures)

    @contextlib.contextmanager
    def applied_to(self, group: Any) -> Iterator[None]:
        """Give the connections that gloo makes in this block so long, collectives over them as
        long as before.
        """
        usual = getattr(group, "_timeout", None)
        if usual is None or "gloo" not in group.getBackendName():  # NCCL connects later
            yield
            return
        group.set_timeout(min(usual, datetime.timedelta(seconds=self.seconds)))
        began, self._failures = time.monotonic(), self._failures + 1
        try:
            yield
        finally:
            group.set_timeout(usual)
        self._seconds.append(time.monotonic() - began)
        self._failures = 0
        group.parent._get_backend(torch.device("cpu"))._set_default_timeout(usual)


def check_store(handles: list[str], seconds: float) -> None:
    """Raise ConnectionError if the process in whose store the ranks of a quorum meet is gone:
    torch's store would try to connect several times.
    """
    try:
        host, _, port = json.loads(handles[0])["store"].rpartition(":")
        address = host.strip("[]"), int(port)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # not as torchft says it
        return
    with socket.create_connection(address, seconds) as connection:
        connection.settimeout(0.05)
        with contextlib.suppress(TimeoutError):  # it says nothing until it is asked
            if not connection.recv(1):
                raise ConnectionResetError(f"the store at {host}:{port} is gone")
