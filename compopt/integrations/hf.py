"""Hugging Face's Trainer.

    from compopt.integrations.hf import CompoptCallback

    Trainer(model, args, optimizers=(optimizer, scheduler), callbacks=[CompoptCallback()], ...)
    Trainer(model, args, optimizer_cls_and_kwargs=(compopt.RadiusAdamW, options),
    callbacks=[CompoptCallback()], ...)

The optimizer trains without the callback too. The callback avoids a clip that makes payloads stale,
and checkpoints with the residuals of rank 0 only. With LocalSteps it also ends the running round
before all ranks need the same model.
"""

from __future__ import annotations

import inspect
from typing import Any

from .._engine.checkpoint import describe_residual_source
from .._engine.module_hooks import end_open_rounds
from .._engine.optimizer import CompressedOptimizer
from .._engine.stats import Stats
from .._wire.warning import warn_on_rank_0
from ..local_steps.local_steps import LocalSteps

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import CallbackHandler
except ImportError as error:
    raise ImportError(
        "compopt.integrations.hf needs Hugging Face's transformers (pip install transformers), "
        f"whose import failed: {error}"
    ) from error


# Takes the place of ``args.max_grad_norm`` while the optimizer clips. It is compared by identity: a
# user's own 0.0 is another object.
MOVED = float("0")
# The entry of a parameter group that holds a clip given by a Trainer. Checkpoints save it.
FROM_TRAINER = "trainer_max_grad_norm"
# The numbers of which logs show the mean over steps.
AVERAGED = ("bytes_sent", "wait_seconds", "straggler_seconds")


