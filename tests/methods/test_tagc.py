"""TagcAdamW against Algorithm 1 written on dense tensors, and what is the class's own."""

from __future__ import annotations

import functools

import pytest
import torch
from oracles import TagcOracle
from problems import COMPRESSED, gradients, replicas, step, weights
from slow_rows import in_turn
from torch import nn

import compopt

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
