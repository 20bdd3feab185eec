"""torchtitan on two gloo ranks, by its own command: FSDP2 with DCP checkpoints, and replicas that take local steps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from frameworks import check_resumed, check_runs, run_framework, write_titan_assets

pytest.importorskip("torchtitan")
pytestmark = pytest.mark.slow
NAMES = ["adamw", "average", "adamw_replicas", "average_replicas", "separate", "local"]


@pytest.fixture
def folder(tmp_path) -> Path:
    write_titan_assets(tmp_path)
    return tmp_path


def train(folder: Path, name: str, **environment: str) -> dict:
    arguments = "--module", "titan_configs", "--config", name
    return run_framework("train_titan.py", folder, *arguments, DUMP=f"out_{name}", **environment)


def test_its_command_with_clip_schedule_accumulation_and_killed_runs(folder):
    runs = {name: train(folder, name) for name in NAMES}
    check_runs(runs)
    check_runs({name: runs[f"{name}_replicas"] for name in ("adamw", "average")})
    for name in ("separate", "local"):
        shutil.rmtree(folder / f"out_{name}")
        train(folder, name, KILLED_IN_STEP="6")
        again = train(folder, name)
        check_resumed(again, runs[name])


def test_a_container_that_cannot_work_says_what_to_write():
    import torch

    from compopt.integrations.torchtitan import OptimizersContainer, shard_only

    model = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="needs make="):
        OptimizersContainer.Config().build(model_parts=[model])
    with pytest.raises(TypeError, match="use torchtitan's own"):
        OptimizersContainer.Config(make=lambda params, group: torch.optim.SGD(params)).build(model_parts=[model])
    with pytest.raises(ValueError, match="pipeline_parallel_degree = 1"):
        OptimizersContainer.Config(make=lambda params, group: None).build(model_parts=[model, model])
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.llama3 import model_registry

    sizes = dict(dp_replicate=2, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=2)
    with pytest.raises(ValueError, match="partial_dtensor"):
        shard_only(model_registry("debugmodel")).parallelize_fn(model, parallel_dims=ParallelDims(**sizes))
