"""Prepares the book for any file server: no inline scripts and styles, which its policy forbids; a tenth of
the theme's files; and links from a lab's text to the page in which the lab is written.
"""

import hashlib
import posixpath
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from labs.kit.browser.about import site_url
from labs.kit.browser.csp import LABS, TEXT, policy_of

LAB_TEXT = re.compile(r"(lab-\d\d)/README")
UNUSED = re.compile(  # a switch of versions, a search while one types: the book has neither
    r"\s*<script>DOCUMENTATION_OPTIONS\.(?:pagename|search_as_you_type) = [^<]*</script>"
    r'|\s*<script defer src="[^"]*/fontawesome\.js[^"]*"></script>'
)
SEARCHING = re.compile(r'\s*<script src="[^"]*(?:searchtools|language_data|searchindex)\.js[^"]*"></script>')
# A button that says "Search Ctrl+K" has that for its name, a summary what it shows.
NAMED_TWICE = re.compile(r'(<button class="btn search-button-field[^>]*?|<summary) aria-label="[^"]*"')
VIEWPORT = re.compile(r'\s*<meta name="viewport"[^>]*>')
# The title and the contents once more, for printers.
PRINTED = re.compile(r'<div id="jb-print-docs-body".*?(?=<div id="searchbox">)', re.S)
BRAND = re.compile(r'<div class="sidebar-primary-item">(?=\s*<a class="navbar-brand)')
# Sphinx's search quotes and marks the bars around a text too. The link that ends the marks is a script.
MENDED = {
    "searchtools.js": {
        '`[role="main"] ${anchor}`': "`article.bd-article ${anchor}`",
        "querySelector('[role=\"main\"]')": 'querySelector("article.bd-article")',
    },
    "sphinx_highlight.js": {
        'querySelectorAll("div.body")': 'querySelectorAll("article.bd-article")',
        '<a href="javascript:SphinxHighlight.hideSearchWords()">': '<button type="button">',
        "</a></p>": "</button></p>",
        "searchBox.appendChild(": 'searchBox.addEventListener("click", SphinxHighlight.hideSearchWords);\n'
        "    searchBox.append(",
    },
}
# Deferred scripts keep their order, and come before what waits for the document. The search has no such.
WAITS = re.compile(r'<script src="(?=[^"]*_static/)')
SHEET = re.compile(r'\s*<link\b(?=[^>]*\brel="stylesheet")[^>]*\bhref="[./]*_static/([^"?]+)[^>]*>')
SCRIPT = re.compile(r"<script(?: data-[^>]*)?>(.*?)</script>", re.S)
STYLE = re.compile(r"<style[^>]*>(.*?)</style>", re.S)
STYLED = re.compile(r'<[a-z]\w*\b[^<>]*? style="([^"]*)"[^<>]*>', re.I)
FORBIDDEN = re.compile(r'<[a-z]\w*\b[^<>]* (on\w+="|(?:href|src)="javascript:)', re.I)
ICON = re.compile(r'class="[^"]*\bfa-solid fa-([a-z-]+)')
TABLE = re.compile(r'<table class="table">.*?</table>', re.S)
SHORT = 24  # letters; a table of shorter cells scrolls
IMAGE = re.compile(r'<img\b[^>]*? src="([^":]+\.svg)"[^>]*>')
# The rules of one media query, which have braces of their own.
DARK = re.compile(r"@media ?\(prefers-color-scheme: ?dark\) ?\{((?:[^{}]*\{[^{}]*\})*)[^{}]*\}")
WIDE_AS_IT_IS = '<meta name="viewport" content="width=device-width, initial-scale=1">'
CHARSET = '<meta charset="utf-8" />'


