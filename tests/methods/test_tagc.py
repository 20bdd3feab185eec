"""TagcAdamW against Algorithm 1 written on dense tensors, step by step, its shards, and what is the class's own."""

from __future__ import annotations

import copy
import functools
import itertools
import math

import pytest
import torch
from conformance import assert_same, snapshot
from oracles import TagcOracle
from problems import BY_DTYPE, COMPRESSED, MATRICES, each_dtype, gradients, replicas, step, weights
from sim import World
from slow_rows import in_turn
from torch import Tensor, nn

import compopt
from compopt.tagc import tagc
from compopt.tagc.tagc import count_selected

SHAPES = [(64, 65), (80,), (64, 66), (3, 41, 47), (10, 10)]
HYPER = {"lr": 3e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
# Compressed tensors lie in reverse order of registration, whole bytes of mask each: 723, 528 and 520. The cuts are at
# whole words of 8 bytes not above 1771 / 2, and 1771 / 3 and 2 * 1771 / 3.
CUTS = {
    1: [[(3, 0, 5781), (2, 0, 4224), (0, 0, 4160)]],
    2: [[(3, 0, 5781), (2, 0, 1256)], [(2, 1256, 4224), (0, 0, 4160)]],
    3: [[(3, 0, 4672)], [(3, 4672, 5781), (2, 0, 3624)], [(2, 3624, 4224), (0, 0, 4160)]],
}


def make(ranks: int, shapes=SHAPES, dtype=torch.float64, **options):
    start, options = weights(shapes, dtype), {**HYPER, **options}
    world, params, optimizers = replicas(ranks, start, functools.partial(compopt.TagcAdamW, **options))
    return world, start, params, optimizers


SKETCH = dict(codec="sketch", density=0.1, sketch_ratio=4)
OPTIONS = {
    "compact": dict(density=0.0125, max_grad_norm=10.0),
    "dense start": dict(density=0.2, dense_steps=3, maximize=True),
    "sketch 2": dict(codec="sketch", density=0.2, sketch_ratio=2, max_grad_norm=20.0),
    "sketch 4": SKETCH,
    "sketch 10": dict(codec="sketch", density=0.0125, sketch_ratio=10),
    "sketch that does not fit": dict(codec="sketch", density=0.2, sketch_ratio=10),
}


@pytest.mark.parametrize(("name", "ranks"), in_turn(OPTIONS, (2, 3, 1)))
def test_equals_the_oracle(name, ranks):
    world, start, params, optimizers = make(ranks, **OPTIONS[name])
    given = {k: v for k, v in OPTIONS[name].items() if k not in ("codec", "sketch_ratio")}
    oracle = TagcOracle(start, ranks, **HYPER, **given, shards=CUTS[ranks], compress=COMPRESSED)
    for t in range(7):
        grads = gradients(ranks, t, SHAPES)
        step(world, params, optimizers, grads)
        oracle.step(grads)
        for local in params:
            for p, wanted in zip(local, oracle.params, strict=True):
                torch.testing.assert_close(p.detach(), wanted, rtol=1e-9, atol=1e-10)
    for rank, optimizer in enumerate(optimizers):
        assert optimizer.stats.phase == "sparse"
        sent = sum(int(union.sum()) for union, c in zip(oracle.union, COMPRESSED, strict=True) if c)
        assert optimizer.stats.density == sent / (4160 + 4224 + 5781)
        if ranks < 3 or "not fit" in name:  # three independent supports are more than Table 1 is made for
            assert (optimizer.stats.leftovers > 0) == ("not fit" in name)
        for i, p in enumerate(params[rank]):
            if COMPRESSED[i]:
                held = optimizer.state[p]["residual"]
                torch.testing.assert_close(held, oracle.residual[rank][i], rtol=1e-10, atol=1e-11)
                moments = torch.cat([o.state[local[i]]["exp_avg"] for o, local in zip(optimizers, params, strict=True)])
                torch.testing.assert_close(moments.view(p.shape), oracle.m[i], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "options", [OPTIONS["sketch 2"], SKETCH, OPTIONS["sketch 10"]], ids=lambda o: str(o["density"])
)
def test_a_sketch_in_float32_is_exact_to_a_thousandth_at_the_loads_of_table_1(options):
    """Gradients of log-normal size, as transformers' are; the compact code of the same is what they should be."""
    averages = []
    for codec in ("sketch", "compact"):
        world, _, params, optimizers = make(2, [(96, 200)], torch.float32, **{**options, "codec": codec}, lr=1.0)
        grads = [
            [torch.randn(96, 200).exp() * local[0].sign()] for local in gradients(2, 0, [(96, 200)], torch.float32)
        ]
        grads = grads if codec == "sketch" else averages.pop()
        step(world, params, optimizers, grads)
        moments = torch.cat([o.state[local[0]]["exp_avg"] for o, local in zip(optimizers, params, strict=True)])
        averages += [moments, grads] if codec == "sketch" else [moments]
        assert optimizers[0].stats.leftovers == 0
    sketched, compact = averages
    assert (sketched - compact).norm() < 1e-3 * compact.norm()
    assert ((sketched != 0) == (compact != 0)).float().mean() > 0.999


def fields_added(bits: list[torch.Tensor], width: int) -> torch.Tensor:
    """The authors' index: one field of ``width`` bits an element, packed into bytes, and the bytes added up."""
    each = 8 // width
    shifts = width * torch.arange(each)
    packed = [(mask.view(-1, each).long() << shifts).sum(1) for mask in bits]
    total = sum(packed) & 255
    return ((total.unsqueeze(1) >> shifts) & ((1 << width) - 1)).view(-1) > 0


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("shared", [1.0, 0.5, 0.0])
def test_the_or_loses_no_index_where_added_fields_do(ranks, shared):
    n, left = 4096, 512
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    bits = []
    for rank in range(ranks):
        local = torch.randperm(n - left, generator=torch.Generator().manual_seed(1 + rank))[: left - int(shared * left)]
        chosen = torch.cat([order[: int(shared * left)], order[left:][local]])
        bits.append(torch.zeros(n, dtype=torch.bool).index_fill_(0, chosen, True))
    grads = [[(mask * (rank + 2.0 + torch.arange(n))).view(64, 64).double()] for rank, mask in enumerate(bits)]
    world, _, params, optimizers = make(ranks, [(64, 64)], density=0.25, weight_decay=0.0)
    step(world, params, optimizers, grads)
    union = torch.stack(bits).any(0)
    moved = torch.cat([o.state[local[0]]["exp_avg"] for o, local in zip(optimizers, params, strict=True)]) != 0
    assert torch.equal(moved, union)

    everywhere = torch.stack(bits).all(0)
    lost = (everywhere & ~fields_added(bits, 1)).sum() / max(1, int(everywhere.sum()))
    if shared == 1.0:
        assert lost > 0.8
    if ranks == 16 and shared:
        assert (everywhere & ~fields_added(bits, 4)).any()
    if ranks == 2:
        assert torch.equal(fields_added(bits, 4), union)


def named(*names: str) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.zeros(64, 64))) for name in names]


