"""Lightning's Trainer: logs, and the rounds of local steps.

    from compopt.integrations.lightning import CompoptCallback

    Trainer(strategy="ddp", callbacks=[CompoptCallback()], ...)

Optimizers other than LocalSteps train and save without the callback too: Lightning itself calls
``consolidate_state_dict`` before it saves. With ModelParallelStrategy it does not, but the callback
does.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from .._engine.module_hooks import end_open_rounds
from .._engine.optimizer import CompressedOptimizer

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import Strategy
else:
    # Lightning has two names: prefer the imported one, then an installed one
    names = "lightning.pytorch", "pytorch_lightning"
    imported = [name for name in names if name in sys.modules]
    installed = [name for name in names if importlib.util.find_spec(name.partition(".")[0])]
    if not installed:
        raise ImportError("compopt.integrations.lightning needs Lightning: pip install lightning.")
    preferred = [*imported, *installed][0]
    Callback = importlib.import_module(f"{preferred}.callbacks").Callback
    Strategy = importlib.import_module(f"{preferred}.strategies").Strategy


class CompoptCallback(Callback):
    """Ends the running round of :class:`compopt.LocalSteps` before each validation, before each
    checkpoint, and at the end of ``fit``, because within a round models differ between ranks.

    Checkpoints are those of ``ModelCheckpoint`` and ``trainer.save_checkpoint``. With a strategy
    that collects optimizer state in its own way, as ModelParallelStrategy does, the state of every
    optimizer of compopt is consolidated before. Every
    ``trainer.log_every_n_steps`` steps the loggers get the numbers of ``optimizer.stats.as_dict()``
    as "compopt/bytes_sent" and so on.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # no hook runs before the Trainer collects the model's parameters
        save = trainer.save_checkpoint

        def end_rounds_and_save(*args: Any, **kwargs: Any) -> None:
            if not trainer.interrupted:  # other ranks may not call it then
                end_open_rounds(trainer.optimizers)
            save(*args, **kwargs)

        trainer.save_checkpoint = end_rounds_and_save
        _consolidate_before_saving(trainer.strategy)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        vars(trainer).pop("save_checkpoint", None)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        last, self._last_step = self._last_step, trainer.global_step
        if self._last_step == last or self._last_step % trainer.log_every_n_steps:
            return  # no step yet: it accumulates gradients
        for wrapped in trainer.optimizers:
            optimizer = getattr(wrapped, "optimizer", wrapped)
            if isinstance(optimizer, CompressedOptimizer):
                values = optimizer.stats.as_dict()
                numbers = {n: v for n, v in values.items() if isinstance(v, int | float)}
                metrics = {f"compopt/{name}": value for name, value in numbers.items()}
                for logger in trainer.loggers:
                    logger.log_metrics(metrics, step=trainer.global_step)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        end_open_rounds(trainer.optimizers)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        end_open_rounds(trainer.optimizers)


def _consolidate_before_saving(strategy: Any) -> None:
    """Have a strategy consolidate state when it collects that for a checkpoint, also after ``fit``.

    Lightning's base class does; a strategy with a method of its own may not.
    """
    if type(strategy).optimizer_state is Strategy.optimizer_state:
        return
    collect = type(strategy).optimizer_state

    def consolidate_and_collect(wrapped: Any) -> Any:
        optimizer = getattr(wrapped, "optimizer", wrapped)
        if isinstance(optimizer, CompressedOptimizer):
            optimizer.consolidate_state()
        return collect(strategy, wrapped)

    strategy.optimizer_state = consolidate_and_collect
