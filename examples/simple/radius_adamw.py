"""Radius (Zheng and Zhang, MLSys 2025), Algorithms 1 and 2, for reading: AdamW on gradients that in most steps cross
the network only at a mask of their largest elements, which all ranks share for T steps.

Rank n at step t, from 1; G_n is its gradient of one tensor, w the parameters, D the density. Lines are the paper's::

     3  if t < dense_steps:                                     # dense
     4      G <- mean over ranks of G_n
     7  elif there is no mask yet, or t % T == 0:                # resample
     8      G_n <- G_n + residual
     9      G <- mean over ranks of G_n
    10      residual <- 0
    12  else:                                                    # sparse
    13      sent <- G_n[mask]
    14      sent <- mean over ranks of sent
    15      G <- sent on the mask, 0 off it                      # and line 17
    16      residual <- residual + G_n off the mask, 0 on it
    20  G <- G * min(1, max_grad_norm / |G|)                     # all tensors together
    21  u <- mhat / (sqrt(vhat) + eps) + weight_decay * w        # Algorithm 2, over all elements
    22  if resampled:
    23      mask <- the round(D * n) largest |u|; rank 0's is broadcast
    25  w <- w - lr * u

It equals ``compopt.RadiusAdamW`` with the same arguments (``interval`` is T). The paper's mask is undefined until T
divides t; here the first step after the dense start resamples. The class sends a mask as one bit per element.

Run it: torchrun --nproc-per-node 2 examples/simple/radius_adamw.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn


class RadiusAdamW(torch.optim.Optimizer):
    """Tensors of fewer than 2 dimensions or 4096 elements are averaged whole in every step."""

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        density: float = 0.4,
        interval: int = 200,
        dense_steps: int = 1000,
        max_grad_norm: float = float("inf"),
    ):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.density, self.interval, self.dense_steps = density, interval, dense_steps
        self.max_grad_norm = max_grad_norm
        self.t, self.bytes_sent, self.has_masks = 0, 0, False
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {name: torch.zeros_like(p) for name in ("m", "v", "residual")}

    @torch.no_grad()
    def step(self):
        self.t += 1
        phase = "sparse"  # line 12
        if self.t < self.dense_steps:
            phase = "dense"  # line 3
        elif not self.has_masks or self.t % self.interval == 0:
            phase = "resample"  # line 7
        pairs = [(group, p) for group in self.param_groups for p in group["params"]]
        gradients = [self.exchange(p, phase) for _, p in pairs]
        norm = torch.stack([G.norm() for G in gradients]).norm()
        clip = min(1.0, self.max_grad_norm / (norm.item() + 1e-6))
        for (group, p), G in zip(pairs, gradients, strict=True):
            u = self.update_moments(group, p, clip * G)  # line 20
            if phase == "resample" and is_compressed(p):  # line 22
                self.select_mask(p, u)
            p -= group["lr"] * u  # line 25
        self.has_masks |= phase == "resample"

    def exchange(self, p: Tensor, phase: str) -> Tensor:
        """Lines 4 to 17: the averaged gradient of one tensor."""
        state = self.state[p]
        if phase == "dense" or not is_compressed(p):
            return self.average(p.grad.clone())  # line 4
        if phase == "resample":
            G = self.average(p.grad + state["residual"])  # lines 8 and 9
            state["residual"].zero_()  # line 10
            return G
        mask, G = state["mask"], torch.zeros_like(p)
        G[mask] = self.average(p.grad[mask])  # lines 13 to 15
        state["residual"].add_(p.grad).masked_fill_(mask, 0)  # line 16
        return G

    def update_moments(self, group: dict, p: Tensor, G: Tensor) -> Tensor:
        """Algorithm 2, line 21: AdamW's direction."""
        state, (beta1, beta2) = self.state[p], group["betas"]
        m, v = state["m"], state["v"]
        m.mul_(beta1).add_(G, alpha=1 - beta1)
        v.mul_(beta2).add_(G * G, alpha=1 - beta2)
        mhat, vhat = m / (1 - beta1**self.t), v / (1 - beta2**self.t)
        return mhat / (vhat.sqrt() + group["eps"]) + group["weight_decay"] * p

    def select_mask(self, p: Tensor, u: Tensor) -> None:
        """Line 23."""
        largest = u.abs().flatten().topk(max(1, round(self.density * p.numel()))).indices
        mask = torch.zeros(p.numel(), dtype=torch.uint8)
        mask[largest] = 1
        dist.broadcast(mask, src=0)
        self.bytes_sent += mask.numel()
        self.state[p]["mask"] = mask.bool().view(p.shape)

    def average(self, x: Tensor) -> Tensor:
        """The mean over ranks, in place."""
        dist.all_reduce(x)
        self.bytes_sent += x.numel() * x.element_size()
        return x.div_(dist.get_world_size())


def is_compressed(p: Tensor) -> bool:
    return p.dim() >= 2 and p.numel() >= 4096


def main(steps: int = 200) -> None:
    """Learn to write this file: predict each byte from the 8 bytes before it."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same start on all ranks
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)
    )  # fmt: skip
    optimizer = RadiusAdamW(model.parameters(), lr=3e-3, density=0.1, interval=20, dense_steps=20)
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
