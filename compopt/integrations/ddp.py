"""DistributedDataParallel, without a change to the script.

A comm hook that returns each DDP bucket unchanged keeps DDP from averaging gradients densely, and
tells the optimizer which gradients backward has finished. It is registered by ``attach``, or by a
forward-pre-hook that every new optimizer sets on all modules (see ``_engine.module_hooks``).

If the optimizer's ``process_group`` has this rank only in common with DDP's, DDP averages inside a
site, and the optimizer, in ``step()``, between sites::

    mesh = init_device_mesh("cuda", (sites, gpus), mesh_dim_names=("sites", "ranks"))
    ddp = DDP(model, process_group=mesh.get_group("ranks"))
    compopt.SeparateAdam(model.parameters(), process_group=mesh.get_group("sites"))

A new optimizer over parameters of another one replaces that at once, on every rank: the old one may
still be alive on some ranks only. Optimizers over different parameters share a DDP.
"""

from __future__ import annotations

import gc
import time
import types
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Joinable, _JoinConfig
from torch.distributed.distributed_c10d import _get_default_group
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from .._engine.engine import Role
from .._engine.module_hooks import Backward, ModuleWatch, copy_first_parameters, list_parameters
from .._engine.optimizer import CompressedOptimizer, construction_callbacks, join_callbacks
from .._wire.collectives import Communicator
from .._wire.groups import list_group_ranks

# all that were made, with the handover of their gradients, if there was one
_ddps: WeakKeyDictionary[DDP, Handover | None] = WeakKeyDictionary()
_watch_of: WeakKeyDictionary[CompressedOptimizer, ModuleWatch] = WeakKeyDictionary()


def attach(model: nn.Module, optimizer: CompressedOptimizer) -> None:
    """Let ``optimizer`` average the gradients of ``model`` (a DDP, or a module that holds one)
    instead of DDP.

    It is not needed if the optimizer exists before the first forward: it then finds the DDP by
    itself. It replaces another compopt optimizer over some of the same parameters, whose ``step()``
    raises from then on.

    Raises:
        ValueError: no DDP in ``model`` holds the optimizer's parameters, or DDP and the optimizer
            have different ranks.
        RuntimeError: DDP has another comm hook already, wraps another DDP, or is in its
            ``join()``.
    """
    optimizer._engine.attached_at = time.monotonic_ns()
    if not hand_over_gradients(model.modules(), optimizer):
        raise ValueError(
            "model holds no DistributedDataParallel with parameters of this optimizer: wrap it "
            "first, or pass the wrapped model."
        )


def hand_over_gradients(modules: Iterable[nn.Module], optimizer: CompressedOptimizer) -> list[DDP]:
    """Give ``optimizer`` the gradients of those DDPs among ``modules`` that hold its parameters;
    return them. Of optimizers over the same parameters the latest wins.
    """
    params = list_parameters(optimizer)
    ddps = [m for m in modules if isinstance(m, DDP) and not params.isdisjoint(m.parameters())]
    for ddp in ddps:
        _check_handover(ddp, optimizer)
        handover = _ddps[ddp] = _ddps.get(ddp) or Handover(ddp)
        handover.add_optimizer(optimizer)
    return ddps


