"""Laws of answered questions: likelihoods are those of the model, matches are normalised, shares have intervals."""

from __future__ import annotations

from typing import Any

import begun
import families
import pytest
import torch
from trl_templates import template

from stillroom.data.checkers import is_same_text, normalised
from stillroom.metrics import questions as module
from stillroom.metrics.metrics import wilson
from stillroom.metrics.questions import Question, answer_questions
from stillroom.models.generate import Piece


def log_prob(model: Any, before: list[int], after: list[int]) -> float:
    with torch.no_grad():
        logs = torch.log_softmax(model(torch.tensor([before + after])).logits[0].float(), -1)
    return sum(float(logs[len(before) - 1 + place, token]) for place, token in enumerate(after))


def test_the_likeliest_choice_is_the_one_the_model_finds_likeliest() -> None:
    model, words = families.build("llama"), begun.byte_tokenizer()
    choices = ("the room", "still waters run", "x")
    before = words("Question: where\nAnswer:")["input_ids"]
    sums = [log_prob(model, before, words(f" {text}", add_special_tokens=False)["input_ids"]) for text in choices]
    best = max(range(3), key=sums.__getitem__)
    best_by_byte = max(range(3), key=lambda place: sums[place] / len(choices[place]))
    for right in range(3):
        found = answer_questions(model, words, [Question("where", False, (choices[right],), choices, right)])
        assert found.choice_accuracy == (right == best) and found.choice_accuracy_by_byte == (right == best_by_byte)
        count = len(words(f" {choices[right]}", add_special_tokens=False)["input_ids"])
        assert found.answer_perplexity == pytest.approx(2.718281828 ** (-sums[right] / count), rel=1e-4)


def test_what_is_written_is_matched_normalised(monkeypatch: Any) -> None:
    model, words = families.build("llama"), begun.byte_tokenizer()
    told = [" The Room.\nQuestion: more", " a  still", "nothing"]
    asked: list[list[int]] = []

    def write(_model: Any, _words: Any, prompts: list[list[int]], give: Any, **_: Any) -> None:
        asked.extend(prompts)
        for row in range(len(prompts)):
            give(Piece(row, told[row], "end of text"))

    monkeypatch.setattr(module, "write", write)
    questions = [Question("q", False, ("room",)), Question("p:", True, ("x", "still")), Question("r", False, ("room",))]
    found = answer_questions(model, words, questions)
    assert found.exact_match == pytest.approx(2 / 3) and found.choice_accuracy is None and found.questions == 3
    assert found.intervals["exact_match"] == wilson(2, 3) and "choice_accuracy" not in found.intervals
    assert words.decode(asked[0], skip_special_tokens=True) == "Question: q\nAnswer:"
    assert words.decode(asked[1], skip_special_tokens=True) == "p:"


def test_a_chat_model_is_asked_with_its_template_and_its_whole_answer_counts(monkeypatch: Any) -> None:
    model, words = families.build("llama"), begun.byte_tokenizer(chat_template=template("llama3"))
    monkeypatch.setattr(module, "write", lambda *given, **_: given[3](Piece(0, "the\nroom", "end of text")))
    found = answer_questions(model, words, [Question("q", False, ("the room",))])
    assert found.exact_match == 1.0


def test_a_question_above_the_positions_counts_as_wrong_and_is_counted() -> None:
    model, words = families.build("gpt2", n_positions=32), begun.byte_tokenizer()
    long = Question("the still room " * 40, False, ("a",), ("a", "b"), 0)
    found = answer_questions(model, words, [long])
    assert found.too_long == 1 and found.choice_accuracy == 0.0 and found.exact_match == 0.0
    assert found.answer_perplexity is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("The  Room!", "room"), ("1,000", "1000"), ("well-known", "well known"), ("an apple a day", "apple day")],
)
def test_case_punctuation_articles_and_spaces_do_not_matter(text: str, wanted: str) -> None:
    assert normalised(text) == wanted


def test_an_answer_that_is_an_article_is_matched_as_it_stands() -> None:
    assert is_same_text(" a", "A") and not is_same_text("", "A")
    assert not is_same_text("the", "A")


def test_the_interval_of_a_share_is_wilson_s() -> None:
    low, high = wilson(8, 10)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert wilson(0, 5)[0] == 0.0 and wilson(5, 5)[1] == 1.0 and wilson(5, 5)[0] < 1.0
