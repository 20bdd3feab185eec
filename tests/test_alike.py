"""Gradients that somebody else begins to average in the middle of a run: refused within two steps, in any class."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from sim import Ranks
from table import CASES
from test_ddp import Net, batch, plain, radius
from test_ddp_lifecycle import apart, vector
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._engine.alike import sample
from compopt._ops.samples import BITS, SAMPLE


def wrapped_again(rank: int) -> dict:
    torch.manual_seed(0)
    net = Net()
    optimizer = radius(net.parameters())
    model = DDP(net)
    for step in range(3):
        plain(model, optimizer, step, None)
    again = DDP(net)  # a new phase, a helper that wraps what it is given
    found = {}
    for step in range(3, 6):
        before = vector(net)
        try:
            plain(again, optimizer, step, None)
        except RuntimeError as error:
            found[step] = [str(error), torch.equal(vector(net), before), optimizer.param_groups[0]["step"]]
    optimizer.zero_grad()
    compopt.attach(again, optimizer)
    for step in range(6, 9):
        plain(again, optimizer, step, None)
    found["after"] = [optimizer.param_groups[0]["step"], apart(net)]

    torch.manual_seed(1)
    net = Net()
    optimizer = radius(net.parameters())
    DDP(net)(batch(0))  # found, and then not used
    try:
        plain(DDP(net), optimizer, 0, None)
    except RuntimeError as error:
        found["at once"] = str(error)

    net = DDP(Net())
    optimizer = radius(net.parameters())
    for _ in range(4):  # the same data on purpose is what a DDP takes
        net(torch.ones(2, 96)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found["same data"] = optimizer.param_groups[0]["step"]
    return found


def test_a_model_that_is_wrapped_again():
    for found in run_ranks(wrapped_again, 2):
        assert 3 not in found  # the mean of what was averaged before is right: one step shows it
        for step in (4, 5):
            message, unchanged, count = found[step]
            assert "bit-identical" in message and "compopt.attach" in message and "Accelerator(cpu=True)" in message
            assert unchanged and count == 4
        assert found["after"] == [7, 0]
        assert "bit-identical" in found["at once"]
        assert found["same data"] == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_averaged_by_anything_else(case, dtype):
    ranks = Ranks(2, lambda: nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 3)).to(dtype), case.make)

    def step(same: bool, scale: float = 1.0) -> None:
        for rank, model, _ in ranks:
            drawn = torch.Generator().manual_seed(10 * ranks.steps + (0 if same else rank))
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=drawn).mul_(scale).to(dtype)
        ranks.world.step(ranks.optimizers)
        ranks.steps += 1

    for scale in (1.0, 0.0, 1.0):  # zeros are alike, and nothing
        step(False, scale)
    step(True)
    step(False)
    step(True)  # by accident, once: looked at, and forgotten
    step(False)
    step(True)
    with pytest.raises(RuntimeError, match="bit-identical"):
        step(True)
    assert {optimizer.param_groups[0].get("step", 8) for optimizer in ranks.optimizers} == {8}
    step(False)
    ranks.assert_replicas_equal()


def test_tensors_that_see_no_data():
    """A penalty only: their gradients are alike on all ranks, and looked at once."""
    ranks = Ranks(2, lambda: nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40)]), CASES[0].make)

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        return model[1](x).square().mean() + model[0].weight.square().sum()

    for optimizer in ranks.optimizers:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    ranks.train(loss, 6)
    ranks.assert_replicas_equal()


@pytest.mark.parametrize("n", [1, SAMPLE - 1, SAMPLE, SAMPLE + 1, 5 * SAMPLE + 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_code_of_a_few_gradients(n, dtype):
    g = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)
    code = sample([None, g, torch.zeros(0, dtype=dtype)], g.device)
    assert len(code) == 2 * BITS + 1 and code[-1] == 0
    assert torch.equal(code[:BITS] + code[BITS:-1], torch.ones(BITS))
    other = g.clone()
    other[0] *= 1.01
    assert not torch.equal(sample([other], g.device), code)
    for nothing in ([], [None], [g * 0], [torch.full_like(g, float("nan"))]):
        assert sample(nothing, g.device).tolist() == [0.0] * 2 * BITS + [1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_kernels_find_the_same_code(dtype):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU then")
    from compopt._ops.triton.ops import TritonOps

    ops, draw = TritonOps(), torch.Generator().manual_seed(0)
    sizes = [1, SAMPLE - 1, SAMPLE, SAMPLE + 1, 5 * SAMPLE + 3]
    gs = [torch.randn(n, generator=draw).to(dtype) for n in sizes]
    tiny, huge = gs[1] * 0, gs[0].clone()
    tiny[510] = torch.finfo(dtype).tiny  # the last that is looked at
    huge[0] = torch.finfo(dtype).max
    wrong = [torch.full_like(gs[0], x) for x in (float("nan"), float("inf"), -float("inf"))]
    turned = torch.randn(40, 30, generator=draw).to(dtype).t()
    some = [
        gs,
        gs[:1],
        gs[::-1],
        [turned],
        [tiny],
        [huge],
        [gs[0] * 0, tiny],
        [tiny * 0, gs[0] * 0],
        gs[4:],
        [gs[4][:700]],
    ]
    for given in some + [[*gs, x] for x in wrong]:
        expected = sample(given, gs[0].device)
        for _ in range(2):  # of a table that is made, and that is kept
            assert torch.equal(sample(given, gs[0].device, ops.sample), expected)
    assert expected[-1] == 1 and sample([huge], gs[0].device, ops.sample)[-1] == 0