class Handover:
    """One DDP whose gradients go to compopt optimizers (several may share its parameters).

    The DDP owns it. Hooks of its parameters and optimizers may keep it for longer, to no effect.
    """

    def __init__(self, ddp: DDP):
        self._ddp = ref(ddp)
        # in the order in which they came, which all ranks share, with what is called at their end
        self._optimizers: WeakKeyDictionary[CompressedOptimizer, finalize[[], Any]]
        self._optimizers = WeakKeyDictionary()
        self._backward = Backward()
        # whether each parameter required a gradient in the last backward
        self._required_grad: list[bool] = []
        self._hooked: set[str] = set()  # names of parameters with a hook of ours
        self._is_idle = False  # DDP does not collect gradients: ranks take local steps
        # a copy of a DDP has a hook of ours
        ddp._comm_hooks[:] = [(hook, state) for hook, state in ddp._comm_hooks if hook is not _hook]
        if getattr(ddp, "mixed_precision", None) is not None:
            raise RuntimeError(
                "DistributedDataParallel(mixed_precision=) averages by a comm hook of its own, and "
                "compopt needs its own: leave mixed_precision out, and call the model within "
                "torch.autocast(device_type, dtype=torch.bfloat16)."
            )
        others = ", ".join(hook.__qualname__ for hook, _ in ddp._comm_hooks)
        try:
            ddp.register_comm_hook(self, _hook)
        except RuntimeError as error:
            raise RuntimeError(
                f"this DistributedDataParallel has a comm hook already ({others}), and compopt "
                "needs its own: remove the other hook, or train with torch.optim."
            ) from error

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Return None for a copy or a pickle of the DDP: its hook has no optimizers."""
        return type(None), ()

    @property
    def ddp(self) -> DDP:
        """The DDP, while it is alive."""
        ddp = self._ddp()
        assert ddp is not None
        return ddp

    # Optimizers

    def add_optimizer(self, optimizer: CompressedOptimizer) -> None:
        """Give ``optimizer`` the gradients, in place of earlier ones over the same parameters."""
        if optimizer._engine.role is Role.WRAPPED:
            return
        params = list_parameters(optimizer)
        for other in self.optimizers:
            if other._engine.role is Role.WRAPPED:
                self._optimizers.pop(other).detach()
            elif other is not optimizer and not params.isdisjoint(list_parameters(other)):
                if other._engine.attached_at > optimizer._engine.attached_at:
                    optimizer._engine.mark_replaced()
                    return
                self._optimizers.pop(other).detach()
                other._engine.mark_replaced()
        if groups_form_site(self.ddp, optimizer):
            join_site(self.ddp, optimizer)
        if optimizer not in self._optimizers:
            optimizer.step_callbacks.append(self.on_step)
            self._optimizers[optimizer] = finalize(optimizer, self.collect_gradients)
        self._required_grad = []
        self.register_parameter_hooks()
        optimizer._engine.role = Role.ACTIVE

    @property
    def optimizers(self) -> list[CompressedOptimizer]:
        """Those that are alive, the first one first."""
        return list(self._optimizers)

    # Backward

    @property
    def is_inside_site(self) -> bool:
        """True if DDP averages gradients inside a site, before the optimizer does between sites."""
        return any(optimizer._engine.site is not None for optimizer in self.optimizers)

    @property
    def is_by_parameter(self) -> bool:
        """True if exchanges may start at any time in backward, because neither DDP nor another
        optimizer starts any there.
        """
        if (ddp := self._ddp()) is None or len(self._optimizers) != 1:
            return False
        return not (ddp.find_unused_parameters or ddp.static_graph or self.is_inside_site)

    def register_parameter_hooks(self) -> None:
        """Register hooks that report each gradient, sooner than DDP's buckets of 25 MB."""
        for name, p in self.ddp.named_parameters():
            if p.requires_grad and name not in self._hooked:
                self._hooked.add(name)
                p.register_post_accumulate_grad_hook(self.on_gradient)

    @_disable_dynamo  # which runs on in a backward that is part of a compiled step
    def on_gradient(self, p: Tensor) -> None:
        if self.is_by_parameter and (self.ddp.require_backward_grad_sync or self._is_idle):
            self.on_gradients_ready([p])

    def on_gradients_ready(self, params: list[Tensor]) -> None:
        """Tell the optimizers that backward has finished ``params``."""
        if self._backward.is_new(self._on_backward_end):
            _check_join(self.ddp, self.optimizers)
            required_grad = [p.requires_grad for p in self.ddp.parameters()]
            if required_grad != self._required_grad:
                self._check_all_owned()
                self.register_parameter_hooks()
                self._required_grad = required_grad
        for optimizer in self.optimizers:
            if self._is_idle:
                optimizer._engine.ddp_left_gradients = True
            # DDP writes the averages of a site when backward has ended
            optimizer.gradients_ready([] if self.is_inside_site else params)

    def _on_backward_end(self) -> None:
        for optimizer in self.optimizers:
            optimizer.backward_done()

    def _check_all_owned(self) -> None:
        """Raise RuntimeError if a trainable parameter belongs to no optimizer of compopt."""
        ddp = self.ddp
        owned = {p for optimizer in self.optimizers for p in list_parameters(optimizer)}
        trainable = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
        unowned = [name for name, p in trainable.items() if p not in owned]
        unowned = [name for name in unowned if name not in ddp.parameters_to_ignore]
        if unowned:
            raise RuntimeError(
                f"{len(unowned)} parameters of this DistributedDataParallel belong to no compopt "
                f"optimizer ({', '.join(unowned[:3])}, ...), and nobody would average their "
                "gradients: give them to the optimizer (compress=False keeps them dense) or set "
                "requires_grad=False. Of two optimizers that share parameters (a trunk) the later "
                "takes all: make one optimizer, with a group for each part."
            )

    # Between steps

    def on_step(self) -> None:
        """Make DDP idle if the next step is local: it then copies no gradients into its buckets and
        back, as within its ``no_sync()``.
        """
        if any(optimizer.averages_gradients for optimizer in self.optimizers):
            self.collect_gradients()
        elif self.is_by_parameter:
            self._is_idle, self.ddp.require_backward_grad_sync = True, False

    def collect_gradients(self) -> None:
        """Let DDP collect gradients again, because they are averaged again."""
        if self._is_idle and (ddp := self._ddp()) is not None:
            self._is_idle = False
            # not by nn.Module's own way, which needs modules that the end of Python has cleared
            vars(ddp)["require_backward_grad_sync"] = True


