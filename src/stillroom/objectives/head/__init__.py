"""The last layer of both models, a chunk of positions at a time: logits, terms and gradients without a full matrix."""

from stillroom.objectives.head.inputs import DenseTeacher, SampledTeacher, TopKTeacher
from stillroom.objectives.head.loss import HeadLoss, fused_head_loss, score_head

__all__ = ["DenseTeacher", "HeadLoss", "SampledTeacher", "TopKTeacher", "fused_head_loss", "score_head"]
