"""Values that no step can use: each is refused by a sentence that names the argument, and the parameter by its name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from conformance import Small, assert_same, loss, snapshot
from sim import Ranks, noting
from slow_rows import in_turn
from torch import nn

import compopt

NAN, INF = math.nan, math.inf


def adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def tensors() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(64, 80)), nn.Parameter(torch.ones(80))]


def named(params) -> list[tuple[str, nn.Parameter]]:
    return [(f"layers.{i}.w", p) for i, p in enumerate(params)]


MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **{name: getattr(compopt, name) for name in ("RadiusAdamW", "ScapeAdamS", "AdamS", "SeparateAdam", "TagcAdamW")},
    "MuonAdamW": lambda params, **options: compopt.MuonAdamW(named(params), **options),
    **{
        name: lambda params, name=name, **options: getattr(compopt, name)(adamw(params), **options)
        for name in ("Separate", "LocalSteps", "Average")
    },
}
OWN = ("RadiusAdamW", "ScapeAdamS", "AdamS", "SeparateAdam", "TagcAdamW", "MuonAdamW")
ALL = tuple(MAKE)


def no_group(value: str) -> str:
    return f"process_group must be None or a group of torch.distributed, got {value}"


LR, DECAY = (
    "Invalid learning rate: {}: lr must be finite and >= 0",
    "Invalid weight_decay value: {}: weight_decay must be",
)
RANK, COUNT = "rank must be an integer >= 1, got {}", "{} must be an integer >= 1, got True"
OUTER = "outer must make an optimizer over a list of anchors, and it failed: "
NOT_FINITE = "{} must be finite in the groups of the {} optimizer, got "
NO_OUTER = "outer must make an optimizer of torch, got {}"
MOMENTUM, STEPS = "momentum must be in [0, 1), got {}", "ns_steps must be an integer from 1 to 99, got {}"


class Something:
    def __repr__(self) -> str:
        return "Something()"


# classes, argument, value, the beginning of the sentence, and what the value needs beside it
TABLE = [
    *((OWN, "lr", value, LR.format(repr(value))) for value in (INF, NAN, -1.0, "x", torch.tensor(INF))),
    *((OWN, "weight_decay", value, DECAY.format(repr(value))) for value in (INF, NAN, "x")),
    *((("RadiusAdamW", "TagcAdamW"), "eps", value, "Invalid epsilon value: ") for value in (INF, torch.ones(2))),
    (("RadiusAdamW", "MuonAdamW"), "betas", torch.tensor(0.9), "betas must be two numbers in [0, 1)"),
    *(((name for name in ALL if name != "MuonAdamW"), "process_group", value, no_group(repr(value)))
      for value in ("x", 3, Something())),
    (("RadiusAdamW", "Average"), "process_group", -100, "process_group does not contain this rank"),
    *((("SeparateAdam", "Separate"), "rank", value, RANK.format(value)) for value in (True, 0, 2.5)),
    (("RadiusAdamW",), "interval", True, COUNT.format("interval")),
    (("RadiusAdamW", "Average"), "max_grad_norm", torch.ones(2), "max_grad_norm must be None or > 0"),
    (("SeparateAdam",), "projection", [], "projection must be "),
    (("TagcAdamW",), "codec", [], "codec must be "),
    (("TagcAdamW",), "select", b"x", "select must be None or a regular expression"),
    (("TagcAdamW",), "eps", 0.0, "eps must be > 0"),
    *((("TagcAdamW",), "sketch_ratio", value, f"sketch_ratio must be finite and >= 1, got {value}")
      for value in (INF, NAN, 0)),
    *((("LocalSteps",), "outer_lr", value, f"outer_lr must be 'auto', or finite and > 0, got {value}")
      for value in (INF, NAN, 0)),
    *((("LocalSteps",), "round_seconds", value, "round_seconds must be None or finite") for value in (INF, NAN)),
    *((("LocalSteps",), "outer", value, OUTER) for value in (3, "x", lambda: None)),
    (("LocalSteps",), "outer", lambda params: None, NO_OUTER.format("NoneType")),
    (("LocalSteps",), "outer", compopt.AdamS, NO_OUTER.format("AdamS")),
    (("LocalSteps",), "outer", lambda params: torch.optim.SGD(tensors()), "outer must step all parameters that it is"),
    (("LocalSteps",), "outer", lambda params: torch.optim.SGD(params, lr=-1.0), f"{OUTER}Invalid learning rate: -1.0"),
    (("LocalSteps",), "outer", lambda params: torch.optim.SGD(params, lr=INF), NOT_FINITE.format("lr", "outer")),
    *((("MuonAdamW",), "momentum", value, MOMENTUM.format(repr(value))) for value in ("x", NAN, -1, 1.0)),
    *((("MuonAdamW",), "ns_steps", value, STEPS.format(repr(value))) for value in ("x", NAN, 1.5, 0, 100, True)),
    *((("MuonAdamW",), "muon_beta2", value, "muon_beta2 must be in [0, 1), got ") for value in ("x", NAN, -1, 1.0)),
    *((("MuonAdamW",), "normalize", value, "normalize must be None or 'rows', got") for value in (True, "x", [])),
    (("MuonAdamW",), "use_muon", "x", "use_muon must be None, True, False or a function"),
]  # fmt: skip
CASES = [(name, argument, value, says) for names, argument, value, says in TABLE for name in names]


@pytest.mark.parametrize(("name", "argument", "value", "says"), CASES)
def test_a_value_that_no_step_can_use_is_refused_in_the_constructor(name, argument, value, says):
    needs_muon(name)
    with pytest.raises((TypeError, ValueError), match=re.escape(says)) as caught:
        MAKE[name](tensors(), **{argument: value})
    assert argument in str(caught.value)


def needs_muon(name: str) -> None:
    if name == "MuonAdamW" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon before 2.9")


@pytest.mark.parametrize("name", ["AdamS", "MuonAdamW"])
def test_a_group_that_is_given_with_such_a_value_is_refused_too(name):
    needs_muon(name)
    first, second = tensors()
    groups = [{"params": named([first])}, {"params": named([second]), "lr": NAN}]
    with pytest.raises(ValueError, match="Invalid learning rate: nan"):
        getattr(compopt, name)(groups)
    optimizer = getattr(compopt, name)(groups[:1])
    with pytest.raises(ValueError, match="Invalid learning rate: nan"):
        optimizer.add_param_group(groups[1])
    assert len(optimizer.param_groups) == 1


WRAPPERS = {
    "Average": compopt.Average,
    "Separate": lambda base, **options: compopt.Separate(base, dense_steps=0, **options),
    "LocalSteps, averaging": lambda base, **options: compopt.LocalSteps(base, 4, dense_steps=100, **options),
    "LocalSteps": lambda base, **options: compopt.LocalSteps(base, 4, growth_steps=0, **options),
}
every_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS)
RATES = [
    ("lr", NAN),
    ("lr", INF),
    ("lr", "x"),
    ("lr", torch.tensor(NAN)),
    ("weight_decay", INF),
    ("eps", NAN),
    ("betas", (0.9, NAN)),
]


@every_wrapper
@pytest.mark.parametrize(("option", "value"), RATES)
def test_a_rate_of_a_wrapped_optimizer_that_no_step_can_use_is_refused_in_the_constructor(wrapper, option, value):
    base = adamw(tensors())
    base.param_groups[0][option] = value
    with pytest.raises(ValueError, match=NOT_FINITE.format(option, "base")):
        WRAPPERS[wrapper](base)


@pytest.mark.parametrize(("wrapper", "on"), in_turn(WRAPPERS, ((0, 1), (1,))), ids=str)
def test_a_rate_that_a_scheduler_makes_nan_is_refused_by_the_next_step_and_nothing_is_lost(wrapper, on):
    def make(params, process_group):
        return WRAPPERS[wrapper](adamw(params), process_group=process_group)

    ranks, untroubled = (Ranks(2, Small, make) for _ in range(2))
    for both in (ranks, untroubled):
        both.train(loss, 3)
    for option, value in RATES:
        right = ranks.optimizers[0].param_groups[0][option]
        ranks.backward(loss)
        before = [snapshot(optimizer) for optimizer in ranks.optimizers]
        for rank in on:
            ranks.optimizers[rank].param_groups[0][option] = value
        if wrapper == "LocalSteps":  # a step of a rank's own: others learn that it is gone at the end of the round
            turns = [ranks.optimizers[rank].step for rank in on]
        else:
            turns = [optimizer.step for optimizer in ranks.optimizers]
        sent = [comm.bytes_sent for comm in ranks.world.comms]
        errors = run_all(ranks, turns)
        says = NOT_FINITE.format(option, "base")
        assert len(errors) == len(turns) and all(map(tells(option, says), errors)), errors
        if wrapper == "LocalSteps":
            assert sent == [comm.bytes_sent for comm in ranks.world.comms]
        for rank in on:
            ranks.optimizers[rank].param_groups[0][option] = right
        for old, optimizer in zip(before, ranks.optimizers, strict=True):
            assert_same(old, snapshot(optimizer))
    for both in (ranks, untroubled):
        both.train(loss, 5)
    assert_same(snapshot(untroubled.optimizers[0]), snapshot(ranks.optimizers[0]))


@pytest.mark.parametrize("on", [(0, 1), (1,)])
def test_a_rate_of_the_outer_optimizer_that_becomes_nan_is_refused_on_all_ranks_and_the_exchange_is_repeated(on):
    def make(params, process_group):
        return WRAPPERS["LocalSteps"](adamw(params), process_group=process_group)

    ranks = Ranks(2, Small, make)
    ranks.train(loss, 4)
    groups = [ranks.optimizers[rank]._anchors.outer.param_groups[0] for rank in on]
    for option in ("lr", "momentum"):
        right = groups[0][option]
        for group in groups:
            group[option] = NAN
        while not (errors := take_step(ranks)):
            pass
        assert len(errors) == 2 and all(map(tells(option, NOT_FINITE.format(option, "outer")), errors)), errors
        for group in groups:
            group[option] = right
        assert take_step(ranks) == [] and ranks.optimizers[0].stats.phase == "exchanged"
        ranks.assert_replicas_equal()


def take_step(ranks: Ranks) -> list[BaseException]:
    ranks.backward(loss)
    return run_all(ranks, [optimizer.step for optimizer in ranks.optimizers])


def tells(option: str, says: str) -> Callable[[BaseException], bool]:
    """Return a test whether an error says so; the step after a failed one begins with a handshake, which says more."""
    return lambda error: says in str(error) or re.search(f"ranks differ.* {option}: rank 0 has", str(error)) is not None


def run_all(ranks: Ranks, calls: list) -> list[BaseException]:
    """Run a call of each rank; return what each raised."""
    errors: list[BaseException] = []
    ranks.world.run([noting(call, errors, ValueError, compopt.CommunicationError) for call in calls])
    return errors


def test_what_a_base_may_have_instead_of_numbers_is_left_to_it():
    """As Adafactor's pair of eps, and a rate of None."""
    base = adamw(tensors())
    base.param_groups[0].update(lr=None, eps=(1e-30, None), momentum=torch.ones(2), weight_decay=-1e-20)
    compopt.Average(base)


