"""Options: one set of keywords, defaults, torch.optim.AdamW's own, changes while a run goes on, what is refused."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conformance import Small, every_average, loss
from sim import Ranks, World
from slow_rows import in_turn
from table import CASES, Case, by_name
from torch import nn

import compopt
from compopt._engine import handshake, options
from compopt._engine.options import TorchOptions

API = Path(__file__).parents[2] / "docs" / "api.md"
FIRST = ("SeparateAdam", "Separate", "Average", "LocalSteps")
CLASSES = {name: getattr(compopt, name) for name in (*FIRST, "RadiusAdamW", "TagcAdamW", "ScapeAdamS", "AdamS")}
TORCHS = {"maximize", *inspect.signature(torch.optim.AdamW).parameters} | TorchOptions.__annotations__.keys()
# One set with one meaning. A class that lacks one says why in docs/api.md.
COMMON = ("payload_dtype", "residual_dtype", "max_grad_norm", "dense_steps", "process_group", "simulate")
LACKING = {
    "residual_dtype": {"ScapeAdamS"},
    "dense_steps": {"Average", "AdamS"},
}
OLD = ("warmup_steps", "every_warmup_steps", "density_warmup_steps", "sparsity", "total_steps")


def keywords(cls: type) -> dict[str, str]:
    """The keywords of a class beside torch's, with their defaults as text."""
    parameters = list(inspect.signature(cls).parameters.values())[1:]  # not what is wrapped, or the parameters
    ours = [p for p in parameters if p.name not in TORCHS and p.kind is not p.VAR_KEYWORD]
    return {p.name: repr(p.default).replace("'", '"') for p in ours}


def make_table() -> str:
    """As docs/api.md has it: a table of the keywords that classes share, first the set with one meaning; below it those
    of one or two classes, with one default.
    """
    defaults = {name: keywords(cls) for name, cls in CLASSES.items()}
    names = dict.fromkeys(name for row in defaults.values() for name in row)
    classes = {name: tuple(cls for cls, row in defaults.items() if name in row) for name in names}
    differing = {name for name in names if len({defaults[cls][name] for cls in classes[name]}) > 1}
    shared = [
        *COMMON,
        *(name for name in names if name not in COMMON and (len(classes[name]) > 2 or name in differing)),
    ]
    lines = [["keyword", *(f"`{name}`" for name in CLASSES)], ["---"] * (len(CLASSES) + 1)]
    lines += [[f"`{name}`", *(row.get(name, "") for row in defaults.values())] for name in shared]
    table = [re.sub(" +", " ", f"| {' | '.join(line)} |") for line in lines]
    others: dict[tuple[str, ...], list[str]] = {}
    for name in (name for name in names if name not in shared):
        others.setdefault(classes[name], []).append(f"`{name}={defaults[classes[name][0]][name]}`")
    rows = [f"- {', '.join(f'`{cls}`' for cls in of)}: {', '.join(words)}" for of, words in others.items()]
    return "\n".join([*table, "", "Keywords of one or two classes:", "", *rows, ""])


def test_the_table_in_the_reference_is_that_of_the_signatures():
    table = make_table()
    assert table in API.read_text(), f"write this into docs/api.md, and what has changed into CHANGELOG.md:\n{table}"


@pytest.mark.parametrize("name", COMMON)
def test_every_class_has_the_common_ones_or_says_why_not(name):
    assert {cls for cls in CLASSES if name not in keywords(CLASSES[cls])} == LACKING.get(name, set())
    for cls in LACKING.get(name, ()):
        assert re.search(rf"^- `{name}`:[^-]*{cls}", API.read_text(), re.M), (
            f"docs/api.md does not say why {cls} lacks it"
        )


@pytest.mark.parametrize("name", COMMON)
def test_the_common_ones_have_one_type(name):
    """But for what a default stands for ("auto"), and LocalSteps, whose start is no share of a run."""
    types = {
        str(inspect.signature(cls).parameters[name].annotation) for cls in CLASSES.values() if name in keywords(cls)
    }
    types = {text.replace(" | Literal['auto']", "") for text in types}
    assert types - {"int"} and len(types - {"int"}) == 1, types


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_no_old_name_is_taken(cls):
    p = torch.nn.Parameter(torch.zeros(64, 64))
    first = [p] if "lr" in inspect.signature(cls).parameters else torch.optim.SGD([p], lr=0.1)
    for name in OLD:
        with pytest.raises(TypeError, match=name):
            cls(first, **{name: 1})


