"""What the student can be asked to do: the `objectives` section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stillroom.config.sections import Ramp, Scalar, Section, Share, Temperature, Weight, between

Divergence = Literal[
    "forward_kl",
    "reverse_kl",
    "jsd",
    "skew_forward_kl",
    "skew_reverse_kl",
    "total_variation",
    "alpha_beta",
    "taid",
    "todi",
    "akl",
]


class KdConfig(Section):
    weight: Weight = Field(1.0, description="weight of the distillation term")
    divergence: Divergence = Field("forward_kl", description="forward_kl for base models; reverse_kl seeks modes")
    temperature: Temperature = Field(1.0, description="softens both sides; the term is multiplied by its square")
    beta: Share = Field(0.5, description="place of the mixture in jsd: 0 is forward, 1 is reverse KL; of alpha_beta")
    alpha: Share = Field(0.1, description="share of its own side in a skewed KL; power of the teacher in alpha_beta")
    interpolation: Share = Field(
        Ramp(start=0.4, end=1.0), description="taid: how far the target is on its way from student (0) to teacher (1)"
    )
    top_k: Annotated[int | Ramp, between(0)] = Field(
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
    def looks_at_rows(self) -> bool:
        """Whether weights or temperatures depend on both models' rows: the head's logits are then made twice."""
        return self.token_weight != "uniform" or self.token_fraction != 1.0 or self.token_temperature != 0.0


class CeConfig(Section):
    weight: Weight = Field(0.0, description="weight of cross-entropy on the data's own tokens")


LayerMap = Literal["last", "proportional"] | tuple[tuple[int, int], ...]
_PAIRS = "last, proportional, or pairs [[student, teacher], ...] counted from 0, or from the end with -1"


class FeatureConfig(Section):
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


class AttentionConfig(Section):
    weight: Weight = Field(0.0, description="weight of matching attention maps; 0: not computed at all")
    layers: LayerMap = Field("proportional", description=f"which layers are matched: {_PAIRS}")
    attention_layers: Annotated[int, Field(ge=0)] = Field(
        2, description="at most so many pairs, the last ones; each keeps [rows, heads, length, length]; 0: none"
    )


class ContrastiveConfig(Section):
    weight: Weight = Field(0.0, description="weight of telling the batch's rows apart; 0: not computed at all")
    layers: LayerMap = Field("last", description=f"which layers are pooled: {_PAIRS}")
    projector: Literal["auto", "always"] = Field("auto", description="as in objectives.feature")
    temperature: Annotated[float, Field(gt=0)] = Field(0.1, description="sharpness of the comparison between rows")


class ObjectivesConfig(Section):
    kd: KdConfig = Field(default_factory=KdConfig)
    ce: CeConfig = Field(default_factory=CeConfig)
    feature: FeatureConfig = Field(default_factory=FeatureConfig)
    attention: AttentionConfig = Field(default_factory=AttentionConfig)
    layerwise: LayerwiseConfig = Field(default_factory=LayerwiseConfig)
    contrastive: ContrastiveConfig = Field(default_factory=ContrastiveConfig)
    chunk_tokens: Annotated[int, Field(ge=0)] = Field(
        0, description="positions the head handles at once; 0: chosen from the vocabulary"
    )
    kernel: Literal["auto", "plain", "compiled"] = Field(
        "auto", description="rows of the head: compiled C++ where a compiler is found and agrees, else plain PyTorch"
    )

    @property
    def inner_weights(self) -> dict[str, Scalar]:
        """Weights of the terms that look inside the models, where they are anything but 0 throughout."""
        weights: dict[str, Scalar] = {
            "feature": self.feature.weight,
            "attention": self.attention.weight if self.attention.attention_layers else 0.0,
            "layerwise": self.layerwise.weight,
            "contrastive": self.contrastive.weight,
        }
        return {name: weight for name, weight in weights.items() if weight != 0.0}