# DDP requires these names, and no annotations that are strings, as they would be here
@_disable_dynamo
def _hook(state, bucket):  # type: ignore[no-untyped-def]
    """Return DDP's bucket unchanged; averaged as by DDP if no optimizer of compopt is left, and
    inside a site.
    """
    handover: Handover | None = state
    if handover is None:  # in a copy of a DDP
        return allreduce_hook(_get_default_group(), bucket)
    optimizers = handover.optimizers
    if not optimizers:
        return allreduce_hook(handover.ddp.process_group, bucket)
    is_in_backward = torch._C._current_graph_task_id() >= 0  # not on a rank without data
    if is_in_backward and not handover.is_by_parameter:
        handover.on_gradients_ready(bucket.parameters())
    for optimizer in optimizers:
        optimizer._engine.ddp_left_gradients = True
    if handover.is_inside_site:
        return allreduce_hook(handover.ddp.process_group, bucket)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _check_handover(ddp: DDP, optimizer: CompressedOptimizer) -> None:
    """Raise if ``optimizer`` cannot average the gradients of ``ddp``."""
    _check_join(ddp, [optimizer])
    if any(isinstance(m, DDP) for m in ddp.module.modules()):
        raise RuntimeError(
            "a DistributedDataParallel wraps another one, and both collect the same gradients: "
            "wrap the model once."
        )
    if ddp._use_python_reducer:  # it gives a hook no buckets
        raise RuntimeError(
            "DistributedDataParallel was made with torch._dynamo.config.optimize_ddp = "
            "'python_reducer', which a compopt optimizer cannot replace: set "
            "optimize_ddp = 'ddp_optimizer' before the model is wrapped."
        )
    if optimizer._engine.role is Role.WRAPPED:
        return
    ddp_ranks = list_group_ranks(ddp.process_group)
    if ddp_ranks is None:
        raise RuntimeError(
            "the process group of this DistributedDataParallel was destroyed: wrap the model anew."
        )
    # the optimizer may have no group, or a destroyed one, which the next step reports
    ranks = list_group_ranks(optimizer.comm.group) or ddp_ranks
    if set(ranks) != set(ddp_ranks) and not groups_form_site(ddp, optimizer):
        raise ValueError(
            f"process_group of the optimizer has ranks {ranks}, DistributedDataParallel's has "
            f"{ddp_ranks}: give both the same group, or groups with one rank in common (DDP the "
            "ranks of a site, the optimizer one rank of every site)."
        )


# Sites


def groups_form_site(ddp: DDP, optimizer: CompressedOptimizer) -> bool:
    """Return True if DDP's ranks are a site, of which the optimizer's group has this rank only, and
    others of other sites.
    """
    if optimizer.comm.may_grow:  # over ranks of other launches
        return len(list_group_ranks(ddp.process_group) or ()) > 1
    ranks = {*(list_group_ranks(optimizer.comm.group) or ())}
    site = {*(list_group_ranks(ddp.process_group) or ())}
    return len(ranks) > 1 and ranks != site and len(ranks & site) == 1