def test_density_is_what_is_kept():
    for name in ("RadiusAdamW", "TagcAdamW", "ScapeAdamS"):
        optimizer = CLASSES[name]([torch.nn.Parameter(torch.zeros(64, 64))], density=1.0)
        assert optimizer.param_groups[0]["density"] == 1.0
        with pytest.raises(ValueError, match="density must be in"):
            CLASSES[name]([torch.nn.Parameter(torch.zeros(64, 64))], density=0.0)


RESULTS = Path(__file__).parents[2] / "bench" / "RESULTS.md"


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(64, 80))]


def around(ps, **options):
    return compopt.Separate(torch.optim.AdamW(ps, lr=1e-3), **options)


both = pytest.mark.parametrize("make", [compopt.SeparateAdam, around], ids=["SeparateAdam", "Separate"])


@both
def test_nothing_said_is_what_is_recommended(make):
    (group,) = make(params()).option_groups
    message = {name: group[name] for name in ("projection", "rank", "payload_dtype")}
    assert message == {"projection": "tracked", "rank": 16, "payload_dtype": "int8"}
    assert 0 <= group["dense_steps"] <= 10


@both
def test_a_random_projection_is_the_papers(make):
    (group,) = make(params(), projection="gaussian").option_groups
    assert (group["ratio"], group["payload_dtype"], group["dense_steps"]) == (16, None, 0)


@both
def test_what_was_said_stays(make):
    (group,) = make(params(), rank=4, payload_dtype=None, dense_steps=7).option_groups
    assert (group["rank"], group["payload_dtype"], group["dense_steps"]) == (4, None, 7)


@both
def test_a_size_that_says_nothing_is_refused_in_a_sentence(make):
    with pytest.raises(ValueError, match=r"ratio=64 is for random projections.*projection='gaussian'"):
        make(params(), ratio=64)
    with pytest.raises(ValueError, match=r"ratio=16 is for random projections"):
        make(params(), ratio=16, projection="tracked", rank=4)
    with pytest.raises(ValueError, match=r"rank=4 is for tracked projections.*gaussian.*ratio="):
        make(params(), rank=4, projection="gaussian")


@both
def test_so_it_is_in_a_group(make):
    prefix = "compopt_" if make is around else ""  # in the groups of a base
    with pytest.raises(ValueError, match="ratio=8 is for random"):
        make([{"params": params(), f"{prefix}ratio": 8}])
    with pytest.raises(ValueError, match="rank=8 is for tracked"):
        make([{"params": params(), f"{prefix}rank": 8}], projection="gaussian")
    optimizer = make(params())
    with pytest.raises(ValueError, match="ratio=8 is for random"):
        optimizer.add_param_group({"params": params(), f"{prefix}ratio": 8})
    assert len(optimizer.param_groups) == 1
    make([{"params": params(), f"{prefix}rank": 8}])


def test_groups_of_another_optimizer_are_taken():
    compopt.SeparateAdam([{**compopt.SeparateAdam(params()).param_groups[0], "params": params()}])


def settings() -> list[str]:
    """The calls among the papers' own settings."""
    _, _, rest = RESULTS.read_text().partition("### The papers' own settings\n")
    return re.findall(r"`(\w+\(params,.*?\))`", rest.partition("\n#")[0].replace("\n", " "))


def test_all_five_papers_are_there():
    names = {call.partition("(")[0] for call in settings()}
    assert names == {"RadiusAdamW", "ScapeAdamS", "AdamS", "SeparateAdam", "TagcAdamW"} and len(settings()) >= 5


@pytest.mark.parametrize("call", settings())
def test_a_papers_settings_are_one_call(call):
    def make(ps, process_group):
        optimizer = eval(f"compopt.{call}", {"compopt": compopt, "torch": torch, "params": ps})
        optimizer._engine.switch_group(process_group)
        return optimizer

    ranks = Ranks(2, Small, make)
    ranks.train(loss, 3)
    ranks.assert_replicas_equal()


LIKE_ADAMW = [case.cls for case in CASES if "lr" in inspect.signature(case.cls).parameters]
classes = pytest.mark.parametrize("cls", LIKE_ADAMW)
HOW = ("foreach", "fused", "capturable")
UNSUPPORTED_OPTIONS = ("amsgrad", "differentiable")


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.zeros(64, 64))


def test_every_class_but_the_wrapper_is_looked_at():
    assert {cls.__name__ for cls in LIKE_ADAMW} == set(compopt.__all__) & {
        "AdamS",
        "RadiusAdamW",
        "ScapeAdamS",
        "SeparateAdam",
        "TagcAdamW",
    }


