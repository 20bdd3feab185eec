"""capturable=True beside capturable=False: the same steps, one of them with a gradient that is not finite on one rank.

    python tests/late_runs.py CASE ...       # on the device of fake_device.py, in a process of its own; prints JSON

What is compared is all that a step may write, to the bit. A step that is not applied counts as one where the host does
not wait to learn that; so the other run is told to count it too.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import torch
from conformance import Small, data
from sim import Ranks
from torch import Tensor, nn

import compopt
from compopt._state import buckets

SIZE, STEPS, BAD = 2, 7, 3  # ranks; steps; the one that is not applied, counted from 0
BYTES = 20_000  # of a bucket: every matrix has its own
GAUSSIAN = dict(lr=1e-2, projection="gaussian", ratio=8, warmup_steps=0)
SCAPE = dict(density=0.1, density_warmup_steps=0)
RADIUS = dict(density=0.4, warmup_steps=2, interval=5)

Make = Callable[..., torch.optim.Optimizer]


def average(params, **options) -> compopt.Average:
    return compopt.Average(torch.optim.AdamW(params, lr=1e-2, fused=True), **options)


def around(params, **options) -> compopt.Separate:
    return compopt.Separate(torch.optim.Adam(params, lr=1e-2, fused=True), **options)


CASES: dict[str, Make] = {
    "AdamS": functools.partial(compopt.AdamS, lr=1e-2),
    "AdamS, bfloat16": functools.partial(compopt.AdamS, lr=1e-2),
    "RadiusAdamW": functools.partial(compopt.RadiusAdamW, lr=1e-2, **RADIUS),
    "RadiusAdamW, dense": functools.partial(compopt.RadiusAdamW, lr=1e-2, warmup_steps=100),
    "RadiusAdamW, int8, clipped": functools.partial(
        compopt.RadiusAdamW, lr=1e-2, payload_dtype="int8", max_grad_norm=0.5, **RADIUS
    ),
    "SeparateAdam": functools.partial(compopt.SeparateAdam, **GAUSSIAN),
    "SeparateAdam, int8": functools.partial(compopt.SeparateAdam, payload_dtype="int8", **GAUSSIAN),
    "SeparateAdam, clipped": functools.partial(compopt.SeparateAdam, max_grad_norm=0.2, block_rows=20, **GAUSSIAN),
    "Average": average,
    "Average, int8, clipped": functools.partial(average, payload_dtype="int8", max_grad_norm=0.2),
    "Average, absent": average,
    "Separate": functools.partial(around, projection="gaussian", ratio=8, warmup_steps=0),
    "Separate, tracked": functools.partial(around, rank=4, warmup_steps=1),
    "SeparateAdam, tracked": functools.partial(compopt.SeparateAdam, lr=1e-2, rank=4, warmup_steps=1),
}
# what kernels commit; bfloat16 they cut in the interpreter, where masters round it, and every step would renew those
TRITONS = {name: CASES[name] for name in ("AdamS", "RadiusAdamW", "RadiusAdamW, int8, clipped")} | {
    "ScapeAdamS": functools.partial(compopt.ScapeAdamS, lr=1e-2, max_grad_norm=0.3, **SCAPE),
    "ScapeAdamS, int8": functools.partial(compopt.ScapeAdamS, lr=1e-2, payload_dtype="int8", **SCAPE),
    "AdamS, its authors'": functools.partial(compopt.AdamS, lr=1e-3, bias_correction="adams"),
}


class Model(Small):
    """``Small``, of which no rank uses ``idle``, and rank 0 alone uses ``alone``."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__(dtype)
        self.alone = nn.Parameter(torch.ones(64, dtype=dtype))


class Used(Model):
    """The same, but what is compressed is used: SCAPE's masks are of one size then."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__(dtype)
        self.idle = nn.Linear(3, 5, dtype=dtype)


class Whole(Used):
    """The same, of which every rank uses all."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.alone * x + 0.1 * self.idle(x[:, :3]).mean()


def loss(model: Model, rank: int, step: int) -> Tensor:
    x = data(rank, step, model.scale.dtype).to(model.scale.device)
    out = (model(x) - x.flip(1)).square().mean()
    return out + (model.alone * x).square().mean() if rank == 0 else out


def placed(model: nn.Module, device: torch.device) -> nn.Module:
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(p.detach().to(device)))
    return model


