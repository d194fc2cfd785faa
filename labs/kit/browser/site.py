"""Completes the book's site: `python -m labs.kit.browser.site docs/_build/site`, as `make docs` does.

It adds the labs' pages and the file `_headers`, and checks the sizes.
"""

import posixpath
import re
import sys
from html import escape
from pathlib import Path

from labs.kit.browser.about import describe
from labs.kit.browser.build import MOST, build, filled, zipped
from labs.kit.browser.build import first_load as loads_of_lab
from labs.kit.browser.csp import FRAMED, LAB, LABS, PLAYER, TEXT, WORKER, policy_of
from labs.kit.judge.manifest import find_lab

TEXT_MOST = 700_000  # bytes, gzipped, that the first visit of a page of the book may load
FRONT, FRONT_MOST = "docs/index.html", 400_000  # the same, of the front page
SITE_MOST = 30_000_000  # bytes on the server's disk
ASSET = re.compile(
    r'<(?:script|img|iframe)\b(?![^>]*loading="lazy")[^>]*? src="([^":]+)"'
    r'|<link\b(?=[^>]*rel="(?:stylesheet|preload|icon)")[^>]*? href="([^":]+)"'
)
URL = re.compile(r"url\(['\"]?(?!data:|#)([^'\")]+)")


def add_pages(site: Path) -> str:
    """Write the labs' pages below write/; without npm, pages that say so. Return what is missing."""
    try:
        build(site / "write", book="..")
        return ""
    except ValueError as error:
        titles = {lab_id: find_lab(lab_id).title for lab_id in LABS}
        for page, title in [*titles.items(), ("arena", "policies against each other")]:
            folder = site / "write" / page
            folder.mkdir(parents=True, exist_ok=True)
            text = "docs/arena" if page == "arena" else f"labs/{page}/README"
            parts = {"POLICY": TEXT, "ID": page, "TITLE": title, "PAGE": text, "WHY": escape(str(error))}
            (folder / "index.html").write_text(filled("missing.html", parts), encoding="utf-8")
        return str(error)


def write_headers(site: Path) -> None:
    """Write the policies for hosts that read a file `_headers`."""
    built = (site / "write" / "app").exists()
    pages = sorted([*site.glob("*.html"), *site.glob("docs/*.html")])
    named = sorted(path.relative_to(site).as_posix() for path in pages)
    kinds = {
        **{f"/{name}": policy_of(name) for name in named},
        **{path: TEXT for path in ("/", "/write/", "/write/index.html")},
        "/docs/": policy_of("docs/index.html"),
        "/docs/concepts/*": policy_of("docs/concepts/index.html"),
        "/labs/*": TEXT,
        "/notebooks/*": TEXT,
        "/_static/player/shell.html": PLAYER,
        **{f"/write/{page}/*": LAB if built else TEXT for page in (*LABS, "arena")},
        "/write/app/worker.js": WORKER,
        "/write/app/race.js": WORKER,
        "/write/app/player/shell.html": PLAYER,
    }
    rules = [f"{path}\n  Content-Security-Policy: {policy}; {FRAMED}\n" for path, policy in kinds.items()]
    always = "/*\n  X-Content-Type-Options: nosniff\n  Referrer-Policy: no-referrer\n"
    (site / "_headers").write_text(always + "".join(rules), encoding="utf-8")


def first_load(site: Path, page: str) -> dict[str, int]:
    """Return the files that the first visit of a page of the book loads, with their gzipped bytes."""
    loads: dict[str, int] = {}

    def load(name: str) -> None:
        path = site / name
        if name in loads:
            return
        loads[name] = zipped(path)
        pattern = {".html": ASSET, ".css": URL}.get(path.suffix)
        if pattern:
            for found in pattern.finditer(path.read_text("utf-8")):
                target = next(filter(None, found.groups())).partition("?")[0].partition("#")[0]
                load(posixpath.normpath(posixpath.join(posixpath.dirname(name), target)))

    load(page)
    return loads


def pages_of_book(site: Path) -> list[str]:
    found = (path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    return sorted(name for name in found if not name.startswith(("write/", "_static/")))


def weigh(site: Path) -> tuple[list[str], list[str]]:
    """Return the sizes of the site, a line each, and those that are too large."""
    total = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    texts = {name: sum(first_load(site, name).values()) for name in pages_of_book(site)}
    written = {page: loads_of_lab(site / "write", page).values() for page in (*LABS, "arena")}
    labs = {f"write/{page}/index.html": sum(sizes) for page, sizes in written.items()}
    front, wrong = f"{texts[FRONT] / 1e3:,.0f} kB (the limit is {FRONT_MOST / 1e3:g})", []
    lines = [
        f"{site}: {total / 1e6:.1f} MB in all (at most {SITE_MOST / 1e6:g})",
        f"first load, gzipped, the front page: {front}",
    ]
    if total > SITE_MOST:
        wrong.append(f"the site has {total / 1e6:.1f} MB")
    if texts[FRONT] > FRONT_MOST:
        wrong.append(f"{FRONT} loads {texts[FRONT] / 1e3:,.0f} kB at first")
    for loads, most, kind in ((texts, TEXT_MOST, "the book"), (labs, MOST, "the labs to write")):
        name, most_of_all = max(loads.items(), key=lambda item: item[1])
        common = sorted(loads.values())[len(loads) // 2]
        lines.append(
            f"first load, gzipped, a page of {kind}: median {common / 1e3:,.0f} kB, at most "
            f"{most_of_all / 1e3:,.0f} kB, {name} (the limit is {most / 1e3:,.0f})"
        )
        heavy = [(name, size / 1e3) for name, size in loads.items() if size > most]
        wrong += [f"{name} loads {size:,.0f} kB at first" for name, size in heavy]
    return lines, wrong


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1], "docs", "index.html").is_file():
        sys.exit("python -m labs.kit.browser.site SITE: the folder into which Sphinx has built the book")
    site = Path(sys.argv[1])
    missing = add_pages(site)
    try:
        describe(site)
    except ValueError as error:
        sys.exit(f"error: {error}")
    write_headers(site)
    lines, wrong = weigh(site)
    print("\n".join(lines))
    if missing:
        print(f"WITHOUT THE LABS TO WRITE IN A PAGE: {missing}")
    if wrong:
        sys.exit("error: too much to load: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
