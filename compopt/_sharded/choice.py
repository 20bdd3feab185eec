"""What TAGC compresses, by name, and where: under DistributedDataParallel, or inside FSDP2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._wire.comm import Comm, ProcessGroup, connect, is_cut_over

# The projections to queries, keys and values, by the names that are customary. What follows the
# attention is a linear layer like any other (section 3.2).
ATTENTION = re.compile(
    r"(^|[._])"
    r"((w?(q|k|v|kv|qk|qkv)|query|key|value|query_key_value|c_attn)(_proj|_lin)?(\.weight)?"
    r"|in_proj_weight)$",
    re.IGNORECASE,
)


def is_pattern(given: Any) -> bool:
    try:
        return bool(re.compile(given))
    except (TypeError, re.error):
        return False


def is_inside(params: Sequence[Tensor], group: ProcessGroup | Comm | None) -> bool:
    """Whether FSDP cuts the parameters over the ranks of ``group``, to average with.

    Raises ValueError where it does so with some, and the rest are not FSDP's.
    """
    if not any(hasattr(p, "device_mesh") for p in params):
        return False
    comm = connect(group)
    cut = [is_cut_over(p, comm) for p in params]
    if any(cut) and not all(cut):
        raise ValueError(
            f"{cut.count(False)} of {len(cut)} parameters are not among those that FSDP cuts over "
            "the ranks of this optimizer: call fully_shard on the whole model before the optimizer "
            "is made, or give the others an optimizer of their own."
        )
    return all(cut)
