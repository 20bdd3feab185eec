"""Model parallelism with compressed activations: equations 1 to 3 of MCBench (Bian et al., MLSys
2024).

A transformer layer computes, all-reduces B*s*h activations over its tensor-parallel ranks, and
computes again; the two cannot overlap. Across the stages of a pipeline the same activations travel
point to point.

The paper leaves four things open. Its Table 8 comes out (to 0.013) with: times in milliseconds, two
bytes an activation on the link between stages, B the micro-batch, and the vocabulary term of the
FLOP count left out of a layer.

The equations are of the paper's auto-encoder; `advise_layers` predicts a step with any compressor.
`speedup` is public, as `compopt.costmodel.speedup`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerCosts:
    """The constants of one kind of machine, fitted once (MCBench, section 4.4), in seconds.

    ``alpha`` is for a floating-point operation, over all tensor-parallel ranks of a node; ``beta``
    for an element of an all-reduce of ``threshold`` elements or more, ``constant`` for a smaller
    one; ``gamma`` for encoding and decoding an element of the uncompressed activation.
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
    code: int | None = None,
    vocabulary: int = 0,
) -> float:
    """Seconds of one layer: equation 1, or equation 2 when an auto-encoder encodes activations to
    `code` numbers a token.
    """
    tokens = batch * sequence
    compute = costs.alpha * layer_flops(batch, sequence, hidden, vocabulary)
    if code is None:
        return compute + costs.all_reduce(tokens * hidden)
    return compute + costs.all_reduce(tokens * code) + costs.gamma * tokens * hidden


def speedup(
    costs: LayerCosts,
    *,
    hidden: int,
    layers: int,
    nodes: int,
    batch: int,
    code: int,
    micro_batch: int | None = None,
    sequence: int = 2048,
    link_bits_per_s: float = 10e9,
    activation_bytes: int = 2,
    vocabulary: int = 0,
) -> float:
    """Dense over compressed step time on a pipeline of ``nodes`` nodes (equation 3).

    The auto-encoder encodes a token's ``hidden`` numbers to ``code``. A step has ``batch``
    sequences, ``micro_batch`` of them at a time (default: min(128, batch // nodes), as in Table 8).
    The link between nodes carries ``activation_bytes`` a number. Raises ValueError for a count that
    is not positive.
    """
    if min(hidden, layers, nodes, batch, code) < 1:
        raise ValueError(
            f"hidden, layers, nodes, batch and code must be positive; got {hidden}, {layers}, "
            f"{nodes}, {batch}, {code}."
        )
    if micro_batch is None:
        micro_batch = max(1, min(128, batch // nodes))
    rounds = ((batch / micro_batch - 1) / nodes + 1) * layers
    per_byte = (nodes - 1) * 8 / link_bits_per_s
    per_number = per_byte * micro_batch * sequence * activation_bytes
    dense, sent = (
        rounds * layer_seconds(costs, micro_batch, sequence, hidden, encoded, vocabulary)
        + per_number * (encoded or hidden)
        for encoded in (None, code)
    )
    return dense / sent
