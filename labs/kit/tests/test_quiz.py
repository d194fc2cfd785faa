"""The questions of the book: the data file, the pages that show them, and `python -m labs quiz`."""

import random

import pytest
from typer.testing import CliRunner

from labs.kit.judge.manifest import LABS_DIR
from labs.kit.learner import quiz
from labs.kit.learner.commands import app

ROOT = LABS_DIR.parent
TOPICS = list(quiz.topics().values())
CONCEPTS = sorted((ROOT / "docs" / "concepts").glob("*.md"))


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_a_topic_has_three_to_five_questions_with_one_right_answer_each_and_a_reason_for_all(topic):
    assert 3 <= len(topic.questions) <= 5
    for question in topic.questions:
        assert question.ask.endswith(("?", "?\n"))
        assert 3 <= len(question.answers) <= 4
        assert [answer.right for answer in question.answers].count(True) == 1
        assert all(len(answer.why.split()) >= 3 for answer in question.answers)
        assert len({answer.text for answer in question.answers}) == len(question.answers)


def test_right_answers_are_spread_over_the_places():
    places = [[q.answers.index(next(a for a in q.answers if a.right)) for q in t.questions] for t in TOPICS]
    assert all(len(set(topic)) > 1 for topic in places)
    flat = sum(places, [])
    assert all(flat.count(place) > len(flat) / 5 for place in range(3))


def test_every_concept_has_its_questions_and_says_how_to_ask_them():
    *concepts, engine = TOPICS
    assert [ROOT / topic.page for topic in concepts] == CONCEPTS and (ROOT / engine.page).is_file()
    for topic in concepts:
        text = (ROOT / topic.page).read_text("utf-8")
        assert f"<!-- {{quiz}} {topic.name} -->" in text
        assert f"`python -m labs quiz {topic.name}`" in text


@pytest.fixture
def topic(monkeypatch):
    """A topic; the right answer of each of its questions stands last."""
    monkeypatch.setattr(random, "sample", lambda population, k: sorted(population, key=lambda a: a.right)[:k])
    return quiz.find_topic("chunks")


def test_a_wrong_answer_is_explained_and_asked_again(capsys, topic):
    last = quiz.LETTERS[len(topic.questions[0].answers) - 1]
    said = iter(["a", last, "z", last, "q"])
    assert quiz.ask(topic, lambda prompt: next(said)) == (1, 2)
    out = capsys.readouterr().out
    wrong = next(answer for answer in topic.questions[0].answers if not answer.right)
    assert f"Not so. {wrong.why}" in out and "Right. " in out
    assert "type a letter: a, b, c, or q to end" in out
    assert "[--------------------] 1 of 5" in out and "[####----------------] 2 of 5" in out
    assert "[####----------------] 1 of 2 right at the first try" in out


def test_on_a_terminal_a_verdict_has_its_colour(capsys, monkeypatch, topic):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    said = iter(["a", quiz.LETTERS[len(topic.questions[0].answers) - 1], "q"])
    quiz.ask(topic, lambda prompt: next(said))
    out = capsys.readouterr().out
    assert "\x1b[1;31mNot so.\x1b[0m" in out and "\x1b[1;32mRight.\x1b[0m" in out


def test_an_end_of_input_ends_it(capsys):
    def closed(prompt):
        raise EOFError

    assert quiz.ask(quiz.find_topic("cost"), closed) == (0, 0)


def test_without_a_topic_they_are_listed_and_no_line_is_wider_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    listed = CliRunner().invoke(app, ["quiz"]).output
    assert all(topic.name in listed and topic.title in " ".join(listed.split()) for topic in TOPICS)
    out = CliRunner().invoke(app, ["quiz", "preemption"], input="a\nb\nc\n" * 20).output.replace("> ", "")
    assert max(map(len, out.splitlines())) <= 50
    assert "docs/concepts/08-preemption.md" in out and "5 questions" in out
