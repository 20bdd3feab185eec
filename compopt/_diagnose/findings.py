"""What was found, as numbers by their names, and the same on all ranks.

Names are tuples of words: ("kept", method, layer), ("overlap", quantity, density, lag, layer) and
so on; the layer "" is the whole.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean

import torch

from .._wire.comm import Comm
from .._wire.requests import AllGather, AllReduceMean
from .sampling import Part
from .shadows import Shadows
from .shares import Shares
from .stability import Stability

Findings = dict[tuple[str, ...], float]
# a residual that is so many times as large in the second half of the steps as in the first
GROWS = 1.2


def weighted(parts: Sequence[Part], values: Mapping[int, float]) -> float:
    """The mean over parts, by the elements that they stand for."""
    sizes = {i: parts[i].weight * parts[i].numel for i in values}
    return sum(sizes[i] * value for i, value in values.items()) / sum(sizes.values())


def _by_layer(
    head: tuple[str, ...], parts: Sequence[Part], values: Mapping[int, float]
) -> Findings:
    found: Findings = {(*head, parts[i].name): value for i, value in values.items()}
    return found | {(*head, ""): weighted(parts, values)} if values else found


def of_shadows(shadows: Shadows, gradient: float) -> Findings:
    """``gradient``: the mean norm of the gradient."""
    found: Findings = {}
    for name, rows in shadows.cosines.items():
        for layer, cosines in zip(
            [*(p.name for p in shadows.parts), ""], zip(*rows, strict=True), strict=True
        ):
            found["kept", name, layer] = mean(cosines)
        found["length", name] = mean(shadows.lengths[name])
        held = shadows.residuals[name]
        half = len(held) // 2
        found["residual", name] = max(held[half:]) / max(gradient, 1e-30)
        # where nothing is held back at the end of the first half there is nothing to compare
        found["growth", name] = max(held[half:]) / before if (before := max(held[:half])) else 1.0
    return found


def of_stability(quantity: str, stability: Stability, parts: Sequence[Part]) -> Findings:
    found: Findings = {}
    for kind, table in (("overlap", stability.overlaps), ("norm", stability.norms)):
        for density, lag in sorted({(density, lag) for density, lag, _ in table}):
            means = {i: mean(v) for (d, g, i), v in table.items() if (d, g) == (density, lag)}
            found |= _by_layer((kind, quantity, str(density), str(lag)), parts, means)
    return found


def of_settling(stability: Stability, density: float) -> Findings:
    """The share of the set that was in the one before, in the first and last third of the steps."""
    rows = [v for (d, lag, _), v in stability.overlaps.items() if (d, lag) == (density, 1)]
    if not rows or min(map(len, rows)) < 6:
        return {}
    thirds = [len(row) // 3 for row in rows]
    return {
        ("settling", "first"): mean(mean(row[:n]) for row, n in zip(rows, thirds, strict=True)),
        ("settling", "last"): mean(mean(row[-n:]) for row, n in zip(rows, thirds, strict=True)),
    }


def of_shares(quantity: str, shares: Shares, parts: Sequence[Part]) -> Findings:
    found: Findings = {}
    for rank in sorted({rank for rank, _ in shares.kept}):
        means = {i: mean(v) for (r, i), v in shares.kept.items() if r == rank}
        found |= _by_layer(("share", quantity, str(rank)), parts, means)
    return found


def of_spread(pairs: Sequence[tuple[float, float]], parts: Sequence[Part]) -> Findings:
    cosines = {i: cosine for i, (cosine, _) in enumerate(pairs)}
    ratios = {i: ratio for i, (_, ratio) in enumerate(pairs)}
    return _by_layer(("cosine",), parts, cosines) | _by_layer(("ratio",), parts, ratios)


def check_alike(names: Iterable[str], steps: int, comm: Comm, device: torch.device) -> None:
    """Raises RuntimeError, on all ranks, where they have seen different things."""
    code = zlib.crc32("\n".join(names).encode()) % 2**23  # float32 holds it
    own = torch.tensor([float(steps), float(code)], dtype=torch.float32, device=device)
    rows: torch.Tensor = comm.start(AllGather(own)).wait()  # type: ignore[assignment]
    seen, codes = rows.t().tolist()
    if any(a != b for a, b in itertools.pairwise(seen)):
        told = ", ".join(str(int(n)) for n in seen)
        raise RuntimeError(
            f"ranks have seen different numbers of steps ({told}): take the same steps inside "
            "compopt.diagnose on all ranks."
        )
    if any(a != b for a, b in itertools.pairwise(codes)):
        raise RuntimeError(
            "ranks have looked at different tensors: give compopt.diagnose the same model and the "
            "same optimizer on all ranks."
        )


def merged(found: Findings, comm: Comm, device: torch.device) -> Findings:
    """The mean over ranks of each number."""
    names = sorted(found)
    numbers = torch.tensor([found[name] for name in names], dtype=torch.float32, device=device)
    comm.start(AllReduceMean(numbers)).wait()
    return dict(zip(names, numbers.tolist(), strict=True))
