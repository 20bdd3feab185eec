"""Several optimizers where a class takes one: each by hand on its own parameters, and what one optimizer would do."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from conformance import Small, assert_same, loss, through_a_file
from oracles import AverageOracle
from oracles import local as oracle
from pairs import pairs
from problems import gradients, replicas, step, weights
from ranks import run_ranks
from sim import Ranks
from slow_rows import in_turn
from torch import nn

import compopt
from compopt._inside.bases import combine_optimizers

FIRST, SECOND = [0, 2], [1, 3, 4]  # of the tensors of ``weights``


def two(params) -> list[torch.optim.Optimizer]:
    params = list(params)
    return [
        torch.optim.SGD([params[i] for i in FIRST], lr=0.1, momentum=0.9),
        torch.optim.AdamW([params[i] for i in SECOND], lr=1e-2),
    ]


def muon_and_adamw(params) -> list[torch.optim.Optimizer]:
    params = list(params)
    rest = [p for i, p in enumerate(params) if i not in FIRST]
    muon = torch.optim.Muon([params[i] for i in FIRST], lr=1e-2, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=1e-2)]


def of_model(model: Small) -> list[torch.optim.Optimizer]:
    matrices = [model.up.weight, model.down.weight]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


def take_steps(model: Small, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for t in steps:
        optimizer.zero_grad()
        loss(model, 0, t).backward()
        optimizer.step()


class ByHand:
    """Each stepped in turn; shares no code with the package."""

    def __init__(self, optimizers):
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


# Each by hand on its own parameters, in float64; Muon's bfloat16 iteration has the same input to the last bits


@pytest.mark.parametrize(("inside", "ranks", "norm"), pairs((two, muon_and_adamw), (1, 2, 3), (None, 3.0)))
def test_average_gives_each_its_part_of_the_average(inside, ranks, norm):
    def make(params, process_group):
        return compopt.Average(inside(params), max_grad_norm=norm, process_group=process_group)

    world, params, optimizers = replicas(ranks, weights(), make)
    wanted = AverageOracle(weights(), ranks, lambda ps: ByHand(inside(ps)), None, norm)
    for t in range(6):
        step(world, params, optimizers, gradients(ranks, t))
        wanted.step(gradients(ranks, t))
    for p, q in zip(params[-1], wanted.params, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("inside", "options", "ranks"), pairs((two, muon_and_adamw), ({}, {"fragments": 2, "delay": 1}), (2, 3))
)
def test_local_steps_are_the_design_with_several_inside(inside, ranks, options):
    def make(params, process_group):
        options_of_all = dict(growth_steps=0, payload_dtype=None, outer_momentum=0.9, outer_lr=0.7)
        options_of_all |= dict(process_group=process_group)
        return compopt.LocalSteps(inside(params), 4, **options_of_all, **options)

    world, params, optimizers = replicas(ranks, weights(), make)
    for t in range(14):
        step(world, params, optimizers, gradients(ranks, t))
    # the fragments of each member's tensors, which are groups: the one in the first half, and the other
    parts = [[0, 1, 3], [2, 4]] if options else None
    fragment_of = {t.param: t.fragment for t in optimizers[0]._anchors.tensors}
    dealt = [fragment_of[p] for p in params[0]]
    assert parts is None or [[i for i in range(5) if dealt[i] == n] for n in range(2)] == parts
    delay = options.get("delay", 0)
    wanted = oracle.train(
        ranks, weights(), gradients, 14, 4, lambda ps: ByHand(inside(ps)), parts=parts, delay=delay
    )  # fmt: skip
    for local_part, theirs in zip(params, wanted, strict=True):
        for p, q in zip(local_part, theirs, strict=True):
            torch.testing.assert_close(p.detach(), q, rtol=1e-11, atol=1e-12)


def test_muon_is_torchs_on_the_averaged_gradient_to_the_bit():
    def make(params, process_group):
        return compopt.Average(muon_and_adamw(params), process_group=process_group)

    world, params, optimizers = replicas(2, weights(dtype=torch.float32), make)
    single = [nn.Parameter(w) for w in weights(dtype=torch.float32)]
    by_hand = ByHand(muon_and_adamw(single))
    for t in range(8):
        grads = gradients(2, t, dtype=torch.float32)
        step(world, params, optimizers, grads)
        for p, a, b in zip(single, *grads, strict=True):
            p.grad = (a + b) / 2
        by_hand.step()
    for p, q in zip(params[1], single, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("payload_dtype", [None, "int8"])
def test_separate_around_muon_is_torchs_muon_on_the_tracked_projection_to_the_bit(payload_dtype):
    """The average has the rank of the projection; Muon's momentum, which sums over steps, a higher one."""
    given: list[list[torch.Tensor]] = []

    def make(params, process_group):
        inside = muon_and_adamw(params)
        options = dict(rank=4, dense_steps=2, payload_dtype=payload_dtype)
        optimizer = compopt.Separate(inside, process_group=process_group, **options)
        if not given:
            everything = list(params)
            inside[0].register_step_pre_hook(lambda *_: given.append([p.grad.clone() for p in everything]))
        return optimizer

    world, params, optimizers = replicas(2, weights(dtype=torch.float32), make)
    single = [nn.Parameter(w) for w in weights(dtype=torch.float32)]
    by_hand = ByHand(muon_and_adamw(single))
    for t in range(8):
        step(world, params, optimizers, gradients(2, t, dtype=torch.float32))
        for p, average in zip(single, given[-1], strict=True):
            p.grad = average.clone()
        by_hand.step()
    for p, q, r in zip(params[0], params[1], single, strict=True):
        assert torch.equal(p, q) and torch.equal(p, r)
    assert "projected" in optimizers[0].stats.phase and len(given) >= 8
    ranks = [int(torch.linalg.matrix_rank(given[-1][i].double(), rtol=1e-5)) for i in FIRST]
    assert ranks == [4, 4]
    buffer = optimizers[0].base.members[0].state[params[0][0]]["momentum_buffer"]
    assert int(torch.linalg.matrix_rank(buffer.double(), rtol=1e-5)) > 4


