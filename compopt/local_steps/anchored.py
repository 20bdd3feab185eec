"""A wrapper with anchors: it makes, saves and loads them, and continues with other ranks.

``LocalSteps`` derives from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from .._engine.checkpoint import check_saved_groups
from .._engine.decision import StepDecision
from .._engine.engine import Engine
from .._engine.exchange import exchange_one
from .._engine.handshake import gather_json, pack_message, unpack_messages
from .._engine.missing_ranks import LOOK_AFTER, PREFIX, use_store
from .._engine.options import Group
from .._engine.resharding import catch_up, rebind_optimizer
from .._inside.bases import has_modes
from .._inside.wrapper import Wrapper
from .._state.bucket import Bucket
from .._state.tensors import HOST
from .._wire.collectives import Communicator
from .._wire.groups import ProcessGroup, Ranks
from .._wire.in_flight import looking_after
from .._wire.requests import AllGather, CommunicationError
from .anchors import Anchors, MakeOuter, assign_to_fragments
from .fragment_sync import FragmentSync
from .local_state_dict import (
    Entry,
    SavedRounds,
    read_rounds,
    save_rounds,
    split_rounds,
)
from .rounds import OpenRound, RoundCounts

ENDS = f"{PREFIX}ends round/"  # and a rank: how many collectives it has started


class AnchoredWrapper(Wrapper):
    """Wraps the optimizer of a rank's own steps, ``inner``, and keeps what outlives a step: anchors
    with their sync (``_sync``), and the counts of rounds. The subclass, ``LocalSteps``, takes
    the steps, and calls ``_sync`` to sync fragments; only this class replaces it.

    ``_make_outer``: makes the outer optimizer; None: SGD with Nesterov's momentum.
    """

    _make_outer: MakeOuter | None
    _counts: RoundCounts
    _sync: FragmentSync | None = None  # made in the first local step, if there are other ranks
    _open_round: OpenRound | None = None

    @property
    def _options(self) -> Group:
        """The options, with the number of steps."""
        return self._wrapper_groups[0]

    @property
    def _params(self) -> list[Tensor]:
        return [*chain.from_iterable(map(itemgetter("params"), self.base.param_groups))]

    @property
    def _anchors(self) -> Anchors | None:
        return None if self._sync is None else self._sync.anchors

    @property
    def has_equal_replicas(self) -> bool:
        return self._sync is None

    def before_layout(self) -> None:
        super().before_layout()
        self._has_modes = has_modes(self.base)
        # ranks step the base on gradients of their own, so what it counts or learns differs
        self._base_options &= self.given_options

    @property
    def residual_buckets(self) -> list[Bucket]:
        anchors = self._anchors
        return [*super().residual_buckets, *(anchors.buckets if anchors else ())]

    # Anchors

    def _see_ranks_and_groups(self) -> None:
        """Connect ranks, add new groups, and keep nothing of the averaged start."""
        engine = self._engine
        engine.connect_ranks().check_unchanged()
        self.lay_out_new_parameters()
        self.add_groups_of_base()
        self._take_changes()
        has_residual = any(bucket.flat["residual"].numel() for bucket in engine.buckets)
        if has_residual or engine.has_foreign_state(self.state):
            engine.rebuild_buckets()

    def _ensure_anchors(self) -> None:
        """Make anchors once there are other ranks, and something to train."""
        engine, options, counts = self._engine, self._options, self._counts
        if self.offload and not engine.comm.can_exchange(HOST):
            raise ValueError(
                "offload='outer' exchanges tensors in host memory, and the process group has no "
                "backend for those: make it by init_process_group('cpu:gloo,cuda:nccl')."
            )
        if engine.sends_nothing:
            self._drop_anchors()
        elif self._sync is None:
            counts.begun = options["step"]
            self._sync = self._make_sync(options)
        if self._sync is None:
            counts.begun = options["step"] + 1  # a round begins after this step
        else:
            self._sync.connect()

    def _make_sync(self, options: Group, fragments: list[int] | None = None) -> FragmentSync | None:
        """Make anchors in these ``fragments``, by default in those of a new run; None if nothing is
        trained.
        """
        if fragments is None:
            fragments = assign_to_fragments(self.param_groups, options["fragments"])
        if set(fragments) <= {-1}:
            return None
        params, on_host, dtype = self._params, self.offload == "outer", self.residual_dtype
        anchors = Anchors(params, fragments, options, self._make_outer, self.ops, on_host, dtype)
        return FragmentSync(self._engine, anchors)

    def _drop_anchors(self) -> None:
        if self._sync is not None:
            self._sync.cancel()
        self._sync = None

    @torch.no_grad()
    def _replace_parameters(self) -> None:
        """Lay out state for other parameters; those that stay keep their anchors."""
        entries = None if self._sync is None else self._save_rounds()
        super()._replace_parameters()
        if entries is not None:
            self._resume_rounds(self._restore_anchors(entries, self._options))

    @torch.no_grad()
    def restart_from_loaded_weights(self) -> None:
        """Begin anew with the model's weights if new ones were loaded since the last round ended.
        All ranks must have loaded them.
        """
        if self._anchors is None or self.round_is_open:
            return
        # a change of modes and back leaves rounding errors
        tolerance = 1e-4 if self._has_modes else 0.0
        with self._in_train_mode():
            if self._anchors.differ_from_params(tolerance):
                self._resume_rounds(None)

    def _check_own_params(self) -> None:
        if self._sync is not None and self._sync.anchors.are_in_params:
            raise RuntimeError(
                "the model shows anchors, not this rank's parameters: leave use_anchors() first."
            )

    def on_fallback(self) -> None:
        super().on_fallback()
        if self._anchors is not None:
            self._anchors.use_pytorch(self.ops)

    # Rounds

    @property
    def round_is_open(self) -> bool:
        """True if parameters may differ from rank to rank: after a local step, until all fragments
        have been synced, or ``end_round()`` is called.
        """
        sync = self._sync
        return sync is not None and (
            sync.running is not None or any(map(attrgetter("has_moved"), sync.anchors.tensors))
        )

    def _note_open_round(self) -> None:
        if self._sync is not None:
            step = self._options["step"]
            begun = min(step - 1, self._counts.begun)
            self._open_round = self._open_round or OpenRound(self, begun)
            self._open_round.update(self.round_is_open, step, self._engine.comm)

    # Ranks in other calls: some in ``end_round()``, others in ``save()`` or
    # ``consolidate_state()``. The first wait in a gather of messages, the others at the store. A
    # rank that waits long in ``end_round()`` posts the number of its collectives to the store. A
    # rank in another call that has started one less joins the same gather, with a message that
    # names its call. So all ranks raise together, and their collectives still match.

    @contextmanager
    def _show_end_of_round(self, sync: FragmentSync) -> Iterator[None]:
        """Say at the store that this rank waits in this block, once it has for long."""
        engine = self._engine
        if not engine.comm.can_poll_store(engine.device):
            yield
            return
        told: list[str] = []

        def tell(text: str) -> None:
            told.append(text)
            use_store(engine, lambda store: store.set(f"{ENDS}{engine.comm.rank}", text))

        try:
            with looking_after(LOOK_AFTER, lambda: tell(str(sync.comm.started))):
                yield
        finally:
            if told:
                tell("")

    def find_end_of_round(self) -> str:
        engine, sync = self._engine, self._sync
        if sync is None:
            return ""
        if sync.running is not None:
            sync.running.poll()  # the other may wait for this first
            if not sync.running.is_decided:
                return ""
        ranks = [rank for rank in range(engine.comm.size) if rank != engine.comm.rank]
        keys = [f"{ENDS}{rank}" for rank in ranks]
        texts = use_store(engine, lambda store: [store.check([k]) and store.get(k) for k in keys])
        waited_for = str(sync.comm.started + 1).encode()
        pairs = zip(ranks, texts or (), strict=False)
        waiting = [rank for rank, text in pairs if text == waited_for]
        return f"rank {waiting[0]} is in end_round() of LocalSteps" if waiting else ""

    def answer_end_of_round(self, kind: int) -> None:
        assert self._sync is not None
        nothing = torch.zeros(0, dtype=torch.int64, device=self._engine.device)
        request = AllGather(pack_message(kind, nothing))
        unpack_messages(exchange_one(self._sync.comm, request).cpu(), 0)

    # Other ranks

    @torch.no_grad()
    def _rebind(self, process_group: ProcessGroup | Ranks | Communicator | None = None) -> None:
        self._check_own_params()
        if self._sync is not None:
            self._sync.cancel()
        rebind_optimizer(self._engine, process_group, self._catch_up)

    def _catch_up(self, engine: Engine) -> None:
        """Continue from the anchors of the rank that is furthest; if no rank has any, as a step is
        caught up with.
        """
        fragments, due = self._adopt_counts()
        if not fragments:
            catch_up(engine)
            return
        self._see_ranks_and_groups()
        is_new = self._sync is None
        try:
            self._sync = self._sync or self._make_sync(self._options, fragments)
            if is_new and self._sync is not None:
                self._sync.due = due
            elif self._sync is not None:
                self._sync.anchors.add_fragments(self._params, fragments)
            self._ensure_anchors()
            anchors = self._anchors
            if anchors is not None:
                if anchors.catch_up(engine, is_new):
                    self._counts.weight = 0.0
                self._agree_on_moved(anchors)
        except BaseException:
            if is_new:  # the next rebind() finds this rank as new as it is
                self._sync = None
            raise

    def _agree_on_moved(self, anchors: Anchors) -> None:
        """Let all ranks sync what any has moved, though a rank that took over a sync has not."""
        moved = {t.param: t.has_moved for t in anchors.tensors}
        row = [moved.get(p, False) for p in self._params]
        rows = gather_json(row, self._engine.device, self._engine.comm)
        any_moved = dict(zip(self._params, map(any, zip(*rows, strict=True)), strict=True))
        for t in anchors.tensors:
            t.has_moved = any_moved.get(t.param, t.has_moved)

    def _adopt_counts(self) -> tuple[list[int], frozenset[int]]:
        """Adopt the counts of the rank that is furthest, of those with anchors. Returns the
        fragments of that rank, none if no rank has anchors, and those that are due on any rank.

        If rounds end by time, a rank that has anchors keeps its number of steps, and begins a round
        if others have begun a later one.
        """
        engine, options, counts = self._engine, self._options, self._counts
        sync = self._sync
        fragment_of = {t.param: t.fragment for t in sync.anchors.tensors} if sync else {}
        fragments = [fragment_of.get(p, -1) for p in self._params]
        syncs = sync.anchors.applied_syncs if sync else -1
        known = (counts.round, options["step"], counts.begun, counts.mean_step, syncs)
        are_due = [sync is not None and n in sync.due for n in fragments]
        row = [sync is not None, *known, fragments, are_due]
        rows = gather_json(row, engine.device, engine.comm)
        has_anchors, number, step, begun, mean_step, _, fragments, _ = max(rows)
        if not has_anchors:
            return [], frozenset()
        # a rank that lacks a sync takes it over, and does not repeat it
        latest = max(row[5] for row in rows)
        dues = [row[-1] for row in rows if row[5] == latest]
        due = frozenset(n for n, *on in zip(fragments, *dues, strict=True) if any(on))
        if sync is not None:
            sync.due = due
        by_time = options["round_seconds"] is not None
        keeps_step = by_time and sync is not None
        if not keeps_step:
            counts.round, counts.begun = number, begun
            for group in self._wrapper_groups:
                group["step"] = step
        if by_time and (not keeps_step or counts.round < number):
            counts.begin_round(number, options["step"], mean_step)
        return list(fragments), due

    # Checkpoints

    def _make_state_dict(self) -> dict[str, Any]:
        saved = super()._make_state_dict()
        if not self._options["dense_steps"]:
            for entry in saved["state"].values():
                entry.pop("residual", None)
        for place, entry in enumerate(self._save_rounds()):
            if entry is not None:
                saved["state"].setdefault(place, {})["outer"] = entry
        return saved

    def _save_rounds(self) -> list[Entry | None]:
        """Return the entries under "outer" of the state dict. Before the first local step they are
        of temporary anchors, which have the same names and shapes.
        """
        self._check_own_params()
        sync, options = self._sync, self._options
        if sync is None and (sync := self._make_sync(options)) is not None:
            for t in sync.anchors.tensors:
                t.fragment = -1
        if sync is None:
            return [None] * len(self._params)
        return save_rounds(self._params, sync, options, self._counts)

    def _show_base_in_state(self) -> None:
        """Show the base's state, and an empty "outer": a flattened state dict needs its name."""
        super()._show_base_in_state()
        for entry in self.state.values():
            entry["outer"] = {}

    @torch.no_grad()
    def load_without_hooks(self, state_dict: dict[str, Any]) -> None:
        self._check_own_params()
        groups = check_saved_groups(self._engine, state_dict)
        state_dict, entries = split_rounds(state_dict, self._engine.name)
        saved = self._restore_anchors(entries, {**self._options, **groups[0]})
        if saved is not None and saved.is_open:
            self._check_frozen(state_dict)
        super().load_without_hooks(state_dict)
        self._resume_rounds(saved)

    def _check_frozen(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError if a checkpoint within a round lacks what a frozen parameter has moved.

        torch.distributed.checkpoint leaves it out when it loads.
        """
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            without = {saved["params"][index] for index in saved.get("without_state", ())}
            absent = {*saved["params"]} - state_dict["state"].keys() - without
            for p, key in zip(group["params"], saved["params"], strict=True):
                if key in absent and not p.requires_grad:
                    raise ValueError(
                        f"loaded state dict is of a running round and lacks parameter {key}, which "
                        "is frozen: set requires_grad=False after load_state_dict()."
                    )

    def _restore_anchors(self, entries: list[Entry | None], options: Group) -> SavedRounds | None:
        """Return the content of saved entries, with new anchors and outer optimizer loaded."""
        try:
            if (saved := read_rounds(entries)) is None:
                return None
            self._engine.connect_ranks()
            # a single process without a group may meet others before the next step
            if self._engine.sends_nothing and self._engine.process_group is not None:
                return saved
            if (sync := self._make_sync(options, saved.fragments)) is not None:
                engine = self._engine
                sync.anchors.note_ranks(engine.comm.size, engine.shard_communicators)
                saved.load_into(sync, options.get("residuals", "mean"))
            return saved
        except CommunicationError:
            raise
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"loaded state dict has an outer optimizer that is damaged, or of other "
                f"parameters: {error}."
            ) from error

    def _resume_rounds(self, saved: SavedRounds | None) -> None:
        """Continue from saved anchors, and with the sync that was in flight."""
        if self._sync is not None:
            self._sync.drain()
        self._drop_anchors()
        self._counts.clock = None
        if saved is not None:
            self._sync, self._counts = saved.sync, saved.counts
            for group in self._wrapper_groups:
                group["step"] = saved.step
            if saved.sync is not None and saved.running is not None:
                saved.sync.begin_sync(saved.running)
        if self._open_round is not None:  # a copy warns once it has taken a step
            self._open_round.update(False, self._counts.begun, self.comm)
            self._note_open_round()
        self._engine.stats = self.add_to_stats(self._engine.stats, StepDecision())

    def _begin_anew(self) -> None:
        self._counts = RoundCounts()
        super()._begin_anew()

    def _copyable_attributes(self) -> dict[str, Any]:
        saved = None if self._sync is None else self._save_rounds()
        kept = {"_make_outer": self._make_outer, "_counts": replace(self._counts), "_rounds": saved}
        return {**super()._copyable_attributes(), **kept}

    @torch.no_grad()
    def _restore_copy(
        self, contents: dict[str, Any], group: ProcessGroup | Ranks | Communicator | None
    ) -> None:
        contents = dict(contents)
        entries = contents.pop("_rounds")
        super()._restore_copy(contents, group)
        if entries is not None:
            self._resume_rounds(self._restore_anchors(entries, self._options))
