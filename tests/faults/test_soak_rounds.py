"""A long run of local steps on four simulated ranks with faults at random: equal after every round, memory flat.

A hundred and twenty steps here; ``make soak`` takes 4,000.
"""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from conservation import everywhere
from sim import World
from table import FORMS
from test_properties import Example
from test_soak import STEPS as OF_A_CLASS
from test_soak import Soak, memory, tensors

import compopt

STEPS = OF_A_CLASS if OF_A_CLASS > 60 else 120
FAULTS = ["not finite", "lost its mind", "absent", "failure", "saved and loaded", "rank lost", "rank replaced", "ended"]
ROUNDS = next(case for case in FORMS if case.form == "rounds")


class Rounds(Soak):
    """Random events of a run in which ranks step on their own."""

    def not_finite(self, step: int) -> None:
        optimizer = self.optimizers[step % len(self.optimizers)]
        everywhere(optimizer)[0].grad.view(-1)[-1] = float("nan")

    def lost_its_mind(self, step: int) -> None:
        """One rank's parameters are not finite; where it is the only one, nobody could help it."""
        if len(self.optimizers) > 1:
            everywhere(self.optimizers[step % len(self.optimizers)])[0].data.view(-1)[0] = float("inf")

    def rank_lost(self, step: int) -> None:
        """Two stay: what one that is left alone has nobody can join without a checkpoint."""
        if len(self.optimizers) > 2:
            super().rank_lost(step)

    def failure(self, step: int) -> None:
        for world in filter(None, (self.world, self.world.beside)):
            world.failing_everywhere.add(world.comms[0].started)

    def saved_and_loaded(self, step: int) -> None:
        """Each rank from its own, on a machine that was restarted."""
        self.world = World(len(self.optimizers))
        self.optimizers = [self.resumed(o, c) for o, c in zip(self.optimizers, self.world.comms, strict=True)]
        self.backward(step)

    def rank_replaced(self, step: int) -> None:
        """A new rank that knows nothing takes the place of another, and more of them those of the lost."""
        self.optimizers.pop(step % len(self.optimizers))
        self.optimizers.append(self.make(World(1).comms[0]))
        while len(self.optimizers) < 4:
            self.optimizers.append(self.make(World(1).comms[0]))
        self.join(self.optimizers)
        self.backward(step)

    def ended(self, step: int) -> None:
        for attempt in range(3):  # a failure may be waiting for it, and one beside
            try:
                self.world.run([optimizer.end_round_as_generator() for optimizer in self.optimizers])
                break
            except compopt.CommunicationError:
                assert attempt < 2
        self.assert_equal_replicas(step)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"every": 6, "fragments": 2, "delay": 2}], ids=["plain", "streamed"])
def test_soak_of_rounds(options, capsys):
    dice = random.Random(0)
    groups = [{"shapes": [(12, 16), (20, 8)], "compress": True}, {"shapes": [(12,)], "compress": None}]
    run = Rounds(Example(ROUNDS, torch.float64, 4, groups, options, [], seed=0, repeat=False))
    counts: dict[str, int] = {}
    held, failed = (0, 0), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(STEPS):
            event = dice.choice(FAULTS) if dice.random() < 0.15 else "nothing"
            counts[event] = counts.get(event, 0) + 1
            run.backward(step, {0, 1} if event == "absent" else set())
            getattr(run, event.replace(" ", "_"))(step)
            try:
                run.world.step(run.optimizers)
            except compopt.CommunicationError:
                failed += 1
            at_rest = all(optimizer.stats.steps_into_round == 0 for optimizer in run.optimizers)
            if at_rest and run.optimizers[0].stats.phase == "exchanged" and not options:
                run.assert_equal_replicas(step)
            if step == STEPS // 2:
                held = tensors(run), memory()
        run.ended(STEPS)
    grown, more = tensors(run) - held[0], memory() - held[1]
    with capsys.disabled():
        if STEPS > 120:
            print(f"\nrounds: {STEPS} steps, {counts}, {failed} failed, {grown} tensors, {more} bytes more")
    assert failed and run.optimizers[0].stats.round > STEPS // 8
    assert abs(grown) <= 60 and (more < 8 * 2**20 or STEPS == 120)