class CompoptCallback(TrainerCallback):
    """Clip in the optimizer, end rounds and consolidate before a save, and log what crossed the
    network.

    - ``args.max_grad_norm`` moves into the optimizer's groups that have none of their own, and
      becomes 0: the averaged gradient is then clipped, not each rank's, and no payload sent in
      backward is sent again. An optimizer that has no such option (torch's) leaves the Trainer's
      clip where it was.
    - Before the Trainer saves, all ranks average their residuals (``consolidate_state``), so that
      the ``optimizer.pt`` of rank 0 holds the residuals of all.
    - The running round of :class:`compopt.LocalSteps` is ended before an evaluation, before a save
      and at the end of training, because within a round models differ between ranks.
    - The Trainer's logs gain ``grad_norm`` (of the averaged gradient), ``bytes_sent`` (by this
      rank, a step, averaged since the last log, without saves), ``bytes_dense`` (what DDP would
      have handed over), ``share`` (of DDP's bytes, since the optimizer was made, with saves),
      ``wait_seconds`` (of this rank for collectives, a step, averaged since the last log),
      ``straggler_seconds`` (the part of it spent on slower ranks), ``phase``, ``skipped_steps`` (so
      far) and ``residual_norm`` (this rank's). ``report_to`` gets them too: TensorBoard, W&B and
      the others.

    Raises ValueError if the Trainer's optimizer is not one of compopt's.
    """

    def __init__(self) -> None:
        # since the last log: the number of steps, the stats of the last one, and sums over all (a
        # list of all stats would grow without end if the Trainer never logs)
        self._count, self._last = 0, Stats()
        self._sums = dict.fromkeys(AVERAGED, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_train_end(args, state, control)  # an earlier training that raised did not end
        ours = unwrap_optimizer(kwargs["optimizer"])
        self._move_clip(args, ours)
        if isinstance(ours, LocalSteps):  # an earlier training may have loaded its best model
            ours.restart_from_loaded_weights()
        # Insert LogStats before the reporters, in place of an earlier one. The Trainer appends a
        # user's callbacks after them, and does not pass the handler to events: search the callers'
        # frames for it.
        frame = inspect.currentframe()
        while frame and (frame := frame.f_back):
            handler = frame.f_locals.get("self")
            if isinstance(handler, CallbackHandler):
                others = [c for c in handler.callbacks if not isinstance(c, LogStats)]
                handler.callbacks[:] = [LogStats(self), *others]
                return

    def _move_clip(self, args: Any, ours: CompressedOptimizer) -> None:
        """Move the clip of the arguments into the groups that have none of their own, in place of
        one that an earlier Trainer has moved there.
        """
        groups = zip(ours.option_groups, ours.param_groups, strict=False)
        pairs = [(options, group) for options, group in groups if "max_grad_norm" in options]
        # arguments that were saved in a training: the clip is that of the checkpoint
        if not pairs or (not args.max_grad_norm and hasattr(args, "_max_grad_norm")):
            return
        for options, group in pairs:
            before = group.pop(FROM_TRAINER, None)
            if options["max_grad_norm"] in (None, before):
                options["max_grad_norm"] = args.max_grad_norm or None
                if args.max_grad_norm:
                    group[FROM_TRAINER] = args.max_grad_norm
        if args.max_grad_norm:
            args._max_grad_norm, args.max_grad_norm = args.max_grad_norm, MOVED

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.max_grad_norm is MOVED:  # another Trainer may have the same arguments
            args.max_grad_norm = args._max_grad_norm
            del args._max_grad_norm

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ours = unwrap_optimizer(kwargs["optimizer"])
        self._prepare_events(ours, control)
        self._count, self._last = self._count + 1, ours.stats
        for name in AVERAGED:
            self._sums[name] += getattr(ours.stats, name)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ours = unwrap_optimizer(kwargs["optimizer"])
        step = ours.stats
        self._prepare_events(ours, control)
        if ours.stats is not step:  # a round has ended: its stats include the bytes of the step
            self._last = ours.stats
            self._sums["bytes_sent"] += ours.stats.bytes_sent - step.bytes_sent

    def _prepare_events(self, ours: CompressedOptimizer, control: Any) -> None:
        """End rounds and consolidate before the Trainer evaluates, saves or ends.

        The Trainer loads the best model, if asked to, after these events.
        """
        if control.should_evaluate or control.should_save or control.should_training_stop:
            end_open_rounds([ours])
        if control.should_save:
            ours.consolidate_state()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ours = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        # the Trainer decides after this event if the model is the best
        if args.save_strategy == "best" and isinstance(ours, CompressedOptimizer):
            ours.consolidate_state()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ours = unwrap_optimizer(kwargs["optimizer"])
        owner = describe_residual_source(ours._engine)
        is_open = getattr(ours, "round_is_open", False)
        contents = ["the model of rank 0 within a round"] if is_open else []
        contents += [f"the residuals of {owner} only"] if owner != "mean" else []
        for content in contents:
            warn_on_rank_0(
                f"the checkpoint of step {state.global_step} holds {content}, as a callback "
                "requested it after CompoptCallback ran: put CompoptCallback last in callbacks.",
                int(not state.is_world_process_zero),
            )


class LogStats(TrainerCallback):
    """Adds the values of a :class:`CompoptCallback` to logs, before a reporter reads them."""

    def __init__(self, source: CompoptCallback) -> None:
        self._source = source

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        source = self._source
        if logs is None or "loss" not in logs or not source._count:
            return
        stats, means = source._last, {name: s / source._count for name, s in source._sums.items()}
        ours = {
            **{name: getattr(stats, name) for name in ("grad_norm", "bytes_dense", "phase")},
            **means,
            "bytes_sent": round(means["bytes_sent"]),
            "share": stats.run.share,
            "skipped_steps": stats.skipped,
            "residual_norm": stats.residual_norm(),
        }
        source._count, source._sums = 0, dict.fromkeys(AVERAGED, 0.0)
        logs.update(ours)
        state.log_history[-1].update(ours)


def unwrap_optimizer(optimizer: Any) -> CompressedOptimizer:
    """Return the optimizer under Accelerate's wrapper; raise ValueError if it is not compopt's."""
    ours = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(ours, CompressedOptimizer):
        raise ValueError(
            "CompoptCallback needs an optimizer of compopt, the Trainer has "
            f"{type(ours).__name__}: pass optimizers= or optimizer_cls_and_kwargs= to the Trainer, "
            "or leave the callback out."
        )
    return ours
