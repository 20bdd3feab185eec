"""Options are read in every step, and checked and rendered only where they have changed."""

from __future__ import annotations

import pytest
import torch
from conformance import Small, every_average, loss
from sim import Ranks
from table import by_name

import compopt
from compopt._engine import handshake, options


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
    count(handshake, "verify_peers", "compared")
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
    before = [optimizer._session.options.message_options for optimizer in ranks.optimizers]
    ranks.train(loss, 1)
    is_wrapper = hasattr(ranks.optimizers[0], "base")  # whose base has the rate, and checks it
    assert counted() == dict(rendered=2, checked=0 if is_wrapper else 2, compared=0)
    assert all(
        optimizer._session.options.message_options is text
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
