"""Accelerators and links: their rates, and the seconds of a collective.

Figures of accelerators are peaks from their makers' data sheets; training reaches a share of them.

``prediction`` and ``layer_prediction`` compute with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Share of the peak bytes a second that elementwise passes reach.
MEMORY_SHARE = 0.75
# Share of the peak operations a second that thin matrix products reach.
PRODUCT_SHARE = 0.5
# Share of the peak operations a second that a transformer's layers reach in training.
LAYER_SHARE = 0.4
# Share of the peak bytes a second that collectives reach between devices of one machine.
PEER_SHARE = 0.8
# Passes of torch.topk over its input: 18 to 32 on a CPU, 22 and 32 in MCBench's table 6.
TOP_K_PASSES = 25
# A QR factorisation takes this many times as long as products of as many operations.
QR_SLOWDOWN = 20


def check_positive(**values: float) -> None:
    """Raise ValueError for the first value that is not positive and finite."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite; got {value}.")


@dataclass(frozen=True)
class Speed:
    """The speed of one rank.

    Args:
        memory_bytes_per_s: bytes that elementwise passes move.
        flops_per_s: operations of matrix products in float32.
        half_flops_per_s: operations of matrix products in 16 bits.
    """

    memory_bytes_per_s: float
    flops_per_s: float
    half_flops_per_s: float

    def __post_init__(self) -> None:
        check_positive(**vars(self))


@dataclass(frozen=True)
class Device:
    """One kind of accelerator, or a core of a CPU.

    Args:
        memory_bytes: its memory; None where that is not the device's to say.
        bytes_per_s: peak of its memory.
        flops_per_s: peak in float32, outside tensor cores: the passes and small products of an
            optimizer.
        half_flops_per_s: peak in 16 bits, of tensor cores without sparsity: layers.
        peer_bytes_per_s: peak to other devices of the same machine, each way.
        source: where the figures stand.
    """

    memory_bytes: float | None
    bytes_per_s: float
    flops_per_s: float
    half_flops_per_s: float
    peer_bytes_per_s: float
    source: str

    @property
    def local(self) -> tuple[float, float]:
        """Bytes and float32 operations a second that an optimizer's work is taken to reach."""
        return MEMORY_SHARE * self.bytes_per_s, PRODUCT_SHARE * self.flops_per_s

    @property
    def speed(self) -> Speed:
        """Speeds that a compressor's work is taken to reach: ``local``, and products in 16 bits."""
        return Speed(*self.local, PRODUCT_SHARE * self.half_flops_per_s)

    @property
    def inside_bits_per_s(self) -> float:
        """Bits a second that a collective inside a machine is taken to reach."""
        return 8 * PEER_SHARE * self.peer_bytes_per_s


DEVICES = {
    "h200": Device(141e9, 4.8e12, 67e12, 989e12, 450e9, "NVIDIA H200 SXM data sheet"),
    "h100": Device(80e9, 3.35e12, 67e12, 989e12, 450e9, "NVIDIA H100 SXM data sheet"),
    "a100": Device(80e9, 2.039e12, 19.5e12, 312e12, 300e9, "NVIDIA A100 80GB SXM data sheet"),
    "l40s": Device(48e9, 0.864e12, 91.6e12, 362e12, 32e9, "NVIDIA L40S data sheet"),
    "l4": Device(24e9, 0.3e12, 30.3e12, 121e12, 32e9, "NVIDIA L4 data sheet"),
    "v100": Device(32e9, 0.9e12, 15.7e12, 125e12, 150e9, "NVIDIA V100 SXM2 data sheet"),
    "rtx4090": Device(24e9, 1.008e12, 82.6e12, 165e12, 32e9, "NVIDIA GeForce RTX 4090 data sheet"),
    "mi300x": Device(192e9, 5.3e12, 163.4e12, 1307e12, 448e9, "AMD Instinct MI300X data sheet"),
    "cpu": Device(
        None,
        13e9,
        100e9,
        100e9,
        10e9,
        "one core of the shared Xeon that bench/results was measured on",
    ),
}


def find_device(name: str | None) -> tuple[Device, str]:
    """Return the device of this name, or an assumed one, and how reports name it."""
    if name is not None and name not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}; got {name!r}.")
    return DEVICES[name or "a100"], name or "a100, name another with --device"


def source_of(number: float | None, default: str = "assumed") -> str:
    """Return "given" for a number of the user's, else the source of the default."""
    return default if number is None else "given"


@dataclass(frozen=True)
class Machine:
    """The ranks that average gradients, and the links between them.

    Args:
        ranks: processes that average gradients.
        link_bytes_per_s: bytes that one rank can send, each second, while it receives as much.
        latency_s: seconds of one message, whatever its size.
        memory_bytes_per_s: bytes that a rank can move in memory.
        flops_per_s: floating-point operations that a rank does in matrix products.
        wait_share: share of a step that a rank waits for the slowest one where all meet.
        lost_s_per_byte: seconds that computation loses for each byte that a rank sends beside it.
        ranks_per_node: of these ranks, how many share a machine. An all-reduce sends a sum once
            from each machine, over the links of all its ranks.
    """

    ranks: int
    link_bytes_per_s: float
    latency_s: float = 50e-6
    memory_bytes_per_s: float = 10e9
    flops_per_s: float = 50e9
    wait_share: float = 0.0
    lost_s_per_byte: float = 0.0
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks must be at least 1; got {self.ranks}.")
        if self.ranks_per_node < 1 or self.ranks % self.ranks_per_node:
            raise ValueError(
                f"ranks_per_node must divide the {self.ranks} ranks; got {self.ranks_per_node}."
            )
        check_positive(
            link_bytes_per_s=self.link_bytes_per_s,
            memory_bytes_per_s=self.memory_bytes_per_s,
            flops_per_s=self.flops_per_s,
        )
        for name in ("latency_s", "wait_share", "lost_s_per_byte"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must not be negative, and finite; got {value}.")

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node


def ring_bytes(ranks: int, size: float) -> float:
    """Bytes that each of these ranks sends in a ring all-reduce of `size` bytes."""
    return 2 * (ranks - 1) / ranks * size


def all_reduce_seconds(machine: Machine, size: float) -> float:
    """A ring all-reduce of `size` bytes (Radius, equation 3) over machines, each of which sends on
    the links of all its ranks.
    """
    if not size:
        return 0.0
    rate = machine.ranks_per_node * machine.link_bytes_per_s
    return ring_bytes(machine.nodes, size) / rate + message_seconds(machine)


def all_gather_seconds(machine: Machine, size: float) -> float:
    """A ring all-gather to, or reduce-scatter of, `size` bytes: half an all-reduce (Radius,
    equation 4).
    """
    return all_reduce_seconds(machine, size) / 2


def message_seconds(machine: Machine) -> float:
    """Seconds of latency in one all-reduce: its messages follow one another."""
    return 2 * (machine.nodes - 1) * machine.latency_s
