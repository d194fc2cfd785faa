"""Takes docs/_static/card/card.png, the picture of a shared page: the moment when a chat has to wait.

python docs/images/card.py [OUT.png]      needs playwright, and Chromium or Chrome
"""

import sys
from pathlib import Path

DOCS = Path(__file__).parents[1]
sys.path.append(str(DOCS / "_ext"))

# E402: these lie in docs/_ext, which is on the path only now.
from front import stage  # noqa: E402

from mini_engine.tests.browser import find_browser, open_browser  # noqa: E402

CARD = DOCS / "_static" / "card" / "card.png"
STYLE = """
:root { --pst-color-border: #c9ced6; --pst-color-surface: #f3f4f5; }
:root { --pst-color-text-muted: #48566b; --pst-color-text-base: #222832; }
* { box-sizing: border-box; }
body { margin: 0; padding: 26px 40px; width: 1200px; background: #fff; }
body { font: 26px/1.3 system-ui, "DejaVu Sans", sans-serif; }
h1 { margin: 0 0 14px; font-size: 40px; }
.hero .chats li { height: 165px; font-size: 17px; }
.hero .memory { font-size: 20px; }
.hero .boxes i { height: 34px; font-size: 17px; line-height: 34px; }
.hero .beats { font-size: 24px; }
"""


def draw(out: Path) -> None:
    if (path := find_browser()) is None:
        sys.exit("no Chromium or Chrome found; install one, or name it in BROWSER_PATH")
    sheet = (DOCS / "_static" / "hero.css").read_text("utf-8") + STYLE
    words = stage().replace('class="hero"', 'class="hero awake"')
    words = words.replace("<li>No box", '<li class="now">No box')
    with open_browser(path) as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 630})
        page.set_content(f"<style>{sheet}</style><h1>mini-engine: build an inference engine</h1>{words}")
        out.parent.mkdir(exist_ok=True)
        page.screenshot(path=out)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else CARD)
    print(CARD)
