"""The decision of all ranks about a step, over buckets and shards, by when="auto", and on ranks that come late."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from deep import Deep, loss
from pairs import name_of
from problems import gradients, replicas, weights
from problems import step as take_step
from randomk import RandomK
from ranks import FOREVER, run_ranks
from sim import Ranks, World
from slow_rows import in_turn
from table import CASES, by_name
from torch import nn

import compopt
from compopt._engine import options as _options
from compopt._engine import trial as _when
from compopt._engine.decision import StepDecision, combine_decisions
from compopt._engine.exchange import StalenessCheck
from compopt._state import buckets as _buckets
from compopt._state.bucket import Bucket
from compopt._wire.payload import bits_differ, encode_bits, encode_stamp
from compopt.tagc.tagc import UnionReducer


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(_buckets, "BUCKET_BYTES", 40_000)

    def build(size: int = 2, **options) -> Ranks:
        message = {"lr": 1e-2, "density": 0.3, "interval": 100, "dense_steps": 0, **options}
        return Ranks(
            size,
            lambda: Deep(6),
            lambda ps, process_group: compopt.RadiusAdamW(ps, process_group=process_group, **message),
        )

    return build


def parameters(ranks: Ranks, rank: int = 0) -> torch.Tensor:
    return nn.utils.parameters_to_vector(ranks.models[rank].parameters()).detach()


def mean_norm(ranks: Ranks) -> float:
    grads = [torch.cat([p.grad.view(-1) for p in model.parameters()]) for model in ranks.models]
    return float(torch.stack(grads).mean(0).double().norm())


def test_one_norm_over_all_buckets(make):
    ranks = make()
    assert len(ranks.optimizers[0]._buckets) > 2
    ranks.backward(loss)
    norm = mean_norm(ranks)
    ranks.world.step(ranks.optimizers)
    assert ranks.optimizers[0].stats.grad_norm == pytest.approx(norm, rel=1e-5)


def test_what_several_ranks_hold_of_a_model_counts_once(make):
    ranks = make()
    for optimizer in ranks.optimizers:
        for bucket in optimizer._buckets:
            bucket.replicate_size = 4
    ranks.backward(loss)
    norm = mean_norm(ranks)
    ranks.world.step(ranks.optimizers)
    assert ranks.optimizers[0].stats.grad_norm == pytest.approx(norm / 2, rel=1e-5)


@pytest.mark.parametrize("layer", range(6))
def test_a_bad_gradient_in_any_bucket_stops_all(make, layer):
    ranks = make()
    ranks.train(loss, 2)
    before = parameters(ranks)
    ranks.backward(loss)
    ranks.models[1].layers[layer].weight.grad[3, 3] = float("nan")
    ranks.world.step(ranks.optimizers)
    assert ranks.optimizers[0].stats.phase == "skipped"
    assert torch.equal(parameters(ranks), before) and torch.equal(parameters(ranks, 1), before)


def test_an_average_that_the_wire_cannot_hold_is_not_applied(make):
    """Each gradient is finite; as float16 it is not."""
    ranks = make(payload_dtype=torch.float16)
    ranks.train(loss, 1)
    before = parameters(ranks)
    ranks.backward(loss)
    for model in ranks.models:
        model.layers[2].weight.grad.fill_(1e5)
    ranks.world.step(ranks.optimizers)
    assert ranks.optimizers[1].stats.phase == "skipped" and torch.equal(parameters(ranks), before)
    ranks.train(loss, 1)
    assert not torch.equal(parameters(ranks), before)


def run_backward(ranks: Ranks) -> None:
    for _, model, optimizer in ranks:
        optimizer.gradients_ready(reversed(list(model.parameters())))
        optimizer.backward_done()


@pytest.mark.filterwarnings("ignore:gradients were changed")
@pytest.mark.parametrize("layer", [5, 3, 2])
@pytest.mark.parametrize("how", ["value", "none"])
def test_a_change_in_any_bucket_that_left_early_makes_all_send_again(make, layer, how):
    ours, plain = make(), make()
    for t in range(5):  # ranks make their acquaintance, then hear of the mask: nothing leaves before
        for ranks in (ours, plain):
            ranks.backward(loss)
            if ranks is ours:
                run_backward(ranks)
            if t == 3:
                weight = ranks.models[1].layers[layer].weight
                weight.grad = None if how == "none" else weight.grad
                if how == "value":
                    weight.grad.data[0, 0] += 1
            ranks.world.step(ranks.optimizers)
            ranks.steps += 1
        stats = ours.optimizers[0].stats
        assert (stats.resent, stats.early_buckets) == (t == 3, stats.buckets - 1 if t == 2 else 0)
        assert torch.equal(parameters(ours), parameters(plain))


def test_what_leaves_in_backward_is_complete_and_a_second_backward_replaces_it(make):
    ours, plain = make(), make()
    for ranks in (ours, plain):
        ranks.train(loss, 2)
        ranks.backward(loss)
    for _ in range(2):
        for rank, model, optimizer in ours:
            for p in model.parameters():
                p.grad.mul_(2)
            started = ours.world.comms[rank].started
            optimizer.gradients_ready(optimizer._buckets[0].params)
            assert ours.world.comms[rank].started == started + 1, "the other buckets have no gradients yet"
            optimizer.gradients_ready(reversed(list(model.parameters())))
            assert ours.world.comms[rank].started == started + len(optimizer._buckets) - 1
            optimizer.backward_done()
    for model in plain.models:
        for p in model.parameters():
            p.grad.mul_(4)
    for ranks in (ours, plain):
        ranks.world.step(ranks.optimizers)
    stats = ours.optimizers[0].stats
    assert not stats.resent and stats.early_buckets == stats.buckets - 1
    assert torch.equal(parameters(ours), parameters(plain))


def combined(*decisions: StepDecision) -> list[StepDecision]:
    """The decisions of shards of one model, combined."""
    world, device = World(len(decisions)), torch.device("cpu")
    pairs = zip(world.comms, decisions, strict=True)
    world.run([partial(combine_decisions, decision, [comm], device) for comm, decision in pairs])
    return list(decisions)


def test_shards_of_a_model_have_one_norm_and_step_together_or_not_at_all():
    norms = [decision.norm for decision in combined(StepDecision(norm=3.0), StepDecision(norm=4.0))]
    assert norms == [pytest.approx(5.0)] * 2
    for wrong in (dict(non_finite=["w"]), dict(mismatched=True), dict(has_failed_rank=True), dict(misplaced=[1])):
        decisions = combined(StepDecision(norm=3.0), StepDecision(norm=4.0, **wrong))
        assert [decision.applied for decision in decisions] == [False, False]
        assert [decision.failed for decision in decisions] == ["non_finite" not in wrong] * 2


def fingerprint_of(*grads: torch.Tensor) -> tuple[StalenessCheck, list[nn.Parameter]]:
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    return StalenessCheck(Bucket(0, {"compress": None}, params, [""] * len(params))), params


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_changed_gradients_are_noticed(dtype):
    for change in (
        lambda g: g.mul_(2),  # of 512 floats twice as large the bits add up to the same
        lambda g: (g[0].add_(1), g[1].sub_(1)),  # the numbers add up to the same
        lambda g: g[7].neg_(),
        lambda g: g[500].add_(0.5),
    ):
        print_, (p, _) = fingerprint_of(torch.ones(512, dtype=dtype), torch.ones(3, dtype=dtype))
        assert not print_.measure().any()
        change(p.grad.data)
        assert print_.measure().all()
    print_, (p, _) = fingerprint_of(torch.ones(512, dtype=dtype), torch.ones(3, dtype=dtype))
    p.grad.mul_(1)
    assert not print_.measure().any()
    p.grad = None
    assert print_.measure().all()
    print_, (p, _) = fingerprint_of(torch.zeros(512, dtype=dtype), torch.ones(3, dtype=dtype))
    p.grad = None  # zeros count as a gradient, none does not
    assert print_.measure().all()


def mean(*words: list[float]) -> list[float]:
    return [math.fsum(same) / len(words) for same in zip(*words, strict=True)]


def test_numbers_that_differ_in_any_bit_are_told_apart():
    for a in range(8):
        for b in range(8):
            assert bits_differ(mean(encode_bits(a, 3), encode_bits(b, 3))) == (a != b)
    places = [encode_stamp(index, step) for index in range(4) for step in range(4)]
    for a in places:
        for b in places:
            assert bits_differ(mean(a, b)) == (a != b)
    assert len(set(map(tuple, places))) == 16


SHAPES = [(64, 65), (80,), (64, 66), (10, 10)]


def make_sharded(**options):
    options = {"lr": 1e-2, "density": 0.1, **options}
    return replicas(3, weights(SHAPES, torch.float32), functools.partial(compopt.TagcAdamW, **options))


def snapshot(params, optimizers) -> list[torch.Tensor]:
    state = [v.clone() for o in optimizers for entry in o.state.values() for v in entry.values()]
    return [p.detach().clone() for local in params for p in local] + state


def same(before, after) -> bool:
    return all(map(torch.equal, before, after))


def test_the_norm_is_of_all_shards():
    world, params, optimizers = make_sharded(density=1.0)
    grads = gradients(3, 0, SHAPES, torch.float32)
    take_step(world, params, optimizers, grads)
    mean = torch.cat([torch.stack(one).mean(0).view(-1) for one in zip(*grads, strict=True)])
    for optimizer in optimizers:
        assert optimizer.stats.grad_norm == pytest.approx(float(mean.double().norm()), rel=1e-6)
        assert optimizer.stats.phase == "sparse"


def test_what_only_one_rank_finds_too_late_to_say_keeps_all_from_stepping(monkeypatch):
    """Its own part of the average cannot be decoded at first: everything has been sent by then."""
    world, params, optimizers = make_sharded()
    take_step(world, params, optimizers, gradients(3, 0, SHAPES, torch.float32))
    before, reduce, raised = snapshot(params, optimizers), UnionReducer.reduce, []

    def broken(reducer):
        mean = yield from reduce(reducer)
        if reducer.layout.rank == 1 and not raised:
            raised.append(reducer)
            raise OverflowError("of rank 1")
        return mean

    monkeypatch.setattr(UnionReducer, "reduce", broken)
    for local, mine in zip(params, gradients(3, 1, SHAPES, torch.float32), strict=True):
        for p, g in zip(local, mine, strict=True):
            p.grad = g
    with pytest.raises(RuntimeError, match=r"not applied on rank 0: .* rank 1 \(OverflowError: of rank 1\)"):
        world.step(optimizers)
    assert same(before, snapshot(params, optimizers))


def test_an_average_that_overflows_in_one_shard_is_not_applied_in_any():
    """Each rank's gradient is finite, and so are its marks; what is sent to one owner is not."""
    world, params, optimizers = make_sharded(payload_dtype="float16")
    take_step(world, params, optimizers, gradients(3, 0, SHAPES, torch.float32))
    before, grads = snapshot(params, optimizers), gradients(3, 1, SHAPES, torch.float32)
    grads[0][2][5, 5] = 1e6
    take_step(world, params, optimizers, grads)
    assert [o.stats.phase for o in optimizers] == ["skipped"] * 3
    assert same(before, snapshot(params, optimizers))