QKV = [
    "blocks.0.qkv.weight", "h.1.attn.c_attn.weight", "layers.2.self_attn.q_proj.weight", "attention.self.key.weight",
    "encoder.layers.0.self_attn.in_proj_weight", "decoder.wq.weight", "x.query_key_value.weight",
]  # fmt: skip
LINEAR = [
    "blocks.0.out.weight", "h.1.attn.c_proj.weight", "layers.2.self_attn.o_proj.weight", "blocks.0.up.weight",
    "head.weight",
    "bytes.weight", "wte.weight", "linear_q.up.weight", "layers.2.mlp.down_proj.weight", "inner.weight", "keys.weight",
]  # fmt: skip


def compressed_of(optimizer) -> list[str]:
    return sorted(n for b in optimizer._buckets for n, c in zip(b.names, b.compressed, strict=True) if c)


def test_large_matrices_are_compressed_but_not_attentions_projections():
    assert compressed_of(compopt.TagcAdamW(named(*QKV, *LINEAR))) == sorted(LINEAR)
    assert len(compressed_of(compopt.TagcAdamW([p for _, p in named(*QKV)]))) == len(QKV)  # nobody named them
    assert compressed_of(compopt.TagcAdamW(named(*QKV, *LINEAR), select=r"wq|\.up\.")) == [
        "blocks.0.up.weight", "decoder.wq.weight", "linear_q.up.weight",
    ]  # fmt: skip
    groups = [{"params": named(*QKV[:2]), "compress": True}, {"params": named(*LINEAR[:2]), "compress": False}]
    assert compressed_of(compopt.TagcAdamW(groups)) == sorted(QKV[:2])
    with pytest.raises(ValueError, match=r"select='mlp' selects by name"):
        compopt.TagcAdamW([nn.Parameter(torch.zeros(64, 64))], select="mlp")