# What one optimizer with the same groups does, to the bit


def groups_of(params) -> list[dict]:
    params = list(params)
    first = {"params": [params[i] for i in FIRST], "lr": 1e-2}
    return [first, {"params": [params[i] for i in SECOND], "lr": 3e-2}]


CLASSES = {
    "Average": lambda base, **o: compopt.Average(base, payload_dtype="int8", max_grad_norm=5.0, **o),
    "Separate": lambda base, **o: compopt.Separate(base, **o),
    "Separate, gaussian": lambda base, **o: compopt.Separate(base, projection="gaussian", ratio=8, **o),
    "LocalSteps": lambda base, **o: compopt.LocalSteps(base, 3, dense_steps=2, growth_steps=4, **o),
    "LocalSteps, fragments": lambda base, **o: compopt.LocalSteps(
        base, 4, growth_steps=0, payload_dtype="int2", fragments=2, delay=1, **o
    ),
}
every_class = pytest.mark.parametrize("name", CLASSES)


@every_class
def test_two_are_one_with_two_groups_and_a_scheduler_acts_on_both(name):
    runs = []
    for is_one in (True, False):

        def make(params, process_group):
            groups = groups_of(params)
            adamw = torch.optim.AdamW
            base = adamw(groups) if is_one else [adamw([group]) for group in groups]  # noqa: B023
            return CLASSES[name](base, process_group=process_group)

        world, params, optimizers = replicas(2, weights(dtype=torch.float32), make)
        ramps = [lambda t: 1 / (t + 1), lambda t: 1 + t / 5]
        schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, ramps) for optimizer in optimizers]
        for t in range(13):
            step(world, params, optimizers, gradients(2, t, dtype=torch.float32))
            for schedule in schedules:
                schedule.optimizer._opt_called = True  # the simulator takes steps in turns
                schedule.step()
        assert [group["lr"] for group in optimizers[0].param_groups] == [1e-2 / 14, 3e-2 * (1 + 13 / 5)]
        runs.append([p.detach() for rank in params for p in rank])
    assert all(map(torch.equal, *runs))


