"""Optimizers that are wrapped: modes, numbers of their own, state of any kind, random numbers, and what is refused."""

from __future__ import annotations

import copy
import io
import random
import warnings
from typing import Any

import numpy
import pytest
import torch
from sim import Ranks
from torch import Tensor, nn

import compopt
from compopt._state.leaves import copy_state

ALL = [compopt.Average, compopt.Separate, compopt.LocalSteps]
PLAIN = dict(payload_dtype=None, growth_steps=0, outer_lr=1.0, outer_momentum=0.0)


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule: z steps, x is the mean of all z, gradients are taken at y = .9 x + .1 z.

    ``p`` is y in train mode and x in eval mode.
    """

    def __init__(self, params: Any, lr: float):
        super().__init__(params, dict(lr=lr, k=0, train_mode=True))

    @torch.no_grad()
    def _move(self, mode: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not mode:
                for p in group["params"]:
                    if p in self.state:
                        p.lerp_(self.state[p]["z"], weight)
                group["train_mode"] = mode

    def train(self) -> None:
        self._move(True, 0.1)

    def eval(self) -> None:
        self._move(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    x = p.lerp(z, 1 - 1 / 0.9)
                    z.sub_(group["lr"] * p.grad)
                    p.copy_(x.lerp_(z, 1 / group["k"]).lerp_(z, 0.1))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 80), nn.Tanh(), nn.Linear(80, 64)).double()


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def ranks_of(cls: type, make_base: Any, size: int = 2, **options: Any) -> Ranks:
    return Ranks(size, model, lambda ps, process_group: cls(make_base(ps), process_group=process_group, **options))


def end_round(ranks: Ranks) -> None:
    ranks.world.run([optimizer.end_round for optimizer in ranks.optimizers])


def switch(ranks: Ranks, mode: str) -> None:
    for optimizer in ranks.optimizers:
        getattr(optimizer, mode)()


def resumed(ranks: Ranks, cls: type, make_base: Any, **options: Any) -> Ranks:
    """As many new ranks, which go on from what rank 0 has saved."""
    file = io.BytesIO()
    torch.save([ranks.optimizers[0].state_dict(), ranks.models[0].state_dict()], file)
    file.seek(0)
    saved, weights = torch.load(file, weights_only=False)
    new = ranks_of(cls, make_base, ranks.world.size, **options)
    for _, own, optimizer in new:
        own.load_state_dict(weights)
        optimizer.load_state_dict(saved)
    new.steps = ranks.steps
    return new


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def largest_difference(a: Ranks, b: Ranks) -> float:
    return max(float((flat(x) - flat(y)).abs().max()) for x, y in zip(a.models, b.models, strict=True))


# train() and eval()


def schedule_free(params: Any) -> ScheduleFree:
    return ScheduleFree(params, lr=0.05)


@pytest.mark.parametrize("cls", ALL)
def test_train_and_eval_are_there_where_the_base_has_them(cls):
    p, q = (nn.Parameter(torch.ones(4)) for _ in range(2))
    assert not hasattr(cls(torch.optim.SGD([p])), "train") and not hasattr(cls(torch.optim.SGD([p])), "eval")
    base = ScheduleFree([p], lr=0.1)
    several = cls([base, torch.optim.SGD([q])])
    several.eval()
    assert base.param_groups[0]["train_mode"] is False
    several.train()
    assert base.param_groups[0]["train_mode"] is True


@pytest.mark.parametrize(
    ("cls", "options"), [(compopt.Average, dict(payload_dtype=None)), (compopt.LocalSteps, dict(every=1, **PLAIN))]
)
def test_schedule_free_evaluates_what_it_does_on_averaged_gradients(cls, options):
    """Its step is linear in the gradients, so ranks that average parameters after every step do the same."""
    ranks = ranks_of(cls, schedule_free, 3, **options)
    ranks.train(loss, 7)
    torch.manual_seed(0)
    alone = model()
    base = schedule_free(alone.parameters())
    for step in range(7):
        base.zero_grad()
        (sum(loss(alone, rank, step) for rank in range(3)) / 3).backward()
        base.step()
    assert (flat(ranks.models[0]) - flat(alone)).abs().max() < 1e-12
    base.eval()
    if cls is compopt.LocalSteps:
        end_round(ranks)
    switch(ranks, "eval")
    for one in ranks.models:
        assert (flat(one) - flat(alone)).abs().max() < 1e-12


def test_ranks_evaluate_the_same_after_a_round_and_go_on():
    """In whichever mode the round ends, and a consolidated checkpoint of either mode continues the run."""
    options = dict(every=3, growth_steps=0)
    ranks = ranks_of(compopt.LocalSteps, schedule_free, **options)
    ranks.train(loss, 4)
    end_round(ranks)
    switch(ranks, "eval")
    ranks.assert_replicas_equal()
    evaluated = flat(ranks.models[0])
    ranks.world.consolidate(ranks.optimizers)
    ranks.assert_replicas_equal()
    assert torch.equal(flat(ranks.models[0]), evaluated)
    from_eval = resumed(ranks, compopt.LocalSteps, schedule_free, **options)
    switch(from_eval, "train")
    switch(ranks, "train")
    assert not torch.equal(flat(ranks.models[0]), evaluated)
    from_train = resumed(ranks, compopt.LocalSteps, schedule_free, **options)
    for new in (ranks, from_eval, from_train):
        new.train(loss, 4)
    assert largest_difference(from_eval, ranks) == largest_difference(from_train, ranks) == 0

    switch(ranks, "eval")  # within a round
    end_round(ranks)
    ranks.assert_replicas_equal()
    end_round(from_train)
    switch(from_train, "eval")
    assert largest_difference(from_train, ranks) < 1e-12
    assert not ranks.optimizers[0].param_groups[0]["train_mode"] and not ranks.optimizers[0].round_is_open


@pytest.mark.parametrize("cls", ALL)
def test_a_step_in_eval_mode_is_refused_with_nothing_applied(cls):
    ranks = ranks_of(cls, schedule_free)
    ranks.train(loss, 2)
    switch(ranks, "eval")
    ranks.backward(loss)
    before = flat(ranks.models[0])
    with pytest.raises(RuntimeError, match=r"eval mode.*optimizer\.train\(\)"):
        ranks.world.step(ranks.optimizers)
    assert (
        torch.equal(flat(ranks.models[0]), before) and ranks.optimizers[0].state_dict()["param_groups"][0]["step"] == 2
    )
    switch(ranks, "train")
    ranks.train(loss, 2)


def test_a_change_of_modes_is_no_other_weights():
    """A training that begins anew keeps the outer momentum, unless the model was loaded."""
    ranks = ranks_of(compopt.LocalSteps, schedule_free, every=2, growth_steps=0)
    ranks.train(loss, 4)
    sync = ranks.optimizers[0]._sync
    for mode in ("eval", "train"):
        switch(ranks, mode)
        ranks.optimizers[0].restart_from_loaded_weights()
    assert ranks.optimizers[0]._sync is sync
    with torch.no_grad():
        ranks.models[0][0].bias.add_(0.5)
    ranks.optimizers[0].restart_from_loaded_weights()
    assert ranks.optimizers[0]._sync is not sync


# Numbers that a base counts or learns


class Learning(torch.optim.Optimizer):
    """SGD whose rate is lr * d; d grows with the gradients it has seen, as Prodigy's."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, dict(lr=lr, d=1.0))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            group["d"] += 0.1 * float(sum(g.square().sum() for g in grads))
            group["seen"] = group.get("seen", 0) + 1  # not among its defaults
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * group["d"])


