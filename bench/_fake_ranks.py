"""One rank of many, the others made up: the package's real code on torch's fake process groups, and what it hands over.

A fake group runs no collective: a sum leaves this rank's numbers, a gather repeats them in every row. What has to make
sense is put in: the masks that other ranks would have chosen, and what they would have left of their gradients.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from compopt._engine import handshake
from compopt._state.bits import pack_bits, set_bits_
from compopt._state.bucket import Bucket
from compopt._state.masks import encode_mask, partition_mask
from compopt._wire.collectives import Communicator
from compopt._wire.in_flight import PendingCollective
from compopt._wire.requests import (
    Agree,
    AllGather,
    AllReduceMean,
    BitOr,
    Broadcast,
    ReadyToCommit,
    ReduceScatterMean,
    Request,
)

KINDS = {AllReduceMean: "payload", ReduceScatterMean: "payload", Broadcast: "masks", BitOr: "masks"}
SINGLE = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
COLLECTIVES = ("all_reduce", "all_gather", SINGLE, "all_to_all_single", "broadcast")


@contextlib.contextmanager
def fake_ranks(ranks: int, left_by_others: float = 0.0) -> Iterator[FakeRanks]:
    """torch.distributed, of which this process is rank 0 of ``ranks``; nothing is sent.

    All ranks hold this one's gradients and number, on purpose.
    """
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        comm = FakeRanks(left_by_others)
        counted = {name: comm.counted(getattr(dist, name)) for name in COLLECTIVES}
        with (
            mock.patch.multiple(dist, **counted),
            mock.patch.object(handshake, "_report_equal_gradients"),
            mock.patch.object(handshake, "_check_rank_numbers"),
        ):
            yield comm
    finally:
        dist.destroy_process_group()


class FakeRanks(Communicator):
    """All ranks of a fake group. Give it to an optimizer as ``process_group``, then call ``follow(optimizer)``.

    ``handed``, ``sent`` and ``received`` count bytes since ``reset``, by kind: payload, header (marks of presence and
    control words, as often as they go out), masks, gathered (parameters). Handed over is what collectives are given.
    Sent and received is what crosses this rank's link each way where an all-reduce is a ring, a gather passes on every
    message, and a broadcast is passed on once.
    """

    or_in_backend = True  # as in gloo; a fake group says it has none

    def __init__(self, left_by_others: float):
        super().__init__()
        self.left_by_others = left_by_others  # share of the elements at which another rank has something (TAGC)
        self.bucket: Bucket | None = None
        self.calls = 0  # of collectives
        self.reset()

    def reset(self) -> None:
        self.kind, self.words = "payload", 0
        self.handed, self.sent, self.received = Counter(), Counter(), Counter()

    def follow(self, optimizer: Any) -> None:
        """Learn which bucket a request is of. Again after whatever rebuilds the optimizer's buckets."""
        algorithm = optimizer._engine.algorithm

        def noted(bucket: Bucket) -> Generator[Request, object, None]:
            answer = None
            with contextlib.closing(algorithm(bucket)) as generator, contextlib.suppress(StopIteration):
                while True:
                    request = generator.send(answer)
                    self.bucket = None if isinstance(request, Agree | ReadyToCommit) else bucket
                    answer = yield request

        optimizer._engine.algorithm = noted

    def start(self, request: Request) -> PendingCollective:
        bucket, self.bucket = self.bucket, None
        mask = isinstance(request, AllGather) and request.tensor.dtype == torch.uint8
        self.kind = KINDS.get(type(request), "masks" if mask else "gathered")
        self.words = _header_bytes(request, bucket, self.size) if bucket and self.kind == "payload" else 0
        pending = super().start(request)
        self.kind = "payload"  # what is started while it is waited for is the second half of an int8 mean
        if isinstance(request, BitOr):
            others = _random_bits(request.tensor.numel(), self.left_by_others)
            request.tensor.bitwise_or_(others.to(request.tensor.device))
        if mask and bucket and self.size > 1:
            return PendingCollective(pending.description, None, lambda: self._with_masks(pending.wait(), bucket))
        return pending

    def counted(self, collective: Callable) -> Callable:
        """``collective`` of torch.distributed, counting what it is given and what a link would carry of it."""
        n, name = self.size, collective.__name__

        def call(*args: Any, **options: Any) -> object:
            inward, outward = (
                (args[0], args[1]) if name in ("all_gather", SINGLE, "all_to_all_single") else (args[0],) * 2
            )
            self.calls += 1
            handed = outward.nbytes
            share = {"all_reduce": 2 * (n - 1) / n, "all_gather": n - 1, SINGLE: n - 1}.get(name, 1)
            sent = received = share * handed
            if name == "all_to_all_single":
                sent, received = handed - inward.nbytes / n, inward.nbytes * (n - 1) / n
            header, self.words = self.words / max(1, handed), 0
            for counter, size in ((self.handed, handed), (self.sent, sent), (self.received, received)):
                counter["header"] += size * header
                counter[self.kind] += size * (1 - header)
            return collective(*args, **options)

        return call

    def _with_masks(self, rows: Tensor, bucket: Bucket) -> Tensor:
        rows[1:] = messages(bucket.compressed_lengths, self.size, bucket.group["density"])
        return rows


def _header_bytes(request: Request, bucket: Bucket, ranks: int) -> int:
    """Bytes of marks and control words in what is started first for a payload: one header, or one for every rank."""
    words, tensor = len(bucket.params) + len(bucket.control.numbers), request.tensor
    if isinstance(request, AllReduceMean):
        return words * (tensor.element_size() if request.message.codec.bits is None else 4 * ranks)
    return words * tensor.element_size() * ranks


@lru_cache(maxsize=256)
def messages(lengths: tuple[int, ...], ranks: int, density: float) -> Tensor:
    """Return what ranks 1 to N - 1 send of a bucket's mask where they choose at random, shape (N - 1, bytes)."""
    partition = partition_mask(lengths, ranks, density)
    rows = torch.empty(ranks - 1, partition.message_bytes, dtype=torch.uint8)
    for rank, shard in enumerate(partition.by_rank[1:], start=1):
        results = [torch.randperm(p.stop - p.start)[: p.k].add_(p.first_bit) for p in shard.slices]
        positions = torch.cat(results).sort().values if results else torch.empty(0, dtype=torch.int64)
        bits = torch.zeros(shard.nbytes, dtype=torch.uint8)
        set_bits_(bits, positions)
        rows[rank - 1] = encode_mask(positions, bits, partition, rank)
    return rows


def _random_bits(size: int, share: float) -> Tensor:
    return pack_bits(torch.rand(8 * size) < share)
