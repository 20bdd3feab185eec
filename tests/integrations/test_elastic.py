"""A run on torchrun agents of this machine: a worker is killed, and the run goes on. `make elastic`: all events."""

from __future__ import annotations

import pytest
from elastic_run import SMALL, Fleet, last_losses, lost_steps
from ranks import HANG_GUARD

STEPS, EVERY = 60, 5


@pytest.fixture
def fleet(tmp_path):
    arguments = [*SMALL, "--steps", str(STEPS), "--every", str(EVERY), "--growth", "1"]
    fleet = Fleet(tmp_path, arguments)
    yield fleet
    fleet.end()


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_worker_costs_at_most_the_round_and_the_snapshot_that_were_underway(fleet):
    fleet.add(0)
    fleet.add(1)
    fleet.wait_until(lambda lines: any(line["ranks"] == 2 and line["step"] >= 20 for line in lines), HANG_GUARD)
    fleet.kill_worker(1)
    assert fleet.finish(HANG_GUARD) == [0, 0], fleet.describe()
    lines = fleet.lines()
    lost = lost_steps(lines)
    assert lost, "the run was interrupted"
    assert max(steps for steps, _ in lost) <= 2 * EVERY, fleet.describe()
    assert {line["step"] for line in lines} == set(range(1, STEPS + 1)) and lines[-1]["step"] == STEPS
    first = sum(line["loss"] for line in lines[:5]) / 5
    assert last_losses(lines, STEPS, 5) < first - 1


@pytest.mark.slow
@pytest.mark.long
def test_a_run_that_is_started_again_after_its_last_step_ends(fleet):
    """As when a worker is killed between the last snapshot and the end of the others."""
    for _ in range(2):
        fleet.open_store()
        fleet.add(0)
        assert fleet.finish(HANG_GUARD) == [0], fleet.describe()
    assert [line["step"] for line in fleet.lines()] == [*range(1, STEPS + 1)]
