"""Starting in backward: stale payloads, the transaction, gradients that change after they were sent, the order."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from deep import Deep, loss
from ranks import run_ranks
from sim import Deadlock, Ranks
from slow_rows import in_turn
from table import projecting
from torch import nn
from torch.distributed.algorithms.join import _JoinConfig
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._engine.exchange import StalenessCheck
from compopt._state import buckets
from compopt._state import buckets as _buckets
from compopt._wire.in_flight import PendingCollective


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 40_000)
    build = lambda params, process_group: compopt.RadiusAdamW(  # noqa: E731
        params, lr=1e-2, density=0.3, interval=4, dense_steps=2, process_group=process_group
    )
    return lambda size=2: Ranks(size, Deep, build)


def run_backward(ranks: Ranks) -> None:
    """Do as the DDP hook: all gradients are ready, bucket for bucket, then backward ends."""
    for _, model, optimizer in ranks:
        optimizer.gradients_ready(reversed(list(model.parameters())))
        optimizer.backward_done()


def train(ranks: Ranks, steps: int, between=lambda ranks, step: None, overlap: bool = True) -> None:
    for _ in range(steps):
        ranks.backward(loss)
        if overlap:
            run_backward(ranks)
        between(ranks, ranks.steps)
        ranks.world.step(ranks.optimizers)
        ranks.steps += 1
        ranks.assert_replicas_equal()


def assert_same_parameters(a: Ranks, b: Ranks) -> None:
    for p, q in zip(a.models[0].parameters(), b.models[0].parameters(), strict=True):
        assert torch.equal(p, q)


def test_all_buckets_but_the_last_start_in_backward_and_nothing_else_changes(make):
    with_overlap, without = make(), make()
    train(with_overlap, 10)
    train(without, 10, overlap=False)
    stats = with_overlap.optimizers[0].stats
    assert stats.buckets > 2 and stats.early_buckets == stats.buckets - 1
    assert without.optimizers[0].stats.early_buckets == 0
    assert stats.bytes_sent == without.optimizers[0].stats.bytes_sent
    assert_same_parameters(with_overlap, without)


def test_nothing_starts_in_backward_within_a_join(make):
    """A rank without data has no backward."""
    ranks, alone = make(), make()
    train(ranks, 3)
    train(alone, 4)
    for optimizer in ranks.optimizers:
        optimizer._join_config = _JoinConfig(enable=True, throw_on_early_termination=False, is_first_joinable=False)
    train(ranks, 1)
    assert alone.optimizers[0].stats.early_buckets > 0 == ranks.optimizers[0].stats.early_buckets
    assert_same_parameters(ranks, alone)


def clip_on_rank_1(ranks: Ranks, step: int) -> None:
    nn.utils.clip_grad_norm_(ranks.models[1].parameters(), 1e-3)


def test_a_gradient_changed_after_backward_on_one_rank_makes_all_ranks_send_again(make):
    changed, without = make(), make()
    train(without, 8, clip_on_rank_1, overlap=False)
    resent = []
    with pytest.warns(UserWarning, match="max_grad_norm") as warned:
        for _ in range(8):
            train(changed, 1, clip_on_rank_1)
            resent.append([optimizer.stats.resent for optimizer in changed.optimizers])
    assert len([w for w in warned if "max_grad_norm" in str(w.message)]) == 1  # rank 0's
    assert resent == [[step == 1] * 2 for step in range(8)]  # then nothing is sent early any more
    assert_same_parameters(changed, without)


def test_gradients_that_were_written_to_but_not_changed_do_not_go_out_again(make):
    """As Hugging Face's Trainer does, which multiplies by 1 to learn a norm."""
    touched, without = make(), make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            train(touched, 1, lambda ranks, _: [p.grad.mul_(1.0) for m in ranks.models for p in m.parameters()])
            stats = touched.optimizers[0].stats
            sends_early = step in (1, 3, 5)  # not in the first, nor after a broadcast
            assert not stats.resent and (stats.early_buckets > 0) == sends_early
    train(without, 6, overlap=False)
    assert_same_parameters(touched, without)


def test_an_accumulating_backward_that_is_not_synced_makes_the_payload_stale(make):
    ranks, without = make(), make()

    def accumulate(ranks: Ranks, step: int) -> None:
        for rank, model, _ in ranks:
            loss(model, rank, step + 50).backward()

    with pytest.warns(UserWarning):
        train(ranks, 5, accumulate)
    train(without, 5, accumulate, overlap=False)
    assert_same_parameters(ranks, without)


