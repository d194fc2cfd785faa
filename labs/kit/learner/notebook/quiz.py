"""The book's questions at the end of a notebook; an answer unfolds and says whether it is right, and why."""

from __future__ import annotations

from markdown_it import MarkdownIt

from labs.kit.learner.quiz import Question, find_topic


class Quiz:
    """The questions of some topics of docs/quizzes.toml, shown as the last expression of a cell.

    It is plain HTML: nothing is sent to the kernel, and it works in a saved page. The plain text does not
    say which answers are right. Raise LabError for an unknown topic.
    """

    def __init__(self, *names: str) -> None:
        self.topics = [find_topic(name) for name in names]
        self.questions = [question for topic in self.topics for question in topic.questions]

    def __repr__(self) -> str:
        questions = "\n\n".join(
            "\n".join([f"{n}. {question.ask}", *(f"   - {answer.text}" for answer in question.answers)])
            for n, question in enumerate(self.questions, 1)
        )
        commands = "\n".join(f"python -m labs quiz {topic.name}" for topic in self.topics)
        return f"{questions}\n\nIn a terminal, with the reasons:\n{commands}"

    def _repr_html_(self) -> str:
        return f'<div class="quiz">{"".join(map(_question, range(1, 99), self.questions))}</div>'


def _question(number: int, question: Question) -> str:
    answers = ""
    for answer in question.answers:
        kind, verdict = ("right", "Right.") if answer.right else ("wrong", "Not so.")
        answers += (
            f'<details class="choice {kind}"><summary><span>{_html(answer.text)}</span></summary>'
            f'<div class="why"><strong>{verdict}</strong> {_html(answer.why)}</div></details>'
        )
    asked = f"<strong>{number}.</strong> {_html(question.ask)}"
    return f'<div class="question">{asked}{answers}<p></p></div>'  # a gap, without a style


def _html(text: str) -> str:
    html: str = MarkdownIt("js-default").renderInline(text)
    return html