@pytest.mark.parametrize("name", ["RadiusAdamW", "SeparateAdam", "TagcAdamW"])
def test_a_rate_of_an_own_class_that_becomes_infinite_is_refused_on_all_ranks(name):
    ranks = Ranks(2, Small, lambda ps, process_group: MAKE[name](ps, dense_steps=0, process_group=process_group))
    ranks.train(loss, 2)
    for option in ("lr", "weight_decay"):
        right = ranks.optimizers[1].param_groups[0][option]
        ranks.optimizers[1].param_groups[0][option] = -INF
        ranks.backward(loss)
        before = [snapshot(optimizer) for optimizer in ranks.optimizers]
        errors = run_all(ranks, [optimizer.step for optimizer in ranks.optimizers])
        assert len(errors) == 2 and all(map(tells(option, f"{option} must be finite"), errors)), errors
        for old, optimizer in zip(before, ranks.optimizers, strict=True):
            assert_same(old, snapshot(optimizer))
        ranks.optimizers[1].param_groups[0][option] = right
    ranks.train(loss, 1)
    ranks.assert_replicas_equal()


@pytest.mark.parametrize("named", [True, False])
def test_a_tensor_that_cannot_be_taken_is_named(named):
    bad = {
        "complex": nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64)),
        "meta": nn.Parameter(torch.zeros(4, 4, device="meta")),
    }
    for name, p in bad.items():
        says = rf"params holds a (complex )?tensor {f'{name} ' if named else ''}of shape \(4, 4\)"
        with pytest.raises((TypeError, ValueError), match=says):
            compopt.AdamS([(name, p)] if named else [p])


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [
        *((compopt.SeparateAdam, name, "1e-3") for name in ("lr", "eps", "weight_decay", "max_grad_norm")),
        (compopt.SeparateAdam, "lr", None),
        *((compopt.AdamS, "betas", value) for value in (0.9, None, ("0.9", "0.999"), (0.9,))),
        (compopt.RadiusAdamW, "density", "0.1"),
        (compopt.ScapeAdamS, "density", "0.1"),
        (compopt.TagcAdamW, "density", "0.1"),
        (compopt.TagcAdamW, "sketch_ratio", "10"),
        *((compopt.RadiusAdamW, name, value) for name in ("interval",) for value in ("1", None)),
        *((compopt.SeparateAdam, "adapt_interval", value) for value in ("100", None, 2.5)),
        (compopt.SeparateAdam, "ef_beta", None),
        *((compopt.SeparateAdam, "dense_steps", value) for value in (math.inf, math.nan, [10])),
        (compopt.ScapeAdamS, "density_steps", math.inf),
        (compopt.RadiusAdamW, "interval", math.inf),
    ],
)
def test_what_is_no_number_in_place_of_one_is_refused_by_the_option_s_name(make, option, value):
    """YAML reads 1e-3 as text."""
    model = nn.Linear(80, 64)
    with pytest.raises(ValueError, match=rf"{option} must be .*"):
        make(model.parameters(), **{"lr": 1e-3, option: value})