@every_class
def test_a_group_added_to_a_member_takes_part(name):
    runs = []
    for is_one in (True, False):
        added = []

        def make(params, process_group):
            adamw, groups = torch.optim.AdamW, groups_of(params)
            members = [adamw(groups)] if is_one else [adamw([group]) for group in groups]  # noqa: B023
            added.append(members[0])  # noqa: B023
            return CLASSES[name](members, process_group=process_group)

        world, params, optimizers = replicas(2, weights(dtype=torch.float32), make)
        for t in range(9):
            if t == 3:
                for rank, member in zip(params, added, strict=True):
                    rank.append(nn.Parameter(torch.ones(64, 80)))
                    member.add_param_group({"params": rank[5:], "lr": 0.1})
            shapes = [tuple(p.shape) for p in params[0]]
            step(world, params, optimizers, gradients(2, t, shapes, torch.float32))
        assert [group["lr"] for group in optimizers[0].param_groups] == [1e-2, 3e-2, 0.1]
        assert not torch.equal(params[0][5], torch.ones(64, 80))
        runs.append([p.detach() for rank in params for p in rank])
    assert all(map(torch.equal, *runs))


@every_class
@pytest.mark.parametrize("members", [1, 2])
def test_a_group_added_to_a_member_is_saved_and_loaded_before_its_first_step(name, members):
    model = Small()
    params = [*model.parameters()]

    def make() -> torch.optim.Optimizer:
        inner = [torch.optim.AdamW([p]) for p in params[:members]]
        optimizer = CLASSES[name](inner)
        inner[-1].add_param_group({"params": params[members:], "lr": 0.1})
        return optimizer

    optimizer, other = make(), make()
    saved = optimizer.state_dict()
    assert [len(group["params"]) for group in saved["param_groups"]] == [1] * members + [len(params) - members]
    take_steps(model, optimizer, range(2))
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    for one, two in zip(optimizer.param_groups, other.param_groups, strict=True):
        assert one["lr"] == two["lr"] and one["params"] == two["params"]
    p = params[members]
    assert torch.equal(other.base.state[p]["exp_avg"], optimizer.base.state[p]["exp_avg"])


# Schedulers, scalers, hooks, state


def test_a_scheduler_of_a_member_and_onecycle():
    model = Small()
    sgd = torch.optim.SGD(model.up.parameters(), lr=1.0, momentum=0.9)
    adamw = torch.optim.AdamW(model.down.parameters(), lr=1.0)
    optimizer = compopt.Average([sgd, adamw])
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    sgd._opt_called = True
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1.0]
    with pytest.raises(ValueError, match="cycle_momentum"):  # one has betas, the other a momentum
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    one = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10, cycle_momentum=False)
    assert [group["lr"] for group in optimizer.param_groups] == one.get_last_lr() == pytest.approx([0.02, 0.02])


