"""SCAPE (Zheng et al., 2026), Algorithm 1, for reading: AdamS whose first moments cross the network, at a mask that was
selected one step before.

Rank n at step t, from 1, and one tensor; M is its mask (all ones at t = 1), e_n the rank's residual, m the momentum,
which is 0 off the mask of the step before. Lines are the paper's::

     9  g_n <- gradient of the loss on this rank's data
    10  x_n <- b1 m + (1 - b1) g_n + e_n
    11  e_n <- x_n off M, 0 on M
    14  b <- mean over ranks of x_n on M
    15  next M <- the largest |x_n| of the rank that owns the tensor
    17  G <- (b - b1 m) / (1 - b1) on M, 0 off it                 # the averaged gradient
    18  G <- G * min(1, max_grad_norm / |G|);  m_old <- m;  m <- b1 m + (1 - b1) G on M, 0 off it
    19  v <- b2 m_old^2 + (1 - b2) G^2                            # is not kept
    21  w <- w - lr (mhat / (sqrt(vhat) + eps) + weight_decay w)

It equals ``compopt.ScapeAdamS`` with the same arguments for tensors of equal size, as many on each rank, the last of
the model first: the class cuts tensors where that gives all ranks equally many elements to select from. It sends masks
as bits or codes, and gathers them while ranks train on. Printed line 18 scales G in v only, and line 20, left out here,
lacks a square root.

Run it: torchrun --nproc-per-node 2 examples/simple/scape_adams.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ScapeAdamS(torch.optim.Optimizer):
    """Tensors of fewer than 2 dimensions or 4096 elements have a mask of ones. The density of the others falls
    exponentially from 1 to ``density`` in ``density_steps`` steps.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        density: float = 0.1,
        density_steps: int = 100,
        max_grad_norm: float = float("inf"),
    ):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.density, self.density_steps = density, density_steps
        self.max_grad_norm = max_grad_norm
        self.t, self.bytes_sent = 0, 0
        self.pairs = [(group, p) for group in self.param_groups for p in group["params"]]
        compressed = [p for _, p in self.pairs if p.dim() >= 2 and p.numel() >= 4096]
        self.owner = {p: i * dist.get_world_size() // len(compressed) for i, p in enumerate(compressed)}
        for _, p in self.pairs:
            ones = torch.ones(p.shape, dtype=torch.bool)
            self.state[p] = {"m": torch.zeros_like(p), "e": torch.zeros_like(p), "mask": ones}

    @torch.no_grad()
    def step(self):
        self.t += 1
        density = self.density ** min(1, self.t / max(1, self.density_steps))  # of the next step
        exchanged = []
        for group, p in self.pairs:
            state, beta1 = self.state[p], group["betas"][0]
            m, M = state["m"], state["mask"]
            x = beta1 * m + (1 - beta1) * p.grad + state["e"]  # line 10
            state["e"] = x.masked_fill(M, 0)  # line 11
            G = torch.zeros_like(p)
            G[M] = (self.average(x[M]) - beta1 * m[M]) / (1 - beta1)  # lines 14 and 17
            if p in self.owner and density < 1:
                state["mask"] = self.select_mask(x, density, self.owner[p])  # line 15
            exchanged.append((G, M))
        norm = torch.stack([G.norm() for G, _ in exchanged]).norm()
        clip = min(1.0, self.max_grad_norm / (norm.item() + 1e-6))
        for (group, p), (G, M) in zip(self.pairs, exchanged, strict=True):
            self.update(group, p, clip * G, M)

    def update(self, group: dict, p: Tensor, G: Tensor, M: Tensor) -> None:
        """Lines 18 to 21."""
        state, (beta1, beta2) = self.state[p], group["betas"]
        m_old = state["m"]
        m = state["m"] = (beta1 * m_old + (1 - beta1) * G) * M  # line 18
        v = beta2 * m_old.square() + (1 - beta2) * G.square()  # line 19
        mhat, vhat = m / (1 - beta1**self.t), v / (1 - beta2**self.t)
        p -= group["lr"] * (mhat / (vhat.sqrt() + group["eps"]) + group["weight_decay"] * p)  # line 21

    def select_mask(self, x: Tensor, density: float, owner: int) -> Tensor:
        """Line 15: the owner's selection, on all ranks."""
        mask = torch.zeros(x.numel(), dtype=torch.uint8)
        if dist.get_rank() == owner:
            mask[x.abs().flatten().topk(max(1, round(density * x.numel()))).indices] = 1
            self.bytes_sent += mask.numel()
        dist.broadcast(mask, src=owner)
        return mask.bool().view(x.shape)

    def average(self, x: Tensor) -> Tensor:
        """The mean over ranks, in place."""
        dist.all_reduce(x)
        self.bytes_sent += x.numel() * x.element_size()
        return x.div_(dist.get_world_size())


def main(steps: int = 200) -> None:
    """Learn to write this file: predict each byte from the 8 bytes before it."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same start on all ranks
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)
    )  # fmt: skip
    optimizer = ScapeAdamS(model.parameters(), lr=3e-3, betas=(0.9, 0.95), density_steps=20)
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