def test_a_loss_that_is_skipped_leaves_no_trace(make):
    ranks, without = make(), make()
    train(ranks, 5)
    train(without, 5)
    ranks.backward(lambda model, rank, step: 100 * loss(model, rank, step))
    run_backward(ranks)  # zero_grad, and no step
    train(ranks, 3)
    train(without, 3)
    assert_same_parameters(ranks, without)


def test_zeroed_gradients_are_not_what_was_sent(make):
    ranks = make()
    train(ranks, 5)
    before = [p.clone() for p in ranks.models[0].parameters()]
    ranks.backward(loss)
    run_backward(ranks)
    for optimizer in ranks.optimizers:
        optimizer.zero_grad()
    ranks.world.step(ranks.optimizers)
    for p, old in zip(ranks.models[0].parameters(), before, strict=True):
        assert torch.equal(p, old)  # as torch's AdamW: no gradient, no step


def test_a_failure_on_the_wire_after_an_early_start_changes_nothing_and_the_next_step_is_right(make):
    ranks, without = make(), make()
    train(ranks, 5)
    train(without, 5)
    ranks.backward(loss)
    ranks.world.failing_everywhere.add(ranks.world.comms[0].started)  # the first bucket, in backward
    run_backward(ranks)
    before = [p.clone() for p in ranks.models[1].parameters()]
    with pytest.raises(compopt.CommunicationError):
        ranks.world.step(ranks.optimizers)
    for p, old in zip(ranks.models[1].parameters(), before, strict=True):
        assert torch.equal(p, old)
    train(ranks, 3)
    train(without, 3)
    assert_same_parameters(ranks, without)


def test_the_gradient_stays_the_ranks_own(make):
    ranks = make()
    train(ranks, 5)
    ranks.backward(loss)
    before = [[p.grad.clone() for p in model.parameters()] for model in ranks.models]
    ranks.world.step(ranks.optimizers)
    for local, model in zip(before, ranks.models, strict=True):
        for g, p in zip(local, model.parameters(), strict=True):
            assert torch.equal(g, p.grad)


def test_the_simulator_reports_ranks_that_would_hang(make):
    ranks = make()
    train(ranks, 3)
    ranks.backward(loss)
    with pytest.raises(Deadlock):
        ranks.world.run([ranks.optimizers[0].step])


def test_an_update_that_raises_stop_iteration_is_an_error(monkeypatch):
    """It must not pass for the end of the generator, and the step for applied."""

    def broken(*_):
        raise StopIteration

    broken.__module__, broken.__qualname__ = "compopt.adams", "update_of_the_test"
    monkeypatch.setattr("compopt.adams.step_adams", broken)
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = compopt.AdamS([p])
    p.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="StopIteration"):
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 0
    with pytest.raises(RuntimeError, match="applied in part"):
        optimizer.step()


STEPS = 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 64, generator=generator, dtype=torch.float64)


def penalty_on_one_layer(net, model, step):
    """The same on all ranks, so that DDP, which does not average it, has the same mean."""
    model(batch(step)).backward()
    net.layers[3].weight.square().sum().mul(0.1).backward()


def clamped_through_data(net, model, step):
    model(batch(step)).backward()
    for p in net.parameters():
        p.grad.data.mul_(0.25)


def one_element_through_data(net, model, step):
    model(batch(step)).backward()
    net.layers[4].weight.grad.data[5, 7] = 0.125


def replaced(net, model, step):
    model(batch(step)).backward()
    net.layers[5].weight.grad = net.layers[5].weight.grad * 0.5


def halve(p):
    p.grad.mul_(0.5)


def hook_of_the_users(net, model, step):
    if step == 0:
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(halve)
    model(batch(step)).backward()


def several_backwards(net, model, step):
    model(batch(step)).backward()
    model(batch(step + 50)).backward()


WAYS = [penalty_on_one_layer, clamped_through_data, one_element_through_data, replaced, hook_of_the_users,
        several_backwards]  # fmt: skip


