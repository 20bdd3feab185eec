"""Local steps against an oracle written from the design, what holds at the end of a round, and faults in it."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import socket
import struct
import time
import warnings

import pytest
import torch
from conformance import through_a_file
from oracles import local as oracle
from problems import SHAPES, gradients, replicas, step, weights
from ranks import run_ranks
from sim import World
from table import projecting

import compopt

PARTS = [[0, 1, 2], [3, 4]]  # of SHAPES: those whose middle is in the first half of all elements, and the others


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def train(ranks: int, steps: int, dtype=torch.float64, shapes=SHAPES, inner=adamw, **options):
    options = {"every": 4, "every_warmup_steps": 0, "payload_dtype": None, **options}

    def make(params, process_group):
        return compopt.LocalSteps(inner(params), process_group=process_group, **options)

    world, params, optimizers = replicas(ranks, weights(shapes, dtype), make)
    for t in range(steps):
        step(world, params, optimizers, gradients(ranks, t, shapes, dtype))
    return params, optimizers


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize(("delay", "mix"), [(0, 0.0), (1, 0.0), (3, 0.0), (0, 0.5), (1, 0.5), (3, 0.25)])
def test_it_is_the_design(ranks, fragments, delay, mix):
    params, optimizers = train(ranks, 26, every=8, fragments=fragments, delay=delay, mix=mix)
    parts = PARTS if fragments == 2 else None
    wanted = oracle.train(ranks, weights(), gradients, 26, 8, adamw, parts=parts, delay=delay, mix=mix)
    assert optimizers[0].stats.round == 3
    for own, theirs in zip(params, wanted, strict=True):
        for p, q in zip(own, theirs, strict=True):
            torch.testing.assert_close(p.detach(), q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_outer_optimizer_grows_with_the_rounds(ranks):
    """Rounds of 1, 1, 1, 2, 3, 4, 6 and 8 steps; by hand, without a codec."""
    lengths, every, lr, mu = [1, 1, 1, 2, 3, 4, 6, 8], 8, 0.7, 0.9
    params, optimizers = train(ranks, sum(lengths), every=every, every_warmup_steps=15)
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
            v[i] = mu_now * v[i] + mean if mu_now else v[i]  # SGD without momentum leaves its own alone
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


@pytest.mark.parametrize("options", [{}, {"warmup_steps": 2}, {"fragments": 2, "delay": 1}])
def test_on_one_process_it_is_the_inner_optimizer_to_the_bit(options):
    params = [torch.nn.Parameter(w) for w in weights(dtype=torch.float32)]
    optimizer = compopt.LocalSteps(adamw(params), 4, every_warmup_steps=0, **options)
    for t in range(9):
        for p, g in zip(params, single(1, t)[0], strict=True):
            p.grad = g
        optimizer.step()
    for p, q in zip(params, oracle.train(1, weights(dtype=torch.float32), single, 9, 99, adamw)[0], strict=True):
        assert torch.equal(p, q)
    assert optimizer.stats.step == 9 and optimizer.stats.bytes_sent == 0


def test_simulated_on_one_process_it_takes_rounds():
    (params,), (optimizer,) = train(1, 9, every=4)
    for p, q in zip(params, oracle.train(1, weights(), gradients, 9, 4, adamw)[0], strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-12, atol=1e-12)
    assert optimizer.stats.round == 2


def single(ranks: int, t: int) -> list[list[torch.Tensor]]:
    return gradients(ranks, t, dtype=torch.float32)


@pytest.mark.parametrize("payload", ["int8", "int4", "bfloat16"])
def test_a_codec_is_the_packages_own_with_the_same_seeds(payload):
    """The oracle averages differences by ``Average``, which is held against its own oracle."""
    world, anchors, averages = replicas(
        2, weights(dtype=torch.float32), lambda ps, process_group: compopt.Average(
            torch.optim.SGD(ps, lr=1.0), payload_dtype=payload, process_group=process_group
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


@pytest.mark.parametrize("kind", ["tracked", "gaussian"])
def test_the_outer_optimizer_may_project(kind):
    def outer(anchors):
        return compopt.Separate(torch.optim.SGD(anchors, lr=0.7, momentum=0.9), **projecting(kind))

    params, optimizers = train(2, 12, torch.float32, outer=outer)
    assert all(map(torch.equal, *params))
    dense = sum(p.numel() * 4 for p in params[0])
    assert 0 < optimizers[0].stats.bytes_sent < 0.7 * dense


def state_of(optimizer) -> dict:
    return through_a_file(optimizer.state_dict())


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"delay": 2, "fragments": 2}, {"delay": 3, "mix": 0.5}])
@pytest.mark.parametrize("at", [2, 4, 5, 8])
def test_a_checkpoint_within_a_round_goes_on_to_the_bit(options, at):
    options = {"every": 4, "payload_dtype": "int8", "warmup_steps": 1, "every_warmup_steps": 0, **options}

    def make(params, process_group):
        return compopt.LocalSteps(adamw(params), process_group=process_group, **options)

    world, params, optimizers = replicas(2, weights(dtype=torch.float32), make)
    for t in range(at):
        step(world, params, optimizers, single(2, t))
    saved = [state_of(optimizer) for optimizer in optimizers]
    world2, params2, optimizers2 = replicas(2, weights(dtype=torch.float32), make)
    for own, theirs, optimizer, state in zip(params2, params, optimizers2, saved, strict=True):
        for p, q in zip(own, theirs, strict=True):
            p.data.copy_(q)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of another rank's residuals
            optimizer.load_state_dict(state)
    for t in range(at, at + 9):
        step(world, params, optimizers, single(2, t))
        step(world2, params2, optimizers2, single(2, t))
    for own, theirs in zip(params, params2, strict=True):
        assert all(map(torch.equal, own, theirs))
    assert optimizers[0].stats.round == optimizers2[0].stats.round > 1


def test_a_failed_exchange_leaves_the_inner_step_and_is_tried_again():
    params, optimizers = train(2, 3)
    world = optimizers[0].comm.world
    alone = [[p.detach().clone() for p in own] for own in params]
    inner = [torch.optim.AdamW(own, lr=1e-2) for own in alone]
    for optimizer, other in zip(optimizers, inner, strict=True):
        other.load_state_dict(copy.deepcopy(optimizer.inner.state_dict()))
    for own, other, grads in zip(alone, inner, gradients(2, 3), strict=True):
        for p, g in zip(own, grads, strict=True):
            p.grad = g
        other.step()
    world.failing_everywhere.add(world.comms[0].started)
    with pytest.raises(compopt.CommunicationError, match="step 4 was taken on rank 0, but not the exchange"):
        step(world, params, optimizers, gradients(2, 3))
    for own, expected in zip(params, alone, strict=True):
        assert all(map(torch.equal, own, expected))
    step(world, params, optimizers, gradients(2, 4))
    assert all(map(torch.equal, *params)) and optimizers[0].stats.phase == "exchanged"


def test_survivors_and_newcomers_go_on_from_the_anchors():
    params, optimizers = train(3, 6)
    before = [p.detach().clone() for p in params[0]]
    world = World(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = list(zip(optimizers[:2], world.comms, strict=True))
        world.run([optimizer.rebind_in_turns(comm) for optimizer, comm in pairs])
        assert all(map(torch.equal, params[0], before))  # what a rank has moved stays
        step(world, params[:2], optimizers[:2], gradients(2, 6))
        step(world, params[:2], optimizers[:2], gradients(2, 7))
        assert all(map(torch.equal, params[0], params[1])) and optimizers[0].stats.round == 2

        world = World(3)
        own = [torch.nn.Parameter(torch.zeros_like(w)) for w in weights()]
        new = compopt.LocalSteps(
            adamw(own), 4, every_warmup_steps=0, payload_dtype=None, process_group=World(1).comms[0]
        )
        ranks, theirs = [*optimizers[:2], new], [*params[:2], own]
        world.run([optimizer.rebind_in_turns(comm) for optimizer, comm in zip(ranks, world.comms, strict=True)])
    assert all(map(torch.equal, own, params[0]))
    for t in range(8, 12):
        step(world, theirs, ranks, gradients(3, t))
    assert all(map(torch.equal, own, params[0])) and new.stats.round == 3 == optimizers[0].stats.round


def test_a_rank_whose_parameters_are_not_finite_takes_the_others_average_and_says_so():
    params, optimizers = train(3, 3)
    world = optimizers[0].comm.world
    params[1][2].data[0, 0] = float("nan")
    optimizers[1].inner.state[params[1][2]]["exp_avg"][0, 0] = float("nan")
    with pytest.warns(UserWarning, match="rank 1 had parameters that are not finite"):
        step(world, params, optimizers, gradients(3, 3))
    assert all(p.isfinite().all() for p in params[0])
    assert all(map(torch.equal, params[0], params[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(4, 12):
            step(world, params, optimizers, gradients(3, t))
    assert all(map(torch.equal, params[0], params[1])) and optimizers[1].stats.round == 3


def test_a_gradient_that_is_not_finite_makes_that_rank_skip_its_own_step_only():
    params, optimizers = train(2, 2)
    world = optimizers[0].comm.world
    grads = gradients(2, 2)
    grads[1][3][0, 0, 0] = float("inf")
    before = [[p.detach().clone() for p in own] for own in params]
    step(world, params, optimizers, grads)
    assert [optimizer.stats.phase for optimizer in optimizers] == ["local", "skipped"]
    assert all(map(torch.equal, params[1], before[1])) and not torch.equal(params[0][0], before[0][0])
    step(world, params, optimizers, gradients(2, 3))
    assert all(map(torch.equal, *params)) and optimizers[1].stats.round == 1 and optimizers[1].stats.skipped == 1


def test_ranks_that_differ_are_told_at_the_end_of_a_round():
    params, optimizers = train(2, 3)
    world = optimizers[0].comm.world
    optimizers[1].param_groups[0]["lr"] = 0.25
    with pytest.raises(ValueError, match=r"Rank 0 has .*lr.* rank 1 has .*0\.25"):
        step(world, params, optimizers, gradients(2, 3))


def test_a_rounds_distances():
    """Two ranks that move at right angles, equally far: a cosine of 0, and a spread of 1."""
    params, optimizers = train(2, 0, torch.float32, [(2,)], lambda ps: torch.optim.SGD(ps, lr=1.0), every=1)
    world = optimizers[0].comm.world
    step(world, params, optimizers, [[torch.tensor([3.0, 0.0])], [torch.tensor([0.0, -3.0])]])
    stats = optimizers[1].stats
    assert stats.cosine == pytest.approx(0, abs=1e-6) and stats.spread == pytest.approx(1, rel=1e-6)
    assert (stats.round, stats.steps_into_round, stats.phase) == (1, 0, "exchanged")


def test_low_precision_has_float32_anchors():
    params, optimizers = train(2, 8, torch.bfloat16, payload_dtype=None)
    assert all(map(torch.equal, *params))
    for fragment in optimizers[0]._rounds.exchanges.fragments:
        for p, anchor in zip(fragment.params, fragment.anchors, strict=True):
            assert anchor.dtype == torch.float32 and torch.equal(anchor.bfloat16(), p)
    assert any(not torch.equal(a, a.bfloat16().float()) for a in fragment.anchors)


def test_a_frozen_layer_is_not_sent_and_joins_when_it_is_trained():
    params, optimizers = train(2, 4)
    world = optimizers[0].comm.world
    for own in params:
        own[2].requires_grad_(False)
    sent = []
    for t in range(4, 20):
        if t == 12:
            sent.append(optimizers[0].stats.bytes_sent)
            for own in params:
                own[2].requires_grad_(True)
        grads = [[g if p.requires_grad else None for p, g in zip(own, given, strict=True)]
                 for own, given in zip(params, gradients(2, t), strict=True)]  # fmt: skip
        step(world, params, optimizers, grads)
    assert all(map(torch.equal, *params))
    assert sent[0] == optimizers[0].stats.bytes_sent - 8 * 8192 - 8  # and its mark in the header


def test_a_group_added_within_a_round_is_exchanged():
    params, optimizers = train(2, 5)
    world = optimizers[0].comm.world
    for own, optimizer in zip(params, optimizers, strict=True):
        own.append(torch.nn.Parameter(torch.ones(64, 80, dtype=torch.float64)))
        optimizer.add_param_group({"params": [own[-1]], "lr": 0.1})
    for t in range(5, 8):
        step(world, params, optimizers, gradients(2, t, [*SHAPES, (64, 80)]))
    assert all(map(torch.equal, *params)) and not torch.equal(params[0][-1], torch.ones(64, 80, dtype=torch.float64))


def test_consolidated_it_goes_on_with_any_number_of_ranks():
    params, optimizers = train(2, 8, torch.float32, payload_dtype="int8")
    world = optimizers[0].comm.world
    world.consolidate(optimizers)
    state = state_of(optimizers[0])
    more = World(3)
    ranks = [[torch.nn.Parameter(p.detach().clone()) for p in params[0]] for _ in range(3)]
    new = [compopt.LocalSteps(adamw(own), process_group=comm) for own, comm in zip(ranks, more.comms, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for optimizer in new:
            optimizer.load_state_dict(state)
    for t in range(8, 12):
        step(more, ranks, new, gradients(3, t, dtype=torch.float32))
    assert new[0].stats.round == 3 and all(map(torch.equal, ranks[0], ranks[2]))


def received() -> int:
    """Bytes that this process has received over TCP, as the kernel counts them."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            own = os.dup(int(name))
        except OSError:
            continue
        try:
            with socket.socket(fileno=own) as one:
                if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    total += struct.unpack_from("<Q", info, 128)[0]  # tcpi_bytes_received
        except OSError:
            with contextlib.suppress(OSError):
                os.close(own)
    return total


