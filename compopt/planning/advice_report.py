"""The advice as text: the recommendation, the line to paste, the table, the inputs."""

from __future__ import annotations

import math

from .advice_decision import (
    WORTH_IT,
    at_link_rate,
    choose_alternative,
    choose_row,
    is_within_budget,
    pays_below,
    waits_briefly,
)
from .formatting import (
    align_columns,
    format_count,
    format_digits,
    format_number_of,
    format_percent,
    format_quantity,
    format_rate,
    format_seconds,
)
from .losses import nearest_measurement
from .methods import FLOAT, METHODS, local_steps_cost, tracked_cost
from .prediction import BASELINE, PEAK_ROOM, ROOM, Row, Situation, count_bytes, predict_rows

# The widest model on which tracked projections were measured, and the shortest run of any method.
MEASURED_WIDTH = 512
MEASURED_STEPS = 800
FAR_APART = 0.01  # seconds of latency: as between sites

# Sentences


def explain_choice(situation: Situation, rows: list[Row], best: Row | None) -> str:
    """The reasons for a row, or for staying with AdamW where there is none."""
    if best is None:
        parts = [explain_dense(situation, rows), explain_memory(situation, rows)]
        return " ".join(part for part in parts if part)
    steps = format_number_of(situation.steps, "step")
    run = f"a run of {steps} takes {format_seconds(best.run_s)}"
    certainty = ""
    if rows[0].fits:
        run += (
            f" instead of {format_seconds(rows[0].run_s)}, {format_factor(best.run)} times as "
            f"fast, with {format_percent(best.run_bytes)} of the bytes"
        )
        if best.run < 1.2 * WORTH_IT:
            certainty = (
                "That is a close call: time both."
                if is_local(best)
                else 'That is a close call: when="auto" times dense and compressed steps, and '
                "decides."
            )
    parts = [
        f"{run}.",
        describe_sites(situation, rows, best),
        describe_absence(situation),
        describe_saves(situation, best),
        describe_loss(situation, best),
        certainty,
        describe_shortness(situation),
        explain_memory(situation, rows),
        describe_limits(situation, best),
        describe_alternative(situation, rows, best),
    ]
    return " ".join(part for part in parts if part)


def describe_loss(situation: Situation, best: Row) -> str:
    """The nearest measurement, and that with Muon; of adapters there is none."""
    if is_of_adapters(situation):
        return "No loss of LoRA was measured: compare a short run with AdamW."
    conditions = best.measurement.conditions if best.measurement else ""
    loss = f"Its loss was {compare_loss(best.loss)} AdamW's in the nearest measurement"
    return f"{loss} ({conditions}). {describe_muon(situation, best)}".strip()


def describe_sites(situation: Situation, rows: list[Row], best: Row) -> str:
    """Describe how ranks that share a link average before they use it; "" where none do, or where
    AdamW is cut in the same way.
    """
    node = situation.machine.ranks_per_node
    if best.shard != node or node == 1 or best.shard == rows[0].shard:
        return ""
    return (
        f"The {node} ranks of a machine or site share its link: average inside it, by HSDP as "
        f"below (docs/hsdp.md), or by DDP, which sends {node} times the bytes of HSDP."
    )


def describe_absence(situation: Situation) -> str:
    """Name what keeps sites training while one is away; "" where ranks are close to each other."""
    if situation.machine.latency_s < FAR_APART:
        return ""
    return "A site that is away need not stop the others (docs/elastic.md)."


def format_factor(factor: float) -> str:
    return f"{factor:.2f}" if factor < 2 else format_digits(factor)


def compare_loss(measured: float | None) -> str:
    loss = measured or 1.0
    if abs(loss - 1) < 5e-4:
        return "level with"
    return f"{abs(100 * (loss - 1)):.1f} % {'above' if loss > 1 else 'below'}"


# What the ladder trained with Muon inside, by the row that has AdamW there.
WITH_MUON = {"LocalSteps": "LocalSteps(MuonAdamW)", "SeparateAdam": "Separate(MuonAdamW)"}


