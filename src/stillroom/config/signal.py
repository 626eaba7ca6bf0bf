"""What a teacher's answers are reduced to: the `teacher.signal` section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stillroom.config.sections import Section, Size

SparseKind = Literal["top_k", "sampled", "hybrid", "renormalised", "target"]

DEFAULT_K = 64
DEFAULT_M = 8
DEFAULT_HYBRID_DRAWS = 12
DEFAULT_DRAWS = 50  # about twelve different tokens (Anshumann et al. 2025)


class SignalConfig(Section):
    kind: Literal["auto", "dense"] | SparseKind = Field(
        "auto",
        description="dense: all tokens; top_k: the k likeliest and the exact mass of the rest, for every divergence; "
        "sampled: drawn tokens; hybrid: the m likeliest and draws from the rest, unbiased for forward_kl; "
        "renormalised: k tokens as if no other could come, which is biased; target: the probability of the target "
        "alone, for objectives.alm. auto: dense live; what a cache holds; for a new cache top_k where "
        "objectives.kd.top_k is set or the divergence is not forward_kl, else hybrid; with two tokenizers hybrid for "
        "objectives.prefix_match or exact_match, else target",
    )
    k: Size | None = Field(None, description="of top_k (64, or objectives.kd.top_k)")
    m: Size | None = Field(None, description="of hybrid (8)")
    draws: Annotated[int, Field(ge=1, le=255)] | None = Field(None, description="of hybrid (12) and sampled (50)")
    draw_seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="of the draws, beside the content of each row"
    )

    compare: Literal["stored", "whole"] = Field(
        "stored",
        description="with teacher.cache, what the finished student is compared with. stored: the answers of the cache; "
        "whole: the teacher itself, which is loaded once, at the end",
    )

    @model_validator(mode="after")
    def _belonging(self) -> SignalConfig:
        """A number that the kind does not read would be ignored in silence."""
        read = {
            "auto": (),
            "dense": (),
            "top_k": ("k",),
            "renormalised": ("k",),
            "sampled": ("draws",),
            "hybrid": ("m", "draws"),
            "target": (),
        }[self.kind]
        for name in ("k", "m", "draws"):
            if getattr(self, name) is not None and name not in read:
                raise ValueError(f"{name} is not read with kind = {self.kind!r}")
        return self
