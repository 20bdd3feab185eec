"""The compressors that the tests of activations run over."""

from __future__ import annotations

import torch

from compopt.activations import AutoEncoder, Compressor, Identity, PowerSGD, Quantize, RandomK, TopK

HIDDEN, SHAPE = 8, (3, 5, 8)
COMPRESSORS = {
    "Identity": Identity,
    "AutoEncoder": lambda: AutoEncoder(HIDDEN, 3),
    "TopK": lambda: TopK(0.25),
    "RandomK": lambda: RandomK(0.25),
    "PowerSGD": lambda: PowerSGD(2, HIDDEN),
    "Quantize2": lambda: Quantize(2),
    "Quantize4": lambda: Quantize(4),
    "Quantize8": lambda: Quantize(8),
    "QuantizeTensor": lambda: Quantize(4, scale="tensor"),
    "QuantizeStochastic": lambda: Quantize(4, stochastic=True),
    "QuantizeBack4": lambda: Quantize(4, gradient_bits=4),
    "QuantizeBeside4": lambda: Quantize(2, gradient_bits=4),
}


def make(name: str) -> Compressor:
    torch.manual_seed(3)
    return COMPRESSORS[name]().double()


def sample(seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