def test_bytes_are_the_index_the_union_and_the_parameters():
    world, _, params, optimizers = make(2, [(128, 256)], torch.float32, density=0.0125)
    step(world, params, optimizers, gradients(2, 0, [(128, 256)], torch.float32))
    stats, n = optimizers[0].stats, 128 * 256
    control = len(optimizers[0]._buckets[-1].control.numbers)
    step(world, params, optimizers, gradients(2, 1, [(128, 256)], torch.float32))
    stats = optimizers[0].stats
    union = round(stats.density * n)
    assert stats.parameter_bytes == 4 * n // 2
    assert (
        stats.bytes_sent == n // 8 + 4 * (union + 2 * (1 + control)) + 40 + stats.parameter_bytes
    )  # 40: the norm and the verdict


def test_steps_of_small_tensors_send_at_least_something():
    world, _, params, optimizers = make(1, [(64, 64)], density=0.0001)
    step(world, params, optimizers, gradients(1, 0, [(64, 64)]))
    assert optimizers[0].stats.density == 1 / 4096


def test_updates_of_float32_parameters_are_gathered_in_bfloat16_with_such_a_payload():
    """Half the bytes; replicas stay equal; each update is right to bfloat16's 8 bits."""
    runs = {}
    for dtype in (None, torch.bfloat16):
        world, start, params, optimizers = make(2, dtype=torch.float32, payload_dtype=dtype, dense_steps=9)
        given = [[g.bfloat16().float() for g in local] for local in gradients(2, 0, SHAPES, torch.float32)]
        step(world, params, optimizers, given)
        for p, q in zip(*params, strict=True):
            assert torch.equal(p, q)
        runs[dtype] = optimizers[0].stats.parameter_bytes, [p - w for p, w in zip(params[0], start, strict=True)]
    (whole, exact), (half, rounded) = runs.values()
    assert 2 * half == whole
    for a, b in zip(exact, rounded, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-6)  # AdamW divides by a root of rounded gradients too
        assert not torch.equal(a, b)


class Run:
    """Ranks whose books are checked in every step: what is applied, what is owed, and what AdamW makes of it."""

    def __init__(self, dtype: torch.dtype, ranks: int = 2, **options):
        self.shapes, self.dtype = BY_DTYPE[dtype], dtype
        make = functools.partial(compopt.TagcAdamW, lr=1e-2, weight_decay=0.1, **{"density": 0.1, **options})
        self.world, self.params, self.optimizers = replicas(ranks, weights(self.shapes, dtype), make)
        self.t = 0

    def options(self, **changed) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0].update(changed)

    def whole(self, name: str, i: int) -> Tensor:
        """A sharded state, put together."""
        states = [o.state[local[i]] for o, local in zip(self.optimizers, self.params, strict=True)]
        return torch.cat([state[name] for state in states]).view(self.shapes[i]).clone()

    def residual(self, i: int) -> Tensor:
        states = [o.state[local[i]] for o, local in zip(self.optimizers, self.params, strict=True)]
        return torch.stack([state["residual"] for state in states]).mean(0)

    def counts(self, i: int) -> list[float]:
        return [float(o.state[local[i]]["step"]) for o, local in zip(self.optimizers, self.params, strict=True)]

    def step(self, absent: int | None = None, exact: bool = True) -> None:
        grads = gradients(self.world.size, self.t, self.shapes, self.dtype)
        for local in grads:
            if absent is not None:
                local[absent] = None
        before = {i: (self.params[0][i].detach().clone(), self.whole("exp_avg", i), self.whole("exp_avg_sq", i),
                      self.residual(i), self.counts(i)) for i in MATRICES}  # fmt: skip
        step(self.world, self.params, self.optimizers, grads)
        self.t += 1
        for i, (w, m, v, residual, counts) in before.items():
            if i == absent:
                assert torch.equal(self.params[0][i], w) and torch.equal(self.whole("exp_avg", i), m)
                assert torch.equal(self.residual(i), residual) and self.counts(i) == counts
                continue
            t = counts[0] + 1
            assert self.counts(i) == [t] * self.world.size
            came = torch.stack([local[i] for local in grads]).mean(0) + residual
            applied = (self.whole("exp_avg", i) - 0.9 * m) / (1 - 0.9)
            torch.testing.assert_close(applied + self.residual(i), came, rtol=1e-4, atol=1e-4)
            if not exact:  # parameters are gathered as their updates, rounded
                continue
            v = 0.999 * v + 0.001 * applied.square()
            torch.testing.assert_close(self.whole("exp_avg_sq", i), v, rtol=1e-3, atol=1e-6)
            update = self.whole("exp_avg", i) / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
            torch.testing.assert_close(self.params[0][i].detach(), w - 1e-2 * (update + 0.1 * w), rtol=1e-3, atol=2e-4)
        for local in self.params[1:]:
            for p, q in zip(self.params[0], local, strict=True):
                assert torch.equal(p, q)

    @property
    def phase(self) -> str:
        return self.optimizers[0].stats.phase