COMPRESSING = [case for case in CASES if "when" in inspect.signature(case.cls).parameters]
every = pytest.mark.parametrize("case", COMPRESSING, ids=lambda case: case.name)
STEPS = 40


def loss_of_step(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (model(x) - x.roll(1, 1)).square().mean()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def train(case, dense: float, compressed: float, monkeypatch, size: int = 2, **options) -> Ranks:
    """Ranks that believe their steps to take these seconds."""
    now = [0.0]
    monkeypatch.setattr(_when.time, "perf_counter", lambda: now[0])
    ranks = Ranks(size, make_model, lambda ps, process_group: case.make(ps, process_group=process_group, **options))
    ranks.phases = []

    def one_step() -> None:
        group = ranks.optimizers[0].option_groups[0]
        ahead = group["step"] + (case.cls is compopt.RadiusAdamW)  # which counts its dense steps from 1
        now[0] += dense if ahead < _options.count_dense_steps(group) else compressed
        ranks.train(loss_of_step, 1)
        ranks.phases.append(ranks.optimizers[0].stats.phase)

    ranks.one_step = one_step
    return ranks


@pytest.mark.parametrize(("case", "seconds"), in_turn(COMPRESSING, (1.1, 0.97)), ids=name_of)
def test_it_stays_dense_where_compressed_steps_are_not_clearly_faster(case, seconds, monkeypatch):
    ranks = train(case, 1.0, seconds, monkeypatch, when="auto")
    for _ in range(STEPS):
        ranks.one_step()
    assert set(ranks.phases[:11]) == {"dense"} and set(ranks.phases[-5:]) == {"dense"}
    assert set(ranks.phases) != {"dense"}
    for optimizer in ranks.optimizers:
        assert optimizer.stats.when.startswith(
            f"dense: a compressed step took {1000 * seconds:.1f} ms, a dense one 1000.0 ms"
        )
        assert optimizer.stats.residual_norm() == 0
        again = case.make(make_model().parameters(), when="auto")
        again.load_state_dict(optimizer.state_dict())
        assert again._engine.trial is None and again.option_groups[0]["pays"] is False
        assert again.option_groups[0]["dense_steps"] == case.compressed["dense_steps"]
    ranks.assert_replicas_equal()


@every
def test_it_compresses_where_that_is_faster(case, monkeypatch):
    ranks = train(case, 1.0, 0.9, monkeypatch, when="auto")
    for _ in range(STEPS):
        ranks.one_step()
    assert "dense" not in ranks.phases[14:] and ranks.optimizers[1].stats.when.startswith("compressed: ")
    ranks.assert_replicas_equal()


@pytest.mark.parametrize("name", ["RadiusAdamW", "TagcAdamW"])
def test_what_was_held_back_goes_out_with_the_first_dense_step(name, monkeypatch):
    """Its gradient in the first moment is that of the step plus the residual."""
    ranks = train(by_name[name], 1.0, 1.1, monkeypatch, size=1, when="auto")
    optimizer, p = ranks.optimizers[0], ranks.models[0][0].weight
    while not (optimizer.stats.when and optimizer.stats.phase == "dense"):
        saved = optimizer.state_dict()["state"][0]
        before, residual = saved["exp_avg"].clone(), saved["residual"].clone()
        ranks.one_step()
    assert residual.abs().max() > 0 and optimizer.stats.residual_norm() == 0
    expected = before.view(p.shape).lerp(p.grad + residual, 0.1)
    torch.testing.assert_close(optimizer.state_dict()["state"][0]["exp_avg"].view(p.shape), expected)


def two_groups(case, now: list[float], monkeypatch, **options) -> Ranks:
    """The first layer's group says "always", the second's "auto"; a step takes longer where the second compresses."""
    monkeypatch.setattr(_when.time, "perf_counter", lambda: now[0])

    def make(params, process_group):
        params = list(params)
        groups = [{"params": params[:2], "when": "always", **options}, {"params": params[2:], "when": "auto"}]
        return case.make(groups, process_group=process_group)

    return Ranks(2, make_model, make)


IN_GROUPS = [case for case in COMPRESSING if case.name != "Separate"]


@pytest.mark.parametrize(("case", "dense_steps"), in_turn(IN_GROUPS, (0, 5)), ids=name_of)
def test_only_groups_that_say_auto_are_tried(case, dense_steps, monkeypatch):
    now = [0.0]
    ranks = two_groups(case, now, monkeypatch, dense_steps=dense_steps)
    for _ in range(STEPS + 1):
        always, auto = ranks.optimizers[0].param_groups
        ahead = auto["step"] + (case.cls is compopt.RadiusAdamW)
        now[0] += 1.0 if ahead < _options.count_dense_steps(auto) else 1.1
        ranks.train(loss_of_step, 1)
    for optimizer in ranks.optimizers:
        assert optimizer.stats.when.startswith("dense: a compressed step took 1100.0 ms, a dense one 1000.0 ms")
        always, auto = optimizer.param_groups
        assert (always["when"], always["dense_steps"], always["pays"]) == ("always", dense_steps, None)
        assert (auto["when"], auto["dense_steps"], auto["pays"]) == ("auto", case.compressed["dense_steps"], False)
        last, first = optimizer._buckets[0], optimizer._buckets[-1]
        assert last.group is auto and optimizer.stats.phase not in ("dense", "skipped")
        assert optimizer.sharded or (last.flat["residual"].any(), first.flat["residual"].any()) == (False, True)
    ranks.assert_replicas_equal()


@every
def test_where_the_ranks_cannot_compare_their_times_no_step_is_half_taken(case, monkeypatch):
    """The exchange of times comes before anything of its step: what says "not applied" was not applied."""
    ranks = train(case, 1.0, 1.1, monkeypatch, when="auto")
    while not ranks.optimizers[0]._engine.trial.compute_medians():
        ranks.one_step()
    for optimizer in ranks.optimizers:
        optimizer.state_dict()  # waits for masks
    started = ranks.world.comms[0].started + ranks.optimizers[0]._engine.post_commit.unconfirmed
    ranks.world.failing_everywhere.add(started)
    before = [p.detach().clone() for p in ranks.models[0].parameters()]
    step = ranks.optimizers[0].option_groups[0]["step"]
    with pytest.raises(compopt.CommunicationError, match=rf"step {step + 1} was not applied"):
        ranks.one_step()
    assert all(map(torch.equal, before, ranks.models[0].parameters()))
    assert all(o.option_groups[0]["step"] == step and o.option_groups[0]["pays"] is None for o in ranks.optimizers)
    for _ in range(3):
        ranks.one_step()
    assert all(optimizer.stats.when.startswith("dense: ") for optimizer in ranks.optimizers)
    assert ranks.optimizers[0].stats.phase == "dense"
    ranks.assert_replicas_equal()


def test_a_model_with_nothing_to_compress_is_not_tried():
    optimizer = compopt.RadiusAdamW([nn.Parameter(torch.zeros(9))], when="auto")
    assert optimizer._engine.trial is None


def test_it_says_what_it_cannot_take():
    with pytest.raises(ValueError, match="when must be 'always' or 'auto', got 'sometimes'"):
        compopt.RadiusAdamW(make_model().parameters(), when="sometimes")


MAKE = {
    "RadiusAdamW": lambda ps: compopt.RadiusAdamW(ps, lr=1e-2, density=1.0, dense_steps=0, interval=2),
    "SeparateAdam": lambda ps: compopt.SeparateAdam(ps, lr=1e-2, projection="gaussian", ratio=1),
    "TagcAdamW": lambda ps: compopt.TagcAdamW(ps, lr=1e-2, density=1.0),
    "bfloat16": lambda ps: compopt.TagcAdamW([p.data.bfloat16().requires_grad_() for p in ps], lr=1e-2, density=0.5),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 80), nn.Tanh(), nn.Linear(80, 3)).double()


