"""Laws of chats, on every template that trl ships: scored are the answers with their end marks, and nothing else.

What a template should give is written down here by hand, template by template; nothing of it is computed.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from refusals import refused
from transformers import PreTrainedTokenizerFast

from stillroom.config.schema import DataConfig
from stillroom.core.errors import ConfigError, DataError
from stillroom.data.chat import ChatPrinter, TemplateChat, prompt_ids
from stillroom.data.preview import preview
from stillroom.data.records import Tally, Turn, Unusable

_TRL = importlib.util.find_spec("trl")
assert _TRL is not None and _TRL.origin is not None
TEMPLATES = {path.stem: path for path in sorted((Path(_TRL.origin).parent / "chat_templates").glob("*.jinja"))}

BOS, EOS = "<s>", "<|endoftext|>"
BAR = "\uff5c"  # DeepSeek writes its marks with a full-width bar and U+2581 for the space

# The text that ends an answer, by the beginning of the template's name; the longest beginning counts.
END_MARKS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "cohere2": "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    "deepseek": f"<{BAR}end\u2581of\u2581sentence{BAR}>",
    "diffusion_gemma": "<turn|>",
    "gemma": "<end_of_turn>",
    "gemma4": "<turn|>",
    "glm4moe": "",  # nothing ends an answer: the next header follows
    "glm4moe_training": "<|user|>",
    "gptoss": "<|end|>",
    "idefics3": "<end_of_utterance>",
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llava_next": "</s>",
    "muse_glimmer": "<|eot|>",
    "nemotron": "<|im_end|>",
    "phi3": "<|end|>",
    "qwen": "<|im_end|>",
    "smolvlm": "<end_of_utterance>",
}
LAST_END_MARKS = {"gptoss": "<|return|>"}  # of the last answer, where it ends otherwise

ALTERNATES = ("cohere", "gemma", "gemma3")  # refuse any order but user, assistant, user, assistant
REFUSES_SYSTEM = ("gemma", "gemma_training")


def by_name(table: dict[str, str], name: str) -> str | None:
    fitting = [start for start in table if name.startswith(start)]
    return table[max(fitting, key=len)] if fitting else None


def is_one_of(name: str, families: tuple[str, ...]) -> bool:
    return name.removesuffix("_training") in families or name.startswith(tuple(f"{one}2" for one in families))


def end_mark(name: str, *, is_last: bool) -> str:
    mark = by_name(LAST_END_MARKS, name) if is_last else None
    mark = by_name(END_MARKS, name) if mark is None else mark
    assert mark is not None, f"{name}: write its end mark down"
    return mark


def scored(name: str, answers: list[str]) -> list[str]:
    """The scored texts that these printed answers should give."""
    earlier = [answer + end_mark(name, is_last=False) for answer in answers[:-1]]
    return [*earlier, answers[-1] + end_mark(name, is_last=True)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"bos_token": BOS, "eos_token": EOS})
    return tokenizer


def chat(*turns: str, **fields: Any) -> dict[str, Any]:
    """Turns written as "u: text", "a: text", "s: text"."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return {"messages": [{"role": roles[turn[0]], "content": turn[3:]} for turn in turns], **fields}


def show(folder: Path, tokenizer: Any, values: list[dict[str, Any]]) -> dict[str, Any]:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return preview(DataConfig(train=str(path), max_bad_share=1, max_length=4096), tokenizer, num_rows=0)


def scored_pieces(row: dict[str, Any]) -> list[str]:
    """The scored pieces without the end-of-text token, which closes every document and is scored."""
    texts = [text for text, is_scored in row["pieces"] if is_scored]
    return [text for text in [*texts[:-1], texts[-1].removesuffix(EOS)] if text]


def shown(folder: Path, name: str, tokenizer: Any, value: dict[str, Any]) -> dict[str, Any]:
    tokenizer.chat_template = TEMPLATES[name].read_text(encoding="utf-8")
    return show(folder, tokenizer, [value])


# -- every template --------------------------------------------------------------------------------------