def describe_muon(situation: Situation, best: Row) -> str:
    """The loss with Muon in place of AdamW; "" where it was not measured or is no lower."""
    name = WITH_MUON.get(best.losses_key, "")
    replicas = situation.machine.ranks // best.shard
    size, tokens = situation.work.parameters, situation.tokens_per_parameter
    measurement = nearest_measurement(name, size, replicas, tokens)
    if measurement is None or measurement.ratio >= (best.loss or 1.0):
        return ""
    return (
        f"That of compopt.{name}, with a learning rate of its own, was "
        f"{compare_loss(measurement.ratio)} AdamW's ({measurement.conditions})."
    )


def describe_saves(situation: Situation, best: Row) -> str:
    """Describe what saves send; "" where there are none."""
    if not best.saves_sent or not situation.save_every:
        return ""
    saves = format_number_of(situation.steps // situation.save_every, "save")
    share = format_percent(best.saves_sent / best.run_sent)
    return f"Of these bytes {share} are consolidate_state()'s, before its {saves}."


def is_of_adapters(situation: Situation) -> bool:
    """True if most of the weights are frozen, as under LoRA's adapters."""
    return situation.work.frozen_bytes > FLOAT * situation.work.parameters


def is_local(row: Row) -> bool:
    return METHODS[row.method].cost is local_steps_cost


def explain_memory(situation: Situation, rows: list[Row]) -> str:
    """The reason for AdamW's layout; "" where it fits on every rank, or the layout was given."""
    baseline = rows[0]
    held, _ = count_bytes(situation, METHODS[BASELINE], 1)
    if held <= situation.room_bytes or situation.shard is not None:
        return ""
    text = (
        f"AdamW does not fit on one device: {format_quantity(held)}B of parameters, gradients and "
        f"moments, where {format_quantity(situation.room_bytes)}B are free for them."
    )
    if not baseline.fits:
        needed = math.ceil(held / situation.room_bytes)
        return f"{text} A copy needs {needed} such devices."
    node = situation.machine.ranks_per_node
    if baseline.shard <= node:
        return f"{text} Cut each copy over the {baseline.shard} ranks of a machine (FSDP2)."
    return (
        f"{text} Cut over {baseline.shard} ranks on {baseline.shard // node} machines (FSDP2), a "
        "copy sends parameters and gradients over this link for "
        f"{format_seconds(baseline.shard_s)} of every step, which no optimizer makes less: put "
        "more ranks into a machine (--ranks-per-node) if you can."
    )


def describe_shortness(situation: Situation) -> str:
    if situation.steps >= MEASURED_STEPS:
        return ""
    return (
        f"No run of fewer than {MEASURED_STEPS} steps was measured: the losses here say nothing "
        f"about one of {situation.steps:,}."
    )


def describe_limits(situation: Situation, best: Row) -> str:
    """Describe what the nearest measurement does not cover, and how to close the gap."""
    width, method = situation.work.side, METHODS[best.method]
    if method.cost is not tracked_cost:
        return ""
    rank = method.options.get("rank", 16)
    projected, _ = situation.work.count_factors(rank)
    if projected < 0.5 * situation.work.parameters:
        narrow = format_percent(1 - projected / situation.work.parameters)
        return (
            f"{narrow} of the parameters are in tensors too narrow for rank {rank}, as LoRA's "
            f"adapters are: they are only rounded, to int{method.options.get('bits', 8)}."
        )
    if width <= 1.1 * MEASURED_WIDTH:
        return ""
    return (
        f"Rank {rank} was measured up to width {MEASURED_WIDTH}, yours is about {width:.0f}: if "
        f"the loss falls behind AdamW's, take rank={4 * rank}."
    )


def describe_alternative(situation: Situation, rows: list[Row], best: Row) -> str:
    other = choose_alternative(situation, rows, best)
    if other is None:
        return ""
    text = f"{other.method} would take {format_seconds(other.run_s)}"
    if not other.fits:
        return f"{text}, but does not fit into memory."
    loss = f"its loss was {compare_loss(other.loss)} AdamW's"
    if is_of_adapters(situation):
        return f"{text}."
    if not is_within_budget(situation, other):
        return f"{text}, but {loss}."
    if is_local(other):
        loss += ", and it waits for the network once in a round, which suits a link that varies"
    return f"{text}; {loss}."


def explain_dense(situation: Situation, rows: list[Row]) -> str:
    baseline, machine = rows[0], situation.machine
    budget = f"the loss budget of {100 * situation.loss_budget:g} %"
    beyond = describe_alternative(situation, rows, baseline)
    if machine.ranks == 1:
        return "there is nothing to average over a link: one process averages with nobody."
    if not baseline.fits:
        return f"no method within {budget} fits. {beyond}".strip()
    if baseline.is_bound_by_shards and situation.shard is not None:
        return (
            f"a copy that is cut over {baseline.shard} ranks, as shard={baseline.shard} asks for, "
            "sends parameters and gradients over this link for "
            f"{format_seconds(baseline.shard_s)} of every step, which no optimizer makes less: "
            f"without shard={baseline.shard} a copy is cut over as few ranks as hold it."
        )
    if baseline.is_bound_by_shards:
        return f"no layout within {budget} keeps the parameters off this link. {beyond}".strip()
    waiting = format_percent(baseline.step.exchange / baseline.step.total)
    if baseline.shard == machine.ranks:
        slow = ""
        if situation.shard is not None and baseline.step.exchange > baseline.step.compute:
            slow = (
                f" A step waits {waiting} of its time for the parameters and gradients of that "
                f"copy: without shard={baseline.shard} it is cut over as few ranks as hold it."
            )
        return (
            "there is nothing to average over a link: all ranks together hold one copy of the "
            f"model.{slow} Inside FSDP2 SeparateAdam and TagcAdamW compress its reduce-scatter "
            f"and, with gather_dtype='int8', its gathers (docs/fsdp.md). {beyond}"
        ).strip()
    because = f"a dense step waits {waiting} of its time for the network"
    if waits_briefly(baseline):
        because += ", less than a fifth."
    else:
        because += (
            f", and neither SeparateAdam nor LocalSteps makes the run 5 % faster within {budget}."
        )
    slower = at_link_rate(situation, 8 * machine.link_bytes_per_s / 2)
    other = choose_row(slower, predict_rows(slower))
    if other is not None:
        return (
            f"{because} That is a close call: over half of the link's rate {other.method} would be "
            f"{format_factor(other.run)} times as fast."
        )
    if beyond:
        return f"{because} {beyond}"
    rate = pays_below(situation)
    return because + (f" Below about {format_rate(rate)} a rank one would." if rate else "")


def make_line(situation: Situation, row: Row) -> str:
    """The constructor call, with the mesh of a copy that is cut."""
    method = METHODS[row.method]
    start = method.start_steps(situation.steps)
    line = method.line.format(steps=situation.steps, start=start)
    if not row.fits or row.is_bound_by_shards:
        return "# There is no line to paste for this setup."
    if row.shard == 1:
        return line
    copy = f"# FSDP2, a copy on {row.shard} ranks"
    if row.shard == situation.machine.ranks:
        return f"fully_shard(model)  {copy}\n{line}"
    if row.method == BASELINE:
        return f"fully_shard(model, mesh=mesh)  {copy}\n{line}"
    cut = f'fully_shard(model, mesh=mesh["shard"])  {copy}: docs/hsdp.md'
    return f'{cut}\n{line[:-1]}, process_group=mesh.get_group("replicate"))'


# The table

HEAD = (
    "  method",
    "run",
    "times",
    "loss",
    "step ms",
    "own",
    "exposed",
    "MB sent",
    "bytes",
    "GB peak",
    "shards",
)


def is_beaten(row: Row, rows: list[Row]) -> bool:
    """True if another row that fits is as fast with as low a loss, and better in one of them."""
    loss = 1.0 if row.loss is None else row.loss
    return any(
        other.fits
        and other.loss is not None
        and other.run_s <= row.run_s
        and other.loss <= loss
        and (other.run_s < row.run_s or other.loss < loss)
        for other in rows
    )


def format_table(situation: Situation, rows: list[Row], chosen: str, all_rows: bool = False) -> str:
    """A line a method, the fastest run first, and where the losses were measured."""
    best = next(row for row in rows if row.method == chosen)
    mentioned = best, rows[0], choose_alternative(situation, rows, best)
    shown = [
        row
        for row in rows
        if all_rows or row in mentioned or (row.fits and not is_beaten(row, rows))
    ]
    shown.sort(key=lambda row: row.run_s)
    measured = dict.fromkeys(row.measurement.conditions for row in shown if row.measurement)
    letters = {text: chr(ord("a") + i) for i, text in enumerate(measured)}
    table: list[tuple[str, ...]] = [HEAD]
    for row in shown:
        loss = "?" if row.loss is None else f"{row.loss:.3f}"
        seconds = row.step.total, row.step.local, row.step.exchange
        cells = (
            f"{'>' if row.method == chosen else ' '} {row.method}{'' if row.ours else ' *'}",
            format_seconds(row.run_s),
            f"{format_factor(row.run)}x",
            f"{loss} {letters[row.measurement.conditions] if row.measurement else ' '}",
            *(f"{1e3 * s:,.0f}" if s >= 0.1 else f"{1e3 * s:.1f}" for s in seconds),
            f"{row.sent / 1e6:,.{0 if row.sent >= 1e8 else 2}f}",
            format_percent(row.run_bytes),
            f"{format_digits(row.peak_bytes / 1e9)}{'' if row.fits else ' (does not fit)'}",
            str(row.shard),
        )
        table.append(cells)
    notes = [
        "> advised, * not ours. run, bytes: of all steps. step ms: after the dense start. loss:",
        "  relative to AdamW's, in the nearest measurement (letters):",
        *(f"  {letter} {text}" for text, letter in letters.items()),
    ]
    hidden = len(rows) - len(shown)
    if hidden:
        do, lose = ("does", "is slower and loses") if hidden == 1 else ("do", "are slower and lose")
        methods = format_number_of(hidden, "more method")
        notes.append(f"{methods} {do} not fit, or {lose} more: --all.")
    return "\n".join([*align_columns(table), *notes])


def format_situation(situation: Situation) -> str:
    """Format the inputs of the predictions: given, measured or assumed."""
    sources, machine, work = situation.sources, situation.machine, situation.work
    node = (
        f"{machine.ranks_per_node} in a machine or site"
        if machine.ranks_per_node > 1
        else "each in its own machine"
    )
    ranks, steps = (
        format_number_of(machine.ranks, "rank"),
        format_number_of(situation.steps, "step"),
    )
    parameters = "parameter" if work.parameters == 1 else "parameters"
    frozen = f"{format_quantity(work.frozen_bytes)}B frozen; " if work.frozen_bytes else ""
    saves = "no saves" if situation.save_every is None else f"a save every {situation.save_every}"
    is_single = machine.ranks_per_node == machine.ranks > 1
    link = 8 * (situation.inside_bytes_per_s if is_single else machine.link_bytes_per_s)
    place, source = ("inside one", "inside") if is_single else ("between machines", "link")
    shared = ""
    if machine.ranks_per_node > 1 and not is_single:
        shared = f"{format_rate(link * machine.ranks_per_node)} a machine or site, "
    lines = [
        f"{format_count(work.parameters)} {parameters}; {frozen}{ranks}, {node} "
        f"({sources['nodes']})",
        f"{shared}{format_rate(link)} a rank {place} ({sources[source]}), "
        f"{format_seconds(machine.latency_s)} a message ({sources['latency']})",
        f"{format_seconds(situation.compute_s)} of computation a step ({sources['computation']}), "
        f"{format_seconds(situation.overlap_s)} of it hiding communication ({sources['overlap']})",
        f"a run of {steps} ({sources['steps']}), {saves} ({sources['saves']}), "
        f"{situation.tokens_per_parameter:g} tokens per parameter ({sources['tokens']})",
        f"own work at {format_quantity(machine.memory_bytes_per_s)}B/s and "
        f"{format_quantity(machine.flops_per_s)}FLOP/s ({sources['own work']})",
    ]
    if machine.ranks_per_node > 1 and not is_single:
        inside = format_rate(8 * situation.inside_bytes_per_s)
        lines.insert(2, f"{inside} a rank inside one ({sources['inside']})")
    if machine.ranks_per_node == 1 and machine.ranks > 2 and sources["nodes"] == "assumed":
        lines.insert(2, "a link of its own for every rank (assumed; if some share one: --sites)")
    if situation.memory_bytes is not None:
        lines.append(
            f"{format_quantity(situation.room_bytes)}B of memory for parameters, gradients and "
            f"state, {100 * ROOM:g} % of a device's, and {100 * PEAK_ROOM:g} % at the peak "
            f"({sources['memory']})"
        )
    return "\n".join(["Computed from", *(f"  {line}" for line in lines)])
