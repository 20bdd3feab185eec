"""Local steps between two sites of two ranks each, FSDP2 within a site: against replicas that are simulated whole."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from sim import Ranks
from torch import nn

import compopt

OPTIONS = [dict(), dict(fragments=2), dict(fragments=2, delay=1), dict(delay=2)]
STEPS = 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.scale = nn.Parameter(torch.ones(64))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh()) * self.scale


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x) - x.flip(1)).square().mean()


def made(params, process_group, **options) -> compopt.LocalSteps:
    options = {"every": 4, "growth_steps": 0, "payload_dtype": None, "max_grad_norm": 0.5, **options}
    return compopt.LocalSteps(torch.optim.AdamW(params, lr=1e-2), process_group=process_group, **options)


def sharded(**options) -> tuple[nn.Module, compopt.LocalSteps]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("sites", "ranks"))
    model = Net()
    fully_shard(model.up, mesh=mesh["ranks"])
    fully_shard(model, mesh=mesh["ranks"])
    return model, made(model.parameters(), mesh.get_group("sites"), **options)


def whole(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().full_tensor().view(-1) for p in model.parameters()])


def train(model, optimizer, rank: int, steps) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def distances(optimizer) -> tuple[float, float]:
    """How far apart sites were at the last exchange."""
    return optimizer.stats.cosine, optimizer.stats.spread


def load(path: str, options: dict) -> tuple[nn.Module, compopt.LocalSteps]:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = sharded(**options)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return model, optimizer


def on_sites(rank: int, folder: str) -> list[tuple[list[torch.Tensor], bool, tuple[float, float]]]:
    """The parameters after every second step; whether a checkpoint, loaded after the fifth, goes on to the bit; and how
    far sites are apart in the end.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict

    found = []
    for number, options in enumerate(OPTIONS):
        model, optimizer = sharded(**options)
        reached = []
        for step in range(0, STEPS, 2):
            train(model, optimizer, rank, range(step, step + 2))
            reached.append(whole(model))
        other, again = sharded(**options)
        train(other, again, rank, range(6))
        again.consolidate_state()
        path = f"{folder}/{number}"
        weights, state = get_state_dict(other, again)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
        third, resumed = load(path, options)
        for one in ((other, again), (third, resumed)):
            train(*one, rank, range(6, STEPS))
        found.append((reached, torch.equal(whole(other), whole(third)), distances(optimizer)))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("sites"))


@pytest.fixture(scope="module")
def sites(folder):
    return run_ranks(on_sites, 4, folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(OPTIONS)), ids=lambda n: str(OPTIONS[n]))
def test_two_sites_of_two_ranks_are_two_replicas(number, sites):
    """The oracle knows nothing of shards: a replica's gradient is the mean over its site."""
    options = OPTIONS[number]
    oracle = Ranks(2, Net, lambda params, process_group: made(params, process_group, **options))

    def loss(model: nn.Module, site: int, step: int) -> torch.Tensor:
        return (loss_of(model, 2 * site, step) + loss_of(model, 2 * site + 1, step)) / 2

    for i in range(STEPS // 2):
        oracle.train(loss, 2)
        for rank, found in enumerate(sites):
            expected = torch.cat([p.detach().view(-1) for p in oracle.models[rank // 2].parameters()])
            torch.testing.assert_close(found[number][0][i], expected, rtol=0, atol=1e-10)
    expected = distances(oracle.optimizers[0])
    for found in sites:
        assert found[number][2] == pytest.approx(expected, abs=0.08)  # by other signs


@pytest.mark.slow
def test_a_checkpoint_of_sites_goes_on_to_the_bit(sites):
    assert all(is_same for found in sites for _, is_same, _ in found)


def on_one_site(rank: int, folder: str) -> None:
    for number, options in enumerate(OPTIONS):
        model, optimizer = load(f"{folder}/{number}", options)
        before = whole(model)
        optimizer.end_round()
        optimizer.consolidate_state()
        assert torch.equal(whole(model), before), "its ranks hold different shards, and average nothing"
        train(model, optimizer, rank, range(6, 8))


@pytest.mark.slow
def test_one_site_goes_on_from_a_checkpoint_of_two(sites, folder):
    run_ranks(on_one_site, 2, folder)


def groups_of(rank: int) -> list[bool]:
    """Return True if the exchange and the decision of shards run over groups in which training sends nothing."""
    model, optimizer = sharded(delay=1)
    train(model, optimizer, rank, range(1))
    sync, session = optimizer._sync, optimizer._session
    pairs = [(sync.comm, session.comm), *zip(sync.shards, session.shard_communicators, strict=True)]
    return [beside.group is not training.group and beside.ranks == training.ranks for beside, training in pairs]


@pytest.mark.slow
def test_a_delayed_exchange_has_groups_of_its_own():
    assert run_ranks(groups_of, 4) == [[True, True]] * 4