@classes
def test_signature_and_defaults_are_torchs(cls):
    """Options of how to compute are taken by ``torch_options``."""
    torchs = inspect.signature(torch.optim.AdamW).parameters
    ours = inspect.signature(cls).parameters
    positional = [name for name, p in torchs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    same = [name for name in torchs if name in ours]
    assert {name: ours[name].default for name in same} == {name: torchs[name].default for name in same}
    assert torchs.keys() - ours.keys() == TorchOptions.__annotations__.keys()
    assert ours["torch_options"].annotation == "Unpack[TorchOptions]"


@classes
def test_a_name_that_torch_does_not_have_is_refused(cls):
    with pytest.raises(TypeError, match=f"{cls.__name__} got unexpected keyword arguments: momentum, warmup_epochs"):
        cls([matrix()], warmup_epochs=3, foreach=False, momentum=0.9)


@classes
@pytest.mark.parametrize("name", HOW)
def test_how_to_compute_is_taken_and_true_is_answered_once(cls, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls([matrix()], **{name: False})
        cls([matrix()], **{name: None})
    with pytest.warns(UserWarning, match=f"{name}=True changes nothing.*optimizer.backend") as report:
        optimizer = cls([matrix()], **{name: True})
    assert len(report) == 1 and report[0].filename == __file__
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = torch.ones_like(p)
    optimizer.step()


def test_several_at_once_are_one_warning():
    with pytest.warns(UserWarning, match="foreach=True, fused=True, capturable=True change nothing") as report:
        compopt.RadiusAdamW([matrix()], foreach=True, fused=True, capturable=True)
    assert len(report) == 1


def test_other_ranks_say_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compopt.RadiusAdamW([matrix()], fused=True)


@classes
@pytest.mark.parametrize("name", UNSUPPORTED_OPTIONS)
def test_what_cannot_be_is_refused_in_a_sentence(cls, name):
    cls([matrix()], **{name: False})
    with pytest.raises(ValueError, match=f"{name}=True .*: .*{name}=False"):
        cls([matrix()], **{name: True})
    with pytest.raises(ValueError, match=f"{name}=True"):
        cls([{"params": [matrix()], name: True}])


def trained(**options) -> torch.optim.AdamW:
    p = matrix()
    adamw = torch.optim.AdamW([p], **options)
    p.grad = torch.ones_like(p)
    adamw.step()
    return adamw


@pytest.mark.parametrize(
    ("options", "cls"),
    in_turn(
        [{}, {"foreach": True}, {"fused": True}, {"capturable": True}, {"foreach": False}],
        (compopt.RadiusAdamW, compopt.TagcAdamW, compopt.AdamS),
    ),
)
def test_a_checkpoint_of_adamw_loads_whatever_it_says(cls, options):
    saved = trained().state_dict()
    saved["param_groups"][0] |= options  # capturable wants a GPU
    p = matrix()
    optimizer = cls([p], process_group=World(1).comms[0])
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["step"] == 1 and optimizer.state[p]["exp_avg"].any()


def test_a_checkpoint_of_amsgrad_is_refused_in_a_sentence():
    optimizer = compopt.RadiusAdamW([matrix()])
    with pytest.raises(ValueError, match="amsgrad=True"):
        optimizer.load_state_dict(trained(amsgrad=True).state_dict())


def test_around_a_base_amsgrad_is_the_bases_own_business():
    p = matrix()
    optimizer = compopt.Separate(torch.optim.AdamW([p], amsgrad=True, foreach=True))
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.base.state[p]["max_exp_avg_sq"].any()


@pytest.fixture
def counted(monkeypatch):
    """Counts how often options are rendered, checked, and compared by a handshake."""
    counts = dict.fromkeys(["rendered", "checked", "compared"], 0)

    def count(owner: object, name: str, what: str) -> None:
        original = getattr(owner, name)

        def counting(*args):
            counts[what] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, counting)

    def reset() -> dict[str, int]:
        found = dict(counts)
        counts.update(dict.fromkeys(counts, 0))
        return found

    count(options, "make_comparable", "rendered")
    count(handshake, "compare_optimizers", "compared")
    reset.count = count
    return reset


def make_ranks(case, size: int = 2) -> Ranks:
    return Ranks(size, Small, lambda ps, process_group: case.make(ps, process_group=process_group))


@every_average
def test_a_steady_step_renders_nothing_and_a_rate_alone_where_it_changes(case, counted):
    counted.count(case.cls, "check_group", "checked")
    ranks = make_ranks(case)
    ranks.train(loss, 6)
    counted()
    ranks.train(loss, 1)
    assert counted() == dict(rendered=0, checked=0, compared=0)
    for optimizer in ranks.optimizers:
        optimizer.param_groups[0]["lr"] *= 0.5
    before = [optimizer._engine.options.message_options for optimizer in ranks.optimizers]
    ranks.train(loss, 1)
    is_wrapper = hasattr(ranks.optimizers[0], "base")  # whose base has the rate, and checks it
    assert counted() == dict(rendered=2, checked=0 if is_wrapper else 2, compared=0)
    assert all(
        optimizer._engine.options.message_options is text
        for optimizer, text in zip(ranks.optimizers, before, strict=True)
    )


@pytest.mark.parametrize("value", ["list", "tensor"])
def test_what_changes_in_place_on_one_rank_is_noticed_in_the_same_step(value):
    held = {"list": [0.9, 0.95], "tensor": torch.tensor(1e-3)}
    name = "betas" if value == "list" else "lr"
    ranks = make_ranks(by_name["RadiusAdamW"])
    for optimizer in ranks.optimizers:
        optimizer.param_groups[0][name] = held[value].copy() if value == "list" else held[value].clone()
    ranks.train(loss, 3)
    changed = ranks.optimizers[1].param_groups[0][name]
    if value == "list":
        changed[1] = 0.99
    else:
        changed.fill_(2e-3)
    with pytest.raises(ValueError, match=f"group 0, {name}: rank 0 has"):
        ranks.train(loss, 1)


def test_a_bad_option_is_refused_until_it_is_corrected():
    ranks = make_ranks(by_name["RadiusAdamW"], 1)
    ranks.train(loss, 2)
    group = ranks.optimizers[0].param_groups[0]
    good, group["density"] = group["density"], 2.0
    for _ in range(2):
        with pytest.raises(ValueError, match="density"):
            ranks.train(loss, 1)
    group["density"] = good
    ranks.train(loss, 1)
    assert group["step"] == 3


@pytest.mark.parametrize("name", ["RadiusAdamW", "TagcAdamW", "ScapeAdamS", "SeparateAdam", "Separate"])
def test_which_tensors_are_compressed_stays_as_it_was_laid_out(name):
    """Else a checkpoint would say that they are, and lack their state."""
    ranks = Ranks(2, Small, lambda ps, process_group: by_name[name].make(ps, process_group=process_group))
    ranks.train(loss, 3)
    option = "compopt_compress" if name == "Separate" else "compress"
    for choice in (False, True):  # of large matrices; of biases
        for optimizer in ranks.optimizers:
            optimizer.param_groups[0][option] = choice
        with pytest.raises(ValueError, match=f"compress={choice} would change whether .*: set it back"):
            ranks.train(loss, 1)
        for optimizer in ranks.optimizers:
            optimizer.param_groups[0][option] = None
        ranks.train(loss, 1)
    ranks.assert_replicas_equal()
    for optimizer in ranks.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())