def train_changing(way, make) -> tuple[torch.Tensor, list[bool]]:
    torch.manual_seed(0)
    net = Net().double()
    model = DDP(net)
    optimizer = make(net.parameters())
    resent = []
    for step in range(STEPS):
        if isinstance(optimizer, compopt.RadiusAdamW) and step == 0:
            compopt.attach(model, optimizer)  # its hooks come before the user's
        way(net, model, step)
        optimizer.step()
        resent.append(getattr(getattr(optimizer, "stats", None), "resent", False))
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(net.parameters()).detach(), resent


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = Net(), Net()


def actor_and_critic(make) -> torch.Tensor:
    """One optimizer over two DDPs: the critic's gradients are clipped before the actor's backward."""
    torch.manual_seed(0)
    both = Two().double()
    actor, critic = DDP(both.actor), DDP(both.critic)
    optimizer = make(both.parameters())
    for ddp in (actor, critic) if make is lossless else ():
        compopt.attach(ddp, optimizer)
    for step in range(STEPS):
        critic(batch(step)).backward()
        for p in both.critic.parameters():
            p.grad.mul_(0.1)
        actor(batch(step + 50)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(both.parameters()).detach()


def lossless(params):
    return compopt.RadiusAdamW(params, lr=1e-2, density=1.0, interval=100, dense_steps=100)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def all_ways(rank: int) -> dict[str, list]:
    buckets.BUCKET_BYTES = 70_000
    warnings.simplefilter("ignore")
    results = {}
    for way in WAYS:
        (wanted, _), (got, resent) = train_changing(way, adamw), train_changing(way, lossless)
        results[way.__name__] = [float((wanted - got).abs().max()), resent]
    results["actor_and_critic"] = [float((actor_and_critic(adamw) - actor_and_critic(lossless)).abs().max()), []]
    return results


def test_every_change_is_seen():
    for results in run_ranks(all_ways, 2):
        for name, (distance, resent) in results.items():
            assert distance < 1e-9, f"{name}: not DDP + AdamW"
            if name not in ("several_backwards", "actor_and_critic"):
                assert resent == [False, True, False, False, False], name
            elif name == "several_backwards":
                assert not any(resent), "the second replaced the first"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 512, 1023, 4096, 65537])
