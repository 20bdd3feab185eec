"""Compressed activations for tensor- and pipeline-parallel layers, in torch's own parallelism
(MCBench, MLSys 2024)::

    encoder = lambda: AutoEncoder(hidden=1024, code=100)
    plan = {"up": ColwiseParallel(), "down": CompressedRowwiseParallel(encoder)}
    parallelize_module(mlp, mesh["tp"], plan)  # torch.distributed.tensor.parallel
    first = SendCompressed(nn.Sequential(*blocks[:6]), TopK(0.1))  # torch.distributed.pipelining
    second = ReceiveCompressed(nn.Sequential(*blocks[6:]), TopK(0.1), shape=(8, 128, 1024))

A compressor of your own is one class with three methods. It sends `values`, which carry gradients,
and a `side` tensor that does not (or None). It is `summable` if the sum of all ranks' values
decompresses to the sum of their activations::

    class Halves(Compressor):
        summable = True  # the sum of every rank's means is the mean of the sum

        def compress(self, x, ranks=ALONE):
            return x.unflatten(-1, (-1, 2)).mean(-1), None

        def decompress(self, values, side, shape):
            return values.repeat_interleave(2, dim=-1).view(shape)

        def bytes(self, shape, dtype=torch.float32):
            return math.prod(shape) // 2 * dtype.itemsize

`set_compression` turns compressors off and on, as in a warm-up; `drop_compressors` removes them for
fine-tuning. docs/activations.md shows where compression pays, and the differences from the paper's
code with their effects.
"""

from typing import TYPE_CHECKING

from .base import ALONE, Compressor, TensorParallelRanks, replicated
from .codecs import AutoEncoder, Identity, PowerSGD, Quantize, RandomK, TopK
from .pipeline import ReceiveCompressed, SendCompressed, drop_compressors, set_compression

if TYPE_CHECKING:
    from .tensor_parallel import CompressedRowwiseParallel, MeshRanks
else:

    def __getattr__(name: str) -> object:
        """Import torch's tensor parallelism lazily: it takes half a second to load."""
        if name in ("CompressedRowwiseParallel", "MeshRanks"):
            from . import tensor_parallel

            return getattr(tensor_parallel, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ALONE",
    "AutoEncoder",
    "CompressedRowwiseParallel",
    "Compressor",
    "Identity",
    "MeshRanks",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "ReceiveCompressed",
    "SendCompressed",
    "TensorParallelRanks",
    "TopK",
    "drop_compressors",
    "replicated",
    "set_compression",
]
