"""mcbench.py's Table 7: what a step sends over each stage boundary, timed with nothing else on the way."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _encoder import MICRO_BATCHES, Trainer, compressors, encoder
from torch.distributed.device_mesh import DeviceMesh

BOUNDARY = {"inputs": 16, "outputs": 10, "tokens": 128, "width": 256, "layers": 4, "heads": 8, "micro_batch": 8}
SMALL_BURST = 32 << 10  # bytes ahead of the rate: what is compressed must not hide in it


def messages_of(trainer: Trainer, x, y) -> dict[int, list[tuple[int, torch.dtype]]]:
    """Elements and dtype of all that this rank sends to others in one step, by receiver."""
    sent: dict[int, list] = defaultdict(list)
    send = dist.isend

    def isend(tensor, dst=None, group=None, tag=0, group_dst=None):
        other = dst if group_dst is None else dist.get_global_rank(group or dist.group.WORLD, group_dst)
        sent[other].append((tensor.numel(), tensor.dtype))
        return send(tensor, dst, group, tag, group_dst)

    dist.isend = dist.distributed_c10d.isend = isend  # torch's pipelining compares the two
    try:
        trainer.step(x, y)
    finally:
        dist.isend = dist.distributed_c10d.isend = send
    return sent


def boundary_rank(mesh: DeviceMesh, labels: list[str], steps: int) -> None:
    """One rank of Table 7: what a step sends over a boundary, sent again with nothing else on the way, and back."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made = compressors(BOUNDARY["micro_batch"] * BOUNDARY["tokens"], BOUNDARY["width"])
    sizes = {name: value for name, value in BOUNDARY.items() if name != "micro_batch"}
    x = torch.randn(BOUNDARY["micro_batch"] * MICRO_BATCHES, BOUNDARY["tokens"], BOUNDARY["inputs"])
    y = torch.randint(BOUNDARY["outputs"], (len(x),))
    everyone: dict[str, list] = {}
    for label in labels:
        torch.manual_seed(0)
        trainer = Trainer(encoder(**sizes), mesh, made[label], BOUNDARY["micro_batch"], F.cross_entropy, 1e-4)
        trainer.step(x, y)  # torch's pipelining finds out shapes
        everyone[label] = [None] * ranks
        dist.all_gather_object(everyone[label], dict(messages_of(trainer, x, y)))
        del trainer
    selected: dict[tuple, list[float]] = defaultdict(list)
    for _ in range(steps):  # compressors take turns
        for label in labels:
            for first in range(ranks - 1):
                dist.barrier()
                if rank in (first, first + 1):
                    start = time.perf_counter()
                    for sender in (first, first + 1):
                        for size, dtype in everyone[label][sender].get(2 * first + 1 - sender, []):
                            message = torch.zeros(size, dtype=dtype)
                            if not size:
                                continue
                            dist.send(message, 2 * first + 1 - sender) if rank == sender else dist.recv(message, sender)
                    selected[label, first].append(time.perf_counter() - start)
                dist.barrier()
    seconds: list = [None] * ranks
    dist.all_gather_object(seconds, {key: statistics.median(results) for key, results in selected.items()})
    if rank == 0:
        rows = []
        for label in labels:
            for first in range(ranks - 1):
                sent = [everyone[label][a].get(b, []) for a, b in ((first, first + 1), (first + 1, first))]
                nbytes = [sum(size * dtype.itemsize for size, dtype in messages) for messages in sent]
                both = max(seconds[first][label, first], seconds[first + 1][label, first])
                rows.append([label, f"{first}-{first + 1}", 1e3 * both, *(n / 1e6 for n in nbytes)])
        print(json.dumps({"rows": rows}))
