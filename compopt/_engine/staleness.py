"""The staleness check: whether gradients have changed since they were read in backward."""

from __future__ import annotations

import torch
from torch import Tensor

from .._state.buckets import Bucket


class StalenessCheck:
    """Sums of a bucket's gradients, which tell whether these are the same, to the bit, when the
    step begins.

    Version counters do not: ``p.grad.data`` has one of its own, and the Trainer multiplies by 1 to
    learn a norm. Each gradient's bits are summed as integers, which any change of one element
    changes, and its elements as numbers, which tells what integers miss (of 512 floats twice as
    large the bits have the same sum). The host does not wait.
    """

    def __init__(self, bucket: Bucket):
        self.bucket = bucket
        self.present, self.sums = self._sum_gradients()

    def accept_filled(self) -> None:
        """Accept the zeros that DDP gives, at the end of backward, to a tensor that other ranks use
        and this one does not.
        """
        self.present = [
            now or before for now, before in zip(self._list_present(), self.present, strict=True)
        ]

    def measure(self) -> Tensor:
        """1 where a gradient has changed, else 0, on the bucket's device."""
        present, sums = self._sum_gradients()
        if present != self.present:
            return torch.ones(1, dtype=torch.float32, device=self.bucket.device)
        return (sums != self.sums).any().view(1).float()

    def _list_present(self) -> list[bool]:
        return [p.grad is not None for p in self.bucket.params]

    def _sum_gradients(self) -> tuple[list[bool], Tensor]:
        integers = [torch.zeros((), dtype=torch.int64, device=self.bucket.device)]
        numbers = [torch.zeros((), dtype=torch.float64, device=self.bucket.device)]
        for g in self.bucket.grads():
            flat = (
                integers[0].view(1)
                if g is None or not g.numel()
                else g.detach().contiguous().view(-1)
            )
            integers.append(sum_of_bits(flat))
            numbers.append(flat.sum(dtype=torch.promote_types(flat.dtype, torch.float32)).double())
        return self._list_present(), torch.stack(
            [torch.stack(integers), torch.stack(numbers).view(torch.int64)]
        )


def sum_of_bits(flat: Tensor) -> Tensor:
    """The sum of a vector's bits, as integers of its elements' width, at least 32."""
    if flat.itemsize < 4 and (
        len(flat) * flat.itemsize % 4 or flat.storage_offset() * flat.itemsize % 4
    ):
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % (4 // flat.itemsize))).clone()
    dtype = torch.int64 if flat.itemsize == 8 else torch.int32
    return flat.view(dtype).sum(dtype=dtype).long()