@each_dtype
@pytest.mark.parametrize("options", [{}, dict(codec="sketch", sketch_ratio=2, density=0.05)], ids=["compact", "sketch"])
def test_nothing_is_lost_and_the_owner_steps_as_adamw_does(dtype, options):
    run = Run(dtype, ranks=3, **options)
    for absent in (None, None, 2, None):
        run.step(absent)
    assert run.phase == "sparse" and run.residual(2).any()


@pytest.mark.parametrize("n", [1, 7, 4096, 16_384, 16_385, 200_000])
@pytest.mark.parametrize("density", [1.0, 0.5, 0.2, 0.1, 0.0125, 0.001])
def test_what_is_left_is_what_density_says(n, density):
    """At most that share is left, no element less, and one where there are any."""
    k = count_selected(density, n)
    assert k == max(1, math.floor(round(density * n, 6)))
    assert k == 1 or k / n <= density + 1e-9


@each_dtype
def test_every_shard_leaves_its_share(dtype):
    run = Run(dtype, density=0.25)
    run.world.record = True
    run.step()
    (sent,) = [per_rank for kind, per_rank in run.world.log if kind == "BitOr"]
    (bucket,) = run.optimizers[0]._buckets
    cuts = bucket.shards.mask_cuts
    for bits in sent:
        for rank in range(2):
            local = bits[cuts[rank] : cuts[rank + 1]]
            left = int((local.unsqueeze(1) >> torch.arange(8) & 1).sum())
            assert left == count_selected(0.25, bucket.shards.compressed_counts[rank])


@each_dtype
def test_the_norm_that_is_clipped_is_of_all_shards(dtype):
    run = Run(dtype, density=1.0, max_grad_norm=1.0)
    grads = gradients(2, 0, run.shapes, dtype)
    step(run.world, run.params, run.optimizers, grads)
    mean = [torch.stack(same).mean(0) for same in zip(*grads, strict=True)]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in mean))
    assert run.optimizers[0].stats.grad_norm == pytest.approx(norm, rel=1e-5)
    for i in MATRICES:
        torch.testing.assert_close(run.whole("exp_avg", i), 0.1 * mean[i] / norm, rtol=1e-4, atol=1e-7)


def test_a_sketch_draws_other_cells_in_every_step_and_bucket_and_the_same_on_all_ranks(monkeypatch):
    """Cells that repeat would leave the same elements over in every step."""
    drawn = []

    class Recorded(tagc.Sketch):
        def __init__(self, layout, index, counts, ratio, seed):
            drawn.append((layout.rank, seed))
            super().__init__(layout, index, counts, ratio, seed)

    monkeypatch.setattr(tagc, "Sketch", Recorded)

    def make(params, **options):
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        return compopt.TagcAdamW(groups, codec="sketch", density=0.1, **options)

    shapes = BY_DTYPE[torch.float64]
    world, params, optimizers = replicas(2, weights(shapes, torch.float64), make)
    for t in range(2):
        step(world, params, optimizers, gradients(2, t, shapes, torch.float64))
    of_rank = [[seed for rank, seed in drawn if rank == r] for r in range(2)]
    assert sorted(of_rank[0]) == sorted(of_rank[1])
    assert len(set(of_rank[0])) == 4, "2 steps of 2 buckets"