def late_gradients(params: list[torch.Tensor], step: int, rank: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(p.shape, generator=drawn, dtype=torch.float64) for p in params]


def train_late(optimizer: torch.optim.Optimizer, steps: range, rank: int, averaged: bool) -> torch.Tensor:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        local = late_gradients(params, step, rank)
        both = [(a + b) / 2 for a, b in zip(local, late_gradients(params, step, 1 - rank), strict=True)]
        for p, g in zip(params, both if averaged else local, strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()
    return nn.utils.parameters_to_vector(params).detach().double()


def late(rank: int, folder: str) -> dict[str, list]:
    """Return how far each class ends from AdamW on averaged gradients, and from the other rank."""
    dist.barrier()
    dist.destroy_process_group()
    made = {name: make(list(net().parameters())) for name, make in MAKE.items()}
    for name, optimizer in made.items():
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if name != "AdamW":
            assert optimizer.stats.residual_norm() == 0 and optimizer.comm.size == 1
        train_late(optimizer, range(2), 0, averaged=False)  # alone: two steps, of the same data on all ranks
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2, timeout=FOREVER)
    assert made["RadiusAdamW"].state_dict()["param_groups"][0]["residuals"] == f"rank {rank} of 2"
    wanted = train_late(made["AdamW"], range(2, 5), rank, averaged=True)
    results = {}
    for name in list(MAKE)[:-1]:
        got = train_late(made[name], range(2, 5), rank, averaged=False)
        theirs = got.clone()
        dist.broadcast(theirs, 0)
        sizes = [entry["exp_avg"].numel() for entry in made[name].state.values()]
        results[name] = [
            made[name].comm.size,
            float((got - theirs).abs().max()),
            float((got - wanted).abs().max()),
            sizes,
        ]
    return results