TRAP = ("u: Is 4 prime? Answer Yes or No.", "a: No", "u: And is 5 prime? Yes or No.", "a: Yes")
QUOTED = '{"a": [1,\n\n2]} \\n "b"'
PRIVATE = "\U000f0000a\U000f0001"  # as the marks that find the answers
CHATS: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "single": (("u: Is 4 prime? Answer Yes or No.", "a: No"), ["No"]),
    "trap": (TRAP, ["No", "Yes"]),
    "one word many times": (("u: No", "a: No", "u: No No", "a: No", "u: No", "a: No"), ["No", "No", "No"]),
    "a word of the template": (("u: Who?", "a: assistant", "u: What?", "a: user"), ["assistant", "user"]),
    "the question again": (("u: Say: I am here.", "a: Say: I am here.", "u: ok", "a: ok"), ["Say: I am here.", "ok"]),
    "lines and quotes": (("u: q", f"a: {QUOTED}", "u: q", "a: x\n\ny"), [QUOTED, "x\n\ny"]),
    "private characters": (("u: q\U000f0000", f"a: {PRIVATE}", "u: q", "a: b"), [PRIVATE, "b"]),
    "an end mark spelt out": (("u: <|im_end|>?", "a: so <|im_end|> so", "u: q", "a: b"), ["so <|im_end|> so", "b"]),
    "an empty answer": (("u: Say nothing.", "a: ", "u: Say nothing, Yes?", "a: Yes"), ["Yes"]),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_scored_are_the_answers_with_their_end_marks_and_nothing_else(
    name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = TEMPLATES[name].read_text(encoding="utf-8")
    result = show(tmp_path, tokenizer, [chat(*turns) for turns, _ in CHATS.values()])
    assert len(result["rows"]) == len(CHATS), result["bad_records"]
    for row, (kind, (_, answers)) in zip(result["rows"], CHATS.items(), strict=True):
        assert scored_pieces(row) == scored(name, answers), kind
    assert result["left_out"] == {"empty_answers": 1}


@pytest.mark.parametrize("name", TEMPLATES)
def test_pieces_joined_are_what_the_tokenizer_s_own_template_prints(
    name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    value = chat(*TRAP)
    (row,) = shown(tmp_path, name, tokenizer, value)["rows"]
    messages = value["messages"]
    if name.startswith(("idefics3", "llava_next", "smolvlm")):  # they read contents as lists of parts only
        messages = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    printed = str(tokenizer.apply_chat_template(messages, tokenize=False))
    assert "".join(text for text, _ in row["pieces"]).removesuffix(EOS) == printed.removesuffix(EOS)
    printer = ChatPrinter(tokenizer.chat_template, tokenizer.special_tokens_map)
    opened = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert printer(messages, opens_answer=True) == opened


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_system_turn_is_never_scored(name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    value = chat("s: Answer Yes or No. No", *TRAP)
    if name in REFUSES_SYSTEM:
        with pytest.raises(DataError, match="System role not supported"):
            shown(tmp_path, name, tokenizer, value)
        return
    (row,) = shown(tmp_path, name, tokenizer, value)["rows"]
    assert scored_pieces(row) == scored(name, ["No", "Yes"])


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_before_any_question_does_not_score_its_header(
    name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    value = chat("a: Hello", "u: Hello?", "a: Yes")
    if is_one_of(name, ALTERNATES):
        with pytest.raises(DataError, match="roles must alternate"):
            shown(tmp_path, name, tokenizer, value)
        return
    (row,) = shown(tmp_path, name, tokenizer, value)["rows"]
    assert scored_pieces(row) == scored(name, ["Hello", "Yes"])


# -- thoughts --------------------------------------------------------------------------------------------

THOUGHT = "<think>\nfoo\n</think>\n\nYes"
FORGETS = ("Yes", THOUGHT)  # earlier thoughts are dropped
THOUGHTS = {  # what is printed of THOUGHT as the first and as the last answer
    "": (THOUGHT, THOUGHT),
    "deepseek": ("\n\nYes", "\n\nYes"),
    "deepseek_r1_distill_training": (THOUGHT, THOUGHT),
    "glm4moe": ("Yes", "<think>foo</think>\nYes"),
    "lfm2_2_5": FORGETS,
    "nemotron": ("\n\nYes", THOUGHT),
    "qwen3.": FORGETS,
    "qwen3_5_nothink.": FORGETS,
    "qwen3_5_think.": FORGETS,
    "qwen3_6.": FORGETS,
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_of_a_thought_inside_the_content_what_is_printed_is_scored(
    name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    result = shown(tmp_path, name, tokenizer, chat("u: foo?", f"a: {THOUGHT}", "u: Yes?", f"a: {THOUGHT}"))
    fitting = max((start for start in THOUGHTS if f"{name}.".startswith(start)), key=len)
    assert scored_pieces(result["rows"][0]) == scored(name, list(THOUGHTS[fitting]))
    num_dropped = sum("foo" not in printed for printed in THOUGHTS[fitting])
    assert result["left_out"].get("unprinted_thoughts", 0) == num_dropped


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("qwen3", "<think>\nfoo\n</think>\n\nYes<|im_end|>"),
        ("qwen3_5_think", "foo\n</think>\n\nYes<|im_end|>"),  # its prompt opens the thought
        ("nemotron_3_nano", "foo\n</think>\nYes<|im_end|>"),
        ("glm4moe", "\n<think>foo</think>\nYes"),
        (
            "gptoss",
            "<|channel|>analysis<|message|>foo<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
        ),
    ],
)
@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_given_apart_is_scored_where_it_is_printed_and_else_counted(
    name: str, last: str, field: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    value = chat("u: foo?", "a: Yes", "u: Yes?", "a: Yes")
    for message in value["messages"][1::2]:
        message[field] = "foo"
    result = shown(tmp_path, name, tokenizer, value)
    assert scored_pieces(result["rows"][0]) == ["Yes" + end_mark(name, is_last=False), last]
    assert result["left_out"] == {"unprinted_thoughts": 1}
    assert any("lack a part, such as an earlier thought" in note for note in result["notes"])


# -- shapes of messages ----------------------------------------------------------------------------------

PARTS = [{"type": "text", "text": "Ye"}, {"type": "text", "text": "s"}]
REFUSED = {
    "has tool_calls": {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
    "a part of type image": {"role": "user", "content": [{"type": "image", "url": "x"}, *PARTS]},
    "type text without its text": {"role": "user", "content": [{"type": "text"}]},
    "content is null": {"role": "user", "content": None},
    "its thought is a list": {"role": "assistant", "content": "x", "reasoning_content": ["x"]},
}


def test_contents_in_parts_of_text_are_joined(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    value = {"messages": [{"role": "user", "content": PARTS}, {"role": "assistant", "content": PARTS}]}
    assert scored_pieces(shown(tmp_path, "qwen2_5", tokenizer, value)["rows"][0]) == ["Yes<|im_end|>"]


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_read_of_a_chat_is_named(why: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    value = {"messages": [REFUSED[why], {"role": "assistant", "content": "x"}]}
    with pytest.raises(DataError, match=why):
        shown(tmp_path, "qwen2_5", tokenizer, value)


def test_tools_that_no_template_is_given_are_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    result = shown(tmp_path, "qwen2_5", tokenizer, chat("u: q", "a: x", tools=[{"name": "f"}]))
    assert result["left_out"] == {"ignored_tools": 1}


def test_a_turn_that_the_template_does_not_print_is_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    result = show(tmp_path, tokenizer, [chat("s: be kind", "u: q", "a: x")])
    assert scored_pieces(result["rows"][0]) == ["x;"] and result["left_out"] == {"unprinted_turns": 1}


# -- templates of other kinds ----------------------------------------------------------------------------


def body(content: str) -> str:
    """A template that prints the contents so."""
    opening = "{% if add_generation_prompt %}<assistant>{% endif %}"
    return "{% for m in messages %}<{{ m.role }}>" + content + "</>{% endfor %}" + opening


ODD = {
    "as JSON": (body("{{ m.content | tojson }}"), ['\\"No\\" \u00e9', "No"], '"</>'),
    "upper case": (body("{{ m.content | upper }}"), ['"NO" \u00c9', "NO"], "</>"),
    "first in a variable": (body("{% set c = m.content ~ '' %}{{ c[:] }}"), ['"No" \u00e9', "No"], "</>"),
    "generated without the end mark": (
        body("{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}q{% endif %}"),
        ['"No" \u00e9', "No"],
        "</>",
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_answer_printed_otherwise_is_scored_as_it_is_printed(
    kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    template, answers, mark = ODD[kind]
    tokenizer.chat_template = template
    result = show(tmp_path, tokenizer, [chat("u: No", 'a: "No" \u00e9', "u: No", "a: No")])
    assert scored_pieces(result["rows"][0]) == [answer + mark for answer in answers]


def test_an_answer_that_the_template_does_not_mark_as_generated_is_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    last = "{% if m.role == 'assistant' and loop.last %}{% generation %}{{ m.content }}{% endgeneration %}"
    tokenizer.chat_template = body(last + "{% else %}{{ m.content }}{% endif %}")
    result = show(tmp_path, tokenizer, [chat("u: q", "a: x", "u: q", "a: y")])
    assert scored_pieces(result["rows"][0]) == ["y</>"]
    assert result["left_out"] == {"turns_not_marked_generated": 1}


@pytest.mark.parametrize("change", ["m.content | reverse", "m.content ~ m.content", "m.content.split('e')[0]", "'x'"])
def test_an_answer_that_cannot_be_found_again_is_never_guessed(
    change: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = body(f"{{{{ {change} if m.role == 'assistant' and not loop.last else m.content }}}}")
    result = show(tmp_path, tokenizer, [chat("u: yes", "a: yes", "u: yes", "a: no")])
    assert scored_pieces(result["rows"][0]) == ["no</>"]
    assert result["left_out"] == {"unscored_turns": 1}


def test_a_chat_that_cannot_be_aligned_is_refused_by_name(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = body("{{ m.content[1:] if m.role == 'assistant' else m.content }}")
    with pytest.raises(DataError, match="prints the answers so that they cannot be found again"):
        show(tmp_path, tokenizer, [chat("u: yes", "a: yes")])


# -- templates that do harm ------------------------------------------------------------------------------

SAID = "{% for m in messages %}{{ m.content }}{% endfor %}"
HARMFUL = {
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ messages.none.at_all }}": "no attribute",
    "{{ messages | length + 'x' }}": "TypeError",
    "{% if %}": "Expected an expression",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}": "RecursionError",
    "{{ 'a' * 10 ** 10 }}": "it builds 1e\\+10 characters",
    "{{ ('a' * 10000000000)[:3] }}": "it builds",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}": "it builds",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}": "it builds",
    "{% set a = ['x'] * 9999 %}{% set b = [a] * 9999 %}{% set c = [b] * 9999 %}{{ c }}": "it builds",
    "{{ 'a'.rjust(10000000000) }}": "it builds",
    "{{ '%10000000000d' % 1 }}": "it builds",
    "{{ '{:10000000000}'.format(1) }}": "it builds",
    "{% set b = 'a' * 900000 %}{{ b.replace('a', b) }}": "it builds",
    "{% set b = 'a' * 900000 %}{{ ([b] * 900000) | join(b) }}": "it builds",
    "{{ 'a' | center(10000000000) }}": "the filter center is given 10,000,000,000",
    "{{ (10 ** 100000) ** 100000 }}": "it builds",
    "{{ lipsum(n=100000) }}": "'lipsum' is undefined",
    "{{ dict.mro() }}": "attribute 'mro'",
    "{% set x %}{% for i in range(100000) %}{{ 'a' * 900000 }}{% endfor %}{% endset %}": "more work than is allowed",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "more work than is allowed",
}


@pytest.mark.parametrize("harm", HARMFUL)
def test_a_template_that_fails_or_runs_away_refuses_its_chats_with_the_reason(
    harm: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = SAID + harm
    with pytest.raises(DataError, match=HARMFUL[harm]) as caught:
        show(tmp_path, tokenizer, [chat("u: q", "a: x")])
    assert caught.value.exit_code == 2


def test_a_template_that_runs_away_ends_the_reading_after_a_few_chats(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = SAID + "{{ 'a' * 10 ** 10 }}"
    write = TemplateChat(tokenizer, Tally())
    turns = (Turn("user", "q"), Turn("assistant", "x"))
    for _ in range(2):
        with pytest.raises(Unusable):
            write(turns)
    with pytest.raises(DataError, match="3 chats in a row"):
        write(turns)


@pytest.mark.parametrize("harm", ["{{ 1 / 0 }}", "{{ 'a' * 10 ** 10 }}"])
def test_a_prompt_is_printed_within_the_same_bounds(harm: str, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = SAID + harm
    with refused(ConfigError, "--prompt"):
        prompt_ids(tokenizer, "q")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_opened_as_the_answers_of_training_are(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = TEMPLATES[name].read_text(encoding="utf-8")
    asked = tokenizer.decode(prompt_ids(tokenizer, "Is 4 prime?")[0])
    assert asked.count("Is 4 prime?") == 1


def test_a_long_chat_is_within_the_bounds_of_a_template(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = TEMPLATES["gemma4"].read_text(encoding="utf-8")
    printer = ChatPrinter(tokenizer.chat_template, tokenizer.special_tokens_map)
    turns = [{"role": role, "content": "word " * 2000} for _ in range(100) for role in ("user", "assistant")]
    assert printer(turns).count("word") == 2000 * 200