@pytest.mark.parametrize("option", ["outer_lr", "outer_momentum", "round_seconds", "max_grad_norm"])
def test_text_in_place_of_a_number_of_local_steps(option):
    with pytest.raises(ValueError, match=f"{option} must be .*, got '0.5'"):
        compopt.LocalSteps(torch.optim.AdamW(nn.Linear(8, 8).parameters()), **{option: "0.5"})


@pytest.mark.parametrize("make", [compopt.SeparateAdam, compopt.AdamS])
def test_numbers_may_be_numpys_or_in_tensors(make):
    numpy = pytest.importorskip("numpy")
    for lr, betas in ((numpy.float32(1e-3), numpy.array([0.9, 0.95])), (torch.tensor(1e-3), torch.tensor([0.9, 0.95]))):
        make(nn.Linear(8, 8).parameters(), lr=lr, betas=betas)


def test_a_round_without_end_is_refused_by_the_option_s_name():
    with pytest.raises(ValueError, match="every must be an integer >= 1, got inf"):
        compopt.LocalSteps(torch.optim.AdamW(nn.Linear(8, 8).parameters()), every=math.inf)


def test_numbers_of_numpy_and_tensors_compute_as_pythons_do():
    numpy = pytest.importorskip("numpy")

    def step(make, **options) -> torch.Tensor:
        p = nn.Parameter(torch.linspace(-1, 1, 80 * 64).view(80, 64))
        optimizer = make([p], simulate=True, **options)
        for n in range(3):
            p.grad = torch.randn(80, 64, generator=torch.Generator().manual_seed(n))
            optimizer.step()
        return p.detach()

    for make, plain, others in (
        (compopt.RadiusAdamW, {"density": 0.5}, {"density": torch.tensor(0.5)}),
        (compopt.TagcAdamW, {"density": 0.5}, {"density": torch.tensor(0.5)}),
        (compopt.SeparateAdam, {"maximize": True}, {"maximize": 1}),
        (compopt.RadiusAdamW, {"dense_steps": 10}, {"dense_steps": numpy.int64(10)}),
    ):
        assert torch.equal(step(make, **plain), step(make, **others))
