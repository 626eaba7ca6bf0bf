"""The `objectives` section of the configuration."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from stillroom.config.registry import DIVERGENCES, OBJECTIVES
from stillroom.config.sections import (
    MOST,
    MOST_FLOAT,
    Count,
    ObjectiveSection,
    Positive,
    Ramp,
    Scalar,
    Section,
    Share,
    Temperature,
    Weight,
    between,
)


def _known_divergence(name: str) -> str:
    if name not in DIVERGENCES:
        near = difflib.get_close_matches(name, DIVERGENCES.names(), n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"no divergence has this name: {meant}one of {', '.join(DIVERGENCES.names())}")
    return name


Divergence = Annotated[str, AfterValidator(_known_divergence)]


class KdConfig(ObjectiveSection):
    looks_inside = False

    weight: Weight = Field(1.0, description="weight of the distillation term")
    divergence: Divergence = Field("forward_kl", description="forward_kl for base models; reverse_kl seeks modes")
    temperature: Temperature = Field(1.0, description="softens both sides; the term is multiplied by its square")
    beta: Share = Field(0.5, description="place of the mixture in jsd: 0 is forward, 1 is reverse KL; of alpha_beta")
    alpha: Share = Field(0.1, description="share of its own side in a skewed KL; power of the teacher in alpha_beta")
    interpolation: Share = Field(
        Ramp(start=0.4, end=1.0), description="taid: how far the target is on its way from student (0) to teacher (1)"
    )
    top_k: Annotated[int | Ramp, between(0, MOST)] = Field(
        0, description="use the teacher's k likeliest tokens and the exact mass of the rest; 0: all tokens"
    )
    token_weight: Literal["uniform", "entropy"] = Field(
        "uniform", description="entropy: positions weigh by the student's entropy over its mean in the sequence"
    )
    token_fraction: Annotated[Scalar, between(1e-4, 1.0)] = Field(
        1.0, description="share of each sequence's positions that is distilled: those where token_criterion is largest"
    )
    token_criterion: Literal["hellinger", "entropy"] = Field(
        "hellinger", description="hellinger: distance of teacher and student; entropy: the student's"
    )
    token_temperature: Annotated[Scalar, between(0.0, 10.0)] = Field(
        0.0, description="strength of the temperature by difficulty (AdaKD uses 0.5); 0: one temperature for all"
    )
    on_wrong_teacher: Literal["keep", "label_residual", "mft"] = Field(
        "keep",
        description="label_residual: the mass a top-k teacher leaves over goes to the label; mft: where the teacher's "
        "likeliest token is not the label, the label is mixed in until it leads",
    )
    label_margin: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="by how much it then leads")

    @model_validator(mode="after")
    def _possible(self) -> KdConfig:
        if self.on_wrong_teacher == "mft" and self.top_k != 0:
            raise ValueError("on_wrong_teacher = 'mft' needs the teacher's whole row: set top_k = 0")
        return self

    @property
    def needs_both_logits(self) -> bool:
        """Whether token weights or temperatures depend on both models' logits, which are then computed twice."""
        return self.token_weight != "uniform" or self.token_fraction != 1.0 or self.token_temperature != 0.0


class CeConfig(ObjectiveSection):
    needs_teacher = False
    looks_inside = False

    weight: Weight = Field(0.0, description="weight of cross-entropy on the data's own tokens")


LayerMap = Literal["last", "proportional"] | tuple[tuple[int, int], ...]
_PAIRS = "last, proportional, or pairs [[student, teacher], ...] counted from 0, or from the end with -1"


class FeatureConfig(ObjectiveSection):
    weight: Weight = Field(0.0, description="weight of matching hidden states; 0: not computed at all")
    kind: Literal["mse", "cosine"] = Field(
        "mse", description="mse: squared error over the teacher's own square; cosine: direction alone"
    )
    layers: LayerMap = Field("last", description=f"which layers are matched: {_PAIRS}")
    projector: Literal["auto", "always"] = Field(
        "auto", description="a trained matrix from the student's width to the teacher's; auto: where they differ"
    )


class LayerwiseConfig(FeatureConfig):
    weight: Weight = Field(0.0, description="weight of matching layer by layer; 0: not computed at all")
    layers: LayerMap = Field("proportional", description=f"which layers are matched: {_PAIRS}")


class AttentionConfig(ObjectiveSection):
    weight: Weight = Field(0.0, description="weight of matching attention maps; 0: not computed at all")
    layers: LayerMap = Field("proportional", description=f"which layers are matched: {_PAIRS}")
    attention_layers: Count = Field(
        2, description="at most so many pairs, the last ones; each keeps [rows, heads, length, length]; 0: none"
    )

    @property
    def used_weight(self) -> Scalar:
        return self.weight if self.attention_layers else 0.0


class ContrastiveConfig(ObjectiveSection):
    weight: Weight = Field(0.0, description="weight of telling the batch's rows apart; 0: not computed at all")
    layers: LayerMap = Field("last", description=f"which layers are pooled: {_PAIRS}")
    projector: Literal["auto", "always"] = Field("auto", description="as in objectives.feature")
    temperature: Positive = Field(0.1, description="sharpness of the comparison between rows")


