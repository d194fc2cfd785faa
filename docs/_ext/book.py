"""What the book adds to Sphinx: quizzes, players, links to the glossary, and directives that a forge hides.

A comment `<!-- {name} argument -->` in a page is the directive `name`, its further lines the body. So a
page reads as plain Markdown elsewhere, and the table of contents, a quiz or a player appears only in the
book. In the line above a comment a picture, or words that begin with *In the book*, are for the forge.
"""

import html
import json
import re
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import runs
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from labs.kit.learner.quiz import find_topic, topics
from mini_engine.show.player import write_shell

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
HIDDEN = re.compile(
    r"(?:^(?:!\[[^]]*\]\([^)]*\)|\*In the book [^\n]*)\n)?^<!-- \{([\w-]+)\} ?([^\n]*?)(?:\n(.*?))?[ \n]-->$",
    re.M | re.S,
)
GLOSSARY = "docs/glossary"
LINKED = ("docs/", "labs/", "notebooks/")


def show_hidden(app: Sphinx, docname: str, source: list[str]) -> None:
    """Comments that are directives become directives, and links to folders plain text."""

    def directive(found: re.Match[str]) -> str:
        # Some pages are there in some editions of the course only.
        there = [
            line
            for line in (found[3] or "").splitlines()
            if "*" not in line or any(ROOT.glob(line[1:] + ".*"))
        ]
        return "\n".join([f"````{{{found[1]}}} {found[2]}", *there, "````"])

    def link(found: re.Match[str]) -> str:
        return found[1] if (folder / found[2]).is_dir() else found[0]

    folder = Path(app.env.doc2path(docname)).parent
    source[0] = re.sub(r"\[([^]\n]+)\]\(([^)\s:#]+)\)", link, HIDDEN.sub(directive, source[0]))


# ------------------------------------------------------------------------------------------ quizzes


class Quiz(SphinxDirective):
    """`<!-- {quiz} preemption -->`: the questions of a topic in quizzes.toml. Each answer is a <details>, so
    that a click shows whether it is right and why, without any script."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(DOCS / "quizzes.toml"))
        topics.cache_clear()  # a server that rebuilds would show the first ones for ever
        found: list[nodes.Node] = [raw('<div class="quiz">')]
        for number, question in enumerate(find_topic(self.arguments[0]).questions, 1):
            found += [raw(f'<div class="question"><div class="number">Question {number}</div>')]
            found += self.parse_text_to_nodes(question.ask)
            for answer in question.answers:
                kind, verdict = ("right", "Right.") if answer.right else ("wrong", "Not so.")
                found.append(raw(f'<details class="choice {kind}"><summary>'))
                found += (words := self.parse_text_to_nodes(answer.text))
                for paragraph in words:
                    paragraph["classes"].append("answer")
                found.append(raw(f'</summary><div class="why"><strong>{verdict}</strong>'))
                found += self.parse_text_to_nodes(answer.why)
                found.append(raw("</div></details>"))
            found.append(raw("</div>"))
        return [*found, raw("</div>")]


def raw(text: str) -> nodes.raw:
    return nodes.raw("", text, format="html")


# ------------------------------------------------------------------------------------------ players


class Play(SphinxDirective):
    """`<!-- {play} paging -->`: a run of runs.py. The page has the run and a picture of the step at which the
    player opens; play.js puts the player in its place."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        (name,) = self.arguments
        try:
            shown = runs.find(name)
        except KeyError:
            raise ExtensionError(f"runs.py has no run {name!r}; it has {', '.join(runs.RUNS)}") from None
        picture = ""
        if name in runs.RUNS:
            source = f"{'../' * self.env.docname.count('/')}_static/runs/{name}.svg"
            picture = f'<img src="{source}" alt="{html.escape(shown.words())}">'
        title = html.escape(f"The trace player: {' and '.join(shown.names)}")
        data = json.dumps(shown.payload(), separators=(",", ":")).replace("<", "\\u003c")
        data = f'<script type="application/json">{data}</script>'
        return [raw(f'<div class="play full-width" data-title="{title}">{picture}{data}</div>')]


