"""The runs that bench/quality.py compares: what each trains with, and which of them share a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import int8

import compopt

DENSE = 0.15  # of the steps, averaged dense at the start; what a run "from scratch" does without
WEIGHT_DECAY = 1e-2  # of all methods
PAPERS = (0.9, 0.95)  # betas of AdamS and SCAPE, as their authors train Llama

Make = Callable[[list, float, int], torch.optim.Optimizer]  # from groups, learning rate, dense steps


def adamw(groups: list, lr: float, dense: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, weight_decay=WEIGHT_DECAY, fused=True)


def adams(groups: list, lr: float, dense: int) -> torch.optim.Optimizer:
    return compopt.AdamS(groups, lr=lr, betas=PAPERS, weight_decay=WEIGHT_DECAY)


def sgd(groups: list, lr: float, dense: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=100 * lr, momentum=0.9, nesterov=True)


def of(cls: str, **options: object) -> Make:
    """A class of ours, with a dense start unless the options say otherwise."""
    made = {"weight_decay": WEIGHT_DECAY} | options
    return lambda groups, lr, dense: getattr(compopt, cls)(groups, lr=lr, **{"warmup_steps": dense, **made})


def scape(density: float, **options: object) -> Make:
    return of("ScapeAdamS", **{"betas": PAPERS, "density": density, "density_warmup_steps": 0, **options})


def ramped(density: float, **options: object) -> Make:
    """SCAPE from scratch, its density falling over the first half of the run: the bytes of a dense start of 15 %."""

    def make(groups: list, lr: float, dense: int) -> torch.optim.Optimizer:
        return scape(density, warmup_steps=0, density_warmup_steps=round(dense / DENSE / 2), **options)(groups, lr, 0)

    return make


def separate(ratio: float, **options: object) -> Make:
    return of("SeparateAdam", **{"projection": "gaussian", "ratio": ratio, **options})


def around(base: Make, **options: object) -> Make:
    return lambda groups, lr, dense: compopt.Separate(base(groups, lr, dense), **{"warmup_steps": dense, **options})


def radius(density: float, interval: int = 20, **options: object) -> Make:
    return of("RadiusAdamW", density=density, interval=interval, **options)


def tracked(rank: int, **options: object) -> Make:
    return of("SeparateAdam", **{"projection": "tracked", "rank": rank, "payload_dtype": None, **options})


def local(every: int, payload: str = "int4", **options: object) -> Make:
    """Local steps of AdamW; the start is their own."""
    return lambda groups, lr, dense: compopt.LocalSteps(
        adamw(groups, lr, dense), every, payload_dtype=payload, **options
    )


def rival(cls: str, start: float = 0.0, **options: object) -> Make:
    """A class of _rivals.py; it begins with this share of the steps that others average dense."""

    def make(groups: list, lr: float, dense: int) -> torch.optim.Optimizer:
        import _rivals

        begins = {"dense": round(start / DENSE * dense)} if start else {}
        return getattr(_rivals, cls)(groups, lr=lr, weight_decay=WEIGHT_DECAY, **begins, **options)

    return make


# They average by themselves, and DDP's own average is switched off: it would be a second one.
RIVALS: dict[str, Make] = {
    "DeMo 32": rival("DeMo", k=32),
    "DeMo 8": rival("DeMo", k=8),
    "SparseLoCo 15": rival("SparseLoCo", every=15, start=0.005),
    "SparseLoCo 30": rival("SparseLoCo", every=30, start=0.005),
}

# every, payload, growing, outer learning rate
AT_RATES = [
    (300, "int4", 2000, 1.0),
    (300, "int4", 1500, 1.0),
    (30, "int2", 780, 1.0),
    *((every, "int2", growth, 1.0) for every in (30, 140) for growth in (1500, 2000)),
]
# A string names one of torch's hooks, or naive top-k, of examples/baselines.py and its rank or density.
METHODS: dict[str, Make | str] = {
    "AdamW (DDP)": adamw,
    "AdamS": adams,
    **{f"PowerSGD rank {rank}": f"powersgd {rank}" for rank in (1, 2, 4, 6, 8, 13, 16, 32)},
    **{f"naive top-k {density}": f"topk {density}" for density in (0.4, 0.2, 0.05, 0.025, 0.01, 0.005)},
    "naive top-k 0.4, no error feedback": "forgetful 0.4",
    "RadiusAdamW 0.9": radius(0.9),
    "RadiusAdamW 0.5": radius(0.5),
    "RadiusAdamW 0.4": radius(0.4),
    "ScapeAdamS 0.1, as printed, from scratch": scape(0.1, clip="scape", warmup_steps=0),
    "ScapeAdamS 0.1, ramp of 15 % from scratch": scape(0.1, warmup_steps=0, density_warmup_steps=120),
    "ScapeAdamS 0.1": scape(0.1),
    "ScapeAdamS 0.1, no mask delay": scape(0.1, mask_delay=0),
    "ScapeAdamS 0.1, ramp over half, from scratch": ramped(0.1),
    "ScapeAdamS 0.1, sharded": scape(0.1, sharded=True),
    "ScapeAdamS 0.1, offload": scape(0.1, offload="residual"),
    "ScapeAdamS 0.1, dense 7 %, ramp of 15 %": scape(0.1, warmup_steps=60, density_warmup_steps=120),
    "ScapeAdamS 0.01": scape(0.01),
    "ScapeAdamS 0.01, no mask delay": scape(0.01, mask_delay=0),
    "SeparateAdam 8": separate(8),
    "SeparateAdam 16": separate(16),
    "SeparateAdam 64": separate(64),
    **{f"SeparateAdam {ratio}, blocks": separate(ratio, block_rows="auto") for ratio in (8, 16)},
    "SeparateAdam 16, from scratch": separate(16, warmup_steps=0),
    "SeparateAdam 8, no error feedback": separate(8, ef_beta=1.0),
    "SeparateAdam 16, no error feedback": separate(16, ef_beta=1.0),
    "SeparateAdam 64, no error feedback": separate(64, ef_beta=1.0),
    "SeparateAdam 16, never reset": separate(16, reset_interval=None),
    "SeparateAdam 16, adaptive": separate(16, adaptive=True, adapt_interval=100),
    **{f"SeparateAdam tracked {rank}": tracked(rank) for rank in (1, 2, 4, 8, 16)},
    **{f"SeparateAdam tracked {rank}, int8": tracked(rank, payload_dtype=int8) for rank in (4, 8, 16, 32)},
    **{f"SeparateAdam tracked {rank}, int4": tracked(rank, payload_dtype="int4") for rank in (4, 8, 16, 32)},
    **{
        f"Separate tracked {rank} around AdamS, int8": around(
            adams, projection="tracked", rank=rank, payload_dtype=int8
        )
        for rank in (4, 8, 16, 32)
    },
    **{f"RadiusAdamW {density}": radius(density) for density in (0.1, 0.2, 0.6, 0.8)},
    **{
        f"RadiusAdamW {density}, interval {interval}": radius(density, interval)
        for density in (0.2, 0.4, 0.6, 0.8)
        for interval in (100, 400)
    },
    **{
        f"RadiusAdamW 0.4, {'' if interval == 20 else f'interval {interval}, '}residual scale {share}": radius(
            0.4, interval, residual_scale=share
        )
        for interval in (20, 100)
        for share in (0.3, 0.1)
    },
    **{f"RadiusAdamW {density}, int8": radius(density, payload_dtype=int8) for density in (0.4, 0.2, 0.1)},
    **{f"ScapeAdamS {density}": scape(density) for density in (0.05, 0.2)},
    **{f"ScapeAdamS {density}, int8": scape(density, payload_dtype=int8) for density in (0.01, 0.05, 0.1, 0.2)},
    **{f"SeparateAdam {ratio}, int8": separate(ratio, payload_dtype=int8) for ratio in (4, 8, 16)},
    "TagcAdamW 0.9875, bf16": of("TagcAdamW", sparsity=0.9875, payload_dtype=torch.bfloat16),
    **{
        f"TagcAdamW 0.9875, bf16, updates in {word}": of(
            "TagcAdamW", sparsity=0.9875, payload_dtype=torch.bfloat16, update_dtype=word
        )
        for word in ("int8", "int4", "int2")
    },
    **{f"TagcAdamW {sparsity}": of("TagcAdamW", sparsity=sparsity) for sparsity in (0.8, 0.9, 0.9875)},
    **{
        f"LocalSteps {every}, {word}, growing {growth}": local(every, word, every_warmup_steps=growth)
        for every, growth in ((10, 300), (30, 600), (30, 780), (30, 800), (30, 900), (250, 2000), (300, 2000))
        for word in ("float32", "int8", "int4")
    },
    **{
        f"LocalSteps {every}, {word}, growing {growth}, outer lr {rate:g}": local(
            every, word, every_warmup_steps=growth, outer_lr=rate
        )
        for every, word, growth, rate in AT_RATES
    },
    "LocalSteps 30, int4, growing 780, 4 fragments": local(30, every_warmup_steps=780, fragments=4, delay=1),
    **RIVALS,
    "Separate 16 around AdamS": around(adams, projection="gaussian", ratio=16),
    "Separate 16 around SGD": around(sgd, projection="gaussian", ratio=16),
}


def parts(name: str) -> tuple[Make, str, str]:
    """Return a maker of the method's optimizer, the hook of examples/baselines.py and its setting ("": none)."""
    method = METHODS[name]
    if name in RIVALS:
        return RIVALS[name], "alone", ""
    return (adamw, *method.split()) if isinstance(method, str) else (method, "", "")


