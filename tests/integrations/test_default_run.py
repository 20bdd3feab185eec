"""nanoGPT's shape with nothing but the class swapped: loss, and bytes of the whole run as the sockets count them."""

from __future__ import annotations

import pytest
from in_place import as_torchrun_would
from ranks import run_ranks
from test_scripts import run
from user_scripts import NANOGPT

LINE = "torch.optim.AdamW(optim_groups, lr=learning_rate, betas=betas)"
SWAPPED = "compopt.SeparateAdam(optim_groups, lr=learning_rate, betas=betas)"
# As many sequences a step, in half as many backwards.
HALF = ("gradient_accumulation_steps = 8, 16, 4", "gradient_accumulation_steps = 16, 16, 2")
# Text that can be learnt but for its noise: one token in ten is any. As it stands the script's loss goes to 0.
NOISY = (
    "    return x[:, :-1].contiguous()",
    "    x = torch.where(torch.rand(x.shape, generator=data) < 0.1, torch.randint(64, x.shape, generator=data), x)\n"
    "    return x[:, :-1].contiguous()",
)


def both(rank: int, folder: str) -> list[dict]:
    as_torchrun_would(rank, 2)
    source = NANOGPT.replace("max_iters, warmup_iters, dtype = 40, 5", "max_iters, warmup_iters, dtype = 199, 5")
    source = source.replace(*NOISY).replace(*HALF)
    assert LINE in source and "199" in source and "torch.rand(" in source and HALF[1] in source
    return [run(source, rank, folder), run(source.replace(LINE, SWAPPED), rank, folder)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
def test_by_default_two_hundred_steps_take_a_tenth_of_the_bytes(tmp_path):
    """Measured: 1.060 and 1.063 times AdamW's loss, 10.2 % of its bytes as they are counted, on the sockets 3 % more.

    Without a start the loss is 1.10 to 1.11 times AdamW's, after 30 steps 1.05: the text is a permutation of 64 tokens,
    whose matrix has full rank.
    """
    for rank, (adamw, ours) in enumerate(run_ranks(both, 2, str(tmp_path))):
        losses = [sum(one["losses"][-20:]) / 20 for one in (adamw, ours)]
        assert ours["class"] == "SeparateAdam" and ours["equal"] and len(ours["losses"]) == 200
        assert losses[1] <= 1.08 * losses[0]
        assert ours["counted"] <= 0.103 * adamw["dense"]
        broadcast = adamw["dense"] / 200  # of the parameters, DDP's, by rank 0
        assert 0 < ours["sent"] - ours["counted"] - broadcast * (rank == 0) < 0.05 * ours["counted"]
