"""The book's extension of Sphinx: quizzes, players, links to the glossary, and hidden directives.

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
from mini_engine.trace import Trace

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
HIDDEN = re.compile(
    r"(?:^(?:!\[[^]]*\]\([^)]*\)|\*In the book [^\n]*)\n)?^<!-- \{([\w-]+)\} ?([^\n]*?)(?:\n(.*?))?[ \n]-->$",
    re.M | re.S,
)
GLOSSARY = "docs/glossary"
LINKED = ("docs/", "labs/", "notebooks/")


def show_hidden(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn comments that are directives into directives, and links to folders into plain text."""

    def directive(found: re.Match[str]) -> str:
        # Some pages exist in some editions of the course only.
        lines = (found[3] or "").splitlines()
        there = [line for line in lines if "*" not in line or any(ROOT.glob(line[1:] + ".*"))]
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
        topics.cache_clear()  # else a server that rebuilds shows the old ones
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
        if name in runs.RUNS and any(isinstance(run, Trace) for run in shown.runs):
            source = f"{'../' * self.env.docname.count('/')}_static/runs/{name}.svg"
            size = re.search(r' width="\d+" height="\d+"', shown.picture() or "")
            picture = f'<img src="{source}"{size[0]} alt="{html.escape(shown.words())}">'
        title = html.escape(f"The trace player: {' and '.join(shown.names)}")
        data = json.dumps(shown.payload(), separators=(",", ":")).replace("<", "\\u003c")
        data = f'<script type="application/json">{data}</script>'
        return [raw(f'<div class="play full-width" data-title="{title}">{picture}{data}</div>')]


def write_players(app: Sphinx, error: Exception | None) -> None:
    """Write the player, and the pictures that stand for it."""
    if error is None and app.builder.name == "html":
        static = Path(app.outdir, "_static")
        write_shell(static / "player")
        (static / "runs").mkdir(exist_ok=True)
        for name in runs.RUNS:
            if (picture := runs.find(name).picture()) is not None:
                (static / "runs" / f"{name}.svg").write_text(picture, encoding="utf-8")


class Filter(SphinxDirective):
    """`<!-- {filter} LABEL -->`: a field, which filter.js makes, that leaves the sections with its words."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        return [raw(f'<div class="filter" data-label="{html.escape(self.arguments[0])}"></div>')]


# ----------------------------------------------------------------------------------------- glossary


@cache
def terms() -> dict[str, tuple[str, str]]:
    """Return the terms of glossary.md, in lower case: the anchor of the heading, and the first sentence."""
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
    """Link the first use of a term in each page to the glossary."""
    if app.builder.format != "html" or not docname.startswith(LINKED) or docname == GLOSSARY:
        return
    to = app.builder.get_relative_uri(docname, GLOSSARY)
    seen: set[str] = set()
    for node in filter(_is_prose, list(doctree.findall(nodes.Text))):
        place = node.parent
        if not isinstance(place, nodes.literal):
            if pieces := _pieces(str(node), to, seen):
                place.replace(node, pieces)
        elif (name := str(node).lower()) in terms() and terms()[name][0] not in seen:
            seen.add(terms()[name][0])
            place.parent.replace(place, _link(to, name, place.deepcopy()))


def _is_prose(node: nodes.Node) -> bool:
    kinds = (nodes.reference, nodes.title, nodes.literal_block, nodes.raw, nodes.caption, nodes.image)
    chain, prose = node.parent, False
    while chain is not None:
        # A click on an answer opens it, so it has no links.
        if isinstance(chain, kinds) or "answer" in getattr(chain, "attributes", {}).get("classes", ()):
            return False
        chain, prose = chain.parent, prose or isinstance(chain, nodes.paragraph)
    return prose


def _pieces(text: str, to: str, seen: set[str]) -> list[nodes.Node]:
    pieces, done = [], 0
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
    target = {"refuri": f"{to}#{anchor}", "reftitle": meaning, "classes": ["term"], "internal": True}
    return nodes.reference("", "", shown, **target)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", show_hidden)
    app.connect("doctree-resolved", link_terms)
    app.connect("build-finished", write_players)
    app.add_directive("quiz", Quiz)
    app.add_directive("play", Play)
    app.add_directive("filter", Filter)
    made_by = [*sorted(Path(__file__).parent.glob("*.py")), DOCS / "images" / "real_bugs.py"]
    state = crc32(b"".join(path.read_bytes() for path in made_by))  # a change rebuilds every page
    return {"version": "1", "env_version": state, "parallel_read_safe": True, "parallel_write_safe": True}