def write_players(app: Sphinx, error: Exception | None) -> None:
    """The player, and the pictures that stand for it."""
    if error is None and app.builder.name == "html":
        static = Path(app.outdir, "_static")
        write_shell(static / "player")
        (static / "runs").mkdir(exist_ok=True)
        for name in runs.RUNS:
            (static / "runs" / f"{name}.svg").write_text(runs.find(name).picture(), encoding="utf-8")


# ----------------------------------------------------------------------------------------- glossary


@cache
def terms() -> dict[str, tuple[str, str]]:
    """Each term of glossary.md, in lower case: the anchor of its heading, and its first sentence."""
    found = {}
    text = (DOCS / "glossary.md").read_text("utf-8")
    for heading, body in re.findall(r"^## (.+?)\n+(.*?)(?=\n\n|\Z)", text, re.M | re.S):
        plain = re.sub(r"\[([^\]]+)\]\([^)]+\)|[`*]", r"\1", " ".join(body.split()))
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for name in re.sub(r"[`)]", "", heading.replace(" (", ", ")).split(", "):
            found[name.lower()] = (anchor, plain.partition(". ")[0])
    return found


@cache
def pattern() -> re.Pattern[str]:
    longest = sorted(terms(), key=len, reverse=True)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, longest))})(?:s|es)?(?![\w-])", re.I)


def link_terms(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """In each page the first use of a term leads to the glossary."""
    if app.builder.format != "html" or not docname.startswith(LINKED) or docname == GLOSSARY:
        return
    to = app.builder.get_relative_uri(docname, GLOSSARY)
    seen: set[str] = set()
    for node in list(doctree.findall(nodes.Text)):
        if not _is_prose(node):
            continue
        if isinstance(node.parent, nodes.literal):
            if (name := str(node).lower()) in terms() and terms()[name][0] not in seen:
                seen.add(terms()[name][0])
                place = node.parent
                place.parent.replace(place, _link(to, name, place.deepcopy()))
            continue
        if pieces := _pieces(str(node), to, seen):
            node.parent.replace(node, pieces)


def _is_prose(node: nodes.Node) -> bool:
    kinds = (nodes.reference, nodes.title, nodes.literal_block, nodes.raw, nodes.caption, nodes.image)
    chain = node.parent
    prose = False
    while chain is not None:
        # An answer is itself what is clicked on: a link in it could not be told from it.
        if isinstance(chain, kinds) or "answer" in getattr(chain, "attributes", {}).get("classes", ()):
            return False
        prose = prose or isinstance(chain, nodes.paragraph)
        chain = chain.parent
    return prose


def _pieces(text: str, to: str, seen: set[str]) -> list[nodes.Node]:
    pieces: list[nodes.Node] = []
    done = 0
    for match in pattern().finditer(text):
        name = match[0].lower()
        name = next((n for n in (name, name[:-1], name[:-2]) if n in terms()), None)
        if name is None or terms()[name][0] in seen:
            continue
        seen.add(terms()[name][0])
        pieces += [nodes.Text(text[done : match.start()]), _link(to, name, nodes.Text(match[0]))]
        done = match.end()
    return [*pieces, nodes.Text(text[done:])] if pieces else []


def _link(to: str, name: str, shown: nodes.Node) -> nodes.reference:
    anchor, meaning = terms()[name]
    return nodes.reference(
        "", "", shown, refuri=f"{to}#{anchor}", reftitle=meaning, classes=["term"], internal=True
    )


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", show_hidden)
    app.connect("doctree-resolved", link_terms)
    app.connect("build-finished", write_players)
    app.add_directive("quiz", Quiz)
    app.add_directive("play", Play)
    made_by = [*sorted(Path(__file__).parent.glob("*.py")), DOCS / "images" / "real_bugs.py"]
    state = crc32(b"".join(path.read_bytes() for path in made_by))  # changed, it makes every page anew
    return {"version": "1", "env_version": state, "parallel_read_safe": True, "parallel_write_safe": True}