def test_what_a_base_learns_is_each_ranks_own_in_local_steps():
    """Against the base alone on each rank, with parameters averaged after every third step."""
    options = dict(every=3, **PLAIN)
    ranks = ranks_of(compopt.LocalSteps, Learning, **options)
    ranks.train(loss, 9)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(model())
    bases = [Learning(m.parameters()) for m in models]
    for step in range(9):
        for rank, (own, base) in enumerate(zip(models, bases, strict=True)):
            base.zero_grad()
            loss(own, rank, step).backward()
            base.step()
        if step % 3 == 2:
            with torch.no_grad():
                for p, q in zip(*(own.parameters() for own in models), strict=True):
                    p.copy_((p + q) / 2)
                    q.copy_(p)
    for own, alone in zip(ranks.models, models, strict=True):
        assert (flat(own) - flat(alone)).abs().max() < 1e-12
    learned = [optimizer.param_groups[0]["d"] for optimizer in ranks.optimizers]
    assert (
        learned == pytest.approx([base.param_groups[0]["d"] for base in bases], rel=1e-9) and learned[0] != learned[1]
    )

    ranks.optimizers[1].param_groups[0]["seen"] = 5
    ranks.world.consolidate(ranks.optimizers)
    for optimizer in ranks.optimizers:
        group = optimizer.param_groups[0]
        assert (group["d"], group["seen"], type(group["seen"])) == (learned[0], 9, int)
    new = resumed(ranks, compopt.LocalSteps, Learning, **options)
    for one in (ranks, new):
        one.train(loss, 4)
    assert largest_difference(ranks, new) == 0


