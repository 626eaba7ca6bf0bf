"""Load models, describe them, and run them."""

from stillroom.models.anatomy import Anatomy, agree_on_vocabulary, anatomy_of, head_error, num_ids, vocabulary_hash
from stillroom.models.files import find
from stillroom.models.load import (
    LoadedModel,
    has_tokenizer,
    load_student,
    load_teacher,
    load_tokenizer,
    open_student,
    open_teacher,
    try_model,
)
from stillroom.models.student import Student, gives_attention

__all__ = [
    "Anatomy",
    "LoadedModel",
    "Student",
    "agree_on_vocabulary",
    "anatomy_of",
    "find",
    "gives_attention",
    "has_tokenizer",
    "head_error",
    "load_student",
    "load_teacher",
    "load_tokenizer",
    "num_ids",
    "open_student",
    "open_teacher",
    "try_model",
    "vocabulary_hash",
]