class AlmConfig(ObjectiveSection):
    looks_inside = False
    compares_spans = True

    weight: Weight = Field(0.0, description="weight of matching the likelihoods of spans, for two tokenizers")
    temperature: Annotated[Scalar, between(1.0, MOST_FLOAT)] = Field(
        100.0, description="both likelihoods are raised to 1 / temperature, and the term is multiplied by it"
    )
    divergence: Literal["kl", "total_variation"] = Field(
        "kl", description="between the teacher's and the student's probability that this span comes, or another"
    )


class ExactMatchConfig(ObjectiveSection):
    looks_inside = False
    compares_spans = True

    weight: Weight = Field(
        0.0, description="weight of forward KL over tokens of the same bytes, all others being one, for two tokenizers"
    )


class PrefixMatchConfig(ObjectiveSection):
    looks_inside = False
    compares_spans = True

    weight: Weight = Field(
        0.0,
        description="weight of forward KL over groups of tokens that begin a text alike, wherever a span begins, for "
        "two tokenizers",
    )


class UldConfig(ObjectiveSection):
    looks_inside = False
    compares_spans = True

    weight: Weight = Field(0.0, description="weight of the distance of sorted probabilities, for two tokenizers")


class SpanHiddenConfig(ObjectiveSection):
    compares_spans = True

    weight: Weight = Field(0.0, description="weight of matching mean hidden states of spans, for two tokenizers")
    kind: Literal["mse", "cosine"] = Field("cosine", description="as in objectives.feature")
    layers: LayerMap = Field("last", description=f"which layers are matched: {_PAIRS}")
    projector: Literal["auto", "always"] = Field("auto", description="as in objectives.feature")


class ObjectivesConfig(Section):
    """Built-in objectives, and those of other packages under their names (`config/registry.py`)."""

    model_config = ConfigDict(extra="allow")

    kd: KdConfig = Field(default_factory=KdConfig)
    ce: CeConfig = Field(default_factory=CeConfig)
    feature: FeatureConfig = Field(default_factory=FeatureConfig)
    attention: AttentionConfig = Field(default_factory=AttentionConfig)
    layerwise: LayerwiseConfig = Field(default_factory=LayerwiseConfig)
    contrastive: ContrastiveConfig = Field(default_factory=ContrastiveConfig)
    alm: AlmConfig = Field(default_factory=AlmConfig)
    exact_match: ExactMatchConfig = Field(default_factory=ExactMatchConfig)
    prefix_match: PrefixMatchConfig = Field(default_factory=PrefixMatchConfig)
    uld: UldConfig = Field(default_factory=UldConfig)
    span_hidden: SpanHiddenConfig = Field(default_factory=SpanHiddenConfig)
    chunk_tokens: Count = Field(
        0,
        description="positions the head handles at once; 0: chosen from the vocabulary, on a card from its free memory",
    )
    kernel: Literal["auto", "plain", "compiled"] = Field(
        "auto",
        description="rows of the head: compiled (C++ on a CPU, torch.compile on a card) where that is possible and "
        "agrees, else plain PyTorch",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _read_registered(cls, table: Any, read_own: ModelWrapValidatorHandler[ObjectivesConfig]) -> ObjectivesConfig:
        """Validate the section of each registered objective by its own class; refuse an unknown name."""
        if not isinstance(table, Mapping):
            return read_own(table)
        read = {name: value for name, value in table.items() if name in cls.model_fields}
        problems: list[InitErrorDetails] = []
        for name in (name for name in table if name not in read):
            if name not in OBJECTIVES:
                problems.append({"type": "extra_forbidden", "loc": (name,), "input": table[name]})
                continue
            try:
                read[name] = OBJECTIVES.find(name).section.model_validate(table[name])
            except ValidationError as error:
                problems += [_placed(problem, name) for problem in error.errors()]
        if not problems:
            return read_own(read)
        try:
            read_own(read)  # to report the errors of built-in sections too
        except ValidationError as error:
            problems += [_placed(problem) for problem in error.errors()]
        raise ValidationError.from_exception_data(cls.__name__, problems)

    @property
    def sections(self) -> dict[str, ObjectiveSection]:
        """Every objective's section, built-in ones first."""
        own = {name: getattr(self, name) for name in type(self).model_fields}
        fields = {**own, **(self.model_extra or {})}
        return {name: section for name, section in fields.items() if isinstance(section, ObjectiveSection)}

    @property
    def weights(self) -> dict[str, Scalar]:
        """Weights of `kd` and `ce`, and of other objectives whose weight is not constantly 0."""
        weights = {name: section.used_weight for name, section in self.sections.items()}
        return {name: weight for name, weight in weights.items() if name in ("kd", "ce") or weight != 0.0}

    @property
    def asks_teacher(self) -> bool:
        """Whether an objective needs the teacher's answers at any time of the run."""
        return any(weight != 0.0 and self.sections[name].needs_teacher for name, weight in self.weights.items())

    @property
    def inner_weights(self) -> dict[str, Scalar]:
        """The weights of objectives that use hidden states or attention maps."""
        return {name: weight for name, weight in self.weights.items() if self.sections[name].looks_inside}

    @property
    def span_weights(self) -> dict[str, Scalar]:
        """The weights of objectives that compare spans of two tokenizers."""
        return {name: weight for name, weight in self.weights.items() if self.sections[name].compares_spans}


def _placed(problem: Any, *name: str) -> InitErrorDetails:
    """An error of a section, with the objective's name before its location."""
    placed: InitErrorDetails = {"type": problem["type"], "loc": (*name, *problem["loc"]), "input": problem["input"]}
    if "ctx" in problem:
        placed["ctx"] = problem["ctx"]
    return placed
