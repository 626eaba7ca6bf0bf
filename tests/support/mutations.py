"""Answers of JSON with one thing wrong in them."""

from __future__ import annotations

import copy
import math
import random
from typing import Any


def mutated(answer: Any, chance: random.Random) -> Any:
    """The answer with one value somewhere in it replaced, removed or doubled."""
    answer = copy.deepcopy(answer)
    here, path = answer, []
    while isinstance(here, dict | list) and here and (not path or chance.random() < 0.85):
        key = chance.choice(list(here) if isinstance(here, dict) else range(len(here)))
        path.append((here, key))
        here = here[key]
    holder, key = path[-1]
    match chance.randrange(4):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.insert(key, holder[key])
        case _:
            holder[key] = chance.choice(
                [None, [], {}, "text", 10**9, -5, 3.5, True, math.nan, math.inf, -math.inf, [[]], 10**400]
            )
    return answer