@every_class
def test_a_gradscaler_skips_all_of_them_and_changes_nothing_else(name):
    runs = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = Small()
        inside = [
            torch.optim.Muon([model.up.weight, model.down.weight], lr=1e-2),
            torch.optim.AdamW([model.up.bias, model.down.bias, model.scale], lr=1e-2),
        ]
        optimizer = CLASSES[name](inside)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100)
        for t in range(6):
            optimizer.zero_grad()
            scaler.scale(loss(model, 0, t)).backward()
            if t == 3:
                model.scale.grad[5] = float("inf")
                before = [p.detach().clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            if t == 3:
                assert all(map(torch.equal, before, model.parameters()))
                assert optimizer.stats.skipped == 1
        assert scaler.get_scale() == scale / 2
        runs.append([p.detach() for p in model.parameters()])
    for p, q in zip(*runs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_hooks_of_the_wrapper_of_the_combination_and_of_members_are_called():
    model, called = Small(), []
    sgd = torch.optim.SGD(model.up.parameters(), lr=1.0)
    optimizer = compopt.Average([sgd, torch.optim.AdamW(model.down.parameters())])
    for label, one in (("wrapper", optimizer), ("base", optimizer.base), ("sgd", sgd)):
        one.register_step_pre_hook(lambda *_, label=label: called.append(f"{label} before"))
        one.register_step_post_hook(lambda *_, label=label: called.append(f"{label} after"))
        one.register_state_dict_pre_hook(lambda _, label=label: called.append(f"{label} saves"))
        one.register_state_dict_post_hook(lambda _, saved, label=label: called.append(f"{label} saved"))
        one.register_load_state_dict_pre_hook(lambda _, saved, label=label: called.append(f"{label} loads"))
        one.register_load_state_dict_post_hook(lambda _, label=label: called.append(f"{label} loaded"))
    loss(model, 0, 0).backward()
    optimizer.step()
    order = ["wrapper before", "base before", "sgd before", "sgd after", "base after", "wrapper after"]
    assert called == order
    saved = optimizer.state_dict()
    assert {"base saves", "sgd saves", "sgd saved", "base saved"} <= {*called}
    optimizer.load_state_dict(saved)
    assert {"base loads", "sgd loads", "sgd loaded", "base loaded"} <= {*called}


def test_a_hook_may_replace_a_state_dict():
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    both = combine_optimizers([torch.optim.SGD(params[:1], lr=1.0), torch.optim.SGD(params[1:], lr=2.0)])
    both.register_state_dict_post_hook(lambda _, saved: {**saved, "more": 1})
    saved = both.state_dict()
    assert saved["more"] == 1 and [group["params"] for group in saved["param_groups"]] == [[0], [1]]

    def faster(optimizer, loaded):
        return {**loaded, "param_groups": [{**group, "lr": 9.0} for group in loaded["param_groups"]]}

    both.register_load_state_dict_pre_hook(faster)
    both.load_state_dict(saved)
    assert [group["lr"] for group in both.param_groups] == [9.0, 9.0]


def test_a_closure_is_evaluated_once():
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    both, calls = combine_optimizers([torch.optim.SGD(params[:1], lr=1.0), torch.optim.SGD(params[1:], lr=2.0)]), []

    def closure():
        calls.append(torch.is_grad_enabled())
        for p in params:
            p.grad = torch.ones_like(p)
        return 7.0

    assert both.step(closure) == 7.0 and calls == [True]
    assert [p.tolist() for p in params] == [[0, 0, 0], [-1, -1, -1]]
    both.zero_grad()
    assert all(p.grad is None for p in params)


def test_state_is_the_members_own():
    params = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    members = [torch.optim.AdamW(params[:1]), torch.optim.AdamW(params[1:])]
    both = combine_optimizers(members)
    assert not both.state and both.state.get(params[1]) is None and params[1] not in both.state
    members[0].state[params[0]] = {"note": 4}
    members[1].state[params[1]]["note"] = 3
    both.state[params[1]]["note"] = 5
    assert [*both.state.items()] == [(params[0], {"note": 4}), (params[1], {"note": 5})]
    assert members[1].state[params[1]] == {"note": 5} and not both.state.get(params[2])


@every_class
def test_a_member_that_loads_by_itself_is_followed(name):
    """torch's load_state_dict makes new groups and a new state."""
    torch.manual_seed(0)
    model = Small()
    first = [model.up.weight, model.down.weight]
    muon, adamw = torch.optim.Muon(first, lr=1e-2), torch.optim.AdamW([model.up.bias, model.down.bias], lr=1e-2)
    optimizer = CLASSES[name]([muon, adamw], simulate=True)
    take_steps(model, optimizer, range(3))
    saved = copy.deepcopy(muon.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    muon.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1e-2]
    assert optimizer.state_dict()["base"]["param_groups"][0]["lr"] == 0.5
    before = model.up.weight.detach().clone()
    optimizer.step()
    assert float((model.up.weight - before).norm()) > 1  # a step of .5, orthonormal


@pytest.mark.parametrize(("name", "at"), in_turn(CLASSES, (0, 2, 4, 7)))
def test_a_checkpoint_goes_on_to_the_bit(name, at):
    def make(params, process_group):
        return CLASSES[name](muon_and_adamw(params), process_group=process_group)

    world, params, optimizers = replicas(2, weights(dtype=torch.float32), make)
    for t in range(at):
        step(world, params, optimizers, gradients(2, t, dtype=torch.float32))
    saved = [through_a_file(optimizer.state_dict()) for optimizer in optimizers]
    assert [len(group["params"]) for group in saved[0]["param_groups"]] == [2, 3]
    world2, params2, optimizers2 = replicas(2, [p.detach() for p in params[0]], make)
    for local_part, theirs, optimizer, state in zip(params2, params, optimizers2, saved, strict=True):
        for p, q in zip(local_part, theirs, strict=True):
            p.data.copy_(q)
        optimizer.load_state_dict(state)
    for t in range(at, at + 7):
        step(world, params, optimizers, gradients(2, t, dtype=torch.float32))
        step(world2, params2, optimizers2, gradients(2, t, dtype=torch.float32))
    for local_part, theirs in zip(params, params2, strict=True):
        assert all(map(torch.equal, local_part, theirs))
    for one, other in zip(optimizers, optimizers2, strict=True):
        assert_same(snapshot(one.base.members[0]), snapshot(other.base.members[0]))


def snapshot(optimizer) -> list[torch.Tensor]:
    return [value.clone() for entry in optimizer.state.values() for value in entry.values()]


@every_class
def test_a_checkpoint_that_does_not_fit_leaves_every_member_as_it_was(name):
    torch.manual_seed(0)
    model = Small()
    optimizer = CLASSES[name](of_model(model), simulate=True)
    take_steps(model, optimizer, range(4))
    saved, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.base.state_dict())
    groups = saved["base"]["param_groups"]
    swapped = {**saved, "base": {**saved["base"], "param_groups": groups[::-1]}}
    key = groups[1]["params"][0]  # a state of the wrapper's of the second member, after both members have loaded
    state = {**saved["state"], key: {k: v for k, v in saved["state"][key].items() if k != "step"}}
    damaged = {**saved, "state": state, "base": {**saved["base"], "state": {}}}
    for broken in (swapped, damaged):
        with pytest.raises(ValueError, match="loaded"):
            optimizer.load_state_dict(broken)
        after = optimizer.base.state_dict()
        assert after["param_groups"] == before["param_groups"] and after["state"].keys() == before["state"].keys()
        assert all(torch.equal(v, before["state"][k][n]) for k, e in after["state"].items() for n, v in e.items())


def test_an_entry_is_replaced_in_its_member_only():
    model = Small()
    optimizer = combine_optimizers(of_model(model))
    take_steps(model, optimizer, range(1))
    with pytest.raises(TypeError):
        optimizer.state[next(model.parameters())] = {}


def test_the_state_dict_of_the_combination_is_loaded_alone_and_in_its_place():
    """As one optimizer's: the checkpoint of a run without compression."""
    torch.manual_seed(0)
    model = Small()
    plain = combine_optimizers(of_model(model))
    take_steps(model, plain, range(3))
    saved = through_a_file(plain.state_dict())
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1], [*range(2, 7)]]
    for name in CLASSES:
        other = copy.deepcopy(model)
        optimizer = CLASSES[name](of_model(other))
        optimizer.load_state_dict(saved)
        buffer = optimizer.base.members[0].state[other.up.weight]["momentum_buffer"]
        assert torch.equal(buffer, plain.state[model.up.weight]["momentum_buffer"])
        with pytest.raises(ValueError, match=r"SGD \+ AdamW|groups of|parameters in group"):
            CLASSES[name](two([*other.parameters()][:5])).load_state_dict(saved)