def test_ranks_that_meet_after_the_optimizer_was_made(tmp_path):
    first, second = run_ranks(late, 2, str(tmp_path))
    for name in list(MAKE)[:-1]:
        for ranks, from_rank_0, from_adamw, _ in (first[name], second[name]):
            assert ranks == 2, f"{name} stayed alone"
            assert from_rank_0 == 0, f"{name}: replicas differ"
            assert from_adamw < 1e-12 or name == "bfloat16"
    for name in ("TagcAdamW", "bfloat16"):  # moments were cut for two ranks
        owned = sorted(a + b for a, b in zip(first[name][3], second[name][3], strict=True))
        assert owned == [3, 80, 240, 5600]


@pytest.mark.parametrize("name", ["RadiusAdamW", "TagcAdamW"])
def test_one_process_trains_without_torch_distributed(name):
    optimizer = MAKE[name](list(net().parameters()))
    comm = optimizer.comm
    train_late(optimizer, range(3), 0, averaged=False)
    assert optimizer.comm is comm and comm.size == 1


# The norm where no rank has a gradient of some tensors: what residuals have of them is sent, and not applied

ABSENT = 7  # the step without gradients of every second tensor
ADAM = dict(lr=1e-3, weight_decay=0.0)
TRACKED = dict(ADAM, rank=4, dense_steps=0, payload_dtype=None)
RADIUS = dict(ADAM, density=0.2, interval=ABSENT, dense_steps=1)
SHARDED = dict(ADAM, density=0.2, dense_steps=1)
SCAPE = dict(SHARDED, density_steps=1)
APPLIED = {
    "SeparateAdam": (compopt.SeparateAdam, TRACKED),
    "SeparateAdam, int8": (compopt.SeparateAdam, {**TRACKED, "payload_dtype": "int8", "residual_dtype": "int8"}),
    "RadiusAdamW": (compopt.RadiusAdamW, RADIUS),
    "RandomK, sharded": (RandomK, dict(SHARDED, sharded=True, payload_dtype="bfloat16")),
    "AdamS": (compopt.AdamS, dict(ADAM, payload_dtype="int2")),
    "TagcAdamW": (compopt.TagcAdamW, SHARDED),
    "TagcAdamW, sketch": (compopt.TagcAdamW, dict(SHARDED, codec="sketch")),
}
OTHERS = {
    "Gaussian": (compopt.SeparateAdam, dict(ADAM, projection="gaussian", ratio=4)),
    "ScapeAdamS": (compopt.ScapeAdamS, SCAPE),
    "ScapeAdamS, sharded": (compopt.ScapeAdamS, dict(SCAPE, sharded=True)),
    "TagcAdamW, start": (compopt.TagcAdamW, dict(SHARDED, dense_steps=9, payload_dtype="bfloat16")),
}


