"""Hugging Face's Trainer.

    from compopt.integrations.hf import CompoptCallback

    Trainer(model, args, optimizers=(optimizer, scheduler), callbacks=[CompoptCallback()], ...)
    Trainer(model, args, optimizer_cls_and_kwargs=(compopt.RadiusAdamW, options),
    callbacks=[CompoptCallback()], ...)

The optimizer trains without the callback too. The callback keeps what the Trainer does around it
from costing more than it must: a clip that would touch gradients on their way, and checkpoints with
the residuals of rank 0 only. With LocalSteps it also ends the running round where all ranks need
the same model.
"""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any

from .._engine.base import CompressedOptimizer
from .._engine.saving import whose_residuals
from .._engine.stats import Stats
from .._wire.warning import warn
from ._rounds import end_open_rounds, has_open_round

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import CallbackHandler
except ImportError as error:
    raise ImportError(
        "compopt.integrations.hf needs Hugging Face's transformers: pip install transformers."
    ) from error


class CompoptCallback(TrainerCallback):
    """Clip in the optimizer, end rounds and consolidate before a save, and log what crossed the
    network.

    - ``args.max_grad_norm`` moves into the optimizer's groups that have none of their own, and
      becomes 0: the averaged gradient is then clipped, not each rank's, and no payload sent in
      backward is sent again. An optimizer that has no such option (AdamS) leaves the Trainer's clip
      where it was.
    - Before the Trainer saves, all ranks average their residuals (``consolidate_state``), so that
      the ``optimizer.pt`` which rank 0 writes holds what all of them owe.
    - The running round of :class:`compopt.LocalSteps` is ended before an evaluation, before a save
      and at the end of training: within a round every rank holds a model of its own.
    - The Trainer's logs gain ``grad_norm`` (of the averaged gradient), ``bytes_sent`` (by this
      rank, a step, averaged since the last log), ``bytes_dense`` (what DDP would have handed over),
      ``share`` (of DDP's bytes, over the whole run), ``wait_seconds`` (of this rank for
      collectives, a step, averaged since the last log), ``straggler_seconds`` (the part of it spent
      on slower ranks), ``phase``, ``skipped_steps`` (so far) and ``residual_norm`` (this rank's).
      ``report_to`` gets them too: TensorBoard, W&B and the others.

    Raises ValueError where the Trainer's optimizer is not one of compopt's.
    """

    def __init__(self) -> None:
        self._steps: list[Stats] = []  # since the last log

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        ours = unwrap(optimizer)
        options = [group for group in ours._option_groups if "max_grad_norm" in group]
        if args.max_grad_norm and options:
            for group in options:
                if group["max_grad_norm"] is None:
                    group["max_grad_norm"] = args.max_grad_norm
            args.max_grad_norm = 0.0
        move_before_reporters(LogStats(self), inspect.currentframe())

    def on_step_end(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        self._prepare(unwrap(optimizer), control)
        self._steps.append(unwrap(optimizer).stats)

    def on_epoch_end(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        self._prepare(unwrap(optimizer), control)

    def _prepare(self, ours: CompressedOptimizer, control: Any) -> None:
        """For what the Trainer does next."""
        # A best model that the Trainer loads at the end is loaded after these events.
        if control.should_evaluate or control.should_save or control.should_training_stop:
            end_open_rounds([ours])
        if control.should_save:
            ours.consolidate_state()

    def on_evaluate(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        if args.save_strategy == "best" and isinstance(
            getattr(optimizer, "optimizer", optimizer), CompressedOptimizer
        ):
            # Whether this is the best is known only after this event.
            unwrap(optimizer).consolidate_state()

    def on_save(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        if has_open_round(unwrap(optimizer)):
            warn(
                f"the checkpoint of step {state.global_step} holds the model of rank 0 within a "
                "round, for another callback asked for it after CompoptCallback had its turn: put "
                "CompoptCallback last in callbacks.",
                int(not state.is_world_process_zero),
            )
        whose = whose_residuals(unwrap(optimizer)._session)
        if whose != "mean":
            warn(
                f"the checkpoint of step {state.global_step} holds the residuals of {whose} only, "
                "for another callback asked for it after CompoptCallback had its turn: put "
                "CompoptCallback last in callbacks.",
                int(not state.is_world_process_zero),
            )

    def add_to_logs(self, state: Any, logs: dict[str, Any]) -> None:
        """Add the values of the steps since the last log."""
        if "loss" not in logs or not self._steps:
            return
        stats, count = self._steps[-1], len(self._steps)
        ours = {
            "grad_norm": stats.grad_norm,
            "bytes_sent": round(sum(one.bytes_sent for one in self._steps) / count),
            "bytes_dense": stats.bytes_dense,
            "share": stats.run.share,
            "wait_seconds": sum(one.wait_seconds for one in self._steps) / count,
            "straggler_seconds": sum(one.straggler_seconds for one in self._steps) / count,
            "phase": stats.phase,
            "skipped_steps": stats.skipped,
            "residual_norm": stats.residual_norm(),
        }
        self._steps.clear()
        logs.update(ours)
        state.log_history[-1].update(ours)


class LogStats(TrainerCallback):
    """Adds what a :class:`CompoptCallback` has seen to logs, before a reporter reads them."""

    def __init__(self, source: CompoptCallback) -> None:
        self._source = source

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is not None:
            self._source.add_to_logs(state, logs)


def move_before_reporters(callback: LogStats, frame: FrameType | None) -> None:
    """Put a callback first in the list of the handler that has called; once.

    The Trainer appends a user's callbacks after its reporters, and no event passes the handler: it
    is looked up in the callers' frames.
    """
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler):
            others = [c for c in handler.callbacks if not isinstance(c, LogStats)]
            handler.callbacks[:] = [callback, *others]
            return
        frame = frame.f_back


def unwrap(optimizer: Any) -> CompressedOptimizer:
    """Our optimizer under Accelerate's wrapper. Raises ValueError where there is none."""
    ours = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(ours, CompressedOptimizer):
        raise ValueError(
            "CompoptCallback needs an optimizer of compopt, the Trainer has "
            f"{type(ours).__name__}: pass optimizers= or optimizer_cls_and_kwargs= to the Trainer, "
            "or leave the callback out."
        )
    return ours
