"""SEPARATE ("A Simple Low-rank Projection for Gradient Compression in Modern Large-scale Model Training Process", 2024)
as SeparateAdam has it by default, for reading: AdamW on gradients that cross the network as low-rank factors. The
subspace is tracked by PowerSGD's power iteration (Vogels et al., 2019).

A gradient of rank n, as a matrix g_n of rows x columns; e_n is its residual; Q, of columns x r, is the same on all
ranks and random at first; orth makes columns orthonormal. In each step after the dense ones::

    1  h_n <- g_n + e_n                          # what is to be sent
    2  P <- mean over ranks of h_n Q             # first exchange: rows x r values
    3  R <- orth(P);  p_n <- h_n^T R
    4  p <- mean over ranks of p_n               # second exchange: columns x r values
    5  ghat <- R p^T                             # AdamW's gradient, the same on all ranks
    6  e_n <- h_n - R p_n^T                      # what this rank's own factor leaves out
    7  Q <- orth(p)                              # the next step starts from these directions

It equals ``compopt.SeparateAdam(params, payload_dtype=None)`` with these Q. By default the class rounds both payloads
to int8, at random without bias, and adds what rounding takes off p_n to e_n. The paper's own Algorithm 1, in the class
``projection="gaussian"``, draws R anew from a seed in every step: p_n = h_n R, ghat = mean(p_n) R^T / r, and
e_n <- beta e_n + (1 - beta) (h_n - p_n R^T / r).

Run it: torchrun --nproc-per-node 2 examples/simple/separate_adam.py
"""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn


def average(x: Tensor) -> Tensor:
    """The mean over ranks, in place."""
    dist.all_reduce(x)
    return x.div_(dist.get_world_size())


def orth(matrix: Tensor) -> Tensor:
    """Orthonormal columns that span those of the matrix."""
    return torch.linalg.qr(matrix).Q


def average_low_rank(g: Tensor, e: Tensor, Q: Tensor) -> Tensor:
    """Lines 1 to 7 for one matrix: return the averaged gradient; update the residual e and the basis Q in place."""
    h = g + e  # line 1
    P = average(h @ Q)  # line 2
    R = orth(P)  # line 3
    own = h.T @ R
    p = average(own.clone())  # line 4
    e.copy_(h - R @ own.T)  # line 6
    Q.copy_(orth(p))  # line 7
    return R @ p.T  # line 5


def matrix_shape(p: Tensor) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix. Trailing dimensions are joined while they are narrow (convolutions)."""
    split = p.dim() - 1
    while split > 1 and math.prod(p.shape[split:]) < 64:
        split -= 1
    return math.prod(p.shape[:split]), math.prod(p.shape[split:])


class SeparateAdam(torch.optim.AdamW):
    """AdamW on these averages. Tensors of fewer than 2 dimensions or 4096 elements, and those that r columns would not
    make smaller, are averaged whole. The first ``dense_steps`` steps average all tensors whole.
    """

    def __init__(self, params, rank: int = 16, dense_steps: int = 10, **adamw):
        super().__init__(params, **adamw)
        self.params = [p for group in self.param_groups for p in group["params"]]
        self.dense_steps, self.t, self.bytes_sent = dense_steps, 0, 0
        self.e: dict[Tensor, Tensor] = {}
        self.Q: dict[Tensor, Tensor] = {}
        seed = torch.Generator().manual_seed(0)
        for p in self.params:
            if p.dim() < 2 or p.numel() < 4096:
                continue
            rows, columns = matrix_shape(p)
            r = min(rank, rows, columns)
            if r * (rows + columns) < rows * columns:
                self.e[p] = torch.zeros(rows, columns, dtype=p.dtype)
                self.Q[p] = orth(torch.randn(columns, r, generator=seed, dtype=p.dtype))

    @torch.no_grad()
    def step(self):
        self.t += 1
        for p in self.params:
            if p in self.Q and self.t > self.dense_steps:
                e, Q = self.e[p], self.Q[p]
                p.grad = average_low_rank(p.grad.view(e.shape), e, Q).view(p.shape)
                self.bytes_sent += sum(e.shape) * Q.shape[1] * Q.element_size()
            else:
                average(p.grad)
                self.bytes_sent += p.numel() * p.element_size()
        super().step()


def main(steps: int = 200) -> None:
    """Learn to write this file: predict each byte from the 8 bytes before it."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same start on all ranks
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)
    )  # fmt: skip
    optimizer = SeparateAdam(model.parameters(), lr=3e-3)
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