def over_gloo(rank: int, options: dict) -> list[tuple[int, float, int, str, int]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = compopt.LocalSteps(torch.optim.AdamW(ddp.parameters(), lr=1e-2), 4, every_warmup_steps=0, **options)
    told = []
    for t in range(12):
        time.sleep(0.1)  # of an exchange gloo has a last word
        before = received()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * t + rank))
        optimizer.zero_grad()
        (ddp(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
        got = received() - before
        weights = torch.cat([p.detach().view(-1) for p in model.parameters()]).double()
        stats = optimizer.stats
        told.append((got, float(weights.abs().sum()), stats.steps_into_round, stats.phase, stats.bytes_sent))
    return told


def test_real_ranks_under_ddp_are_equal_when_a_round_ends_and_silent_until_then():
    runs = run_ranks(over_gloo, 2, {})
    for first, second in list(zip(*runs, strict=True))[3:]:  # DDP itself deals its buckets anew at first
        got, checksum, at, phase, sent = first
        if at == 0:
            # half a byte an element and scales; gloo's own headers beside that
            assert 0.9 * sent < got < 1.5 * sent + 3000 and checksum == second[1] and phase == "exchanged"
        else:
            assert (phase, sent) == ("local", 0) and checksum != second[1]
            assert got == 0 or at == 1  # the other rank may not have ended the exchange before


def test_real_ranks_apply_a_delayed_exchange_at_the_same_step():
    """Fragments and a delay over gloo end where the simulator's, which has no delays, would."""
    runs = run_ranks(over_gloo, 2, {"delay": 1, "fragments": 2, "payload_dtype": "int8"})
    assert [phase for *_, phase, _ in runs[0]] == ["local", "local", *["exchanged", "local"] * 5]
    assert [told[3] for told in runs[0]] == [told[3] for told in runs[1]]


def waits_apart(rank: int) -> float:
    from compopt._wire.comm import Comm, timeout_of

    return timeout_of(Comm().apart().group).total_seconds()


def test_what_runs_beside_others_waits_as_long_as_they_do():
    assert run_ranks(waits_apart, 2) == [20.0, 20.0]  # as tests/ranks.py says of the default group
