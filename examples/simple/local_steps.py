"""DiLoCo (Douillard et al., 2023), as LocalSteps has it, for reading: ranks train on their own for H steps, then
average what they have moved.

Rank n has parameters w_n, equal on all ranks at the start of a round; anchors a are what they were then. An inner
optimizer, any of torch, steps w_n; the outer one, SGD with Nesterov's momentum, steps the anchors::

    1  in each of H steps: the inner optimizer steps w_n by this rank's own gradient
    then, at the end of the round:
    2  d_n <- a - w_n                            # the pseudo-gradient
    3  d <- mean over ranks of d_n
    4  v <- mu v + d;  a <- a - lr (d + mu v)    # the outer optimizer, the same on all ranks
    5  w_n <- a

It equals ``compopt.LocalSteps(inner, every=H, payload_dtype=None, growth_steps=0)``. By default the class rounds
d_n to int4 and adds what rounding takes off to the next round's, and rounds grow to H steps over the first 800 steps.
Fragments of the model at different steps, and an exchange that goes on during the next steps, are Streaming DiLoCo's
(``fragments=``, ``delay=``).

Run it: torchrun --nproc-per-node 2 examples/simple/local_steps.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


class LocalSteps:
    def __init__(
        self, inner: torch.optim.Optimizer, every: int = 30, outer_lr: float = 0.7, outer_momentum: float = 0.9
    ):
        self.inner, self.every = inner, every
        self.t, self.bytes_sent = 0, 0
        self.params = [p for group in inner.param_groups for p in group["params"]]
        self.anchors = [p.detach().clone() for p in self.params]
        self.outer = torch.optim.SGD(self.anchors, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()  # line 1
        self.t += 1
        if self.t % self.every == 0:
            self.end_round()

    def end_round(self) -> None:
        for a, w in zip(self.anchors, self.params, strict=True):
            a.grad = a - w  # line 2
            dist.all_reduce(a.grad)  # line 3
            a.grad /= dist.get_world_size()
            self.bytes_sent += a.numel() * a.element_size()
        self.outer.step()  # line 4
        for a, w in zip(self.anchors, self.params, strict=True):
            w.copy_(a)  # line 5

    def zero_grad(self) -> None:
        self.inner.zero_grad()


def main(steps: int = 200) -> None:
    """Learn to write this file: predict each byte from the 8 bytes before it."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same start on all ranks
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)
    )  # fmt: skip
    optimizer = LocalSteps(torch.optim.AdamW(model.parameters(), lr=3e-3), every=10, outer_momentum=0.3)
    torch.manual_seed(dist.get_rank())  # other data on each rank
    for step in range(1, steps + 1):
        at = torch.randint(len(text) - 8, (64, 1)) + torch.arange(9)
        loss = nn.functional.cross_entropy(model(text[at[:, :8]]), text[at[:, 8]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % (steps // 4) == 0 and dist.get_rank() == 0:
            dense = 4 * step * sum(p.numel() for p in model.parameters())
            print(f"step {step}: loss {loss:.3f}, {optimizer.bytes_sent:,} bytes sent, DDP sends {dense:,}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
