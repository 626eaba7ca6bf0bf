"""Models: loading them, describing them, and asking them."""

from stillroom.models.load import has_tokenizer, load_student, load_teacher, load_tokenizer
from stillroom.models.loaded import LoadedModel, open_student, open_teacher, tried
from stillroom.models.probe import Anatomy, anatomy, head_error
from stillroom.models.source import find
from stillroom.models.student import Student
from stillroom.models.taps import gives_attention
from stillroom.models.vocabulary import agree_on_vocabulary, vocabulary_hash

__all__ = [
    "Anatomy",
    "LoadedModel",
    "Student",
    "agree_on_vocabulary",
    "anatomy",
    "find",
    "gives_attention",
    "has_tokenizer",
    "head_error",
    "load_student",
    "load_teacher",
    "load_tokenizer",
    "open_student",
    "open_teacher",
    "tried",
    "vocabulary_hash",
]
