"""torchtitan's command on CPUs, which it does not know: `train_titan.py --module titan_configs --config OPTIMIZER`."""

import sys
import types

import torch
from torch import _utils

_utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda *_: "cpu"
torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 30, name="cpu")
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None
torch.cpu.memory_stats = lambda *_: {}
torch.cpu.current_device = lambda: 0

from frameworks import report  # noqa: E402
from torchtitan import train  # noqa: E402
from torchtitan.distributed import fsdp  # noqa: E402

divide = fsdp.disable_fsdp_gradient_division
losses: list[float] = []


def divide_without_multiples(model: torch.nn.Module) -> None:
    """Gloo has no PREMUL_SUM. In groups of one rank torch reduces nothing, and would divide twice if it were to sum."""
    divide(model)
    is_sharded = sys.argv[-1] in ("adamw", "average", "separate")
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule) and is_sharded:
            module.set_force_sum_reduction_for_comms(True)


fsdp.disable_fsdp_gradient_division = divide_without_multiples
train_to_the_end = train.Trainer.train


def train_and_report(self: train.Trainer) -> None:
    log = self.metrics_processor.log
    self.metrics_processor.log = lambda step, loss, *rest, **more: (losses.append(loss), log(step, loss, *rest, **more))
    train_to_the_end(self)
    report(self.model_parts[0], losses=losses)


train.Trainer.train = train_and_report
train.main()
