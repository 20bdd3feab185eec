"""Kills of real ranks around ``save()``: a few here, 100 in ``make soak``."""

from __future__ import annotations

import os
import random

import pytest
from snapshot_faults import CLASSES
from snapshot_kills import kill_and_resume

KILLS = int(os.environ.get("COMPOPT_KILLS", 1))
SETTINGS = [(2, "LocalSteps"), (3, "SeparateAdam")] + [(size, name) for name in CLASSES for size in (2, 3)]


@pytest.mark.parametrize("number", range(KILLS))
def test_what_killed_ranks_left_goes_on_to_the_bit(number):
    size, name = SETTINGS[number % len(SETTINGS)]
    print(kill_and_resume(size, name, random.Random(number)))
