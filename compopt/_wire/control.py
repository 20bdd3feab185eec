"""What the runtime wants agreed in a step: numbers beside a payload's header, whose mean over ranks
tells what it must.

A payload may be of low precision, and its mean of many ranks. So a fact is 0 or 1, and its mean
above 0 where any rank has it; a number is bits and their complements, of which the mean of both is
above 0 where ranks differ.
"""

from __future__ import annotations

from torch import Tensor

# A tensor: known on the device only, and not worth waiting for.
Words = list[float] | Tensor


class Control:
    """Words by name, in the order in which they are given; their names and lengths are the same on
    all ranks.
    """

    def __init__(self, **words: Words):
        self.words = words

    def __len__(self) -> int:
        return sum(map(len, self.words.values()))

    @property
    def numbers(self) -> list[float]:
        """All words, with 0 for those that only the device knows."""
        return [
            number
            for words in self.words.values()
            for number in ([0.0] * len(words) if isinstance(words, Tensor) else words)
        ]

    @property
    def on_device(self) -> list[tuple[slice, Tensor]]:
        """The words that only the device knows, and where they belong."""
        return [
            (at, words)
            for (_, at), words in zip(self.places, self.words.values(), strict=True)
            if isinstance(words, Tensor)
        ]

    def read(self, mean: list[float]) -> dict[str, list[float]]:
        """The mean over ranks of all words, by name."""
        return {name: mean[at] for name, at in self.places}

    @property
    def lengths(self) -> list[tuple[str, int]]:
        """The names of the words, and how many each has."""
        return [(name, len(words)) for name, words in self.words.items()]

    @property
    def places(self) -> list[tuple[str, slice]]:
        """The names of the words, and where they are."""
        places, start = [], 0
        for name, words in self.words.items():
            places.append((name, slice(start, start + len(words))))
            start += len(words)
        return places


def bits(number: int, count: int) -> list[float]:
    """The lowest bits of ``number``, then their complements."""
    low = [float(number >> i & 1) for i in range(count)]
    return low + [1 - bit for bit in low]


def differ(mean: list[float]) -> bool:
    """Whether ranks had different ``bits``, from their mean."""
    half = len(mean) // 2
    return any(a > 0 and b > 0 for a, b in zip(mean[:half], mean[half:], strict=True))


def place_bits(index: int, step: int) -> list[float]:
    """Which bucket and which step a payload belongs to: the lowest four bits of each number."""
    return bits(index % 16 + 16 * (step % 16), 8)