def lead_to_the_pages(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Lead a link "Write ..." to a lab's text to that lab's page, and begin the text with such a link."""
    if app.builder.format != "html":
        return

    def page(lab: str) -> str:
        return posixpath.relpath(f"write/{lab}/index.html", posixpath.dirname(docname))

    for link in doctree.findall(nodes.reference):
        found = link.astext().startswith("Write ") and LAB_TEXT.search(link.get("refuri", ""))
        if found and found[1] in LABS:
            link["refuri"] = page(found[1])
            link["classes"].append("write")
    lab = "arena" if docname == "docs/arena" else docname.removeprefix("labs/").removesuffix("/README")
    title = next(iter(doctree.findall(nodes.title)), None)
    if lab in (*LABS, "arena") and title is not None:
        what, beside = ("a policy", "others") if lab == "arena" else (lab, "the reference's")
        target = {"refuri": page(lab), "classes": ["write"], "internal": True}
        link = nodes.reference("", f"Write {what} in your browser", **target)
        rest = nodes.Text(f" Nothing to install, and your run beside {beside}.")
        title.parent.insert(title.parent.index(title) + 1, nodes.paragraph("", "", link, rest))


def finish(app: Sphinx, error: Exception | None) -> None:
    """Rewrite the pages that were built, and delete files that none of them uses."""
    if error is not None or app.builder.name != "html":
        return
    out = Path(app.outdir)
    static = out / "_static"
    icons: set[str] = set()
    for path in out.rglob("*.html"):
        if path.is_relative_to(out / "write") or path.is_relative_to(static):
            continue
        text = path.read_text("utf-8")
        icons.update(ICON.findall(text))
        path.write_text(strict(text, path.relative_to(out).as_posix(), static), encoding="utf-8")
    draw_icons(icons, static)
    gather(out, static)
    mend(static)
    twins = [path.with_name(path.name.replace("-light.svg", ".svg")) for path in out.rglob("*-light.svg")]
    for unused in (*twins, *static.rglob("*.map"), *static.glob("*-macros.html"), *static.glob("*.png")):
        unused.unlink(missing_ok=True)
    for folder in ("locales", "vendor", "images"):
        shutil.rmtree(static / folder, ignore_errors=True)
    first = app.builder.get_target_uri(app.config.root_doc)
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>{CHARSET}\n{WIDE_AS_IT_IS}\n<title>mini-engine</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{TEXT}">\n'
        f'<meta http-equiv="refresh" content="0; url={first}">\n</head>\n'
        f'<body><main><h1><a href="{first}">mini-engine</a></h1></main></body>\n</html>\n'
    )
    (out / "index.html").write_text(page, encoding="utf-8")


def strict(text: str, name: str, static: Path) -> str:
    """Return a page without inline scripts and styles, with its policy. A second time changes nothing."""
    up = "../" * name.count("/")
    policy = policy_of(name)

    def styled(found: re.Match[str]) -> str:
        rule = f"inline-{digest(found[1])}"
        write_once(static / "inline.css", f".{rule} {{ {found[1]} }}\n")
        tag = found[0].replace(f' style="{found[1]}"', "")
        if ' class="' in tag:
            return tag.replace(' class="', f' class="{rule} ', 1)
        return re.sub(r"^<\w+", rf'\g<0> class="{rule}"', tag)

    text = PRINTED.sub("", NAMED_TWICE.sub(r"\1", UNUSED.sub("", text)))
    text = BRAND.sub('<div class="sidebar-primary-item" role="banner">', text)
    if name != "search.html":
        text = WAITS.sub('<script defer src="', SEARCHING.sub("", text))
    text = SCRIPT.sub(lambda one: f'<script src="{up}_static/{kept(one[1], "js", static)}"></script>', text)
    sheet = f'<link rel="stylesheet" href="{up}_static/%s">'
    text = STYLED.sub(styled, STYLE.sub(lambda one: sheet % kept(one[1], "css", static), text))
    if found := FORBIDDEN.search(text):
        raise ExtensionError(f"{name}: {found[1]} is a script in an attribute, which no policy lets run")
    if "Content-Security-Policy" not in text:
        link = f'<link rel="stylesheet" href="{up}_static/%s.css">'
        meta = f'{CHARSET}\n    <meta http-equiv="Content-Security-Policy" content="{policy}">'
        meta += f"\n    {WIDE_AS_IT_IS}"
        text = VIEWPORT.sub("", text).replace(CHARSET, meta, 1)
        text = text.replace("</head>", f"{link % 'icons'}{link % 'inline'}\n  </head>", 1)
        text = IMAGE.sub(lambda found: both(found, (static.parent / name).parent), TABLE.sub(stacked, text))
        first, image, rest = text.partition("<img ")  # pictures further down are loaded when they come near
        text = first + image + rest.replace("<img ", '<img loading="lazy" ')
    return text


def stacked(found: re.Match[str]) -> str:
    """Return a table whose cells know their column, if it has prose: on a phone its rows stand as cards."""

    def row(cells: re.Match[str]) -> str:
        names = iter(labels)
        return re.sub(r"<td", lambda _: f'<td data-label="{next(names, "")}"', cells[0])

    head, _, body = found[0].partition("</thead>")
    labels = [re.sub(r"<[^>]*>", "", cell).strip() for cell in re.findall(r"<th\b.*?</th>", head, re.S)]
    cells = re.findall(r"<td\b.*?</td>", body, re.S)
    if all(len(re.sub(r"<[^>]*>", "", cell)) <= SHORT for cell in cells):
        return found[0]
    head = head.replace('<table class="table', '<table class="stacks table', 1)
    return f"{head}</thead>" + re.sub(r"<tr\b.*?</tr>", row, body, flags=re.S)


def both(found: re.Match[str], folder: Path) -> str:
    """Return an image that has a palette for dark systems as two, for the page's own switch."""
    path = folder / found[1].partition("?")[0]
    svg = path.read_text("utf-8") if path.is_file() else ""
    if not DARK.search(svg):
        return found[0]
    tags = ""
    for kind, drawn in (("light", DARK.sub("", svg)), ("dark", DARK.sub(lambda one: one[1], svg))):
        path.with_name(f"{path.stem}-{kind}.svg").write_text(drawn, encoding="utf-8")
        tag = found[0].replace(found[1], f"{found[1].removesuffix('.svg')}-{kind}.svg")
        if ' class="' in tag:
            tags += tag.replace(' class="', f' class="only-{kind} ', 1)
        else:
            tags += tag.replace("<img ", f'<img class="only-{kind}" ')
    return tags


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def kept(text: str, kind: str, static: Path) -> str:
    """Write inline text into a file, and return its name."""
    name = f"inline-{digest(text)}.{kind}"
    (static / name).write_text(text.strip() + "\n", encoding="utf-8")
    return name


@cache
def write_once(path: Path, line: str) -> None:
    """Add a rule to a style sheet that earlier builds may have begun: Sphinx writes only changed pages."""
    known = path.read_text("utf-8") if path.exists() else ""
    if line not in known:
        path.write_text(known + line, encoding="utf-8")


def mend(static: Path) -> None:
    """Change lines of Sphinx's scripts, once. Raise ExtensionError if they are not there."""
    for name, changes in MENDED.items():
        text = (static / name).read_text("utf-8")
        for old, new in changes.items():
            if old not in text and new not in text:
                raise ExtensionError(f"Sphinx's {name} has no {old!r} to change")
            text = text if new in text else text.replace(old, new)
        (static / name).write_text(text, encoding="utf-8")


def draw_icons(names: set[str], static: Path) -> None:
    """Write the dozen icons that the pages show, of the theme's two thousand, without its script or fonts."""
    (static / "inline.css").touch()
    library = static / "scripts" / "fontawesome.js"
    data = library.read_text("utf-8")
    rules = [
        "/* Icons: Font Awesome Free by Fonticons, Inc., fontawesome.com, CC BY 4.0 */",
        ".fa-solid::before { content: none !important; }",
        ".fa-solid { display: inline-block; width: 1.25em; height: 1em; vertical-align: -0.125em; "
        "background: currentColor; mask: var(--icon) center / contain no-repeat; }",
    ]
    for name in sorted(names):
        found = re.findall(rf'[{{,]"?{name}"?:\[(\d+),(\d+),\[[^]]*\],"[0-9a-f]+","([^"]+)"\]', data)
        if not found:
            raise ExtensionError(f"the theme's icons have no {name!r}")
        wide, high, path = found[-1]  # outlined ones come before
        box = f"xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {wide} {high}'"
        address = "data:image/svg+xml," + quote(f"<svg {box}><path d='{path}'/></svg>", safe=" =:/'")
        rules.append(f'.fa-{name} {{ --icon: url("{address}"); }}')
    (static / "icons.css").write_text("\n".join(rules) + "\n", encoding="utf-8")
    library.unlink()
    sheet = static / "styles" / "pydata-sphinx-theme.css"
    sheet.write_text(re.sub(r"@font-face\{[^}]*\}", "", sheet.read_text("utf-8")), encoding="utf-8")
    for licence in static.rglob("fontawesome.js*"):
        licence.unlink()


def gather(out: Path, static: Path) -> None:
    """Let each page load one style sheet instead of nine: its first content has to wait for all of them."""
    pages = {path: path.read_text("utf-8").partition("</head>") for path in out.rglob("*.html")}
    found = {path: SHEET.findall(head) for path, (head, _, _) in pages.items()}
    names = next((names for names in found.values() if "inline.css" in names), [])
    text = "".join((static / name).read_text("utf-8") for name in names).replace('@charset "UTF-8";', "")
    text = text.replace('@import "../basic.css";', (static / "basic.css").read_text("utf-8"))
    for path, (head, end, body) in pages.items():
        if "inline.css" in found[path]:
            up = "../" * (len(path.relative_to(out).parts) - 1)
            link = f'<link rel="stylesheet" href="{up}_static/sheet.css?v={digest(text)}">\n    '
            head = SHEET.sub("", head).replace("<title>", f"{link}<title>", 1)
            path.write_text(head + end + body, encoding="utf-8")
    if names:
        (static / "sheet.css").write_text(text, encoding="utf-8")
    for name in {"basic.css", *names} - {name for name in names if name.startswith("inline")}:
        (static / name).unlink(missing_ok=True)


class Hosted(SphinxDirective):
    """`<!-- {hosted} here -->`: the address at which this book is hosted, if SITE_URL says it."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        url = site_url()
        link = nodes.reference("", url, refuri=url)
        return [nodes.paragraph("", "", nodes.Text("This book is hosted at "), link)] if url else []


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-resolved", lead_to_the_pages)
    app.connect("build-finished", finish, priority=900)  # after the theme, which changes its sheets
    app.add_directive("hosted", Hosted)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
