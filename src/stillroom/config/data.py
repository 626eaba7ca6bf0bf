"""The `data` section: sources, the layout of their records, and how rows are made of them."""

from __future__ import annotations

import string
from datetime import date
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from stillroom.config.sections import Count, Section

MOST_TOKENS = 2**24  # in a row

# The fields that records are made of; `columns` names all of one group.
SHAPES = (
    ("text",),
    ("prompt", "completion"),
    ("question", "answer"),
    ("instruction", "input", "output"),
    ("instruction", "output"),
    ("messages",),
    ("conversations",),
)
Pieces = tuple[tuple[str, str | None], ...]  # (literal text, name of the column that follows it, if any)


@lru_cache(maxsize=64)  # asked for each record
def template_pieces(template: str) -> Pieces:
    """The pieces of a template such as "Q: {question}". A brace that stands for itself is written twice.

    Raise ValueError where it is no such text or names no column.
    """
    pieces: list[tuple[str, str | None]] = []
    for literal, name, form, conversion in string.Formatter().parse(template):
        if name is not None and (form or conversion or not name or not name.strip() == name or set(name) & set(".[")):
            raise ValueError(f"{{{name}}} in the template must be the name of a column, and nothing else")
        pieces.append((literal, name))
    if not any(name for _, name in pieces):
        raise ValueError("the template names no column: write one in braces, as in 'Q: {question}'")
    return tuple(pieces)


class Layout(Section):
    """How an object of a file becomes a record. Without settings, by the fields it has."""

    columns: dict[str, str] = Field(
        default_factory=dict,
        description="which column holds each field of a record, as {prompt = 'question', completion = 'answer'}; the "
        "others are not read",
    )
    template: str = Field(
        "", description="the text of a record, its columns in braces, as in 'Q: {question}\\nA: {answer}'"
    )
    scored: tuple[str, ...] = Field(
        (), description="columns of the template whose text is learned, with what ends the template; empty: all text"
    )

    @field_validator("scored", mode="before")
    @classmethod
    def _as_names(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("columns")
    @classmethod
    def _are_a_shape(cls, columns: dict[str, str]) -> dict[str, str]:
        if columns and not any(set(columns) == set(shape) for shape in SHAPES):
            known = " or ".join(", ".join(shape) for shape in SHAPES)
            raise ValueError(f"names the fields {', '.join(columns)}; a record is made of {known}")
        if any(not column for column in columns.values()):
            raise ValueError("a column has an empty name")
        return columns

    @field_validator("template")
    @classmethod
    def _is_a_template(cls, template: str) -> str:
        if template:
            template_pieces(template)
        return template

    @model_validator(mode="after")
    def _is_one_way(self) -> Layout:
        if self.columns and self.template:
            raise ValueError("columns and template are both set: the template names its columns itself, set only one")
        if self.scored and not self.template:
            raise ValueError("scored names columns of a template, and template is not set")
        names = [name for _, name in template_pieces(self.template) if name] if self.template else []
        if strange := [name for name in self.scored if name not in names]:
            raise ValueError(f"scored names {', '.join(strange)}, and the template has {', '.join(names)}")
        return self

    @property
    def has_layout(self) -> bool:
        return bool(self.columns or self.template)

    @property
    def pieces(self) -> Pieces:
        return template_pieces(self.template) if self.template else ()

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """The columns that must be there. An `input` may be missing from some records."""
        if self.template:
            return tuple(dict.fromkeys(name for _, name in self.pieces if name))
        return tuple(self.columns.values())


class SourceConfig(Layout):
    """One of several sources of training data."""

    path: str = Field(description="file, glob, folder, hf:NAME[:CONFIG[:SPLIT]], builtin:stdlib or builtin:qa")
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        1.0, description="passes over this source in one epoch of the run; 2: seen twice as often, 0.5: half of it"
    )
    objectives: Literal["all", "labels"] = Field(
        "all", description="labels: learn from the text alone; the teacher is not asked about this source"
    )


SOURCE_TAGS = ("<name>", "<sources>")  # pydantic's names of the two forms of `train`, in its errors


def _tag_of(value: Any) -> str:
    return SOURCE_TAGS[not isinstance(value, str)]


def _as_sources(value: Any) -> Any:
    """One table is a list of one; a name in a list is a source without settings."""
    if isinstance(value, dict | SourceConfig):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple({"path": one} if isinstance(one, str) else one for one in value)
    return value


Sources = Annotated[
    Annotated[str, Tag(SOURCE_TAGS[0])] | Annotated[tuple[SourceConfig, ...], Field(min_length=1), Tag(SOURCE_TAGS[1])],
    Discriminator(_tag_of),
]


