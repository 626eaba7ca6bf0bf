"""Find sizes of students with as many parameters as a budget allows, by counts alone.

Four depths, from the one that alone meets the budget to all layers, and at each depth four ways to cut widths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stillroom.config.schema import ShrinkConfig
from stillroom.core.errors import ConfigError
from stillroom.models.anatomy import anatomy_of, layers_of
from stillroom.models.shrink.width import FAMILIES, kept_size

_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}
_WAYS = (("mlp_width",), ("width",), ("mlp_width", "heads"), ("width", "mlp_width", "heads"))
_DEPTHS = 4
_NEAR = 0.8  # of the largest candidate: a smaller one wastes the budget
_STEPS, _LEAST = 32, 8  # a size is cut to so many of 32 parts: at least a quarter is kept


def parse_budget(text: str, whole: int) -> int:
    """Read 80M, 1.2B or 80000000 as a number of parameters, and up to 1 without a unit as a share of `whole`."""
    digits, unit = text.strip().rstrip("kmbKMB").strip(), text.strip()[-1:].lower()
    value = float(digits) * _UNITS.get(unit, 1)
    return int(value * whole if unit not in _UNITS and value <= 1.0 else value)


class Counter:
    """Counts the parameters of a student before it is cut. Reads shapes alone, so a network without weights will do."""

    def __init__(self, teacher: Any) -> None:
        self._config = teacher.config.get_text_config()
        blocks = layers_of(teacher)
        self.num_layers = len(blocks)
        self._layers = [list(block.named_parameters()) for block in blocks]
        inside = {id(parameter) for layer in self._layers for _, parameter in layer}
        self._outside = [(name, p) for name, p in teacher.named_parameters() if id(p) not in inside]

    def __call__(self, wanted: ShrinkConfig) -> int:
        """The parameters of a student; where layers differ in size, of one with the largest layers."""

        def total(parameters: Sequence[tuple[str, Any]]) -> int:
            return sum(kept_size(name, tuple(p.shape), self._config, wanted) for name, p in parameters)

        layers = sorted(map(total, self._layers), reverse=True)
        assert isinstance(wanted.layers, int)
        return total(self._outside) + sum(layers[: wanted.layers])


def candidates(teacher: Any, wanted: ShrinkConfig) -> list[ShrinkConfig]:
    """Students within the budget: by depth alone first, then at each depth each way to cut widths."""
    count, whole = Counter(teacher), anatomy_of(teacher).num_parameters
    budget, has_widths = parse_budget(wanted.to, whole), _family(teacher) in FAMILIES
    plain = wanted.model_copy(update={"to": ""})
    by_depth = [plain.model_copy(update={"layers": number}) for number in range(count.num_layers, 0, -1)]
    alone = next((one for one in by_depth if count(one) <= budget), None)
    found = [] if alone is None else [alone]
    lowest = 1 if alone is None else int(alone.layers)  # type: ignore[arg-type]
    depths = {lowest + (count.num_layers - lowest) * place // (_DEPTHS - 1) for place in range(_DEPTHS)}
    for depth in sorted(depths - {one.layers for one in found}) if has_widths else ():
        for way in _WAYS:
            tried = (_narrowed(teacher, plain, depth, way, part) for part in range(_STEPS - 1, _LEAST - 1, -1))
            fitting = next((one for one in tried if count(one) <= budget), None)
            if fitting is not None and fitting not in found:
                found.append(fitting)
    largest = max(map(count, found), default=0)
    found = [one for one in found if count(one) >= _NEAR * largest]
    if not found:
        smallest = by_depth[-1]
        if has_widths:
            smallest = min((_narrowed(teacher, plain, 1, way, _LEAST) for way in _WAYS), key=count)
        raise ConfigError(
            f"student.shrink.to = {wanted.to} is {budget:,} parameters, and the smallest student that can be cut from "
            f"this teacher of {whole:,} has {count(smallest):,}",
            where="student.shrink.to",
            advice=[f"--set student.shrink.to={count(smallest)}", "or name a smaller model as the student"],
        )
    return found


def _family(teacher: Any) -> str:
    return str(teacher.config.get_text_config().model_type)


def _narrowed(teacher: Any, plain: ShrinkConfig, depth: int, way: Sequence[str], part: int) -> ShrinkConfig:
    """A student whose sizes are `part` of 32 of the teacher's, rounded down to what fast matrices like.

    Some families refuse a width that is not a multiple of the number of heads.
    """
    config = teacher.config.get_text_config()
    heads, neurons = int(config.num_attention_heads), int(config.intermediate_size)

    def rounded(size: int, grain: int) -> int:
        return max(1, size * part // _STEPS // grain) * grain

    sizes = {"heads": rounded(heads, heads // int(config.num_key_value_heads))}
    sizes["width"] = rounded(int(config.hidden_size), math.lcm(8, sizes["heads"] if "heads" in way else heads))
    sizes["mlp_width"] = rounded(neurons, 32 if neurons >= 256 else 8)
    return plain.model_copy(update={"layers": depth, **{name: sizes[name] for name in way}})