GRID = (1e-3, 2e-3, 4e-3)
ADAMS_GRID = (5e-4, *GRID)  # AdamS wants a smaller one than AdamW


@dataclass(frozen=True)
class Table:
    """Runs of equal length; the first is what the others are compared with. Each is shown at its best rate."""

    steps: int
    rows: dict[str, tuple[float, ...]]  # method: learning rates to try


TABLES = {
    "radius": Table(
        1500,
        {"AdamW (DDP)": (1e-3,), "naive top-k 0.4": (1e-3,), "RadiusAdamW 0.4, interval 100": (1e-3,)}
        | {f"RadiusAdamW {name}": (1e-3,) for name in ("0.9", "0.5", "0.4", "0.4, int8")},
    ),
    "scape": Table(
        800,
        {"AdamW (DDP)": GRID, "AdamS": ADAMS_GRID, "PowerSGD rank 4": GRID[1:]}
        | {"ScapeAdamS 0.1": ADAMS_GRID, "ScapeAdamS 0.01": ADAMS_GRID}
        | {name: GRID[1:2] for name in METHODS if name.startswith("ScapeAdamS 0.1, ")}
        | dict.fromkeys(("ScapeAdamS 0.1, no mask delay", "ScapeAdamS 0.1, ramp over half, from scratch"), GRID[:2])
        | {"ScapeAdamS 0.01, no mask delay": GRID[1:2]},
    ),
    "tagc": Table(
        800,
        {"AdamW (DDP)": GRID, "PowerSGD rank 4": GRID[1:]}
        | {name: GRID[1:] for name in METHODS if name.startswith("Tagc")},
    ),
    "separate": Table(
        800,
        {"AdamW (DDP)": GRID, "SeparateAdam 8": GRID, "SeparateAdam 16": GRID, "SeparateAdam 64": GRID}
        | {f"PowerSGD rank {rank}": GRID[1:2] for rank in (2, 6, 13)}
        | {name: GRID[1:2] for name in METHODS if name.startswith("Separate") and "," in name and ", int" not in name}
        | {"SeparateAdam 16, adaptive": GRID[1:]}
        | {f"SeparateAdam {ratio}, blocks": GRID[2:] for ratio in (8, 16)}
        | {"AdamS": GRID, "Separate 16 around AdamS": GRID, "Separate 16 around SGD": GRID},
    ),
    "time_to_loss": Table(
        800,
        {"AdamW (DDP)": GRID[1:], "AdamS": ADAMS_GRID[:-1], "PowerSGD rank 4": GRID[1:], "naive top-k 0.025": GRID[1:]}
        | {"RadiusAdamW 0.4": GRID, "ScapeAdamS 0.1": ADAMS_GRID[:-1], "ScapeAdamS 0.01": ADAMS_GRID[:-1]}
        | {"SeparateAdam 16": GRID[1:], "SeparateAdam tracked 16, int8": GRID[1:], "TagcAdamW 0.9875": GRID[1:]},
    ),
    "radius-sweep": Table(
        400,
        {"AdamW (DDP)": GRID[1:2]}
        | {
            f"RadiusAdamW {density}" + ("" if interval == 20 else f", interval {interval}"): GRID[1:2]
            for density in (0.8, 0.6, 0.4, 0.2)
            for interval in (20, 100, 400)
        },
    ),
    "scape-sweep": Table(
        400, {"AdamS": GRID[1:2]} | {f"ScapeAdamS {density}": GRID[1:2] for density in (0.2, 0.1, 0.05, 0.01)}
    ),
}