class DataConfig(Layout):
    train: Sources = Field(
        "builtin:stdlib",
        description="file, glob, folder, hf:NAME[:CONFIG[:SPLIT]], builtin:stdlib or builtin:qa; or several, as "
        "[{path = 'a.jsonl', weight = 2}, {path = 'b.jsonl', objectives = 'labels'}]",
    )
    eval: str | None = Field(None, description="held-out data; without it a share of `train` is held out")
    eval_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.05, description="share held out by content hash when `eval` is not given; of few documents more are"
    )
    train_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the training documents that is used, chosen by content hash"
    )
    max_records: Count = Field(0, description="records read from each source, the first ones; 0: all")
    streaming: bool = Field(
        False, description="read hub datasets over the network without storing them; see max_records"
    )
    max_length: Annotated[int, Field(ge=8, le=MOST_TOKENS)] = Field(256, description="tokens in a row")
    packing: Literal["auto", "blocks", "rows", "packed"] = Field(
        "auto",
        description="of training data. blocks: documents end to end in full rows; rows: each record in rows of its "
        "own, padded; packed: several records in a row that do not see each other; auto: blocks for plain text, rows "
        "where records have a prompt. Held-out records are scored alone",
    )
    group_by_length: bool = Field(
        False, description="put training rows of about equal length into a batch: less padding, another order"
    )
    order: Literal["shuffled", "short_first"] = Field(
        "shuffled",
        description="of training rows. short_first: the first ones from short to long, see short_first_share; the "
        "others shuffled",
    )
    short_first_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.3, description="share of the run's steps that go from short rows to long ones; at most the first epoch"
    )
    cache: str = Field(
        "auto",
        description="folder of the token store, which keeps large files tokenized; auto: the user's cache folder, for "
        "files of 32 MB and more together; off: tokenize at every start, in memory",
    )
    bos: Literal["auto"] | bool = Field(
        "auto", description="begin each document with the begin-of-text token; auto: where the tokenizer does by itself"
    )
    day: str = Field(
        "",
        description="the day that a chat template prints, where it prints one, as 2026-01-31; empty: the day on which "
        "the run begins, which the run keeps",
    )
    train_on_prompt: bool = Field(False, description="score the prompt's tokens too")
    min_coverage: Annotated[float, Field(ge=0, le=1)] = Field(
        0.5,
        description="with a teacher that has a tokenizer of its own: least share of the scored text's bytes that both "
        "tokenizers read as the same; below it the pair is refused",
    )
    max_bad_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.01, description="stop when more than this share of the records cannot be used"
    )

    @field_validator("day", mode="before")
    @classmethod
    def _is_a_day(cls, value: Any) -> Any:
        if isinstance(value, date):  # TOML has dates
            return value.isoformat()
        if isinstance(value, str) and value:
            try:
                date.fromisoformat(value)
            except ValueError:
                raise ValueError(f"{value!r} is no day: write it as 2026-01-31") from None
        return value

    @field_validator("train", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return _as_sources(value)

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The sources of the training data. One without a layout of its own has that of the section."""
        if isinstance(self.train, str):
            return (self._with_layout(SourceConfig(path=self.train)),)
        return tuple(self._with_layout(source) for source in self.train)

    @property
    def source_names(self) -> tuple[str, ...]:
        """A name for each source: its path, with a number where a path stands twice."""
        paths = [source.path for source in self.sources]
        return tuple(
            path if paths.count(path) == 1 else f"{path} #{paths[: place + 1].count(path)}"
            for place, path in enumerate(paths)
        )

    @property
    def label_sources(self) -> frozenset[str]:
        """The names of the sources that are learned from the labels alone."""
        named = zip(self.source_names, self.sources, strict=True)
        return frozenset(name for name, source in named if source.objectives == "labels")

    def named(self, spec: str) -> SourceConfig:
        """A spec such as `eval` as a source with the section's layout."""
        return self._with_layout(SourceConfig(path=spec))

    def alone(self, source: SourceConfig) -> DataConfig:
        """The section as if this source, with its layout, were all its training data."""
        layout = {name: getattr(source, name) for name in Layout.model_fields}
        return self.model_copy(update={"train": source.path, **layout})

    @property
    def is_mixed(self) -> bool:
        """Whether the sources' rows are drawn by weight and kept apart. A list of one plain source is that source."""
        first, *others = self.sources
        return bool(others) or first.weight != 1.0 or first.objectives != "all"

    def _with_layout(self, source: SourceConfig) -> SourceConfig:
        layout = {name: getattr(self, name) for name in Layout.model_fields}
        return source if source.has_layout else source.model_copy(update=layout)