def test_moments_and_masters_are_shared_out_equally():
    world, _, params, optimizers = make(4, dtype=torch.bfloat16, density=0.1)
    step(world, params, optimizers, gradients(4, 0, SHAPES, torch.bfloat16))
    n = sum(p.numel() for p in params[0])
    for optimizer in optimizers:
        for name in ("exp_avg", "exp_avg_sq", "master"):
            held = sum(entry[name].numel() for entry in optimizer.state.values())
            assert abs(held - n / 4) <= 2 * 64 and all(e[name].dtype == torch.float32 for e in optimizer.state.values())


@pytest.mark.parametrize("late", range(4))
def test_whichever_collective_fails_nothing_has_changed(late):
    """Index, gradients, norm, and the updated parameters: all or nothing."""
    world, _, params, optimizers = make(2, density=0.1)
    for t in range(2):
        step(world, params, optimizers, gradients(2, t, SHAPES))
    before = [snapshot(optimizer) for optimizer in optimizers]
    world.failing_everywhere.add(world.comms[0].started + late)
    with pytest.raises(compopt.CommunicationError, match="step 3 was not applied"):
        step(world, params, optimizers, gradients(2, 2, SHAPES))
    for old, optimizer in zip(before, optimizers, strict=True):
        assert_same(old, snapshot(optimizer))
    step(world, params, optimizers, gradients(2, 2, SHAPES))
    assert all(torch.equal(p, q) for p, q in zip(*params, strict=True)) and optimizers[0].stats.applied_steps == 3


def test_a_consolidated_checkpoint_is_whole_and_fits_adamw():
    world, _, params, optimizers = make(3, density=1.0)
    for t in range(3):
        step(world, params, optimizers, gradients(3, t, SHAPES))
    world.consolidate(optimizers)
    saved = copy.deepcopy(optimizers[2].state_dict())
    reference = torch.optim.AdamW([nn.Parameter(p.detach().clone()) for p in params[0]], **HYPER)
    reference.load_state_dict(saved)
    step(world, params, optimizers, grads := gradients(3, 3, SHAPES))
    local = reference.param_groups[0]["params"]
    for i, p in enumerate(local):
        p.grad = sum(grads[rank][i] for rank in range(3)) / 3
    reference.step()
    for p, wanted in zip(params[1], local, strict=True):
        torch.testing.assert_close(p.detach(), wanted.detach(), rtol=1e-10, atol=1e-12)
    assert optimizers[0].state_dict()["param_groups"][0]["residuals"] == "rank 0 of 3"  # a step later it is not


def test_after_a_rank_is_lost_the_shards_of_the_others_are_kept():
    world, _, params, optimizers = make(3, density=0.1)
    for t in range(3):
        step(world, params, optimizers, gradients(3, t, SHAPES))
    before = [torch.cat([o.state[local[0]]["exp_avg_sq"] for o, local in zip(optimizers, params, strict=True)])]
    lost = slice(len(optimizers[0].state[params[0][0]]["exp_avg_sq"]), None)
    lost = slice(lost.start, lost.start + len(optimizers[1].state[params[1][0]]["exp_avg_sq"]))
    before[0][lost] = 0
    survivors, world = [0, 2], World(2)
    params, optimizers = [params[r] for r in survivors], [optimizers[r] for r in survivors]
    with pytest.warns(UserWarning, match="1 of 3 ranks are gone.* shards begin again"):
        world.run(
            [functools.partial(optimizer.rebind, comm) for optimizer, comm in zip(optimizers, world.comms, strict=True)]
        )
    world.consolidate(optimizers)
    saved = optimizers[1].state_dict()["state"][0]["exp_avg_sq"]
    torch.testing.assert_close(saved.view(-1), before[0])
    step(world, params, optimizers, gradients(2, 3, SHAPES))
    assert all(torch.equal(p, q) for p, q in zip(*params, strict=True))


