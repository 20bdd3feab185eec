"""What TAGC compresses, by name."""

from __future__ import annotations

import re
from typing import Any

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
