"""Teachers that are quantised, streamed or in a GGUF file, asked for in ways that cannot work."""

from __future__ import annotations

import gguf_files
from border_cases import Case, Place, Words, case

TEACHERS: list[Case] = []


@case(TEACHERS, 20, "teacher.max_quantisation_kl = 1e-12")
def quantised_above_the_bound(place: Place) -> Words:
    return place.distill(teacher__quantisation="int8", teacher__max_quantisation_kl=1e-12)


@case(TEACHERS, 20, "CUDA card")
def bitsandbytes_on_a_cpu(place: Place) -> Words:
    return place.distill(teacher__quantisation="bnb-4bit")


@case(TEACHERS, 2, "teacher.quantisation")
def quantisation_that_nobody_knows(place: Place) -> Words:
    return place.distill(teacher__quantisation="int3")


@case(TEACHERS, 2, "max_quantisation_kl")
def a_bound_of_nothing(place: Place) -> Words:
    return place.distill(teacher__quantisation="int8", teacher__max_quantisation_kl=0)


@case(TEACHERS, 2, "stays on the device")
def quantised_and_streamed(place: Place) -> Words:
    return place.distill(teacher__quantisation="int8", teacher__placement="stream")


@case(TEACHERS, 20, "is no GGUF file")
def gguf_that_is_something_else(place: Place) -> Words:
    return place.distill(teacher__model=str(place.file("teacher.gguf", b"PK\x03\x04" * 64)))


@case(TEACHERS, 20, "was cut short")
def gguf_cut_short(place: Place) -> Words:
    path = gguf_files.write(place.world / "teacher", place.folder / "teacher.gguf")
    path.write_bytes(path.read_bytes()[:-1000])
    return place.distill(teacher__model=str(path))


@case(TEACHERS, 20, "'rwkv7'")
def gguf_of_an_unknown_architecture(place: Place) -> Words:
    path = gguf_files.write(place.world / "teacher", place.folder / "teacher.gguf", architecture="rwkv7")
    return place.distill(teacher__model=str(path))


@case(TEACHERS, 20, "there is no model")
def gguf_that_is_not_there(place: Place) -> Words:
    return place.distill(student__model=str(place.folder / "none.gguf"))