def test_what_a_base_counts_under_the_name_of_an_option_of_ours_is_kept_without_its_own_state_dict():
    """As torch.distributed.checkpoint and snapshots save it; a base may make the entry in its first step."""
    p = nn.Parameter(torch.ones(3))
    optimizer = compopt.Average(Learning([p]))
    optimizer.param_groups[0]["step"] = 7
    saved = {name: value for name, value in optimizer.state_dict().items() if name != "base"}
    new = compopt.Average(Learning([nn.Parameter(torch.ones(3))]))
    new.load_state_dict(saved)
    assert new.param_groups[0]["step"] == 7 and new.option_groups[0]["step"] == 0


def test_what_a_base_is_given_is_still_compared():
    ranks = ranks_of(compopt.LocalSteps, Learning, every=2, growth_steps=0)
    ranks.optimizers[1].param_groups[0]["lr"] = 0.2
    with pytest.raises(ValueError, match=r"lr: rank 0 has 0\.1, rank 1 has 0\.2"):
        ranks.train(loss, 2)
    ranks = ranks_of(compopt.Average, Learning)
    ranks.train(loss, 1)
    ranks.optimizers[1].param_groups[0]["d"] += 1
    with pytest.raises(ValueError, match="base's group 0, d:"):
        ranks.train(loss, 1)


# Options in groups


class WithRank(torch.optim.SGD):
    """A base that reads ``rank`` in its groups, as GaLore does."""


def test_a_groups_own_rank_is_the_bases():
    def make(params: Any, process_group: Any, **group: Any) -> compopt.Separate:
        base = WithRank([{"params": [p], **group} for p in params], lr=0.1)
        return compopt.Separate(base, rank=3, dense_steps=0, process_group=process_group)

    def sent(**group: Any) -> tuple[int, list[str]]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ranks = Ranks(2, model, lambda ps, process_group: make(ps, process_group, **group))
        ranks.train(loss, 2)
        return ranks.optimizers[0].stats.bytes_sent, [str(one.message) for one in said]

    plain, said = sent()
    assert not said
    own, said = sent(rank=1, ratio=2.0, compress=False, ef_beta=0.5)
    assert own == plain and len(said) == 2  # once on each of the simulated ranks
    assert "compress=False, ratio=2.0, rank=1, ef_beta=0.5" in said[0] and "compopt_rank" in said[0]
    assert sent(compopt_rank=1)[0] < plain < sent(compopt_compress=False)[0]


# State of any kind


