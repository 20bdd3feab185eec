"""Optimizers that a user of timm registers: `train.py --device-modules timm_optimizers --opt OPTIMIZER ...`."""

from frameworks import NAMES, make_optimizer, report
from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry
from torch.nn.parallel import DistributedDataParallel

import __main__

train_one_epoch = __main__.train_one_epoch
make_replica = DistributedDataParallel.__init__
losses: list[float] = []


def make_on_cpu(self, model, device_ids=None, **options):
    make_replica(self, model, **options)


def register(name):
    def make(params, lr, weight_decay=0.0, **options):
        optimizer = make_optimizer(name, params, lr, clip=1.0, weight_decay=weight_decay, **options)
        if name in ("separate", "local"):  # train.py calls it on all ranks, before it evaluates and saves
            optimizer.sync_lookahead = lambda: save(optimizer)
        return optimizer

    default_registry.register(OptimInfo(name=name, opt_class=make))


def save(optimizer):
    if hasattr(optimizer, "end_round"):
        optimizer.end_round()
    optimizer.consolidate_state()


def train_and_report(epoch, model, *rest, **options):
    found = train_one_epoch(epoch, model, *rest, **options)
    losses.append(found["loss"])
    report(model, losses=losses)
    return found


for optimizer_name in NAMES[1:]:
    register(optimizer_name)
DistributedDataParallel.__init__ = make_on_cpu
__main__.train_one_epoch = train_and_report