def states(optimizer) -> list[dict]:
    return [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]


def train_to_absent(cls: type, options: dict, before=lambda optimizers: None) -> list:
    """Return the optimizers of two ranks after a step without gradients of every second of four tensors; ``before``
    is called before it."""
    world = World(2)
    params = [[nn.Parameter(torch.zeros(shape)) for shape in [(64, 72), (70, 64), (9,), (7,)]] for _ in range(2)]
    optimizers = [cls(ps, process_group=comm, **options) for ps, comm in zip(params, world.comms, strict=True)]
    for t in range(1, ABSENT + 1):
        grads = gradients(2, t, [p.shape for p in params[0]], torch.float32)
        for ps, of_rank in zip(params, grads, strict=True):
            for i, (p, g) in enumerate(zip(ps, of_rank, strict=True)):
                p.grad = None if t == ABSENT and i % 2 else g
        if t == ABSENT:
            before(optimizers)
        world.step(optimizers)
    return optimizers


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("name", APPLIED)
def test_the_norm_is_of_what_is_applied(name, limit):
    """It follows from first moments: m <- b1 m + (1 - b1) G. A clip makes it the limit."""
    cls, options = APPLIED[name]
    before: list[list[torch.Tensor]] = []

    def momenta(optimizers: list) -> list[list[torch.Tensor]]:
        parts = slice(None) if optimizers[0]._buckets[0].is_sharded else slice(1)  # each rank's, or all of one
        return [[s["exp_avg"].clone() for s in states(o)] for o in optimizers[parts]]

    optimizers = train_to_absent(
        cls, dict(options, max_grad_norm=limit), lambda optimizers: before.extend(momenta(optimizers))
    )
    pairs = [pair for of_rank in zip(before, momenta(optimizers), strict=True) for pair in zip(*of_rank, strict=True)]
    applied = [(m - 0.9 * old) / 0.1 for n, (old, m) in enumerate(pairs) if not n % 2]
    assert all(torch.equal(old, m) for n, (old, m) in enumerate(pairs) if n % 2)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in applied))
    reported = optimizers[0].stats.grad_norm
    assert reported == pytest.approx(optimizers[1].stats.grad_norm, rel=1e-6)
    assert norm == pytest.approx(reported if limit is None else limit, rel=1e-3) and reported > 1


