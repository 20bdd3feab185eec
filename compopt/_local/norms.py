"""The norm of what a rank has, which the host may read later than it is found."""

from __future__ import annotations

import torch
from torch import Tensor

from .._state.devices import is_accelerator, later


class Norm:
    """The L2 norm of some tensors: on a device it stays there until it is read.

    ``there``: what the device finds, or None where the host knows it.
    """

    def __init__(self, tensors: list[Tensor]):
        found = torch.nn.utils.get_total_norm(tensors) if tensors else None
        self.there: Tensor | None = None
        if found is not None and is_accelerator(found.device):
            self.there = found
            self._copy, self._arrived = later(found)
        else:
            self._value = 0.0 if found is None else float(found)

    def read(self, come: bool = False) -> float:
        """The number. ``come``: the host has waited for something that the device did after it."""
        if self.there is not None:
            if not (come and self._arrived.query()):
                self._arrived.synchronize()
            self._value, self.there = float(self._copy), None
        return self._value

    def squared(self) -> Tensor:
        """Its square, on the device; NaN where it is not finite."""
        assert self.there is not None
        return self.there.double().square().where(self.there.isfinite(), torch.nan).view(1)
