"""Local steps against an oracle written from the design, options, and rounds that are ended before their time."""

from __future__ import annotations

import itertools
import math

import local_runs
import pytest
import torch
from local_runs import adamw, are_equal, copies, end_round, single, train
from oracles import local as oracle
from pairs import pairs
from problems import gradients, replicas, step, weights
from slow_rows import slow_but
from torch.utils._python_dispatch import TorchDispatchMode

import compopt
from compopt.local_steps.anchors import assign_to_fragments

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
    monkeypatch.setattr("compopt.local_steps.anchors.KEPT_BYTES", kept_bytes)
    _, optimizers = train(2, 9, torch.float32, payload_dtype="int4", delay=delay)
    for bucket in optimizers[0]._anchors.buckets:
        assert not hasattr(bucket, "payload") and bucket.pseudo_gradient is None
        assert not bucket._memory.tensors and bool(bucket.scratch.tensors) == bool(kept_bytes)


@pytest.mark.parametrize("options", [
    {}, {"delay": 2, "fragments": 2}, {"residual_dtype": "int8"}, {"outer": lambda a: torch.optim.Adam(a, lr=0.02)},
], ids=["", "delayed", "int8 residual", "Adam"])  # fmt: skip
def test_buckets_take_turns_in_the_memory_of_a_sync_and_its_bits_stay(options, monkeypatch):
    monkeypatch.setattr("compopt._state.buckets.BUCKET_BYTES", 20_000)
    begun = 10 if "delay" in options else 12
    options = {"payload_dtype": "int4"} | options
    shared, (optimizer, _) = train(2, begun, torch.float32, **options)
    buckets = optimizer._anchors.buckets
    if "delay" in options:
        assert len(buckets) > 2
        payloads = [bucket.payload for bucket in optimizer._sync.running.buckets]
        assert len({payload.body.data_ptr() for payload in payloads}) == 1 < len(payloads)
    monkeypatch.setattr("compopt.local_steps.anchors.Anchors.note_ranks", lambda *_: None)
    wanted, (other, _) = train(2, begun, torch.float32, **options)
    assert all(map(torch.equal, shared[1], wanted[1]))
    for bucket, like in zip(buckets, other._anchors.buckets, strict=True):
        assert torch.equal(bucket.flat["residual"], like.flat["residual"])


def test_the_memory_of_an_exchange_that_is_given_up_is_left_to_what_may_still_write_to_it():
    _, optimizers = train(2, 4, torch.float32, payload_dtype="bfloat16", every=4, delay=2)
    sync = optimizers[0]._sync
    (bucket,) = sync.running.buckets
    given_up = bucket.payload.flat
    sync.cancel()
    bucket.make_sync_payload()
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


def test_the_length_of_a_round():
    """Of two ranks that move at right angles, equally far: their average is shorter by the square root of 2."""
    params, optimizers = train(2, 0, torch.float32, [(2,)], lambda ps: torch.optim.SGD(ps, lr=1.0), every=1)
    world = optimizers[0].comm.world
    step(world, params, optimizers, [[torch.tensor([3.0, 0.0])], [torch.tensor([0.0, -3.0])]])
    stats = optimizers[1].stats
    assert stats.step_length == pytest.approx(0.5**0.5)
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


def test_a_delay_ends_before_the_next_exchange_of_its_fragment():
    params = [torch.nn.Parameter(w) for w in weights()]
    compopt.LocalSteps(adamw(params), 30, fragments=2, delay=15)
    with pytest.raises(ValueError, match=r"delay.*at most every / fragments, 15"):
        compopt.LocalSteps(adamw(params), 30, fragments=2, delay=16)