def test_what_a_commit_adapts_on_all_ranks_needs_no_handshake(counted):
    ranks = Ranks(
        2,
        Small,
        lambda ps, process_group: compopt.SeparateAdam(
            ps, process_group=process_group, projection="gaussian", adaptive=True, adapt_interval=1, dense_steps=0
        ),
    )
    ranks.train(loss, 3)
    assert ranks.optimizers[0].param_groups[0]["adapted"]
    counted()
    ranks.train(loss, 3)
    assert counted()["compared"] == 0


NAMES = "OptimizerInfo OptimizerInput _get_optim_inputs_including_global_cliquey_kwargs get_error_inputs_for_all_optims"


def find_description() -> ModuleType:
    """Return torch's module, which takes seconds to import."""
    return importlib.import_module("torch.testing._internal.common_optimizers")


def inputs(device, dtype=None) -> list:
    OptimizerInput = find_description().OptimizerInput
    return [
        OptimizerInput(None, {}, "default"),
        OptimizerInput(None, {"lr": 0.01}, "non-default lr"),
        OptimizerInput(None, {"lr": torch.tensor(0.01)}, "tensor lr"),
        OptimizerInput(None, {"weight_decay": 0.1}, "weight decay"),
        OptimizerInput(None, {"weight_decay": 0.1, "maximize": True}, "maximize"),
    ]