@pytest.mark.parametrize("name", OTHERS)
def test_the_norm_does_not_know_residuals_that_are_not_applied(name):
    def enlarge(optimizers: list) -> None:
        for optimizer in optimizers:
            for state in states(optimizer)[1::2]:
                for kind in {"residual", "common"} & state.keys():
                    state[kind].mul_(1000)

    cls, options = OTHERS[name]
    norms = [train_to_absent(cls, options, before)[0].stats.grad_norm for before in (lambda _: None, enlarge)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] > 1


@pytest.mark.parametrize(
    "name", [name for name in {**APPLIED, **OTHERS} if "sharded" not in name and "Tagc" not in name]
)
def test_the_norm_is_one_where_a_rank_has_no_residuals(name):  # as one that has joined
    def forget(optimizers: list) -> None:
        for rank, optimizer in enumerate(optimizers):
            saved = copy.deepcopy(optimizer.state_dict())
            for state in saved["state"].values() if rank else ():
                state.get("residual", torch.empty(0)).zero_()
            optimizer.load_state_dict(saved)

    cls, options = {**APPLIED, **OTHERS}[name]
    first, second = train_to_absent(cls, dict(options, max_grad_norm=0.5), forget)
    assert first.stats.grad_norm == second.stats.grad_norm
    assert all(map(torch.equal, first.param_groups[0]["params"], second.param_groups[0]["params"]))
