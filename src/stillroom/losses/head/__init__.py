"""The last layer of both models, a chunk of positions at a time: logits, terms and gradients without a full matrix."""

from stillroom.losses.head.loss import DenseTeacher, HeadLoss, SampledTeacher, TopKTeacher, fused_head_loss, score_head

__all__ = ["DenseTeacher", "HeadLoss", "SampledTeacher", "TopKTeacher", "fused_head_loss", "score_head"]
