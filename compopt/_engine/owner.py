"""An optimizer that another one owns and steps: what its engine asks of the owner.

Nobody else steps it, so no integration hears of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from .._wire.control import Words
from .decision import StepDecision
from .settings import Setting
from .turns import Turns

if TYPE_CHECKING:
    from .engine import Engine


class Owner(Protocol):
    """Who owns an optimizer."""

    def compared(self) -> Engine:
        """Whose gradients tell whether somebody else averages them too."""

    def settings(self) -> list[Setting]:
        """What else must be the same on all ranks, step for step."""

    def words(self) -> dict[str, Words]:
        """What else is averaged over ranks beside the gradients; in ``StepDecision.agreed``."""

    def before_commit(self) -> Turns[None]:
        """Wait until the step may be applied, all ranks having agreed to."""

    def committed(self, decision: StepDecision) -> None:
        """The step is applied; this still belongs to it."""


_being_made: ContextVar[bool] = ContextVar(
    "compopt: an owned optimizer is being made", default=False
)


@contextmanager
def making_own() -> Iterator[None]:
    """Optimizers made in this block have an owner."""
    token = _being_made.set(True)
    try:
        yield
    finally:
        _being_made.reset(token)


def is_owned() -> bool:
    """Whether the optimizer that is being made has an owner."""
    return _being_made.get()