# What is refused


def test_what_cannot_be_combined_is_refused_by_name():
    p, q, r = (nn.Parameter(torch.zeros(64, 64)) for _ in range(3))
    for cls in (compopt.Average, compopt.Separate, compopt.LocalSteps):
        with pytest.raises(ValueError, match="empty list"):
            cls([])
        with pytest.raises(TypeError, match="a list with a Parameter"):
            cls([p])
        with pytest.raises(TypeError, match="got dict"):
            cls({"a": torch.optim.SGD([p])})
        with pytest.raises(TypeError, match="LBFGS"):
            cls([torch.optim.SGD([p]), torch.optim.LBFGS([q])])
        with pytest.raises(ValueError, match="RadiusAdamW compresses by itself"):
            cls([torch.optim.SGD([p]), compopt.RadiusAdamW([q])])
        named = [("up.weight", p), ("down.weight", q)]
        with pytest.raises(
            ValueError, match=r"share 1 parameters: up\.weight .*\(64, 64\) in SGD .*and Adam .*group 1"
        ):
            cls([torch.optim.SGD(named), torch.optim.Adam([{"params": [("a", r)]}, {"params": named[:1]}])])
        one = torch.optim.SGD([p, q, r])
        with pytest.raises(ValueError, match="share 3 parameters"):
            cls([one, one])
    assert compopt.Average([one]).base is one


