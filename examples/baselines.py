"""Baselines for compression inside the optimizer: DDP's own all-reduce, torch's PowerSGD, naive top-k.

Each has `phase` and `bytes_sent` of the last step, as `optimizer.stats` of compopt's classes has them: the bytes are
those this rank handed to collectives.
"""

import atexit
import time
from argparse import Namespace

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

POWERSGD_RANK = 4
SMALL = 4096  # elements: what is smaller, or no matrix, is averaged dense, as in compopt


class Dense:
    """DDP's own all-reduce: every gradient is handed over whole."""

    def __init__(self, ddp: DistributedDataParallel):
        self.phase = "dense"
        self.bytes_sent = sum(p.numel() * p.element_size() for p in ddp.parameters())


class PowerSGD:
    """torch's low-rank hook with error feedback: two thin factors a matrix, after `dense_steps`."""

    def __init__(self, ddp: DistributedDataParallel, dense_steps: int):
        self.phase, self.bytes_sent = "none", 0
        # DDP rebuilds its buckets after the first step; torch's hook refuses to start before that.
        self.state = powerSGD_hook.PowerSGDState(None, POWERSGD_RANK, start_powerSGD_iter=max(2, dense_steps))
        ddp.register_comm_hook(self, PowerSGD.hook)

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self.phase = "dense" if self.state.iter < self.state.start_powerSGD_iter else "sparse"
            self.bytes_sent = 0
        before = self.state.total_numel_after_compression  # the hook's own count; it counts compressed steps only
        reduced = powerSGD_hook.powerSGD_hook(self.state, bucket)
        reduced.wait()  # parts are sent from gloo's threads: with two buckets under way ranks could pair them wrongly
        compressed = self.state.total_numel_after_compression - before
        elements = bucket.buffer().numel() if self.phase == "dense" else compressed
        self.bytes_sent += elements * bucket.buffer().element_size()
        return reduced


class TopK:
    """Naive top-k: each rank sends the largest of its gradient plus what it kept back, after `dense_steps`.

    Every rank chooses its own positions, so values and positions (8 bytes an element) are gathered, not all-reduced:
    each rank receives what all others send, and the exchange grows with their number. For fp32 gradients.
    """

    def __init__(self, ddp: DistributedDataParallel, dense_steps: int, density: float):
        self.phase, self.bytes_sent, self.steps = "none", 0, 0
        self.dense_steps, self.density = dense_steps, density
        self.kept = {}  # error feedback: what this rank has not sent yet, for each compressed parameter
        ddp.register_comm_hook(self, TopK.hook)

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self.phase = "dense" if self.steps < self.dense_steps else "sparse"
            self.bytes_sent = 0
            self.steps += 1
        dense = []
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if self.phase == "sparse" and grad.dim() >= 2 and grad.numel() >= SMALL:
                self.exchange(parameter, grad.view(-1))
            else:
                dense.append(grad.view(-1))
        if dense:
            together = torch.cat(dense) / dist.get_world_size()
            dist.all_reduce(together)
            self.bytes_sent += together.numel() * together.element_size()
            for grad, mean in zip(dense, together.split([len(grad) for grad in dense]), strict=True):
                grad.copy_(mean)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def exchange(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """Replace grad, flat, by the mean over ranks of each rank's largest elements."""
        total = self.kept.setdefault(parameter, torch.zeros_like(grad)).add_(grad)
        positions = total.abs().topk(max(1, round(self.density * total.numel()))).indices
        payload = torch.cat([total[positions].view(torch.int32), positions.int()])
        total[positions] = 0.0
        received = [torch.empty_like(payload) for _ in range(dist.get_world_size())]
        dist.all_gather(received, payload)
        self.bytes_sent += payload.numel() * payload.element_size()
        grad.zero_()
        for other in received:
            values, where = other.view(2, -1)
            grad.index_add_(0, where, values.view(torch.float32), alpha=1 / len(received))


HOOKS = {
    "powersgd": lambda ddp, a: PowerSGD(ddp, a.dense_steps),
    "topk": lambda ddp, a: TopK(ddp, a.dense_steps, a.density),
}


def attach(name: str, ddp: DistributedDataParallel, args: Namespace) -> Dense | PowerSGD | TopK:
    """Register the hook called `name`; any other name leaves DDP as it is."""
    # A gloo thread lets go of a collective's tensors a moment after the collective is over. When the interpreter ends
    # within that moment the process aborts ("terminate called without an active exception").
    atexit.register(time.sleep, 0.05)
    return HOOKS[name](ddp, args) if name in HOOKS else Dense(ddp)
