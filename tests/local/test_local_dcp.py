"""torch.distributed.checkpoint of local steps: within a round, on 2, 3 and 1 real ranks, and with FSDP2 shards."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conformance import Small
from ranks import run_ranks
from slow_rows import slow_but
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_map

import compopt

ROUNDS = [dict(), dict(fragments=2, delay=2), dict(dense_steps=2, delay=1)]
Flat = dict[str, torch.Tensor]


def made(**options) -> tuple[torch.nn.Module, compopt.LocalSteps]:
    torch.manual_seed(0)
    model = DDP(Small(), find_unused_parameters=True)
    options = {"every": 4, "growth_steps": 0, "payload_dtype": "int4", **options}
    return model, compopt.LocalSteps(torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def train(model, optimizer, rank: int, steps) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        (model(x) - x.flip(1)).square().mean().backward()
        optimizer.step()


def save(model, optimizer, folder: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(model, optimizer, folder: str, key: str = "") -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.load({f"{key}model": weights, f"{key}optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def flat(model, optimizer) -> Flat:
    """All tensors of model and optimizer, and the step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = copy.deepcopy(optimizer.state_dict()["state"])
    found = {f"p{i}": p.detach().clone() for i, p in enumerate(model.parameters())}

    def add(prefix: str, entry: dict) -> None:
        for name, value in entry.items():
            if isinstance(value, dict):
                add(f"{prefix}.{name}", value)
            else:
                found[f"{prefix}.{name}"] = value

    for place, entry in state.items():
        add(str(place), entry)
    return found


def goes_on(rank: int, before: str | None, after: str, options: dict, steps: tuple[int, int]) -> tuple[Flat, Flat]:
    """Load, train and save; the states that were loaded and saved."""
    model, optimizer = made(**options)
    if before:
        load(model, optimizer, before)
    loaded = flat(model, optimizer)
    train(model, optimizer, rank, range(*steps))
    optimizer.consolidate_state()
    save(model, optimizer, after)
    return loaded, flat(model, optimizer)


def assert_same(a: Flat, b: Flat) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("options", slow_but(lambda options: options == ROUNDS[1], ROUNDS), ids=str)
def test_from_2_ranks_to_3_to_1_within_a_round(options, tmp_path):
    folders = [str(tmp_path / name) for name in "abc"]
    before, then = None, None
    for ranks, folder, steps in zip((2, 3, 1), folders, ((0, 6), (6, 11), (11, 13)), strict=True):
        found = run_ranks(goes_on, ranks, before, folder, options, steps)
        for loaded, saved in found:
            assert_same(saved, found[0][1])
            if then is not None:
                assert_same(loaded, then)
        before, then = folder, found[0][1]
        if ranks > 1:
            anchors = [name for name in then if name.endswith("outer.fragment")]
            assert [int(then[name]) >= 0 for name in anchors].count(True) > 3
            assert any(then[name].any() for name in then if name.endswith("momentum_buffer"))
            assert any(then[name].any() for name in then if "outer.optimizer.residual" in name)


def own_states(rank: int, folder: str, options: dict) -> tuple[Flat, Flat]:
    """The states that each rank goes on to, from memory and from what it alone has saved under its own name."""
    model, optimizer = made(**options)
    train(model, optimizer, rank, range(6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, state = get_state_dict(model, optimizer)
    own = {f"rank {rank} model": weights, f"rank {rank} optimizer": state}
    dcp.save(tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, own), checkpoint_id=folder)
    again, other = made(**options)
    load(again, other, folder, f"rank {rank} ")
    for one in ((model, optimizer), (again, other)):
        train(*one, rank, range(6, 13))
    return flat(model, optimizer), flat(again, other)


@pytest.mark.parametrize("options", slow_but(lambda options: options == ROUNDS[2], ROUNDS), ids=str)
def test_each_rank_goes_on_from_its_own_state_to_the_bit(options, tmp_path):
    """Also while an exchange is on its way."""
    for before, after in run_ranks(own_states, 2, str(tmp_path), options):
        assert_same(before, after)
