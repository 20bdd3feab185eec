"""Model parallelism with compressed activations: equations 1 to 3 of MCBench (Bian et al., MLSys
2024).

A transformer layer computes, all-reduces B*s*h activations over its tensor-parallel ranks, and
computes again; the two cannot overlap. Across the stages of a pipeline the same activations travel
point to point.

The paper leaves four things open. Its Table 8 comes out (to 0.013) with: times in milliseconds, two
bytes an activation on the link between stages, B the micro-batch, and the vocabulary term of the
FLOP count left out of a layer.

Equation 2 holds for any compressor: M_c is the size of its codec's payload, T_overhead the time of
its operations (`encoded`). The paper's constants hold for the auto-encoder only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..activations import Compressor
from .activation_costs import crossing_of, exchange_of
from .hardware import Speed


@dataclass(frozen=True)
class LayerCosts:
    """The constants of one kind of machine, fitted once (MCBench, section 4.4).

    Args:
        alpha: seconds a floating-point operation, over all tensor-parallel ranks of a node.
        beta: seconds an element of a large all-reduce.
        gamma: seconds an element of the uncompressed activation, to encode and decode it.
        constant: seconds of an all-reduce below `threshold`.
        threshold: elements from which an all-reduce costs beta an element.
    """

    alpha: float
    beta: float
    gamma: float
    constant: float
    threshold: int

    def all_reduce(self, elements: float) -> float:
        """Seconds to all-reduce a message of so many elements: a constant, then a line."""
        return self.constant if elements < self.threshold else self.beta * elements


# 4 V100 with NVLink, tensor parallelism of 4: the footnote of section 4.4, in seconds.
PAPER = LayerCosts(alpha=6.33e-16, beta=3.37e-11, gamma=1.5e-13, constant=2e-4, threshold=204_800)


@dataclass(frozen=True)
class Encoded:
    """A layer's exchange and a boundary's message through one compressor, for equations 2 and 3.

    Args:
        elements: M_c, numbers that an all-reduce of the same seconds has.
        overhead: T_overhead, seconds of encoding and decoding, forward and backward.
        crossing: bytes across a stage boundary, forward.
    """

    elements: float
    overhead: float
    crossing: float


def encoded(
    codec: Compressor,
    batch: int,
    sequence: int,
    hidden: int,
    tensor: int,
    speed: Speed,
    activation_bytes: int = 2,
) -> Encoded:
    """M_c and T_overhead of a compressor, from its own code.

    Args:
        codec: made under ``torch.device("meta")``; of (batch, sequence, hidden) activations.
        tensor: tensor-parallel ranks. Payloads that cannot be added up are gathered and decoded.
        speed: of one rank.
        activation_bytes: 2 or 4.
    """
    shape, dtype = (batch, sequence, hidden), dtype_of(activation_bytes)
    one, crossing = exchange_of(codec, shape, dtype, tensor), crossing_of(codec, shape, dtype)
    # Gathering all ranks' payloads takes half the time of an all-reduce of as many bytes.
    nbytes = sum(one.reduced) + tensor * sum(one.gathered) / 2
    overhead = one.forward.seconds(speed) + one.backward.seconds(speed)
    return Encoded(nbytes / activation_bytes, overhead, crossing.forth)


def dtype_of(activation_bytes: int) -> torch.dtype:
    """bfloat16 or float32; ValueError for other sizes."""
    if activation_bytes not in (2, 4):
        raise ValueError(f"activation_bytes must be 2 or 4; got {activation_bytes}.")
    return torch.bfloat16 if activation_bytes == 2 else torch.float32


def layer_flops(batch: float, sequence: int, hidden: int, vocabulary: int = 0) -> float:
    """Floating-point operations of one transformer layer, forward, recomputation and backward.

    96 B s h^2 + 16 B s^2 h + 6 B s h V (Narayanan et al. 2021). The last term is the output
    layer's, which the paper adds to *every* layer; leave `vocabulary` at 0 unless that is what you
    mean.
    """
    tokens = batch * sequence
    return (
        96 * tokens * hidden**2 + 16 * tokens * sequence * hidden + 6 * tokens * hidden * vocabulary
    )


def layer_seconds(
    costs: LayerCosts,
    batch: float,
    sequence: int,
    hidden: int,
    code: int | Encoded | None = None,
    vocabulary: int = 0,
) -> float:
    """Seconds of one layer: equation 1, or equation 2 when activations are encoded to `code`
    numbers a token by an auto-encoder, or by any compressor as `encoded` found.
    """
    tokens = batch * sequence
    compute = costs.alpha * layer_flops(batch, sequence, hidden, vocabulary)
    if code is None:
        return compute + costs.all_reduce(tokens * hidden)
    if isinstance(code, Encoded):
        return compute + costs.all_reduce(code.elements) + code.overhead
    return compute + costs.all_reduce(tokens * code) + costs.gamma * tokens * hidden


def speedup(
    costs: LayerCosts,
    *,
    hidden: int,
    layers: int,
    nodes: int,
    batch: int,
    code: int | Encoded,
    micro_batch: int | None = None,
    sequence: int = 2048,
    link_bits_per_s: float = 10e9,
    activation_bytes: int = 2,
    vocabulary: int = 0,
) -> float:
    """Dense over compressed step time on a pipeline of `nodes` nodes (equation 3).

    Args:
        costs: the machine, see `LayerCosts`.
        hidden: width of the model.
        code: numbers to which an auto-encoder encodes a token, or what `encoded` found for a
            micro-batch.
        layers: transformer layers, spread evenly over the nodes.
        batch: sequences a step; `micro_batch` of them at a time (default: min(128, batch // nodes),
            as in Table 8).
        sequence: tokens a sequence.
        link_bits_per_s: the link between nodes.
        activation_bytes: bytes an activation on that link.

    Raises:
        ValueError: a count is not positive.
    """
    if min(hidden, layers, nodes, batch) < 1 or (isinstance(code, int) and code < 1):
        raise ValueError(
            f"hidden, layers, nodes, batch and code must be positive; got {hidden}, {layers}, "
            f"{nodes}, {batch}, {code}."
        )
    if micro_batch is None:
        micro_batch = max(1, min(128, batch // nodes))
    rounds = ((batch / micro_batch - 1) / nodes + 1) * layers
    per_byte = (nodes - 1) * 8 / link_bits_per_s
    per_number = micro_batch * sequence * activation_bytes
    crossing = code.crossing if isinstance(code, Encoded) else per_number * code
    dense = (
        rounds * layer_seconds(costs, micro_batch, sequence, hidden, None, vocabulary)
        + per_byte * per_number * hidden
    )
    sent = (
        rounds * layer_seconds(costs, micro_batch, sequence, hidden, code, vocabulary)
        + per_byte * crossing
    )
    return dense / sent