class Halves(Tensor):
    """A tensor that consists of two others, and can neither be cloned nor joined, as torchao's 8-bit moments."""

    @staticmethod
    def __new__(cls, low: Tensor, high: Tensor):
        return Tensor._make_wrapper_subclass(cls, low.shape, dtype=torch.float32, device=low.device)

    def __init__(self, low: Tensor, high: Tensor):
        self.low, self.high = low, high

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["low", "high"], []

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], context: Any, shape: Any = None, stride: Any = None):
        return cls(parts["low"], parts["high"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(args[0].low, args[0].high)
        raise NotImplementedError(f"Halves: {func}")

    def __reduce_ex__(self, protocol: int):
        return Halves, (self.low, self.high)


class Projector:
    def __init__(self) -> None:
        self.matrix: Tensor | None = None
        self.scale = 1.0


class Odd(torch.optim.Optimizer):
    """SGD with momentum whose state is in tensors of others, lists, objects and numbers; ``extra`` is put there too."""

    def __init__(self, params: Any, lr: float = 0.05, extra: Any = None):
        super().__init__(params, dict(lr=lr))
        self.extra = extra

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                low = torch.zeros(p.shape, dtype=torch.int8)
                state.update(count=0, moment=Halves(low, p.new_zeros(p.shape)), both=[torch.zeros_like(p), 0.0])
                state["projector"] = Projector()
            state["count"] += 1
            state["moment"].low.add_(1)
            state["moment"].high.lerp_(p.grad, 0.1)
            state["both"][0].lerp_(p.grad, 0.2)
            state["both"][1] += float(p.grad.sum())
            state["projector"].matrix, state["projector"].scale = p.grad[:1].clone(), float(p.grad.max())
            if self.extra is not None:
                state["extra"] = self.extra
            p.sub_(state["moment"].high + state["both"][0] + 1e-3 * state["both"][1], alpha=group_lr(self))


def group_lr(optimizer: torch.optim.Optimizer) -> float:
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("cls", ALL)
def test_state_of_any_kind_is_saved_loaded_and_made_equal(cls):
    options = {} if cls is not compopt.LocalSteps else dict(every=3, growth_steps=0)
    ranks = ranks_of(cls, Odd, **options)
    ranks.train(loss, 4)
    if cls is compopt.LocalSteps:
        end_round(ranks)
    ranks.world.consolidate(ranks.optimizers)
    new = resumed(ranks, cls, Odd, **options)
    a, b = (one.base.state[p] for one, p in zip(new.optimizers, (m[0].weight for m in new.models), strict=True))
    assert torch.equal(a["moment"].high, b["moment"].high) and a["moment"].high is not b["moment"].high
    for one in (ranks, new):
        one.train(loss, 3)
    assert largest_difference(ranks, new) == 0


def test_a_loaded_state_shares_no_memory_with_what_was_loaded():
    value = {"a": [Halves(torch.ones(3, dtype=torch.int8), torch.ones(3))], "b": torch.ones(2)}
    copied = copy_state(value)
    copied["a"][0].high.zero_(), copied["b"].zero_()
    assert value["a"][0].high.sum() == 3 and value["b"].sum() == 2
    with pytest.raises(NotImplementedError):
        copy.deepcopy(value)


def test_state_is_averaged_whole_or_becomes_rank_0s_whole():
    """A mean of moments in one basis and rank 0's basis would not belong together."""
    ranks = ranks_of(compopt.LocalSteps, Odd, every=2, growth_steps=0)
    ranks.train(loss, 3)
    of_rank_0 = copy_state(dict(ranks.optimizers[0].base.state[ranks.models[0][0].weight]))
    ranks.world.consolidate(ranks.optimizers)
    for _, own, optimizer in ranks:
        state = optimizer.base.state[own[0].weight]
        assert torch.equal(state["moment"].high, of_rank_0["moment"].high)
        assert torch.equal(state["both"][0], of_rank_0["both"][0]) and state["both"][1] == of_rank_0["both"][1]
        assert torch.equal(state["projector"].matrix, of_rank_0["projector"].matrix)
        assert state["projector"].scale == of_rank_0["projector"].scale and state["count"] == 3


class Rotating(torch.optim.Optimizer):
    """As SOAP: moments in a basis of the rank's own, which is in a list, one matrix for each dimension."""

    def __init__(self, params: Any):
        super().__init__(params, dict(lr=0.05))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("exp_avg", torch.zeros_like(p))
            state["bases"] = [torch.linalg.svd(p.grad)[0], torch.linalg.svd(p.grad.T)[0]]
            left, right = state["bases"]
            state["exp_avg"].lerp_(left.T @ p.grad @ right, 0.1)
            p.sub_(left @ state["exp_avg"] @ right.T, alpha=group_lr(self))


def test_bases_of_square_matrices_have_no_mean_though_no_other_state_tells():
    """They have the shape of the parameter, and their mean is no basis."""

    def make(params: Any, process_group: Any) -> compopt.LocalSteps:
        return compopt.LocalSteps(Rotating(params), every=4, growth_steps=0, process_group=process_group)

    ranks = Ranks(2, lambda: nn.Linear(6, 6, bias=False).double(), make)
    ranks.train(loss, 3)
    of_rank_0 = copy_state(dict(ranks.optimizers[0].base.state[ranks.models[0].weight]))
    ranks.world.consolidate(ranks.optimizers)
    for _, own, optimizer in ranks:
        state = optimizer.base.state[own.weight]
        assert torch.equal(state["exp_avg"], of_rank_0["exp_avg"])
        assert all(map(torch.equal, state["bases"], of_rank_0["bases"]))


def test_what_cannot_be_averaged_stays_and_is_said_once():
    ranks = ranks_of(compopt.LocalSteps, lambda ps: Odd(ps, extra=torch.Generator()), every=2, growth_steps=0)
    ranks.train(loss, 3)
    before = ranks.optimizers[1].base.state[ranks.models[1][0].weight]["both"][1]
    with pytest.warns(UserWarning, match="holds Generator, and stays rank 0's own") as said:
        for _ in range(2):
            ranks.world.consolidate(ranks.optimizers)
    assert len([one for one in said if "holds Generator" in str(one.message)]) == 1
    assert ranks.optimizers[1].base.state[ranks.models[1][0].weight]["both"][1] == before


def test_a_rank_that_missed_a_step_takes_over_all_that_the_base_holds():
    """Its lists, numbers, objects, tensors of others, and what it learns in its groups."""

    def make(params: Any) -> list[torch.optim.Optimizer]:
        first, *rest = params
        return [Learning([first]), Odd(rest)]

    ranks = ranks_of(compopt.Average, make, 3)
    ranks.train(loss, 2)
    started = ranks.world.comms[0].started
    ranks.world.failing.update((1, started + n) for n in range(9))
    ranks.backward(loss)
    with pytest.raises(compopt.CommunicationError):
        ranks.world.step(ranks.optimizers)
    ranks.steps += 1
    with pytest.warns(UserWarning, match="rank 1 had not applied step 3"):
        ranks.shrink([0, 1])
    (ahead, behind), weights = ranks.optimizers, [m[2].weight for m in ranks.models]
    assert ahead.param_groups[0]["d"] == behind.param_groups[0]["d"] and behind.param_groups[0]["seen"] == 3
    a, b = (optimizer.base.state[p] for optimizer, p in zip(ranks.optimizers, weights, strict=True))
    assert (b["count"], b["both"][1], b["projector"].scale) == (3, a["both"][1], a["projector"].scale)
    assert torch.equal(a["moment"].high, b["moment"].high) and torch.equal(a["projector"].matrix, b["projector"].matrix)
    ranks.train(loss, 3)
    ranks.assert_replicas_equal()


# Random numbers


class Drawing(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * torch.rand_like(p), alpha=0.1 + random.random() + numpy.random.random())


@pytest.mark.parametrize("cls", [compopt.Average, compopt.Separate])
def test_ranks_draw_the_same_in_the_step_of_a_base(cls):
    """With any seeds; and their own random numbers go on as if it had drawn none."""
    ranks = ranks_of(cls, lambda ps: Drawing(ps, lr=0.1))
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(2), random.random()
    torch.manual_seed(3)
    random.seed(3)
    ranks.train(loss, 3)
    assert torch.equal(torch.rand(2), expected[0]) and random.random() == expected[1]
    ranks.assert_replicas_equal()


# What is refused


class SAM(torch.optim.SGD):
    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class WithClosure(torch.optim.SGD):
    def step(self, closure: Any) -> None: ...


class WithoutGroups(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"state": {}}


class Unsaved(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("consolidate first")


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """By the name of torch's, which needs a process group."""


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize(
    ("base", "kind", "sentence"),
    [
        (
            SAM,
            TypeError,
            "base SAM cannot be wrapped: it evaluates the model again within its step.*[.] Use its base optimizer",
        ),
        (WithClosure, TypeError, "evaluates the model again within its step.*[.] Use its variant without a closure"),
        (torch.optim.LBFGS, TypeError, "LBFGS cannot be wrapped: it evaluates the model again"),
        (torch.optim.SparseAdam, TypeError, "sparse gradients.*[.] Use torch.optim.Adam"),
        (
            ZeroRedundancyOptimizer,
            TypeError,
            "ZeroRedundancyOptimizer cannot be wrapped: it shards its state.*[.] Use TagcAdamW",
        ),
        (WithoutGroups, ValueError, r"state_dict\(\) that has no 'param_groups'"),
        (Unsaved, ValueError, r"state_dict\(\) that raises RuntimeError \(consolidate first\)"),
    ],
)
def test_what_cannot_work_is_refused_when_the_object_is_made(cls, base, kind, sentence):
    p = nn.Parameter(torch.ones(3))
    for given in (lambda: base([p]), lambda: [torch.optim.SGD([nn.Parameter(torch.ones(3))]), base([p])]):
        with pytest.raises(kind, match=sentence):
            cls(given())
