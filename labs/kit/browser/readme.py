"""A lab's README.md or AFTER.md as HTML for its page."""

import posixpath
import re
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from labs.kit.judge.manifest import LABS_DIR, Lab

# The commands for a terminal at the beginning of a text.
TERMINAL = re.compile(r"^```\w*\n(?:LAB_IMPL=starter.*\n)(?:.*\n)*?```\n", re.M)
ROOT = LABS_DIR.parent
markdown = MarkdownIt("commonmark", {"html": False}).enable("table")


def html_of(lab: Lab, name: str, course: Path, named: set[str], book: str) -> str:
    """Return the text as HTML; the course's files that it links, shown as plain text, are added to `named`.

    Links to other texts lead into the book, if there is one: `book` is the path to it.
    """
    here = "Write it in the editor. **Run the tests** judges it.\n"
    tokens = markdown.parse(TERMINAL.sub(here, lab.file(name).read_text(encoding="utf-8"), count=1))
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):  # the first level is the page's own
            token.tag = f"h{int(token.tag[1]) + 1}"
        open_links: list[Token] = []
        for child in token.children or ():
            if child.type == "link_open":
                open_links.append(child)
                lead(child, lab, course, named, book)
            elif child.type == "link_close":
                child.tag = open_links.pop().tag
            elif child.type == "image":
                child.attrSet("loading", "lazy")
                child.content = " ".join(child.content.split())
    html = str(markdown.renderer.render(tokens, markdown.options, {}))
    html = html.replace("<pre>", '<pre tabindex="0">')
    return re.sub(r"<table>.*?</table>", r'<div class="scroll" tabindex="0">\g<0></div>', html, flags=re.S)


def lead(link: Token, lab: Lab, course: Path, named: set[str], book: str) -> None:
    """Make a link lead to a tab of the page, a file of the course or another host; else keep its text."""
    target = str(link.attrGet("href"))
    if target.startswith(("https:", "http:")):
        link.attrs = {"href": target, "target": "_blank", "rel": "noopener noreferrer"}
        return
    written, _, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join("labs", lab.id, written))
    tab = {"AFTER.md": "after", "README.md": "read"}.get(posixpath.relpath(path, f"labs/{lab.id}"))
    if tab:
        link.attrs = {"href": f"#{tab}"}
    elif (
        path.endswith(".py") and (course / path).is_file() and "sealed: it" not in (course / path).read_text()
    ):
        named.add(path)
        link.attrs = {"href": f"../source/{path}.txt", "target": "_blank"}
    elif book and path.endswith((".md", ".ipynb")) and (ROOT / path).is_file():
        page = f"{book}/{posixpath.splitext(path)[0]}.html"
        link.attrs = {"href": f"{page}#{anchor}" if anchor else page}
    else:
        link.tag, link.attrs = "span", {}
