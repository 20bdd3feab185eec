"""Every optimizer of the table reaches the stated loss of every toy problem, on 1 and 4 ranks.

The losses were measured with the oracles written from the papers; plain SGD at its best learning rate does not get
there.
"""

from __future__ import annotations

import problems
import pytest
from sim import Ranks
from table import CASES, Case


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", problems.NAMES)
@pytest.mark.parametrize("case", [case for case in CASES if case.problems], ids=lambda case: case.name)
def test_reaches_the_stated_loss(case: Case, name: str, ranks: int):
    toy = problems.problem(name)
    options = {**case.problems, **({"warmup_steps": round(0.15 * toy.steps)} if case.compressed else {})}
    world = Ranks(
        ranks,
        lambda: toy.make_model(0).double(),
        lambda params, process_group: case.new(
            params, lr=toy.lr, weight_decay=0.0, process_group=process_group, **options
        ),
    )
    for step in range(toy.steps):
        for optimizer in world.optimizers:
            optimizer.param_groups[0]["lr"] = toy.lr_at(step)
        world.train(lambda model, rank, step: toy.loss(model, rank, ranks, step), 1)
    world.assert_replicas_equal()
    limit = case.limits.get(name, toy.limit(case.method))
    assert toy.evaluate(world.models[0]) < limit < toy.reached["sgd"]
