"""A tensor that no rank has a gradient for, in the step that chooses masks: what it owes is not lost."""

from __future__ import annotations

import torch
from conformance import every_average, loss, make_ranks
from conservation import TOLERANCE, Ledger


@every_average
def test_a_tensor_absent_for_a_step_is_conserved(case):
    for missing in (4, 6):  # counted from 0; RadiusAdamW chooses its masks anew in the fifth step
        ranks = make_ranks(case, 2, torch.float64)
        for step in range(9):
            ranks.backward(loss)
            if step == missing:
                for model in ranks.models:
                    model.up.weight.grad = None
            books = Ledger(case, ranks.optimizers)
            ranks.world.step(ranks.optimizers)
            ranks.steps += 1
            assert books.check(ranks.optimizers) < TOLERANCE[torch.float64]
        ranks.assert_replicas_equal()