def test_after_a_rebind_that_failed_no_step_is_taken_without_moments():
    world, _, params, optimizers = make(3, density=0.1)
    for t in range(3):
        step(world, params, optimizers, gradients(3, t, SHAPES))
    world.consolidate(optimizers)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    params, optimizers = params[:2], optimizers[:2]

    def rebind(world):
        pairs = zip(optimizers, world.comms, strict=True)
        world.run([functools.partial(optimizer.rebind, comm) for optimizer, comm in pairs])

    failing = World(2)
    failing.failing_everywhere.add(0)
    with pytest.raises(compopt.CommunicationError):
        rebind(failing)
    before = [p.detach().clone() for p in params[0]]
    with pytest.raises(RuntimeError, match=r"rebind\(\) of TagcAdamW failed before ranks had exchanged their shards"):
        step(failing, params, optimizers, gradients(2, 3, SHAPES))
    for saves in (optimizers[0].state_dict, optimizers[0].consolidate_state, lambda: copy.deepcopy(optimizers[0])):
        with pytest.raises(RuntimeError, match=r"rebind\(\) of TagcAdamW failed before ranks had exchanged"):
            saves()
    assert all(map(torch.equal, params[0], before))
    for optimizer, state in zip(optimizers, saved, strict=False):
        optimizer.load_state_dict(state)
    step(failing, params, optimizers, gradients(2, 3, SHAPES))
    assert all(map(torch.equal, *params)) and not torch.equal(params[0][0], before[0])
    with pytest.warns(UserWarning, match="1 of 2 ranks are gone"):
        params, optimizers = params[:1], optimizers[:1]
        rebind(World(1))
    assert any(bool(entry["exp_avg_sq"].any()) for entry in optimizers[0].state.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_rank_that_alone_missed_the_parameters_takes_the_step_over(dtype):
    world, _, params, optimizers = make(2, dtype=dtype, density=0.1, lr=1e-3)
    for t in range(3):
        step(world, params, optimizers, gradients(2, t, SHAPES, dtype))
    world.failing.add((1, world.comms[0].started + 3))  # index, gradients, norm, parameters
    with pytest.raises(compopt.CommunicationError, match="step 4 was not applied on rank 1"):
        step(world, params, optimizers, gradients(2, 3, SHAPES, dtype))
    assert [o.param_groups[0]["step"] for o in optimizers] == [4, 3]
    world = World(2)
    with pytest.warns(UserWarning, match="rank 1 had not applied step 4"):
        world.run(
            [functools.partial(optimizer.rebind, comm) for optimizer, comm in zip(optimizers, world.comms, strict=True)]
        )
    step(world, params, optimizers, gradients(2, 4, SHAPES, dtype))
    assert [o.stats.applied_steps for o in optimizers] == [5, 5]
    assert all(torch.equal(p, q) for p, q in zip(*params, strict=True))


def test_masters_are_the_same_whoever_owns_them():
    """A bfloat16 run on 1, 2 and 3 ranks with the same gradients everywhere, nothing held back: equal parameters."""
    results = []
    for ranks in (1, 2, 4):
        world, _, params, optimizers = make(ranks, dtype=torch.bfloat16, density=1.0, lr=1e-3)
        for t in range(4):
            grads = gradients(1, t, SHAPES, torch.bfloat16)[0]
            for o in optimizers:
                o._engine.ddp_left_gradients = True  # bit-identical gradients on purpose
            step(world, params, optimizers, [grads] * ranks)
        results.append(params[-1])
    for a, b in itertools.combinations(results, 2):
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_a_checkpoint_knows_which_tensors_are_compressed_by_name():
    """Attention is not, and keeps no residual: that was taken for damage."""

    def made() -> tuple[list[nn.Parameter], compopt.TagcAdamW]:
        params = [nn.Parameter(torch.ones(80, 80)) for _ in range(2)]
        named = zip(("layer.q_proj.weight", "fc.weight"), params, strict=True)
        return params, compopt.TagcAdamW(list(named), lr=1e-2, dense_steps=0)

    params, optimizer = made()
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.consolidate_state()
    again = made()[1]
    again.load_state_dict(optimizer.state_dict())
    ours, theirs = (one.state_dict()["state"] for one in (optimizer, again))
    assert "residual" not in ours[0] and torch.equal(ours[1]["residual"], theirs[1]["residual"])
