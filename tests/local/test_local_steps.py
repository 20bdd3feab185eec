"""Local steps against an oracle written from the design, and what holds at the end of a round."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from local_runs import adamw, single, train
from oracles import local as oracle
from pairs import pairs
from problems import gradients, replicas, step, weights
from slow_rows import slow_but
from torch.utils._python_dispatch import TorchDispatchMode

import compopt
from compopt._local.anchors import assign_to_fragments

PARTS = [[0, 1, 2], [3, 4]]  # of SHAPES: those whose middle is in the first half of all elements, and the others


@pytest.mark.parametrize(
    ("delay", "fragments", "ranks"),
    slow_but(lambda *row: row in pairs((0, 1, 4), (1, 2), (2, 4)), itertools.product((0, 1, 4), (1, 2), (2, 4))),
)
def test_it_is_the_design(ranks, fragments, delay):
    params, optimizers = train(ranks, 26, every=8, fragments=fragments, delay=delay)
    parts = PARTS if fragments == 2 else None
    wanted = oracle.train(ranks, weights(), gradients, 26, 8, adamw, parts=parts, delay=delay)
    assert optimizers[0].stats.round == 3
    for own, theirs in zip(params, wanted, strict=True):
        for p, q in zip(own, theirs, strict=True):
            torch.testing.assert_close(p.detach(), q, rtol=1e-12, atol=1e-12)


def test_a_delay_of_a_whole_round_applies_every_exchange():
    """Each exchange is applied in the step that begins the next one."""
    params, _ = train(2, 26, every=4, delay=4)
    wanted = oracle.train(2, weights(), gradients, 26, 4, adamw, delay=4)
    for own, theirs in zip(params, wanted, strict=True):
        for p, q in zip(own, theirs, strict=True):
            torch.testing.assert_close(p.detach(), q, rtol=1e-12, atol=1e-12)


def test_a_delay_loses_no_exchange_while_rounds_grow():
    """The exchange of every round is applied, but for the one that is on its way at the end."""
    params, optimizers = train(2, 0, every=8, delay=2, growth_steps=60)
    phases = []
    for t in range(100):
        step(optimizers[0].comm.world, params, optimizers, gradients(2, t))
        phases.append(optimizers[0].stats.phase)
    rounds = optimizers[0].stats.round
    assert rounds > 20 and phases.count("exchanged") >= rounds - 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_outer_optimizer_grows_with_the_rounds(ranks):
    """Rounds of 1, 1, 1, 2, 3, 4, 6 and 8 steps; by hand, without a codec."""
    lengths, every, lr, mu = [1, 1, 1, 2, 3, 4, 6, 8], 8, 0.7, 0.9
    params, optimizers = train(ranks, sum(lengths), every=every, growth_steps=15)
    assert optimizers[0].stats.round == len(lengths)
    w = [[torch.nn.Parameter(x.clone()) for x in weights()] for _ in range(ranks)]
    inner, anchor = [adamw(own) for own in w], weights()
    v, t = [torch.zeros_like(x) for x in anchor], 0
    for steps in lengths:
        for _ in range(steps):
            for own, optimizer, given in zip(w, inner, gradients(ranks, t), strict=True):
                for p, g in zip(own, given, strict=True):
                    p.grad = g.clone()
                optimizer.step()
            t += 1
        grown = math.log(steps) / math.log(every)
        lr_now, mu_now = 1 + (lr - 1) * grown, mu * grown
        for i, a in enumerate(anchor):
            mean = sum(a - own[i].detach() for own in w) / ranks
            v[i] = mu_now * v[i] + mean
            a -= lr_now * (mean + mu_now * v[i])
            for own in w:
                own[i].data.copy_(a)
    for own in params:
        for p, a in zip(own, anchor, strict=True):
            torch.testing.assert_close(p.detach(), a, rtol=1e-12, atol=1e-12)


def averaged(ranks: int, steps: int) -> list[torch.Tensor]:
    """AdamW on each rank, whose parameters are set to their mean after every step."""
    own = [[torch.nn.Parameter(w) for w in weights()] for _ in range(ranks)]
    optimizers = [adamw(params) for params in own]
    for t in range(steps):
        for params, optimizer, grads in zip(own, optimizers, gradients(ranks, t), strict=True):
            for p, g in zip(params, grads, strict=True):
                p.grad = g
            optimizer.step()
        for same in zip(*own, strict=True):
            mean = torch.stack([p.detach() for p in same]).mean(0)
            for p in same:
                p.data.copy_(mean)
    return own[0]


def test_with_every_1_and_no_outer_momentum_it_averages_parameters():
    params, _ = train(3, 6, every=1, outer_lr=1, outer_momentum=0)
    for p, q in zip(params[2], averaged(3, 6), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"dense_steps": 2}, {"fragments": 2, "delay": 1}])
def test_on_one_process_it_is_the_inner_optimizer_to_the_bit(options):
    params = [torch.nn.Parameter(w) for w in weights(dtype=torch.float32)]
    optimizer = compopt.LocalSteps(adamw(params), 4, growth_steps=0, **options)
    for t in range(9):
        for p, g in zip(params, single(1, t)[0], strict=True):
            p.grad = g
        optimizer.step()
    for p, q in zip(params, oracle.train(1, weights(dtype=torch.float32), single, 9, 99, adamw)[0], strict=True):
        assert torch.equal(p, q)
    assert optimizer.stats.applied_steps == 9 and optimizer.stats.bytes_sent == 0


def test_simulated_on_one_process_it_takes_rounds():
    (params,), (optimizer,) = train(1, 9, every=4)
    for p, q in zip(params, oracle.train(1, weights(), gradients, 9, 4, adamw)[0], strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-12, atol=1e-12)
    assert optimizer.stats.round == 2


@pytest.mark.parametrize("payload", ["int8", "int4", "int2", "bfloat16"])
def test_a_codec_is_the_packages_own_with_the_same_seeds(payload):
    """The oracle averages differences by ``Average``, which is held against its own oracle. It keeps tensors in their
    order where they are not called compressed.
    """
    world, anchors, averages = replicas(
        2, weights(dtype=torch.float32), lambda ps, process_group: compopt.Average(
            torch.optim.SGD([{"params": ps, "compopt_compress": False}], lr=1.0),
            payload_dtype=payload, process_group=process_group,
        ),
    )  # fmt: skip
    kept: list[torch.Tensor] = []

    def codec(exchange: int, differences: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        for own in anchors:
            for p in own:
                p.data.zero_()  # then SGD leaves minus the mean there
        step(world, anchors, averages, differences)
        kept[:] = [-p.detach() for p in anchors[0]]
        return list(kept)

    params, _ = train(2, 12, torch.float32, payload_dtype=payload, outer_momentum=0, outer_lr=1)
    start = weights(dtype=torch.float32)
    wanted = oracle.train(2, start, single, 12, 4, adamw, outer_lr=1, outer_momentum=0, codecs=[codec])
    for p, q in zip(params[0], wanted[0], strict=True):
        assert torch.equal(p.detach(), q)


def test_an_outer_optimizer_that_averages_by_itself_is_refused_by_name():
    def outer(anchors):
        return compopt.Average(torch.optim.SGD(anchors, lr=0.7))

    with pytest.raises(TypeError, match=r"outer must make an optimizer of torch, got Average.*pass payload_dtype="):
        train(2, 1, torch.float32, outer=outer)


@pytest.mark.parametrize("payload_dtype", [None, "int4"])
def test_any_optimizer_of_torch_may_step_anchors(payload_dtype):
    params, optimizers = train(
        2, 12, torch.float32, payload_dtype=payload_dtype, outer=lambda anchors: torch.optim.Adam(anchors, lr=0.02)
    )
    assert all(map(torch.equal, *params)) and optimizers[0].stats.round == 3
    assert not torch.equal(params[0][0].detach(), weights(dtype=torch.float32)[0])


@pytest.mark.parametrize(("kept_bytes", "delay"), [(0, 0), (0, 1), (2**30, 0)])
def test_an_exchange_frees_its_memory_unless_that_is_little(kept_bytes, delay, monkeypatch):
    monkeypatch.setattr("compopt._local.anchors.KEPT_BYTES", kept_bytes)
    _, optimizers = train(2, 9, torch.float32, payload_dtype="int4", delay=delay)
    for bucket in optimizers[0]._anchors.buckets:
        assert not hasattr(bucket, "payload") and bucket.pseudo_gradient is None
        assert bool(bucket._memory.tensors) == bool(bucket.scratch.tensors) == bool(kept_bytes)


def test_the_memory_of_an_exchange_that_is_given_up_is_left_to_what_may_still_write_to_it():
    _, optimizers = train(2, 4, torch.float32, payload_dtype="bfloat16", every=4, delay=2)
    sync = optimizers[0]._sync
    (bucket,) = sync.running.buckets
    given_up = bucket.payload.flat
    sync.cancel()
    bucket.begin_sync()
    assert bucket.payload.flat.data_ptr() != given_up.data_ptr()


@pytest.mark.parametrize(("option", "value"), [("lr", 0.5), ("momentum", 0.5), ("weight_decay", 0.1)])
@pytest.mark.parametrize("growth_steps", [0, 100])
def test_ranks_that_differ_in_the_outer_optimizer_are_told_in_what(option, value, growth_steps):
    """Of one that grows with rounds its own rates are compared, not those of the last round."""
    params, optimizers = train(2, 4, every=4, growth_steps=growth_steps)
    optimizers[1]._anchors.outer.param_groups[0][option] = value
    with pytest.raises(ValueError, match=f"outer optimizer, group 0, {option}: rank 0 has .*, rank 1 has {value}"):
        for t in range(4, 8):
            step(optimizers[0].comm.world, params, optimizers, gradients(2, t))
    assert not optimizers[0]._sync.is_comparing


def test_ranks_whose_outer_optimizers_are_of_two_classes_are_told_so():
    classes = iter([torch.optim.SGD, torch.optim.Adagrad] * 2)
    with pytest.raises(ValueError, match=r"rank 0 has 'LocalSteps .* optimizer SGD', rank 1 has .* Adagrad'"):
        train(2, 4, every=4, outer=lambda anchors: next(classes)(anchors, lr=0.1))


def test_an_exchange_is_a_few_operators_on_all_tensors():
    """Two ranks, 96 tensors each, of which the step of every tensor alone would be a hundred."""

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Count.calls += not function._schema.name.startswith(("aten::view", "aten::slice", "aten::detach"))
            return function(*args, **(kwargs or {}))

    shapes = [(64, 65), (65,)] * 48
    params, optimizers = train(
        2, 3, torch.float32, shapes, lambda ps: torch.optim.AdamW(ps, fused=True), every=1, payload_dtype="int4"
    )
    grads = gradients(2, 3, shapes, torch.float32)
    with Count():
        step(optimizers[0].comm.world, params, optimizers, grads)
    assert optimizers[0].stats.phase == "exchanged" and Count.calls < 2 * 300


def test_a_scheduler_acts_on_the_outer_optimizer():
    """Which steps at a part of its own rates while rounds grow: of 1, 2 and 4 steps here. Its groups show its own."""
    made, rates = [], []

    def note(outer, *_):
        rates.append([(group["lr"], group["momentum"]) for group in outer.param_groups])

    def outer(anchors):
        groups = [{"params": anchors[:1]}, {"params": anchors[1:]}]
        made.append(torch.optim.SGD(groups, lr=0.5, momentum=0.5))
        made[-1].register_step_pre_hook(note)
        return made[-1]

    options = dict(outer=outer, growth_steps=3)
    params, optimizers = train(2, 3, **options)
    made = made[-2:]  # each constructor has made one too, to see what it is given
    assert rates[-2:] == [[(0.75, 0.25)] * 2] * 2
    for one in made:
        assert one.param_groups[0]["lr"] == 0.5 and one.param_groups[0]["momentum"] == 0.5
        one.param_groups[0]["lr"] = 0.25
    for t in range(3, 7):
        step(optimizers[0].comm.world, params, optimizers, gradients(2, t))
    assert rates[-2:] == [[(0.25, 0.5), (0.5, 0.5)]] * 2
    assert optimizers[0].stats.round == 3 and all(map(torch.equal, *params))


def test_a_rounds_distances():
    """Two ranks that move at right angles, equally far: a cosine of 0, and a spread of 1."""
    params, optimizers = train(2, 0, torch.float32, [(2,)], lambda ps: torch.optim.SGD(ps, lr=1.0), every=1)
    world = optimizers[0].comm.world
    step(world, params, optimizers, [[torch.tensor([3.0, 0.0])], [torch.tensor([0.0, -3.0])]])
    stats = optimizers[1].stats
    assert stats.cosine == pytest.approx(0, abs=1e-6) and stats.spread == pytest.approx(1)
    assert (stats.round, stats.steps_into_round, stats.phase) == (1, 0, "exchanged")


def test_low_precision_has_float32_anchors():
    params, optimizers = train(2, 8, torch.bfloat16, payload_dtype=None)
    assert all(map(torch.equal, *params))
    state = optimizers[0].state_dict()["state"]
    anchors = [state[i]["outer"]["anchor"] for i in range(len(params[0]))]
    for p, anchor in zip(params[0], anchors, strict=True):
        assert anchor.dtype == torch.float32 and torch.equal(anchor.bfloat16(), p)
    assert any(not torch.equal(a, a.bfloat16().float()) for a in anchors)


@pytest.mark.parametrize(
    ("sizes", "fragments", "expected"),
    [
        ([4, 4], 2, [0, 1]),
        ([6, 4, 2], 2, [0, 1, 1]),  # the middle of the second is behind the half
        ([5, 6, 5], 2, [0, 0, 1]),
        ([1, 1, 8], 2, [0, 0, 1]),
        ([3, 3, 3, 3, 3, 3], 3, [0, 0, 1, 1, 2, 2]),
    ],
)
def test_fragments_are_of_about_equal_bytes(sizes, fragments, expected):
    """A tensor is in the part in which its middle is; what is frozen is in none, and counts nothing."""
    params = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    frozen = torch.nn.Parameter(torch.zeros(100), requires_grad=False)
    assert assign_to_fragments([{"params": [params[0], frozen, *params[1:]]}], fragments) == [
        expected[0],
        -1,
        *expected[1:],
    ]
    assert assign_to_fragments([{"params": params}, {"params": params}], fragments) == expected * 2, (
        "every group is dealt alike"
    )
    narrow = [torch.nn.Parameter(torch.zeros(4 * size, dtype=torch.bfloat16)) for size in sizes[:1]]
    wide = [torch.nn.Parameter(torch.zeros(2 * size)) for size in sizes[1:]]
    assert assign_to_fragments([{"params": narrow + wide}], fragments) == expected, "bytes, and not elements"
