"""The seconds of one step of a pipeline, by the schedule that torch calls 1F1B."""

from __future__ import annotations

from collections.abc import Sequence


def order_of(stage: int, stages: int, micro_batches: int) -> list[tuple[bool, int]]:
    """What a stage does, in turn: (forward or not, micro-batch).

    As many forwards as there are stages behind it; then one forward and one backward; then the
    backwards that are left.
    """
    ahead = min(stages - 1 - stage, micro_batches)
    order = [(True, k) for k in range(ahead)]
    for k in range(ahead, micro_batches):
        order += [(True, k), (False, k - ahead)]
    return order + [(False, k) for k in range(micro_batches - ahead, micro_batches)]


def pipeline_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    forth: Sequence[float],
    back: Sequence[float],
    micro_batches: int,
) -> float:
    """Seconds until the last backward of a step has ended.

    A link carries one message at a time, in each direction, while its stages compute.

    Args:
        forward, backward: seconds of a micro-batch, for every stage.
        forth, back: seconds of a message across every boundary: the activation, its gradient.
        micro_batches: of a step.
    """
    stages = len(forward)
    orders = [order_of(stage, stages, micro_batches) for stage in range(stages)]
    done, busy, next_ = [0.0] * stages, [[0.0] * stages for _ in range(2)], [0] * stages
    # When what a stage needs for each forward and backward has arrived.
    ready: list[dict[tuple[bool, int], float]] = [{} for _ in range(stages)]
    ready[0] = {(True, k): 0.0 for k in range(micro_batches)}
    ready[-1] |= {(False, k): 0.0 for k in range(micro_batches)}
    waiting = list(range(stages))
    while waiting:
        stage = waiting.pop()
        while next_[stage] < len(orders[stage]):
            what = orders[stage][next_[stage]]
            arrived = ready[stage].get(what)
            if arrived is None:
                break
            ahead, _ = what
            end = max(done[stage], arrived) + (forward if ahead else backward)[stage]
            done[stage], other = end, stage + (1 if ahead else -1)
            next_[stage] += 1
            if 0 <= other < stages:
                link = busy[ahead]
                link[stage] = max(link[stage], end) + (forth[stage] if ahead else back[other])
                ready[other][what] = link[stage]
                waiting.append(other)
    return max(done)
