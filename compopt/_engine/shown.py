"""What an optimizer shows of its session."""

from __future__ import annotations

from collections.abc import Callable

from .._ops.operations import Ops
from .._state.buckets import Bucket
from .._wire.collectives import Communicator
from .session import Session
from .stats import Stats


class Shown:
    """Properties that are the session's."""

    _session: Session

    @property
    def stats(self) -> Stats:
        """What the last step did."""
        return self._session.stats

    @property
    def comm(self) -> Communicator:
        """The ranks this optimizer averages over; connected when first needed."""
        return self._session.comm

    @property
    def ops(self) -> Ops:
        """The kernels in use."""
        return self._session.ops

    @property
    def backend(self) -> str:
        """Their name; they are chosen once at construction."""
        return self.ops.name

    @property
    def backend_reason(self) -> str:
        """Why these, in words."""
        return self.ops.reason

    @property
    def told_of_steps(self) -> list[Callable[[], None]]:
        """Called after every step: integrations that wait for one."""
        return self._session.step_callbacks

    @property
    def _buckets(self) -> list[Bucket]:
        return self._session.buckets

    def _settle(self) -> None:
        self._session.settle_state()
