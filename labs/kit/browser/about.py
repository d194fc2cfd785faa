"""A page's description, title and picture, for search engines and for shared links.

The environment variable SITE_URL is the address at which the site is hosted. Without it a page has no address
of its own, and no picture, for both must be absolute.
"""

import os
import re
from collections.abc import Iterator
from html import escape, unescape
from pathlib import Path
from urllib.parse import urljoin

from labs.kit.judge.manifest import find_lab

CARD = "_static/card/card.png"  # of pages without a picture of their own
OTHERWISE = "Build an LLM inference engine, lab by lab, on a laptop without a GPU."
FRONT = "mini-engine: build an LLM inference engine, lab by lab"
OURS = re.compile(r'\n<(?:meta (?:name="description"|property="og:[^"]*")|link rel="canonical")[^>]*>')
PICTURE = re.compile(r'<img\b[^>]* src="([^":]+\.png)"')
LAB = re.compile(r"write/(lab-\d\d)/")
MOST = 200  # characters of a description


def site_url() -> str:
    """Return SITE_URL with a slash at its end, or "". Raise ValueError if it is no address."""
    url = os.environ.get("SITE_URL", "").strip()
    if url and not re.fullmatch(r"https?://[^\s/\"<>]+(/[^\s\"<>?#]*)?", url):
        raise ValueError(
            f"SITE_URL must be an address as https://course.example/engine/, but is {url!r}; "
            "without it pages have no absolute addresses"
        )
    return url and url.rstrip("/") + "/"


def describe(site: Path) -> None:
    """Write the description, title, picture and address into every page, in place of earlier ones."""
    base = site_url()
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        if not name.endswith("/shell.html") and name != "index.html":  # that one only leads on
            text = OURS.sub("", path.read_text("utf-8"))
            if name == "docs/index.html":
                text = re.sub("<title>.*?</title>", f"<title>{FRONT}</title>", text, count=1, flags=re.S)
            tags = "".join(f"\n{tag}" for tag in _tags(text, name, base))
            path.write_text(text.replace("</title>", f"</title>{tags}", 1), encoding="utf-8")


def _tags(text: str, name: str, base: str) -> Iterator[str]:
    title, words = text.partition("<title>")[2].partition("</title>")[0].strip(), _description(text, name)
    yield f'<meta name="description" content="{words}">'
    own = {"type": "website", "site_name": "mini-engine"}
    own |= {"title": escape(unescape(title)), "description": words}
    if base:
        found = PICTURE.search(text.partition("<article")[2])
        own["url"] = urljoin(base, name)
        own["image"] = urljoin(own["url"], found[1]) if found else urljoin(base, CARD)
        yield f'<link rel="canonical" href="{own["url"]}">'
    for key, value in own.items():
        yield f'<meta property="og:{key}" content="{value}">'


def _description(text: str, name: str) -> str:
    if lab := LAB.match(name):
        words = f"{find_lab(lab[1]).question} Write it in this page, with tests, hints and your run to watch."
    else:
        body = text.partition("<article")[2] or text.partition("<body")[2]
        body = re.sub(r'<div class="hero">.*?</script>', "", body, flags=re.S)
        parts = re.findall(r"<p\b[^>]*>(.*?)</p>", body, re.S)
        said = (re.sub(r"<[^>]+>", "", part) for part in parts if 'class="write' not in part)
        plain = (" ".join(unescape(words).split()) for words in said)
        words = next((words for words in plain if len(words) > 40), OTHERWISE)
        if name == "search.html":  # its first words ask for a script
            words = OTHERWISE
    if len(words) > MOST:
        words = words[:MOST].rpartition(" ")[0] + " ..."
    return escape(words)
