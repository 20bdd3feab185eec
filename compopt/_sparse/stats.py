"""What SCAPE reports of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .._engine.stats import Stats
from .._state.bits import count_shared
from .._state.buckets import Bucket
from .dealing import compressed_lengths, deal_at


@dataclass
class ScapeStats(Stats):
    """Adds what SCAPE did in the last step.

    ``density``: share of the compressed elements that was exchanged. ``payload_bytes`` and
    ``mask_bytes``: what this rank handed over of each. ``mask_overlap()``: share of the newest mask
    that was in the mask before it (Figure 6).
    """

    density: float = 1.0
    payload_bytes: int = 0
    mask_bytes: int = 0
    mask_overlap: Callable[[], float] = field(default=lambda: 0.0, repr=False)


def scape_stats(
    stats: Stats, buckets: Sequence[Bucket], applied: bool, ranks: int, overlap: Callable[[], float]
) -> ScapeStats:
    """What all optimizers report of a step, and what SCAPE adds."""
    masks = sum(mask_bytes(bucket, applied, ranks) for bucket in buckets)
    return ScapeStats(
        **vars(stats),
        density=density(buckets),
        mask_bytes=masks,
        payload_bytes=stats.bytes_sent - masks - stats.parameter_bytes,
        mask_overlap=overlap,
    )


def density(buckets: Iterable[Bucket]) -> float:
    """The share of the compressed elements that the momenta are on."""
    taken, whole = 0, 0
    for bucket in buckets:
        for i, n in enumerate(compressed_lengths(bucket)):
            taken, whole = taken + (n and bucket.cache["mask"].sizes[i]), whole + n
    return taken / max(1, whole)


def mask_bytes(bucket: Bucket, applied: bool, ranks: int) -> int:
    """What this rank handed over of the bucket's mask in the step that has just been counted, if it
    was applied.
    """
    h = bucket.group
    deal = deal_at(bucket, h["step"] + (h["mask_delay"] if applied else 1), ranks)
    return deal.length if deal and (applied or not h["mask_delay"]) else 0


def overlaps(bucket: Bucket) -> dict[str, tuple[int, int]]:
    """For each compressed tensor, by name: elements that its newest mask shares with the one
    before, and all of it.
    """
    found: dict[str, tuple[int, int]] = {}
    newest, held = bucket.cache.get("next_mask"), bucket.cache["mask"]
    for i, name in enumerate(bucket.names):
        old = held.positions[i]
        if shared := bucket.cache["shared"][i]:
            found[name] = shared
        elif newest and newest.bits[i] is not None and old is not None:
            found[name] = int(count_shared(newest.bits[i], old)), newest.sizes[i]
    return found


def shared_of(overlaps: dict[str, tuple[int, int]]) -> float:
    """The share of all newest masks that was in the masks before them."""
    pairs = overlaps.values()
    return sum(shared for shared, _ in pairs) / max(1, sum(k for _, k in pairs))