def info_of(case: Case):
    description = find_description()
    return description.OptimizerInfo(
        case.cls,
        optim_inputs_func=inputs,
        scheduler_inputs=(
            [lambda o: torch.optim.lr_scheduler.StepLR(o, gamma=0.9, step_size=10)],
            [lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)],
            [
                lambda o: torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.95),
                lambda o: torch.optim.lr_scheduler.ConstantLR(o),
            ],
        ),
        supported_impls=(),
        supports_complex=False,
        optim_error_inputs_func=description.get_error_inputs_for_all_optims,
    )  # fmt: skip


@pytest.fixture(params=[case for case in CASES if case.build is None], ids=lambda case: case.name)
def info(request):
    """The description of a class."""
    try:
        missing = [name for name in NAMES.split() if not hasattr(find_description(), name)]
    except ImportError as error:  # private: other versions have other names
        missing = [str(error)]
    if missing:
        pytest.skip(f"this torch has no such description: {missing}")
    return info_of(request.param)


def configurations(info) -> list:
    return find_description()._get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info)


def lr_of(config) -> dict:
    """Its own copy of the options: a scheduler writes into a tensor lr."""
    return copy.deepcopy(config.kwargs)


def test_errors(info):
    for error_input in info.optim_error_inputs_func("cpu", torch.float32):
        given = error_input.optimizer_error_input if hasattr(error_input, "optimizer_error_input") else error_input
        given = getattr(given, "optimizer_input", given)
        params = given.params if given.params is not None else [nn.Parameter(torch.randn(1, 1))]
        expect = pytest.warns if issubclass(error_input.error_type, Warning) else pytest.raises
        with expect(error_input.error_type, match=error_input.error_regex):
            info.optim_cls(params, **given.kwargs)


def test_goes_in_the_right_direction_with_every_scheduler(info):
    for config in configurations(info):
        for schedulers in info.scheduler_inputs:
            torch.manual_seed(0)
            weight, bias = nn.Parameter(torch.randn(70, 60)), nn.Parameter(torch.randn(70))
            optimizer = info.optim_cls([weight, bias], **lr_of(config))
            made = [make(optimizer) for make in schedulers]
            x = torch.randn(60)

            def closure():
                optimizer.zero_grad()  # noqa: B023
                loss = (weight.mv(x) + bias).pow(2).sum()  # noqa: B023
                loss.backward()
                return loss

            first = closure().item()
            for _ in range(20):
                loss = optimizer.step(closure)
                for scheduler in made:
                    with_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                    scheduler.step(loss.detach()) if with_loss else scheduler.step()
            if config.kwargs.get("maximize"):
                assert closure().item() > first
            else:
                assert closure().item() < first


def test_state_dict_round_trip_goes_on_alike(info):
    for config in configurations(info):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(64, 64))
        optimizer = info.optim_cls([p], **lr_of(config))

        def run(optimizer, p, step):
            p.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
            optimizer.step()

        for step in range(3):
            run(optimizer, p, step)
        q = nn.Parameter(p.detach().clone())
        other = info.optim_cls([q], **lr_of(config))
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for step in range(3, 6):
            run(optimizer, p, step)
            run(other, q, step)
        assert torch.equal(p, q)
        assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_hooks_around_step_state_dict_and_loading(info):
    called = []
    optimizer = info.optim_cls([nn.Parameter(torch.randn(64, 64))])
    optimizer.register_step_pre_hook(lambda *_: called.append("before step"))
    optimizer.register_step_post_hook(lambda *_: called.append("after step"))
    optimizer.register_state_dict_pre_hook(lambda *_: called.append("before state_dict"))
    optimizer.register_state_dict_post_hook(lambda o, d: called.append("after state_dict"))
    optimizer.register_load_state_dict_pre_hook(lambda o, d: called.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda o: called.append("after loading"))
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == [f"{when} {what}" for what in ("step", "state_dict", "loading") for when in ("before", "after")]


def test_group_options_override_defaults(info):
    p, q = nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64, 64))
    optimizer = info.optim_cls([{"params": [p]}, {"params": [q], "lr": 0.0}], lr=0.1)
    p.grad = q.grad = torch.ones(64, 64)
    optimizer.step()
    assert not torch.equal(p, torch.ones(64, 64)) and torch.equal(q, torch.ones(64, 64))


def test_named_parameters_keep_their_names(info):
    model = nn.Linear(64, 64)
    optimizer = info.optim_cls(model.named_parameters())
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
