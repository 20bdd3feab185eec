"""Compressed activations for tensor- and pipeline-parallel layers, in torch's own parallelism (MCBench, MLSys 2024)::

    plan = {"up": ColwiseParallel(), "down": CompressedRowwiseParallel(lambda: AutoEncoder(hidden=1024, code=100))}
    parallelize_module(mlp, mesh["tp"], plan)                                   # torch.distributed.tensor.parallel
    first = SendCompressed(nn.Sequential(*blocks[:6]), Quantize(8))             # torch.distributed.pipelining
    second = ReceiveCompressed(nn.Sequential(*blocks[6:]), Quantize(8), shape=(8, 128, 1024))

A compressor of your own is one class with three methods. What it sends is `values`, which carry gradients, and a `side`
tensor that does not (or None); `summable` says that adding up the values of all ranks adds up the activations::

    class Halves(Compressor):
        summable = True  # the sum of every rank's means is the mean of the sum

        def compress(self, x, ranks=ALONE):
            return x.unflatten(-1, (-1, 2)).mean(-1), None

        def decompress(self, values, side, shape):
            return values.repeat_interleave(2, dim=-1).view(shape)

        def bytes(self, shape, dtype=torch.float32):
            return math.prod(shape) // 2 * dtype.itemsize

Where this differs from the paper's code: an AutoEncoder's encoder gradient is summed over the tensor-parallel ranks, so
the encoder stays one matrix; PowerSGD gives the sum, not the mean, and drops no layer at a stage boundary; RandomK
computes its positions on the device.
"""

from .codecs import ALONE, AutoEncoder, Compressor, Identity, PowerSGD, RandomK, TopK
from .pipeline import ReceiveCompressed, SendCompressed
from .quantize import Quantize
from .tensor_parallel import CompressedRowwiseParallel, MeshRanks

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
    "TopK",
]
