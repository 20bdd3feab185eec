"""Payloads: messages of a bucket's tensors, their control fields, dtypes, sizes and memory.

Ranks see only the mean of a payload, perhaps over many ranks and in low precision. So what they
must have in common is encoded such that its mean tells whether they do. A flag is 0 or 1; its mean
is above 0 if any rank has set it. An integer is sent as its bits and their complements; if ranks
differ, the means of some bit and of its complement are both above 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

# Elements processed at a time: a few vectors of them stay in a core's cache between two passes.
CACHE_ELEMENTS = 131072
# Quantized values that share a scale: its 4 bytes are 3 % of theirs, with 4 bits 6 %, with 2 bits
# 12.5 %.
ROW = 128


# Reused memory


class Scratch:
    """Memory that is reused, because new pages cost more than the computation on them.

    It belongs to one owner, who works on one thread at a time: two optimizers never share it.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, use: str, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return n elements with undefined contents, valid until the next call for this ``use``."""
        key = (use, dtype, device)
        memory = self._memory.get(key)
        if memory is None or memory.numel() < n:
            memory = self._memory[key] = torch.empty(n, dtype=dtype, device=device)
        return memory[:n]

    def get_exact_size(self, use: str, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of n elements, and free that which had another size for this ``use``."""
        key = (use, dtype, device)
        if key not in self._memory or self._memory[key].numel() != n:
            self._memory = {other: x for other, x in self._memory.items() if other[0] != use}
            self._memory[key] = torch.empty(n, dtype=dtype, device=device)
        return self._memory[key]

    def replace(self, memory: Tensor, other: Tensor) -> None:
        """Use ``other``, of the same size, in place of ``memory``."""
        self._memory = {key: other if x is memory else x for key, x in self._memory.items()}

    @property
    def tensors(self) -> list[Tensor]:
        """All memory allocated so far."""
        return list(self._memory.values())


def choose_block_size(x: Tensor, on_cpu: int) -> int:
    """Return how many elements or rows of x to process at a time: ``on_cpu``, which stay in a
    core's cache, and on other devices all.
    """
    return on_cpu if x.device.type == "cpu" else max(1, len(x))


# Messages


class Codec:
    """Sends values as floating-point numbers: in ``dtype``, or in the gradients' (None)."""

    bits: int | None = None  # of a quantized value

    def __init__(self, dtype: torch.dtype | None):
        self.dtype = dtype

    def bytes_per_value(self, gradient_dtype: torch.dtype) -> float:
        """Return the bytes of a value on the network, with its share of a scale if quantized."""
        return (self.dtype or gradient_dtype).itemsize

    def count_bytes(self, flat: Tensor, fields: int, lengths: list[int]) -> int:
        """Return the bytes of a message with so many fields, whose body has tensors of these
        lengths.
        """
        return flat.nbytes

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write ``values``, rounded, to a message; they become the rounding errors."""
        block = choose_block_size(message, on_cpu=CACHE_ELEMENTS)
        for sent, unrounded in zip(message.split(block), values.split(block), strict=True):
            sent.copy_(unrounded)
            unrounded.sub_(sent)


class Mean(Protocol):
    """A rank's part in the mean of a quantized payload (``codec.QuantizedMean``)."""

    rank: int
    ranks: int

    def encode_for_owners(self) -> Tensor: ...

    def average_own_chunk(self, received: Tensor) -> Tensor: ...

    def decode_mean(self, gathered: Tensor) -> None: ...