def test_a_late_group_of_two_members_and_a_bad_one_are_refused_and_leave_nothing():
    p, q, r = (nn.Parameter(torch.ones(64, 64)) for _ in range(3))
    sgd, adamw = torch.optim.SGD([p]), torch.optim.AdamW([q])
    optimizer = compopt.Average([sgd, adamw], simulate=True)
    with pytest.raises(TypeError, match=r"which of SGD \+ AdamW"):
        optimizer.add_param_group({"params": [r]})
    assert len(optimizer.param_groups) == len(optimizer._wrapper_groups) == 2
    p.grad = torch.ones_like(p)
    adamw.add_param_group({"params": [p]})
    with pytest.raises(ValueError, match="share 1 parameters"):
        optimizer.step()
    adamw.param_groups.pop()
    optimizer.step()
    assert not torch.equal(p, torch.ones(64, 64)) and len(optimizer.param_groups) == 2

    muon = compopt.MuonAdamW([("blocks.0.up.weight", p), ("head.weight", q)])
    around = compopt.Average(muon, simulate=True)
    with pytest.raises(ValueError, match="compress"):
        around.add_param_group(
            {"params": [("blocks.1.up.weight", r), ("bias", nn.Parameter(r[0]))], "compopt_compress": 3}
        )
    assert len(around.param_groups) == len(around._wrapper_groups) == 2
    around.add_param_group({"params": [("blocks.1.up.weight", r), ("bias", nn.Parameter(torch.ones(4)))]})
    assert [len(member.param_groups) for member in muon.members] == [2, 2] and len(around._wrapper_groups) == 4


def test_optimizers_of_this_package_inside_do_not_average_again():
    def make(params, process_group):
        params = list(params)
        inside = [compopt.AdamS(params[:1], lr=1e-2, process_group=process_group), torch.optim.SGD(params[1:], lr=1e-2)]
        return compopt.Average(inside, process_group=process_group)

    ranks = Ranks(2, Small, make)
    history = ranks.train(loss, 20)
    ranks.assert_replicas_equal()
    assert history[-1] < history[0]
    assert all(o.base.members[0].comm.size == 1 and o.comm.size == 2 for o in ranks.optimizers)


def test_ranks_with_other_members_are_told():
    def make(params, process_group):
        params, other = list(params), torch.optim.SGD if process_group.rank else torch.optim.AdamW
        return compopt.Average([torch.optim.SGD(params[:1]), other(params[1:])], process_group=process_group)

    ranks = Ranks(2, Small, make)
    ranks.backward(loss)
    with pytest.raises(ValueError, match=r"SGD \+ AdamW.*SGD \+ SGD"):
        ranks.world.step(ranks.optimizers)


