"""litgpt's command, with DistributedDataParallel in place of FSDP1: `train_litgpt.py pretrain --config ...`."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager

import lightning
import torch
from frameworks import make_optimizer, report
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from litgpt.data import DataModule
from litgpt.finetune import lora
from torch import Tensor
from torch.utils.data import DataLoader

torch.compile = lambda model, **_: model  # ten seconds
SHARDING = FSDPStrategy if "KEEP_FSDP2" in os.environ else (FSDPStrategy, ModelParallelStrategy)


class Fabric(lightning.Fabric):
    def __init__(self, **options: object) -> None:
        if isinstance(options.get("strategy"), SHARDING):
            options["strategy"] = "ddp"
        super().__init__(**options)

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager:
        return super().init_module(empty_init=empty_init and "KEEP_FSDP2" in os.environ)

    def save(self, path: object, state: dict, **options: object) -> None:
        super().save(path, state, **options)
        report(state["model"])


lightning.Fabric = Fabric
save_adapters = lora.save_lora_checkpoint


def save_adapters_and_report(fabric: lightning.Fabric, model: torch.nn.Module, path: object) -> None:
    save_adapters(fabric, model, path)
    report(model)


lora.save_lora_checkpoint = save_adapters_and_report


class Loader(DataLoader):
    """Stateful, as those of litgpt's own data."""

    first = seen = 0

    def __iter__(self) -> Iterator[Tensor]:
        first, self.first = self.first, 0
        for self.seen, batch in enumerate(super().__iter__(), 1):
            if self.seen > first:
                yield batch

    def state_dict(self) -> dict:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict) -> None:
        self.first = state["seen"]


class Repeats(DataModule):
    """Every second token is the one before it."""

    def connect(self, tokenizer: object = None, batch_size: int = 1, max_seq_length: int = 32) -> None:
        self.batch_size, self.length = batch_size, max_seq_length

    def _load(self, seed: int) -> Loader:
        rows: Tensor = torch.randint(16, (64, self.length // 2 + 1), generator=torch.Generator().manual_seed(seed))
        return Loader(rows.repeat_interleave(2, 1)[:, : self.length + 1], batch_size=self.batch_size)

    def train_dataloader(self) -> Loader:
        return self._load(0)

    def val_dataloader(self) -> Loader:
        return self._load(1)


def is_hidden(name: str, p: Tensor) -> bool:
    return p.ndim == 2 and p.shape[0] not in (48, 256)  # the sizes of vocabularies: litgpt passes no names


def make(params: object, lr: float, max_grad_norm: float | None = None) -> torch.optim.Optimizer:
    return make_optimizer(os.environ["OPTIMIZER"], params, lr, clip=max_grad_norm, use_muon=is_hidden)


if __name__ == "__main__":
    from litgpt.__main__ import main

    main()
