"""Text to train on, as bytes: the standard library's own source files, which are wherever Python is."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

CHUNK = 65536  # bytes; every 20th chunk is validation text
VALIDATION_EVERY = 20
LIMIT = 8_000_000  # bytes of text in all
# Tests, a GUI and what pip installed are not library code; encodings and pydoc_data are mostly generated tables.
SKIP = {"test", "tests", "idlelib", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}


def standard_library(limit: int = LIMIT) -> bytes:
    """The first `limit` bytes of the standard library's .py files, in sorted order: the same text in every process."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    text = bytearray()
    for name in names:
        # _sysconfigdata holds this machine's build settings, nothing a reader would call source.
        if len(text) >= limit or SKIP & set(name.split("/")) or name.startswith("_sysconfigdata"):
            continue
        text += (root / name).read_bytes()
    return bytes(text[:limit])


def load(path: str | None = None, limit: int = LIMIT) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation text.

    Args:
        path: any file, read as bytes; None is the standard library's source.
        limit: bytes of text to keep.

    Returns:
        Two uint8 tensors of shape (bytes,). Every 20th chunk of 64 kB (of a twentieth, in a short text) is validation.

    Raises:
        ValueError: the text is shorter than 10 000 bytes.
    """
    text = Path(path).read_bytes()[:limit] if path else standard_library(limit)
    if len(text) < 10_000:
        where = path or sysconfig.get_path("stdlib")
        raise ValueError(
            f"The text in {where} has {len(text)} bytes; at least 10000 are needed: name a larger --data file."
        )
    chunks = torch.frombuffer(bytearray(text), dtype=torch.uint8).split(min(CHUNK, len(text) // VALIDATION_EVERY))
    train = [chunk for i, chunk in enumerate(chunks) if i % VALIDATION_EVERY != VALIDATION_EVERY - 1]
    return torch.cat(train), torch.cat(chunks[VALIDATION_EVERY - 1 :: VALIDATION_EVERY])


def batches(data: torch.Tensor, batch: int, context: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs and next bytes, two int64 tensors of shape (batch, context), at random places, without end.

    Give every rank a seed of its own (`seed + rank`): the ranks then read different places.

    Raises:
        ValueError: the text is not longer than `context`.
    """
    if len(data) <= context:
        raise ValueError(f"--context {context} does not fit into a text of {len(data)} bytes: use a shorter context.")
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(data) - context, (batch, 1), generator=generator)
        window = data[starts + offsets].long()
        yield window[:, :-1], window[:, 1:]