def test_a_fingerprint_tells_any_change_of_one_element_and_of_all(dtype, n):
    p = nn.Parameter(torch.zeros(n, dtype=dtype))
    (bucket,) = buckets.make_buckets([{"params": [p]}])
    original = torch.randn(n + 1, generator=torch.Generator().manual_seed(n)).to(dtype)[1:]  # not at a word's start
    p.grad = original.clone()
    before = StalenessCheck(bucket)

    def is_noticed(change) -> bool:
        p.grad = original.clone()
        change(p.grad)
        return bool(before.measure())

    assert not is_noticed(lambda g: g.mul_(1.0))
    smallest = torch.finfo(dtype).eps
    assert all(is_noticed(lambda g, i=i: g[i].mul_(1 + smallest)) for i in {0, n // 2, n - 1})
    for factor in (0.5, 2.0, -1.0, 0.0):
        assert is_noticed(lambda g, factor=factor: g.mul_(factor)), factor
    p.grad = None
    assert bool(before.measure())


SPARSE = dict(lr=1e-2, density=0.3, interval=3, dense_steps=1)
TRACKED = projecting("tracked", lr=1e-2)
MAKERS = {
    "Radius": (compopt.RadiusAdamW, SPARSE),
    "Radius, int8": (compopt.RadiusAdamW, {**SPARSE, "payload_dtype": torch.int8}),
    "SCAPE": (compopt.ScapeAdamS, dict(lr=1e-3, density=0.2, density_steps=0)),
    "AdamS": (compopt.AdamS, dict(lr=1e-3)),
    "tracked": (compopt.SeparateAdam, TRACKED),
    "tracked, int8": (compopt.SeparateAdam, {**TRACKED, "payload_dtype": torch.int8}),
    "TAGC": (compopt.TagcAdamW, dict(lr=1e-2, density=0.2)),
}


class Branches(nn.Module):
    """Six branches, of which each rank takes the one or the other first: so backward finishes them in that order."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(96, 96) for _ in range(6))

    def forward(self, x: torch.Tensor, backwards: bool) -> torch.Tensor:
        order = list(self.branches)[::-1] if backwards else list(self.branches)
        return sum(branch(x).tanh().square().mean() for branch in order)


def batch_of_rank(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 96, generator=torch.Generator().manual_seed(100 * step + rank))


def another_order_on_one_rank(rank: int) -> dict[str, list[float]]:
    _buckets.BUCKET_BYTES = 40_000
    results = {}
    for name, (cls, options) in MAKERS.items():
        ends = []
        for alike in (True, False):
            torch.manual_seed(0)
            net = Branches()
            model, optimizer = DDP(net), cls(net.parameters(), **options)
            overlapped = 0
            for step in range(5):
                model(batch_of_rank(step, rank), backwards=rank == 1 and not alike).backward()
                optimizer.step()
                overlapped += optimizer.stats.early_buckets
                optimizer.zero_grad()
            ends.append(nn.utils.parameters_to_vector(net.parameters()).detach())
        theirs = ends[1].clone()
        dist.broadcast(theirs, 0)
        results[name] = [float((ends[1] - theirs).abs().max()), float((ends[0] - ends[1]).abs().max()), overlapped]
    return results


@pytest.mark.slow
def test_ranks_that_finish_gradients_in_another_order_start_the_same_collectives():
    for results in run_ranks(another_order_on_one_rank, 2):
        for name, (between_ranks, between_runs, overlapped) in results.items():
            assert between_ranks == 0, f"{name}: replicas differ"
            assert between_runs < 1e-6, f"{name}: not what ranks of one order get"
            assert overlapped > 0, name


def deep(monkeypatch, name: str) -> Ranks:
    monkeypatch.setattr(_buckets, "BUCKET_BYTES", 33_300)  # two layers

    cls, options = MAKERS[name]
    return Ranks(2, Deep, lambda params, process_group: cls(params, process_group=process_group, **options))


@pytest.mark.parametrize(("name", "begun"), in_turn(MAKERS, ((1, 3), (0, 8), (2, 1))), ids=str)
def test_ranks_of_which_one_began_fewer_buckets_in_backward(monkeypatch, name, begun):
    ranks, without = deep(monkeypatch, name), deep(monkeypatch, name)
    for step in range(5):
        for one in (ranks, without):
            one.backward(loss)
        for (_, model, optimizer), layers in zip(ranks, begun, strict=True):
            optimizer.gradients_ready(list(model.parameters())[::-1][: 2 * 2 * layers])
            optimizer.backward_done()
        if step == 3:  # all go out again, on both ranks, however many had
            for one in (ranks, without):
                one.models[0].layers[7].bias.grad.data[3] += 0.5
        for one in (ranks, without):
            one.world.step(one.optimizers)
            one.steps += 1
        ranks.assert_replicas_equal()
    for p, q in zip(ranks.models[0].parameters(), without.models[0].parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("swapped", ["buckets", "steps"])
def test_payloads_of_different_buckets_or_steps_are_told_apart(monkeypatch, swapped):
    """Of equal length, so that nobody else would notice."""
    ranks = deep(monkeypatch, "AdamS")
    ranks.train(loss, 1)
    before = [p.detach().clone() for p in ranks.models[0].parameters()]
    ranks.backward(loss)
    optimizer = ranks.optimizers[1]
    if swapped == "buckets":
        first, second = optimizer._buckets[:2]
        optimizer._buckets[:2] = [second, first]
    else:
        for bucket in optimizer._buckets:
            bucket.group = {**bucket.group, "step": bucket.group["step"] + 1}
    with pytest.raises(compopt.CommunicationError, match=r"payloads of different buckets or steps met \(bucket 0, of "):
        ranks.world.step(ranks.optimizers)
    for p, old in zip(ranks.models[0].parameters(), before, strict=True):
        assert torch.equal(p, old)


class Work:
    """A collective in flight, with the error that waiting for it raises."""

    def __init__(self, error: Exception | None):
        self.error = error

    def wait(self) -> None:
        if self.error:
            raise self.error


def test_only_what_torch_distributed_raises_is_a_failed_collective():
    """Gloo raises RuntimeError, too; what we make of the result is no business of the wire's."""
    for error in (RuntimeError("Connection closed by peer"), dist.DistBackendError("NCCL"), dist.DistNetworkError("")):
        with pytest.raises(compopt.CommunicationError, match="a mean failed"):
            PendingCollective("a mean", Work(error), lambda: None).wait()

    def ours():
        raise RuntimeError("self.size(-1) must be divisible by 4")

    with pytest.raises(RuntimeError, match="divisible by 4") as caught:
        PendingCollective("a mean", Work(None), ours).wait()
    assert not isinstance(caught.value, compopt.CommunicationError)
