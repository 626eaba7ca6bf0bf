"""Names of `stillroom.losses` that programs import from here: the public address of the fused loss."""

from stillroom.losses import DenseTeacher, HeadLoss, SampledTeacher, TopKTeacher, divergences, fused_head_loss

__all__ = ["DenseTeacher", "HeadLoss", "SampledTeacher", "TopKTeacher", "divergences", "fused_head_loss"]