def held(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of everything that a step may write, without waiting for what has not been read."""
    tensors = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    for entry in optimizer.state.values():
        values = [*entry.values(), *entry.get("base", {}).values()]
        tensors += [value for value in values if isinstance(value, Tensor)]
    return [getattr(x, "held", x).clone() for x in tensors]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in zip(a, b, strict=True)
    )


def near(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-7) for x, y in zip(a, b, strict=True))


def spoil(ranks: Ranks) -> None:
    ranks.models[-1].up.weight.grad[3, 5] = torch.nan
    ranks.models[-1].down.weight.grad[0, 7] = torch.inf


def settle(both: list[Ranks]) -> None:
    """Bring masks that are on their way to where they belong."""
    for ranks in both:
        for optimizer in ranks.optimizers:
            optimizer._runtime.tails.settle()


def count_one_more(ranks: Ranks) -> None:
    for optimizer in ranks.optimizers:
        for group in optimizer._option_groups:
            group["step"] += 1


def run(name: str, device: torch.device, waits: Callable[[], int] = lambda: 0) -> dict[str, object]:
    """What is found. ``waits``: how often the host has waited since it was asked."""
    make, dtype = (CASES | TRITONS)[name], torch.bfloat16 if "bfloat16" in name else torch.float32
    wraps = name in ("Average", "Average, int8, clipped", "Separate", "Separate, tracked")
    model = Used if "Scape" in name else Whole if wraps else Model
    with mock.patch.multiple(buckets, BUCKET_BYTES=BYTES, DEVICE_BUCKET_BYTES=BYTES):
        both = [
            Ranks(SIZE, lambda: placed(model(dtype), device), functools.partial(make, capturable=late))
            for late in (False, True)
        ]
    assert len(both[0].optimizers[0]._buckets) > 1
    prompt, late = both
    differs, far, waited, late_steps, kept = [], [], [], [], []
    for number in range(STEPS):
        for ranks in both:
            ranks.backward(loss)
            if number == BAD:
                spoil(ranks)
        if number == BAD:
            settle(both)
        before = held(late.optimizers[1])
        prompt.world.step(prompt.optimizers)
        waits()
        late.world.step(late.optimizers)
        waited.append(waits() / SIZE)
        late_steps.append(len(late.optimizers[0]._engine.late.coming))
        if number == BAD:
            settle(both)
        after = [[held(optimizer) for optimizer in ranks.optimizers] for ranks in both]
        differs += [number for a, b in zip(*after, strict=True) if not same(a, b)]
        far += [number for a, b in zip(*after, strict=True) if not near(a, b)]
        late.assert_replicas_equal()
        if number == BAD:
            kept = [same(before, held(late.optimizers[1])), prompt.optimizers[0].stats.phase]
            count_one_more(prompt)
        for ranks in both:
            ranks.steps += 1
    stats = late.optimizers[1].stats, prompt.optimizers[1].stats
    return {
        "differs": differs,
        "far": far,
        "waits": waited,
        "late": late_steps,
        "kept": kept,
        "skipped": [one.skipped for one in stats],
        "norms": [one.grad_norm for one in stats],
        "phases": [one.phase for one in stats],
        "bytes": [one.bytes_sent for one in stats],
        "steps": late.optimizers[0]._option_groups[0]["step"],
    }


def refused(make: Make, device: torch.device) -> str:
    try:
        make([nn.Parameter(torch.zeros(64, 64, device=device))], capturable=True)
    except ValueError as error:
        return str(error)
    return "taken"


def main(names: list[str]) -> None:
    import fake_device
    from accelerator_run import norm_of_devices

    device = fake_device.register()
    os.environ["COMPOPT_BACKEND"] = "torch"
    torch.set_num_threads(1)
    for module in [module for name, module in sys.modules.items() if name.startswith("compopt")]:
        for name in {"squared_norm", "squared_norm_alike"} & vars(module).keys():
            setattr(module, name, norm_of_devices)
    found = {}
    for name in names or CASES:
        with fake_device.Device() as pretend:

            def waits(pretend=pretend) -> int:
                counted = pretend.accesses.total()
                if counted and os.environ.get("PLACES"):
                    print(dict(pretend.accesses), file=sys.stderr)
                pretend.accesses.clear()
                return counted

            try:
                found[name] = run(name, device, waits) | {"mixed": dict(pretend.mixed)}
            except Exception:
                found[name] = {"raised": traceback.format_exc()}
    with fake_device.Device():
        rate = torch.tensor(0.1).to(device)
        found["refused"] = [
            refused(functools.partial(compopt.AdamS, bias_correction="adams"), device),
            refused(functools.partial(compopt.AdamS, lr=rate), device),
            refused(lambda ps, **options: compopt.Average(torch.optim.AdamW(ps), **options), device),
            refused(lambda ps, **options: compopt.Separate(torch.optim.SGD(ps, fused=True), **options), device),
        ]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