class Payload:
    """One flat message: a header, control fields, and a body with a part for every tensor.

    The header has, for each tensor, 1 if this rank has a gradient for it, 0 if not, NaN if the
    gradient is not finite; averaging makes it a decision that all ranks share. ``control`` has the
    control fields (see ``ControlFields``); ``fields`` are both.

    ``rounding_errors``, as long as the body, is the rounding error of what this rank sends. The
    average does not change it. There are three cases:

    - The values fit the payload's dtype: ``rounding_errors`` is None.
    - The dtype is narrower: values are written to ``rounding_errors``. ``round`` writes the message
      and leaves the errors there.
    - The codec quantizes: the exchange does (see ``codec``), with random numbers that follow from
      the ``seed``, and then writes ``rounding_errors``.
    """

    def __init__(
        self,
        flat: Tensor,
        header_size: int,
        control_size: int,
        lengths: list[int],
        codec: Codec,
        rounding_errors: Tensor | None = None,
        seed: tuple[int, ...] = (),
        scratch: Scratch | None = None,
    ):
        self.flat, self.codec, self.seed, self.rounding_errors = flat, codec, seed, rounding_errors
        self.scratch = scratch or Scratch()
        size = header_size + control_size
        self.fields, self.body = flat.split_with_sizes([size, len(flat) - size])
        self.header, self.control = self.fields.split_with_sizes([header_size, control_size])
        self.lengths = lengths
        # True if ``round`` rounds the values, which are written to ``rounding_errors`` first
        errors = None if codec.bits else rounding_errors
        self.is_rounded_here = errors is not None
        # where values are written, in the gradients' precision
        self.unrounded_body = self.body if errors is None else errors
        # is added to the body where the exchange quantizes it
        self.addend: Tensor | None = None

    # Views are made lazily: kernels use the body as it is.

    @cached_property
    def parts(self) -> list[Tensor]:
        """The body, a tensor at a time."""
        return list(self.body.split(self.lengths))

    @cached_property
    def rounding_error_parts(self) -> list[Tensor]:
        """``rounding_errors``, a tensor at a time; an empty list where nothing is rounded."""
        return (
            [] if self.rounding_errors is None else list(self.rounding_errors.split(self.lengths))
        )

    @cached_property
    def have_gradients(self) -> list[bool]:
        """For each tensor of an average whether any rank had a gradient. ``read_decision`` sets it,
        with all that the host reads.
        """
        return [flag > 0 for flag in self.header.tolist()]

    def clear_parts(self, kept: Sequence[bool]) -> None:
        """Set the parts of the body to zero of which ``kept`` is False."""
        parts = zip(self.parts, kept, strict=False)
        if dropped := [part for part, is_kept in parts if not is_kept]:
            torch._foreach_zero_(dropped)

    @property
    def unrounded_parts(self) -> list[Tensor]:
        """``unrounded_body``, a tensor at a time."""
        return self.rounding_error_parts if self.is_rounded_here else self.parts

    def round(self, addend: Tensor | None = None) -> Payload:
        """Finish the payload: write ``unrounded_body`` plus ``addend``, rounded to a float dtype,
        to the message, and leave the rounding errors in ``unrounded_body``.

        A quantizing codec encodes when the collective starts; ``addend`` is kept until then.
        """
        if self.codec.bits:
            self.addend = addend
        elif addend is not None:
            self.unrounded_body.add_(addend)
        if self.is_rounded_here:
            self.codec.encode(self.unrounded_body, self.body)
        return self

    def write_fields(self, fields: Tensor, control: ControlFields) -> None:
        """Write the header and the control fields, or the latter alone, from the host; those of the
        device, too.
        """
        if len(fields):
            to = self.fields if len(fields) == len(self.fields) else self.control
            to.copy_(fields, non_blocking=True)
        for name, values in control.fields.items():
            if isinstance(values, Tensor):
                self.control[control.slices[name]].copy_(values)

    def with_flat(self, flat: Tensor) -> Payload:
        """Return a payload of the same layout in other memory."""
        return Payload(flat, len(self.header), len(self.control), self.lengths, self.codec)

    @property
    def nbytes(self) -> int:
        """Bytes that cross the network, each way."""
        return self.codec.count_bytes(self.flat, len(self.fields), self.lengths)

    def receive(self, mean: Mean, received: Tensor, gathered: Tensor) -> None:
        """Read the mean of a quantized payload from ``gathered``, the messages of all ranks.

        ``received``: those from which this rank has computed its part of it.
        """
        mean.decode_mean(gathered)


# Control fields

# As a tensor: the host need not know them, and does not wait for the device.
FieldValues = list[float] | Tensor


class ControlFields:
    """Named groups of numbers beside a payload's header. Their means over ranks, which are equal on
    all, say whether the step is applied, and whether ranks differ.

    Names and lengths are the same on all ranks.
    """

    def __init__(self, **fields: FieldValues):
        self.fields = fields
        self.slices: dict[str, slice] = {}  # where each lies in the control part
        self.numbers: list[float] = []  # all fields, with 0 for those on the device
        for name, values in fields.items():
            self.slices[name] = slice(len(self.numbers), len(self.numbers) + len(values))
            self.numbers += [0.0] * len(values) if isinstance(values, Tensor) else values

    def split(self, mean: list[float]) -> dict[str, list[float]]:
        """Return the mean over ranks of all fields by name."""
        return {name: mean[at] for name, at in self.slices.items()}


def encode_bits(number: int, count: int) -> list[float]:
    """Return the lowest bits of ``number``, then their complements."""
    low = [float(number >> i & 1) for i in range(count)]
    return low + [1 - bit for bit in low]


def bits_differ(mean: list[float]) -> bool:
    """True if ranks had different ``encode_bits``, of which this is the mean."""
    half = len(mean) // 2
    return any(a > 0 and b > 0 for a, b in zip(mean[:half], mean[half:], strict=True))


def encode_stamp(index: int, step: int) -> list[float]:
    """Encode the bucket and the step of a payload: the lowest four bits of each."""
    return encode_bits(index % 16 + 16 * (step % 16), 8)


# Users write a torch.dtype or its name. A group keeps the name, which any checkpoint can hold.
PayloadDtype: TypeAlias = (
    torch.dtype
    | Literal["float64", "float32", "bfloat16", "float16", "int8", "int4", "int2"]
    | None
)


# Quantized values


def count_rows(n: int) -> int:
    """Return the number of rows that n quantized values fill."""
    return -(-n // ROW)


def packed_bytes(n: int, bits: int) -> int:
    """Return the bytes of n quantized values."""
    return -(-n * bits // 8)
