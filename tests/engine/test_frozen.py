"""Only what requires a gradient is laid out, keeps state and is sent; fine-tuning under DistributedDataParallel."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conformance import TRACKED, some_average
from ddp_models import Net, apart, plain, radius, vector
from pairs import name_of
from ranks import run_ranks
from sim import Ranks, World
from slow_rows import in_turn, slow_but
from table import CASES, FORMS, Case
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._state import buckets

ALL = [*CASES, *FORMS, TRACKED]


class Model(nn.Module):
    """A backbone, a head, and a layer between them; each of several sizes."""

    def __init__(self):
        super().__init__()
        self.backbone, self.middle, self.head = nn.Linear(70, 80), nn.Linear(80, 90), nn.Linear(90, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.backbone(x).tanh()).tanh())


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(100 * step + rank)
    dtype = model.head.weight.dtype
    return model(torch.randn(4, 70, generator=drawn).to(dtype)).square().mean()


def freeze(models: list[nn.Module], names: str) -> None:
    """Only these layers are trained from now on."""
    for model in models:
        for name, p in model.named_parameters():
            p.requires_grad_(name.split(".")[0] in names.split())


PHASES = [("head", 2), ("middle head", 4), ("backbone head", 3), ("backbone middle head", 4), ("middle", 2)]


@pytest.mark.parametrize("case", [*CASES, *FORMS], ids=lambda case: case.name)
def test_lossless_equals_torch_whatever_is_frozen(case):
    ranks = Ranks(2, lambda: Model().double(), lambda ps, **o: case.new(ps, lr=1e-3, **{**case.lossless, **o}))
    torch.manual_seed(0)
    model = Model().double()
    reference = case.reference(model.parameters(), lr=1e-3)
    for names, steps in PHASES:
        freeze([model, *ranks.models], names)
        for _ in range(steps):
            reference.zero_grad()
            (sum(loss(model, rank, ranks.steps) for rank in range(2)) / 2).backward()
            reference.step()
            ranks.train(loss, 1)
    ranks.assert_replicas_equal()
    for p, q in zip(model.parameters(), ranks.models[0].parameters(), strict=True):
        assert float((p - q).detach().abs().max()) < 1e-12


# with rounds a checkpoint holds one rank's moments: what goes on from it goes another way
KINDS = [(case, torch.float32) for case in ALL if not case.averaging]
KINDS += [(case, torch.bfloat16) for case, _ in KINDS if not case.sends_updates]  # which are refused


def is_fast(case: Case, dtype: torch.dtype) -> bool:
    """Each class in one dtype; in the other with `make slow`."""
    return dtype == (torch.float32, torch.bfloat16)[ALL.index(case) % 2] or case.sends_updates


@pytest.mark.parametrize(("case", "dtype"), slow_but(is_fast, KINDS), ids=name_of)
def test_a_checkpoint_of_a_phase_goes_on_as_the_run_did(case, dtype):
    """Also with state of layers that are frozen just then, and without state of one that was never trained."""

    def run(saved_in: tuple[int, ...]) -> nn.Module:
        ranks = Ranks(2, lambda: Model().to(dtype), case.make)
        for number, (names, steps) in enumerate(PHASES):
            freeze(ranks.models, names)
            ranks.train(loss, steps)
            ranks.world.consolidate(ranks.optimizers)
            if number in saved_in:
                saved = copy.deepcopy(ranks.optimizers[0].state_dict())
                ranks.optimizers = [
                    case.make(model.parameters(), process_group=comm)
                    for model, comm in zip(ranks.models, ranks.world.comms, strict=True)
                ]
                for optimizer in ranks.optimizers:
                    optimizer.load_state_dict(saved)
        ranks.finish_round(loss)
        ranks.assert_replicas_equal()
        return ranks.models[0]

    for p, q in zip(run(()).parameters(), run((0, 2)).parameters(), strict=True):
        assert torch.equal(p, q)


MOMENTS = ["before the optimizer is made", "before the checkpoint is loaded"]


@pytest.mark.parametrize(("case", "moment"), in_turn(ALL, MOMENTS), ids=name_of)
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_distributed_checkpoint_of_a_layer_that_was_frozen_goes_on(case, moment, tmp_path):
    """As torch.optim.AdamW's does. torch leaves out the state of what is frozen when it loads."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss(model, 0, step).backward()
            optimizer.step()

    def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    model = Model()
    optimizer = case.make(model.parameters())
    train(model, optimizer, range(3))
    freeze([model], "middle head")
    train(model, optimizer, range(3, 5))
    dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path)
    resumed = Model()
    if moment == "before the optimizer is made":
        freeze([resumed], "middle head")
    again = case.make(resumed.parameters())
    if moment == "before the checkpoint is loaded":
        freeze([resumed], "middle head")
    state = state_of(resumed, again)
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(resumed, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for one in ((model, optimizer), (resumed, again)):
        train(*one, range(5, 7))
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_frozen_parameters_cost_nothing():
    model = Model()
    freeze([model], "head")
    optimizer = compopt.RadiusAdamW(
        model.parameters(), density=0.5, dense_steps=0, process_group=World(1).comms[0], simulate=True
    )
    assert set(optimizer.state) == set(model.head.parameters())
    loss(model, 0, 0).backward()
    optimizer.step()
    assert optimizer.stats.bytes_dense == 4 * (270 + 3)
    assert optimizer.stats.bytes_sent < 1.5 * optimizer.stats.bytes_dense  # and a few control words
    assert set(optimizer.state_dict()["state"]) == {4, 5}


def test_what_was_held_back_is_kept_while_frozen():
    ranks = Ranks(2, Model, lambda ps, **o: compopt.RadiusAdamW(ps, density=0.2, dense_steps=1, interval=50, **o))
    ranks.train(loss, 4)
    optimizer, weight = ranks.optimizers[0], ranks.models[0].middle.weight
    residuals = optimizer.state[weight]["residual"].clone()
    assert residuals.any()
    freeze(ranks.models, "head")
    ranks.train(loss, 3)
    assert torch.equal(optimizer.state[weight]["residual"], residuals)
    assert torch.equal(optimizer.state_dict()["state"][2]["residual"], residuals)
    held = sum(flat.numel() for bucket in optimizer._buckets for flat in bucket.flat.values())
    assert held == 2 * 273  # the moments of the head; what is kept of the others is not part of any bucket
    assert optimizer.state[weight]["residual"].untyped_storage().nbytes() == 4 * weight.numel()
    copied = copy.deepcopy(optimizer)
    freeze(ranks.models, "middle head")
    ranks.train(loss, 1)
    assert float(optimizer.state[weight]["step"]) == 5
    assert set(map(len, (optimizer.state, copied.state))) == {6}


@some_average("RadiusAdamW", "SeparateAdam", "TagcAdamW", "Separate")
def test_ranks_that_freeze_other_layers_are_told(case):
    for first in (False, True):
        ranks = Ranks(2, Model, case.make)
        if not first:
            ranks.train(loss, 3)
        freeze(ranks.models[:1], "head")
        with pytest.raises(ValueError, match="requires_grad: rank 0 has") as caught:
            ranks.train(loss, 1)
        assert "rank 0 has False, rank 1 has True" in str(caught.value)
        freeze(ranks.models, "head")
        ranks.train(loss, 2)
        ranks.assert_replicas_equal()


def test_all_frozen_and_trained_again():
    ranks = Ranks(2, Model, CASES[0].make)
    ranks.train(loss, 2)
    freeze(ranks.models, "")
    for _ in range(2):
        ranks.world.step(ranks.optimizers)
    freeze(ranks.models, "backbone middle head")
    ranks.train(loss, 2)
    ranks.assert_replicas_equal()


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_a_trainer_that_empties_the_state_begins_anew(case):
    ranks = Ranks(2, Model, case.make)
    ranks.train(loss, 4)
    for optimizer in ranks.optimizers:
        optimizer.state = defaultdict(dict)
    for optimizer in ranks.optimizers[:1]:
        entry = optimizer.state_dict()["state"][0]
        kept = [entry[name] for name in ("residual", "exp_avg") if name in entry]
        assert float(entry["step"]) == 0 and not any(tensor.any() for tensor in kept)
    ranks.train(loss, 3)
    assert float(ranks.optimizers[0].state[ranks.models[0].head.weight]["step"]) == 3
    ranks.finish_round(loss)
    ranks.assert_replicas_equal()


class Adapted(nn.Module):
    """A frozen layer beside a trained product of two small matrices (LoRA)."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x).tanh() + self.b(self.a(x))


def adapters(rank: int, of_rank: int) -> list:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(*(Adapted(96, of_rank) for _ in range(4))))
    frozen = [p.clone() for p in model.parameters() if not p.requires_grad]
    optimizer = compopt.ScapeAdamS(model.parameters(), lr=1e-3, density=0.1, density_steps=0)
    for step in range(5):
        plain(model, optimizer, step, None)
    stats, kept = optimizer.stats, sum(t.numel() for entry in optimizer.state.values() for t in entry.values())
    unmoved = all(map(torch.equal, frozen, (p for p in model.parameters() if not p.requires_grad)))
    return [stats.bytes_dense, stats.bytes_sent, kept, unmoved, apart(model)]


def unfrozen_in_turn(rank: int) -> list:
    """The distance from DDP + AdamW, each phase with a DDP of its own, as torch wants it where layers change."""
    torch.set_default_dtype(torch.float64)
    buckets.BUCKET_BYTES = 160_000
    ends, overlapped = [], []
    for make in (lambda ps: torch.optim.AdamW(ps, lr=1e-2), lambda ps: radius(ps, density=1.0)):
        torch.manual_seed(0)
        net = Net()
        for p in net.parameters():
            p.requires_grad_(False)
        net.norm.requires_grad_(True)
        optimizer = make(net.parameters())
        for phase, more in enumerate([[net.branch], [net.layers[4], net.layers[5]], [net.layers], []]):
            model = DDP(net)
            if isinstance(optimizer, compopt.RadiusAdamW):
                compopt.attach(model, optimizer)
            for step in range(3 * phase, 3 * phase + 3):
                plain(model, optimizer, step, None)
            overlapped.append(getattr(optimizer, "stats", None) and optimizer.stats.early_buckets)
            for module in more:
                module.requires_grad_(True)
        ends.append(vector(net))
    return [float((ends[0] - ends[1]).abs().max()), overlapped[-1]]


def both(rank: int) -> list:
    return [adapters(rank, 8), adapters(rank, 64), unfrozen_in_turn(rank)]


def test_adapters_and_layers_unfrozen_in_turn():
    for small, large, unfrozen in run_ranks(both, 2):
        dense, sent, kept, unmoved, distance = small
        assert dense == 4 * 4 * 2 * 8 * 96  # bytes of DDP
        assert sent < 1.1 * dense  # matrices below 4096 elements are averaged as they are; a few control words
        assert kept < 1.1 * dense / 4 + 100
        assert unmoved and distance == 0
        dense, sent, _, unmoved, distance = large
        assert dense == 4 * 4 * 2 * 64 * 96 and sent < 0.25 * dense
        assert unmoved and distance == 0
        assert unfrozen[0] < 1e-9 and unfrozen[1] > 0