def test_ranks_that_differ_in_an_option_of_one_member_are_told():
    ranks = Ranks(
        2, Small, lambda params, process_group: compopt.Average(groups_in(params), process_group=process_group)
    )
    ranks.train(loss, 1)
    ranks.optimizers[1].base.members[0].param_groups[0]["momentum"] = 0.25
    ranks.backward(loss)
    with pytest.raises(ValueError, match=r"base's group 0, momentum: rank 0 has 0\.9.* rank 1 has 0\.25"):
        ranks.world.step(ranks.optimizers)


def groups_in(params) -> list[torch.optim.Optimizer]:
    params = list(params)
    return [torch.optim.SGD(params[:3], lr=0.1, momentum=0.9), torch.optim.AdamW(params[3:])]


def test_a_late_group_keeps_its_place_in_copies():
    params = [nn.Parameter(torch.ones(n + 1)) for n in range(3)]
    both = combine_optimizers([torch.optim.SGD(params[:1], lr=1.0), torch.optim.SGD(params[1:2], lr=2.0)])
    both.members[0].add_param_group({"params": params[2:], "lr": 3.0})
    for one in (both, copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        assert [group["lr"] for group in one.param_groups] == [1.0, 2.0, 3.0]
        assert [group["params"][0].numel() for group in one.param_groups] == [1, 2, 3]
        assert [group["params"] for group in one.state_dict()["param_groups"]] == [[0], [1], [2]]


def test_a_checkpoint_gives_every_member_its_own_state_only():
    model = Small()
    both = combine_optimizers(of_model(model))
    for t in range(2):
        loss(model, 0, t).backward()
        both.step()
    both.load_state_dict(both.state_dict())
    for member in both.members:
        assert {*member.state} <= {p for group in member.param_groups for p in group["params"]}
    assert len(both.state) == 5  # idle's two have none


# Real ranks


def over_gloo(rank: int, folder: str) -> list[bool]:
    """LocalSteps([Muon, AdamW]) under DDP, saved within a round and resumed; are parameters equal to the bit?"""

    def make():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        ddp = nn.parallel.DistributedDataParallel(net)
        muon = torch.optim.Muon([net[0].weight], lr=1e-2, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW([net[0].bias, *net[2].parameters()], lr=1e-2)
        return net, ddp, compopt.LocalSteps([muon, adamw], 4, growth_steps=0, dense_steps=1)

    def train(ddp, optimizer, steps) -> list[str]:
        phases = []
        for t in steps:
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * t + rank))
            optimizer.zero_grad()
            (ddp(x) - x.flip(1)).square().mean().backward()
            optimizer.step()
            phases.append(optimizer.stats.phase)
        return phases

    net, ddp, optimizer = make()
    train(ddp, optimizer, range(7))  # one averaged step, a round, and two steps of the next one
    was_open = optimizer.round_is_open
    file = f"{folder}/{rank}.pt"
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    phases = train(ddp, optimizer, range(7, 15))
    again, ddp, other = make()
    read = torch.load(file, weights_only=True)
    again.load_state_dict(read["net"])
    other.load_state_dict(read["optimizer"])
    assert train(ddp, other, range(7, 15)) == phases and phases.count("exchanged") == 2
    is_same = all(map(torch.equal, net.parameters(), again.parameters()))
    other.end_round()
    flat = torch.cat([p.detach().view(-1) for p in again.parameters()])
    of_rank_0 = flat.clone()
    torch.distributed.broadcast(of_rank_0, 0)
    return [was_open, is_same, torch.equal(flat, of_rank_0)]


def test_local_steps_of_muon_and_adamw_under_ddp_resume_to_the_bit(tmp_path):
    assert run_ranks(over_gloo, 2, str(tmp_path)) == [[True, True, True]] * 2