def test_stats_count_rounds_from_the_end_of_the_averaged_start():
    params, optimizers = train(2, 0, dense_steps=3, every=4)
    found = []
    for t in range(9):
        step(optimizers[0].comm.world, params, optimizers, gradients(2, t))
        stats = optimizers[0].stats
        found.append((stats.round, stats.steps_into_round))
    assert found == [(0, 0), (0, 0), (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]


def test_steps_are_counted_by_parameter_as_in_the_averaged_start():
    params, optimizers = train(2, 6, dense_steps=2)
    grads = gradients(2, 6)
    grads[0][1], grads[1][2][0, 0] = None, float("nan")
    step(optimizers[0].comm.world, params, optimizers, grads)
    counts = [[int(optimizer.state[p]["step"]) for p in own] for optimizer, own in zip(optimizers, params, strict=True)]
    assert counts[0] == [7, 6, *[7] * (len(counts[0]) - 2)] and set(counts[1]) == {6}
    # what ``state`` shows for a base that counts no steps (SGD)
    own = [{p: int(n) for b in o._buckets for p, n in zip(b.params, b.state["step"], strict=True)} for o in optimizers]
    assert [[steps[p] for p in of_rank] for steps, of_rank in zip(own, params, strict=True)] == counts


def test_the_averaged_start_leaves_no_residual_in_memory():
    params, optimizers = train(2, 2, torch.float32, dense_steps=2, payload_dtype="int4")
    assert optimizers[0].state[params[0][0]]["residual"].any()
    step(optimizers[0].comm.world, params, optimizers, gradients(2, 2, dtype=torch.float32))
    assert not any(optimizers[0].state[p].get("residual", torch.empty(0)).numel() for p in params[0])


def test_stats_count_the_bytes_of_a_step():
    params, optimizers = train(2, 0, every=2)
    found = []
    for t in range(7):
        step(optimizers[0].comm.world, params, optimizers, gradients(2, t))
        found.append(optimizers[0].stats.bytes_sent)
    end_round(optimizers)
    found.append(optimizers[0].stats.bytes_sent)
    exchange = found[3]
    # the first step begins with a handshake; a round that is ended counts to the step before
    assert found[1:] == [exchange, 0, exchange, 0, exchange, 0, exchange] and 0 < found[0] < 150 < exchange


def test_the_bytes_of_a_round_that_is_ended_count_to_those_of_the_step_before():
    params, optimizers = train(2, 10, every=8, fragments=2)
    step(optimizers[0].comm.world, params, optimizers, gradients(2, 10))
    step(optimizers[0].comm.world, params, optimizers, gradients(2, 11))  # fragment 1 is exchanged
    sent = optimizers[0].stats.bytes_sent
    total = optimizers[0].comm.bytes_sent
    end_round(optimizers)
    assert sent > 0 and optimizers[0].stats.bytes_sent == sent + optimizers[0].comm.bytes_sent - total > sent


def test_rounds_too_short_for_a_delay_have_none():
    """Of one step, with two fragments: they are exchanged together, and applied at once."""
    params, optimizers = train(2, 0, every=8, fragments=2, delay=2, growth_steps=100)
    for t in range(3):
        step(optimizers[0].comm.world, params, optimizers, gradients(2, t))
        assert optimizers[0].stats.phase == "exchanged" and are_equal(params)


@pytest.mark.parametrize("at", [2, 3])
def test_ending_a_round_after_an_exchange_leaves_stats_as_they_were(at):
    params, optimizers = train(2, 2, every=2)
    if at == 3:
        step(optimizers[0].comm.world, params, optimizers, gradients(2, 2))
        end_round(optimizers)
    before = {name: value for name, value in vars(optimizers[0].stats).items() if not callable(value)}
    end_round(optimizers)
    assert before == {name: value for name, value in vars(optimizers[0].stats).items() if not callable(value)}


def test_an_exchange_sends_its_fragment_alone():
    """Two of about equal bytes; a message in front has 8 KB."""
    sent = {}
    for fragments in (1, 2):
        params, optimizers = train(2, 8, every=8, fragments=fragments)
        before = optimizers[0].comm.bytes_sent
        for t in range(8, 16):
            step(optimizers[0].comm.world, params, optimizers, gradients(2, t))
            sent.setdefault(fragments, []).append(optimizers[0].stats.bytes_sent)
        assert sum(sent[fragments]) == optimizers[0].comm.bytes_sent - before
    (whole,) = filter(None, sent[1])
    parts = [n for n in sent[2] if n]
    assert len(parts) == 2 and sum(parts) < whole + 10_000 and max(parts) < 0.8 * whole


def momentum_of(optimizer: compopt.LocalSteps) -> float:
    return optimizer.state_dict()["param_groups"][0]["outer_momentum"]


def test_the_outer_momentum_is_smaller_with_a_muon_inside():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon before 2.9")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    muon = torch.optim.Muon([model[0].weight])
    rest = torch.optim.AdamW([model[0].bias, *model[1].parameters()])
    both = compopt.MuonAdamW(model.named_parameters())
    for inner, wanted in ((rest, 0.9), (muon, 0.6), ([muon, rest], 0.6), (both, 0.6)):
        assert momentum_of(compopt.LocalSteps(inner)) == wanted
    assert momentum_of(compopt.LocalSteps(muon, outer_momentum=0.25)) == 0.25


@pytest.mark.parametrize("inner", [None, 5])
def test_what_is_no_optimizer_inside_is_refused_in_a_sentence(inner):
    with pytest.raises(TypeError, match="must be a torch optimizer, got"):
        compopt.LocalSteps(inner)


def train_and_world(ranks: int, steps: int, dtype=torch.float64, **options):
    params, optimizers = local_runs.train(ranks, steps, dtype, **options)
    return optimizers[0].comm.world, params, optimizers


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_round_that_ends_early_has_the_outer_step_of_its_length(ranks):
    """Half of a round of 4, by the logarithm: rate and momentum are half way from 1 and 0 to .7 and .9."""
    _, at_round, _ = train_and_world(ranks, 4)
    _, params, optimizers = train_and_world(ranks, 6)
    start = weights()
    d1 = [(a - w.detach()) for a, w in zip(start, first_mean(ranks), strict=True)]  # of the first round
    anchors = [w.detach().clone() for w in at_round[0]]
    moved = [[a - p.detach() for a, p in zip(anchors, own, strict=True)] for own in params]
    end_round(optimizers)
    assert are_equal(params)
    assert (optimizers[0].stats.round, optimizers[0].stats.steps_into_round) == (2, 0)
    lr, mu = 0.85, 0.45
    for i, p in enumerate(params[0]):
        mean = sum(own[i] for own in moved) / ranks
        v = mu * d1[i] + mean
        torch.testing.assert_close(p.detach(), anchors[i] - lr * (mean + mu * v), rtol=1e-12, atol=1e-12)


def first_mean(ranks: int) -> list[torch.Tensor]:
    """Return where the ranks' first four steps led, on average: without exchanges."""
    _, params, _ = train_and_world(ranks, 4, every=100)
    return [sum(p.detach() for p in tensors) / ranks for tensors in zip(*params, strict=True)]


@pytest.mark.parametrize("options", [dict(fragments=2), dict(delay=2), dict(fragments=2, delay=1)])
def test_ranks_are_equal_afterwards_and_train_on(options):
    world, params, optimizers = train_and_world(2, 10, every=8, **options)
    assert not are_equal(params)
    end_round(optimizers)
    assert are_equal(params)
    for t in range(10, 26):
        step(world, params, optimizers, gradients(2, t))
    end_round(optimizers)
    assert are_equal(params)


@pytest.mark.parametrize("payload", [None, "int4", "int2"])
@pytest.mark.parametrize("gradients_kept", [True, False])
def test_right_after_a_round_nothing_moves(payload, gradients_kept):
    """Not even by what rounding has left in the residuals, or by the outer momentum."""
    _, params, optimizers = train_and_world(2, 8, torch.float32, payload_dtype=payload)
    for optimizer in optimizers if not gradients_kept else []:
        optimizer.zero_grad()
    before = copies(params)
    end_round(optimizers)
    assert all(map(torch.equal, params[0], before[0])) and are_equal(params)
    assert optimizers[0].stats.round == 2


@pytest.mark.parametrize("options", [dict(), dict(fragments=2), dict(delay=2), dict(fragments=2, delay=2)])
@pytest.mark.parametrize("steps", [8, 9, 11])
def test_ending_a_round_twice_is_ending_it_once(options, steps):
    _, params, optimizers = train_and_world(2, steps, torch.float32, every=4, payload_dtype="int4", **options)
    end_round(optimizers)
    before, rounds = copies(params), optimizers[0]._counts.round
    assert are_equal(params)
    end_round(optimizers)
    assert all(map(torch.equal, params[0], before[0])) and are_equal(params)
    assert optimizers[0]._counts.round == rounds == optimizers[0].stats.round


def test_a_round_that_is_ended_after_one_fragment_exchanges_the_others_only():
    """Fragment 1 of 2 was exchanged in this very step: its parameters stay as they are."""
    _, params, optimizers = train_and_world(2, 2, torch.float32, every=4, payload_dtype="int4", fragments=2)
    before = copies(params)
    exchanged = [torch.equal(p, q) for p, q in zip(*params, strict=True)]
    assert any(exchanged) and not all(exchanged)
    end_round(optimizers)
    stayed = [torch.equal(p, q) for p, q in zip(params[0], before[0], strict=True)]
    assert are_equal(params) and stayed == exchanged


def test_what_is_on_its_way_is_all_that_is_exchanged_where_nothing_has_moved_since():
    _, params, optimizers = train_and_world(2, 8, every=4, delay=2)

    def exchanges() -> int:
        return int(optimizers[0].state_dict()["state"][0]["outer"]["optimizer"]["step"])

    assert exchanges() == 1
    end_round(optimizers)
    assert exchanges() == 2 and are_equal(params)


def test_on_one_process_there_is_nothing_to_end():
    model = torch.nn.Linear(4, 4)
    optimizer = compopt.LocalSteps(adamw(model.parameters()))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = model.weight.detach().clone()
    optimizer.end_round()
    assert torch.equal(model.weight.detach(), before)