def join_site(ddp: DDP, optimizer: CompressedOptimizer) -> None:
    """Let ``optimizer`` decide together with the other ranks of this site, and begin with the
    parameters of the first site, as DDP begins with those of the first rank.
    """
    engine, site = optimizer._engine, Communicator(ddp.process_group)
    if engine.site is not None and engine.site.ranks == site.ranks:
        return
    engine.site = site
    if engine.steps == 0:
        copy_first_parameters(engine)
    engine.rebuild_buckets()


def _list_alive(ddps: Iterable[DDP]) -> list[DDP]:
    """Return those of ``ddps`` whose constructor succeeded and whose process group still exists."""
    complete = [ddp for ddp in ddps if "process_group" in vars(ddp)]
    return [ddp for ddp in complete if list_group_ranks(ddp.process_group) is not None]


# Join: ranks that run out of data


def _check_join(ddp: DDP, optimizers: Iterable[CompressedOptimizer]) -> None:
    """Raise RuntimeError if a DDP is in a ``Join`` that lacks its optimizers, or has them first."""
    if not ddp._join_config.enable:
        return
    advice = "write `with Join([ddp_model, optimizer]):` (torch.distributed.algorithms.join)."
    for optimizer in optimizers:
        config = optimizer._join_config
        if config is None:
            raise RuntimeError(
                "DistributedDataParallel.join() lets ranks end at different steps, but a compopt "
                "optimizer exchanges in step(), which a rank that has ended no longer calls: "
                f"{advice}"
            )
        if config.is_first_joinable:
            raise RuntimeError(
                f"DistributedDataParallel has to come before its optimizer in Join: {advice}"
            )


def _on_join(optimizer: CompressedOptimizer) -> None:
    """Take over the DDPs of an optimizer also on a rank that will never run a forward, and arrange
    for its join to end before DDP copies the parameters of one rank to all.
    """
    models = _list_alive(thing for thing in gc.get_objects() if issubclass(type(thing), DDP))
    optimizer._engine.attached_at = time.monotonic_ns()
    for ddp in hand_over_gradients(models, optimizer):
        ddp.__dict__["_sync_final_model"] = types.MethodType(_end_join, ddp)


def _end_join(ddp: DDP, is_last_joiner: bool) -> None:
    """End the join of the optimizers of ``ddp``, and then its own."""
    del ddp.__dict__["_sync_final_model"]
    if handover := _ddps[ddp]:
        for optimizer in handover.optimizers:
            optimizer.end_join()
    ddp._sync_final_model(is_last_joiner)
    ddp._join_config = _JoinConfig.construct_disabled_join_config()


def _on_construction(optimizer: CompressedOptimizer) -> None:
    """Take the gradients of DDPs that are known already; find all others at their first forward."""
    optimizer._engine.attached_at = time.monotonic_ns()
    known = _list_alive(ddp for ddp, handover in [*_ddps.items()] if handover)
    integrated = hand_over_gradients(known, optimizer)
    watch = ModuleWatch(optimizer, hand_over_gradients, integrated, _has_ddp_to_find)
    _watch_of[optimizer] = watch


def _has_ddp_to_find(optimizer: CompressedOptimizer) -> bool:
    """Return whether a DDP with parameters of ``optimizer`` has been handed to no optimizer."""
    params = list_parameters(optimizer)
    others = _list_alive(ddp for ddp, handover in [*_ddps.items()] if not handover)
    return any(not params.isdisjoint(ddp.parameters()) for ddp in others)


def _on_registration(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Watch for the first forward of a new DDP around a model whose optimizers watch no longer:
    they have found a DDP for all parameters, or stepped on gradients that came without one.
    """
    if isinstance(module, DDP) and name == "module" and child is not None:
        _ddps.setdefault(module)
        params = set(child.parameters())
        for optimizer, watch in [*_watch_of.items()]:
            is_found = optimizer._engine.role is Role.ACTIVE and not watch.is_active
            if is_found and not params.isdisjoint(list_parameters(optimizer)):
                _watch_of[optimizer] = ModuleWatch(optimizer, hand_over_gradients)


construction_callbacks.append(_on_construction)
register_module_module_registration_hook(_on_registration)
join_callbacks.append(_on_join)
Joinable.register(CompressedOptimizer)
