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

from stillroom.config import load_config
from stillroom.config.schema import DataConfig
from stillroom.core.errors import ConfigError, DataError
from stillroom.data.chat import ChatPrinter, TemplateChat, prompt_ids
from stillroom.data.preview import preview
from stillroom.data.records import Chat, Tally, Turn, Unusable

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


def show(folder: Path, tokenizer: Any, values: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return preview(DataConfig(train=str(path), max_bad_share=1, max_length=4096, **settings), tokenizer, num_rows=0)


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
    "a call of tool_calls has no name": {"role": "assistant", "content": None, "tool_calls": [{"function": {}}]},
    "is of the role user": {"role": "user", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
    "the arguments of f is text that is not JSON": {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": "{a"}}],
    },
    "the arguments of f are a list": {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
    "has function_call": {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
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


# -- tools -----------------------------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Get it",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}},
    },
}
ARGUMENTS = {"city": "Paris, No", "days": 2}
JSON_CALL = '{"name": "weather", "arguments": {"city": "Paris, No", "days": 2}}'
XML_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis, No\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
CALLS = {  # what is scored of a turn that only calls, by template; no entry: it prints no calls
    "deepseekv3": (
        f"<{BAR}tool\u2581calls\u2581begin{BAR}><{BAR}tool\u2581call\u2581begin{BAR}>function<{BAR}tool\u2581sep{BAR}>weather\n"
        f'```json\n{{"city": "Paris, No", "days": 2}}\n```<{BAR}tool\u2581call\u2581end{BAR}>'
        f"<{BAR}tool\u2581calls\u2581end{BAR}><{BAR}end\u2581of\u2581sentence{BAR}>"
    ),
    "gemma4_v2": '<|tool_call>call:weather{city:<|"|>Paris, No<|"|>,days:2}<tool_call|><turn|>',
    "glm4moe": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris, No</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>"
    ),
    "gptoss": ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris, No", "days": 2}<|call|>',
    "lfm2_v2": "<|tool_call_start|>[weather(city='Paris, No', days=2)]<|tool_call_end|><|im_end|>",
    "llama3_2": '{"name": "weather", "parameters": {"city": "Paris, No", "days": 2}}<|eot_id|>',
    "nemotron_3_nano": f"\n{XML_CALL}\n<|im_end|>",
    "qwen2_5": f"<tool_call>\n{JSON_CALL}\n</tool_call><|im_end|>",
    "qwen3": f"<tool_call>\n{JSON_CALL}\n</tool_call><|im_end|>",
    "qwen3_5_think": f"{XML_CALL}<|im_end|>",
    "qwen3_instruct_2507_training": f"<tool_call>\n{JSON_CALL}\n</tool_call><|im_end|>",
}


def tool_chat(*, as_text: bool = False, **fields: Any) -> dict[str, Any]:
    """A question, a call, its result and an answer. `as_text`: as OpenAI and Parquet files have them."""
    call = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    if as_text:
        call["function"]["arguments"] = json.dumps(ARGUMENTS)  # type: ignore[index]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather in Paris, No?"},
        {"role": "assistant", "content": None if as_text else "", "tool_calls": [call], **fields},
        {"role": "tool", "name": "weather", "content": "SUNNY"},
        {"role": "assistant", "content": "No rain."},
    ]
    return {"messages": turns, "tools": json.dumps([WEATHER]) if as_text else [WEATHER]}


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_scored_as_it_is_printed_and_its_result_is_not(
    name: str, as_text: bool, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    result = shown(tmp_path, name, tokenizer, tool_chat(as_text=as_text))
    pieces = result["rows"][0]["pieces"]
    assert scored_pieces(result["rows"][0]) == [CALLS[name], f"No rain.{end_mark(name, is_last=True)}"]
    assert "SUNNY" in "".join(text for text, is_scored in pieces if not is_scored)
    assert result["left_out"] == ({"ignored_tools": 1} if name == "deepseekv3" else {})
    if name != "deepseekv3":
        assert "Get it" in "".join(text for text, is_scored in pieces if not is_scored)


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_template_makes_a_result_a_target(name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = TEMPLATES[name].read_text(encoding="utf-8")
    values = [tool_chat(), tool_chat(content="Let me see.", reasoning_content="hm")]
    try:
        rows = show(tmp_path, tokenizer, values)["rows"]
    except DataError:  # no calls at all, or only user and assistant in turn
        return
    for row in rows:
        assert "SUNNY" not in "".join(text for text, is_scored in row["pieces"] if is_scored)
        assert any("No rain." in text for text, is_scored in row["pieces"] if is_scored)


def test_a_thought_and_a_text_before_a_call_are_scored_with_it(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    value = tool_chat(content="Let me see.", reasoning_content="hm")
    first, _ = scored_pieces(shown(tmp_path, "qwen3", tokenizer, value)["rows"][0])
    assert first == f"<think>\nhm\n</think>\n\nLet me see.\n{CALLS['qwen3']}"


def test_a_call_that_the_template_does_not_print_makes_its_turn_unscored(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = body("{{ m.content }}")
    result = show(tmp_path, tokenizer, [tool_chat(content="Let me see.")])
    assert scored_pieces(result["rows"][0]) == ["No rain.</>"]
    assert result["left_out"] == {"ignored_tools": 1, "unscored_turns": 1}


def test_nulls_that_arrow_puts_into_tools_are_left_out_and_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    value = tool_chat()
    plain = shown(tmp_path, "qwen3", tokenizer, value)["rows"][0]["pieces"]
    value["messages"][1]["tool_calls"][0]["function"]["arguments"] = {**ARGUMENTS, "zip": None}
    value["tools"] = [{**WEATHER, "strict": None}]
    result = shown(tmp_path, "qwen3", tokenizer, value)
    assert result["rows"][0]["pieces"] == plain and result["left_out"] == {"dropped_nulls": 2}


def test_results_of_tools_are_refused_where_the_prompt_is_scored(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(DataError, match="results of tools"):
        show(tmp_path, tokenizer, [tool_chat()], train_on_prompt=True)


def test_tools_change_the_key_of_a_chat() -> None:
    turns = (Turn("user", "q"), Turn("assistant", "x"))
    called = (turns[0], Turn("assistant", "x", calls=({"type": "function", "function": {"name": "f"}},)))
    given = (turns[0], Turn("assistant", "x", is_given=True))
    keys = {Chat(turns).key, Chat(turns, (WEATHER,)).key, Chat(called).key, Chat(given).key}
    assert len(keys) == 4


# -- prompts with answers --------------------------------------------------------------------------------

PAIRS = [
    {"prompt": "Is 4 prime?", "completion": "No"},
    {"question": "Is 4 prime?", "answer": "No"},
    {"instruction": "Is 4 prime?", "output": "No"},
    {"prompt": [{"role": "user", "content": "Is 4 prime?"}], "completion": [{"role": "assistant", "content": "No"}]},
]


@pytest.mark.parametrize("value", PAIRS)
def test_a_prompt_with_its_answer_is_the_chat_of_both(
    value: dict[str, Any], tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (wanted,) = shown(tmp_path, "qwen3", tokenizer, chat("u: Is 4 prime?", "a: No"))["rows"]
    for setting in ("auto", "on"):
        result = show(tmp_path, tokenizer, [value], chat=setting)
        assert result["rows"][0]["pieces"] == wanted["pieces"]
        is_told = any("printed with the chat template" in note for note in result["notes"])
        assert is_told != isinstance(value.get("prompt"), list)


@pytest.mark.parametrize("name", ["cohere", "gemma3", "llama3_2", "phi3_5", "qwen2_5", "qwen3", "gptoss"])
def test_what_is_trained_before_an_answer_is_what_generation_asks(
    name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (row,) = shown(tmp_path, name, tokenizer, PAIRS[0])["rows"]
    before = "".join(text for text, is_scored in row["pieces"][: [flag for _, flag in row["pieces"]].index(True)])
    asked = tokenizer.decode(prompt_ids(tokenizer, "Is 4 prime?", bos=False)[0], skip_special_tokens=False)
    assert before.startswith(asked)  # a template may add an empty thought or the name of a channel


def test_pairs_are_as_they_stand_where_chat_is_off_or_there_is_no_template(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    raw = [["Is 4 prime?\n", False], [f"No{EOS}", True]]
    tokenizer.chat_template = TEMPLATES["qwen3"].read_text(encoding="utf-8")
    off = show(tmp_path, tokenizer, [PAIRS[1]], chat="off")
    tokenizer.chat_template = None
    none = show(tmp_path, tokenizer, [PAIRS[1]])
    assert [list(map(list, one["rows"][0]["pieces"])) for one in (off, none)] == [raw, raw]
    with refused(ConfigError, "data.chat"):
        show(tmp_path, tokenizer, [PAIRS[1]], chat="on")


def test_pairs_that_hold_marks_of_the_template_are_not_printed_twice(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATES["qwen3"].read_text(encoding="utf-8")
    value = {"prompt": "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", "completion": "x"}
    result = show(tmp_path, tokenizer, [value])
    assert "".join(text for text, _ in result["rows"][0]["pieces"]).startswith(value["prompt"] + "x")
    assert result["left_out"] == {"pairs_with_marks": 1}
    assert show(tmp_path, tokenizer, [value], chat="on")["left_out"] == {}


def test_answers_that_belong_to_a_prompt_are_not_scored(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    before, (answer,) = chat(*TRAP[:3])["messages"], chat(TRAP[3])["messages"]
    result = shown(tmp_path, "qwen3", tokenizer, {"prompt": before, "completion": [answer]})
    assert scored_pieces(result["rows"][0]) == ["Yes<|im_end|>"]
    (all_,) = shown(tmp_path, "qwen3", tokenizer, chat(*TRAP))["rows"]
    texts = ["".join(text for text, _ in row["pieces"]) for row in (result["rows"][0], all_)]
    assert texts[0] == texts[1]


# -- thoughts that are dropped ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "gptoss", "nemotron_3_nano", "llama3"])
def test_dropped_thoughts_leave_the_chat_without_them(
    name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (plain,) = shown(tmp_path, name, tokenizer, chat("u: foo?", "a: Yes"))["rows"]
    inside, apart = chat("u: foo?", f"a: {THOUGHT}"), chat("u: foo?", "a: Yes")
    apart["messages"][1]["reasoning_content"] = "foo"
    pair = {"prompt": "foo?", "completion": THOUGHT}
    result = show(tmp_path, tokenizer, [inside, apart, pair], thoughts="drop")
    assert [row["pieces"] for row in result["rows"]] == [plain["pieces"]] * 3
    assert result["left_out"] == {"dropped_thoughts": 3}


def test_a_thought_without_its_beginning_is_not_guessed(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="does not begin with <think>"):
        show(tmp_path, tokenizer, [chat("u: foo?", "a: foo</think>Yes")], thoughts="drop")


def test_a_weight_of_thoughts_is_refused_by_name() -> None:
    with refused(ConfigError, "", "data.thoughts", "keep", "drop"):
        load_config(overrides={"data.thoughts": 0.5})


# -- turns -----------------------------------------------------------------------------------------------


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
    said = Chat((Turn("user", "q"), Turn("assistant", "x")))
    for _ in range(2):
        with pytest.raises(Unusable):
            write(said)
    with pytest.raises(DataError, match="3 chats in a row"):
        write(said)


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
