"""The whole site, as `make docs` leaves it: its policies, its weight, its links, and who can use it."""

import re
from fnmatch import fnmatch
from html import unescape
from pathlib import Path
from urllib.parse import urlparse

import pytest
import yaml

from labs.kit.browser import commands
from labs.kit.browser import site as site_module
from labs.kit.browser.csp import FRAMED, LABS, PLAYER
from labs.kit.browser.serve import rules
from labs.kit.judge.manifest import LABS_DIR
from labs.kit.tests import marks
from labs.kit.tests.conftest import Course

ROOT = LABS_DIR.parent
META = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">')
TEXTS = {
    "front page": "docs/index.html",
    "concept": "docs/concepts/01-scheduling-problem.html",
    "quiz": "docs/concepts/08-preemption.html",
    "notebook page": "notebooks/03-preemption.html",
    "lab's text": "labs/lab-01/README.html",
}


def pages_of(site: Path) -> dict[str, str]:
    found = {path.relative_to(site).as_posix(): path for path in site.rglob("*.html")}
    return {name: path.read_text("utf-8") for name, path in found.items()}


def test_every_page_has_its_policy_and_nothing_inline(site):
    """In the page and, once and the same, as a header for hosts that read `_headers`."""
    sent = [rule for rule in rules(site) if rule[1] == "Content-Security-Policy"]
    pages = pages_of(site)
    assert len(pages) > 50
    for name, text in pages.items():
        (policy,) = META.findall(text)
        assert "unsafe-inline" not in policy and " 'unsafe-eval'" not in policy
        assert policy.startswith("default-src 'none'; script-src 'self'"), name
        headers = [value for pattern, _, value in sent if fnmatch("/" + name, pattern)]
        assert headers == [f"{policy}; {FRAMED}"], name
        code = re.sub(r'<script type="application/json"[^>]*>.*?</script>', "", text, flags=re.S)
        assert not re.search(r"<script(?![^>]* src=)|<style|<[a-z][^<>]* (style|on[a-z]+)=\"", code), name
    assert PLAYER in (ROOT / "mini_engine/show/player/shell.html").read_text("utf-8")


def test_a_page_has_its_title_and_its_viewport_once_and_no_mark_behind_a_button(site):
    """The theme repeats the title for printers, and the viewport twice; a button ends no sentence."""
    for name in site_module.pages_of_book(site):
        text = (site / name).read_text("utf-8")
        assert (text.count("<h1"), text.count('<meta name="viewport"')) == (1, 1), name
        assert not re.search(r'<a class="[^"]*\bwrite\b(?:(?!</a>).)*</a>(?:</\w+>)*\s*[.,:;]', text), name


def test_a_drawing_has_a_file_for_each_ground_and_a_cell_of_prose_its_column(site):
    pairs = 0
    for name in site_module.pages_of_book(site):
        text = (site / name).read_text("utf-8")
        drawn = re.findall(r'<img\b[^>]*? src="([^":]+)\.svg"', text)
        for source in drawn:
            kind = source.rpartition("-")[2]
            drawing = (site / name).parent / f"{source}.svg"
            assert "prefers-color-scheme" not in drawing.read_text("utf-8")
            if kind in ("light", "dark"):
                assert source.removesuffix(kind) + {"light": "dark", "dark": "light"}[kind] in drawn
                pairs += kind == "dark"
    assert pairs > 40
    front = (site / "docs" / "index.html").read_text("utf-8")
    assert front.count('<td data-label="its question">') == len(list(ROOT.glob("labs/lab-*")))


def test_every_link_of_the_site_leads_somewhere(site):
    """In the pages as they were built, to the labs' pages and back, anchors too."""
    pages = pages_of(site)
    anchors = {name: set(re.findall(r' id="([^"]+)"', text)) for name, text in pages.items()}
    for name, text in pages.items():
        text = re.sub(r'<link rel="canonical"[^>]*>', "", text)
        for tag, target in re.findall(r'<(a|link|img|script|iframe)\b[^>]*? (?:href|src)="([^"]+)"', text):
            if urlparse(target).scheme or target.startswith("//"):
                assert tag == "a" or target.startswith("data:"), f"{name} loads {target} from another host"
                continue
            path, _, anchor = unescape(target).partition("#")
            file = (site / name).parent / path.partition("?")[0] if path else site / name
            file = (file / "index.html" if file.is_dir() else file).resolve()
            assert file.is_file(), f"{name}: {target}"
            key = file.relative_to(site.resolve()).as_posix()
            if anchor and key in anchors:
                assert anchor in anchors[key], f"{name}: {target}"
    # A lab's text and its page lead to each other.
    for lab_id in LABS:
        text = (site / "labs" / lab_id / "README.html").read_text("utf-8")
        assert f'href="../../write/{lab_id}/index.html"' in text
        page = (site / "write" / lab_id / "index.html").read_text("utf-8")
        assert 'href="../../docs/index.html"' in page


def test_little_is_loaded_and_too_much_is_refused(site, monkeypatch):
    """The limits hold for every page; what the theme brings and no page uses is not there."""
    lines, wrong = site_module.weigh(site)
    assert wrong == [] and len(lines) == 4
    names = {path.name for path in (site / "_static").rglob("*")}
    assert not {name for name in names if name.endswith((".map", ".woff2", ".ttf")) or name == "locales"}
    assert "fontawesome.js" not in names
    loads = [sum(site_module.first_load(site, name).values()) for name in site_module.pages_of_book(site)]
    monkeypatch.setattr(site_module, "TEXT_MOST", max(loads) - 1)
    monkeypatch.setattr(site_module, "SITE_MOST", 1)
    monkeypatch.setattr(site_module, "FRONT_MOST", 1)
    _, wrong = site_module.weigh(site)
    assert [line.partition(" ")[0] for line in wrong[:2]] == ["the", "docs/index.html"]
    assert len(wrong) == 3 and "kB" in wrong[2]


def test_without_npm_the_pages_say_what_is_missing(tmp_path, monkeypatch):
    def npm():
        raise ValueError("npm is not installed")

    monkeypatch.setattr("labs.kit.browser.build.npm", npm)
    assert site_module.add_pages(tmp_path) == "npm is not installed"
    for lab_id in (*LABS, "arena"):
        page = (tmp_path / "write" / lab_id / "index.html").read_text("utf-8")
        assert "npm is not installed" in page and "make docs" in page and META.search(page)


# ------------------------------------------------------------------------------------------ in a browser


class Visitor:
    """A page in which nothing but the site itself answers, and what the browser says against it."""

    def __init__(self, browser, address, **options):
        self.context, self.address = browser.new_context(**options), address
        self.page = self.context.new_page()
        self.said, self.outside, self.loaded = [], [], set()
        self.context.add_init_script(
            "document.addEventListener('securitypolicyviolation', (event) => "
            "console.error(`violates ${event.effectiveDirective}: ${event.blockedURI} ${event.sample}`))"
        )
        self.page.on("console", lambda one: one.type in ("error", "warning") and self.said.append(one.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda one: self.asked(one.url))

    def asked(self, url):
        if url.startswith(self.address):
            self.loaded.add(urlparse(url).path.lstrip("/"))
        elif not url.startswith(("data:", "blob:")):
            self.outside.append(url)

    def go(self, name):
        self.loaded.clear()
        self.page.goto(f"{self.address}/{name}")

    def use_everything(self):
        """Open each answer of a quiz and a player, and change the colours."""
        self.page.evaluate("document.querySelectorAll('.quiz details').forEach((one) => one.open = true)")
        if self.page.locator(".play").count():  # it opens when it comes into sight, or by its button
            self.page.evaluate("document.querySelector('.play button').click()")
            self.page.locator(".play.open").first.wait_for()
            self.page.frame_locator(".play iframe").first.locator(".name").first.wait_for()
        for mode in ("light", "dark"):
            self.page.evaluate(f"document.querySelector('.theme-change-button[data-mode={mode}]')?.click()")


@pytest.fixture(scope="module")
def address(site, serving):
    return serving(site)


@pytest.fixture
def visitor(browser, address):
    visitor = Visitor(browser, address)
    yield visitor
    visitor.context.close()


@pytest.mark.parametrize("kind", marks.some(TEXTS, "front page", "quiz"))
def test_a_text_page_keeps_to_its_policy_loads_little_and_can_be_used_by_all(kind, site, visitor, serious):
    visitor.go(TEXTS[kind])
    visitor.page.wait_for_load_state("networkidle")
    loaded = sum(site_module.zipped(site / name) for name in visitor.loaded)
    assert 50_000 < loaded < site_module.TEXT_MOST
    visitor.use_everything()
    assert serious(visitor.page) == []
    assert (visitor.said, visitor.outside) == ([], [])


def test_a_page_does_what_its_policy_forbids_no_more_than_it_says(visitor):
    """The watch of these tests sees a violation when there is one."""
    visitor.go(TEXTS["quiz"])
    script = "Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'})"
    visitor.page.evaluate(f"document.body.append({script})")
    assert visitor.page.evaluate("window.ran") is None
    assert any("violates script-src-elem: inline" in line for line in visitor.said)


def test_the_search_finds_a_page_and_its_marks_can_be_hidden(visitor):
    """Without a network. It quotes and marks the text alone, not the bars around it."""
    visitor.go("search.html?q=preemption")
    found = visitor.page.locator("#search-results ul.search li", has_text="Preemption: recompute and swap")
    found.locator(".context").wait_for()
    assert "System Settings" not in visitor.page.inner_text("#search-results")
    box = "document.querySelector('main .bd-search {}').getBoundingClientRect().toJSON()"
    lens, field = (visitor.page.evaluate(box.format(one)) for one in ("i", "input"))
    style = "getComputedStyle(document.querySelector('main input'))"
    padding = visitor.page.evaluate(f"parseFloat({style}.paddingLeft)")
    assert field["left"] < lens["left"] and lens["right"] < field["left"] + padding  # it covers no letter
    found.locator("a").first.click()
    marks = visitor.page.locator("span.highlighted")
    marks.first.wait_for()
    assert visitor.page.locator("span.highlighted:not(article *)").count() == 0
    visitor.page.get_by_role("button", name="Hide Search Matches").click()
    marks.first.wait_for(state="detached")
    assert (visitor.said, visitor.outside) == ([], [])


def test_figures_are_as_dark_as_the_page_and_a_table_is_as_wide_as_a_phone(browser, address):
    """Whatever the system prefers: the page's own switch counts."""
    visitor = Visitor(browser, address, viewport={"width": 390, "height": 800}, color_scheme="dark")
    visitor.go(TEXTS["concept"])
    for mode in ("light", "dark"):
        visitor.page.evaluate(f"document.querySelector('.theme-change-button[data-mode={mode}]').click()")
        shown = visitor.page.locator("article img:visible").evaluate_all("them => them.map(one => one.src)")
        assert shown and all(source.endswith(f"-{mode}.svg") for source in shown), shown
    visitor.go("docs/index.html")
    wide = "document.querySelector('table').scrollWidth <= document.querySelector('article').clientWidth"
    assert visitor.page.evaluate(wide)
    visitor.context.close()


def test_the_error_gallery_leaves_the_sections_with_these_words(visitor):
    visitor.go("docs/errors.html")
    sections = visitor.page.locator("#the-error-gallery > section")
    field = visitor.page.get_by_label("Words on your screen")
    field.fill("nan ROWS")
    [shown] = (one.get_attribute("id") for one in sections.all() if one.is_visible())
    assert shown == "nan-in-rows-that-matter"
    assert f"1 of {sections.count()}" in visitor.page.inner_text(".filter")
    visitor.page.evaluate("location.hash = 'admitted-twice'")  # as a link of the contents does
    visitor.page.locator("#admitted-twice").wait_for()
    assert field.input_value() == "" and (visitor.said, visitor.outside) == ([], [])


def test_a_lab_s_page_in_the_site_is_ready_below_its_limit(pages, site, visitor):
    """Under its policy and its worker's, with the headers too: Python is there, and the player plays."""
    visitor.go("docs/index.html")
    visitor.page.click("text=Write the scheduler now")
    visitor.page.locator("#status", has_text="Python is ready").wait_for(timeout=120_000)
    visitor.page.click("#tab-play")
    visitor.page.frame_locator("#player").locator(".name").first.wait_for()
    assert "write/app/worker.js" in visitor.loaded
    loaded = sum(site_module.zipped(site / name) for name in visitor.loaded if (site / name).is_file())
    assert 5_000_000 < loaded < site_module.MOST
    assert (visitor.said, visitor.outside) == ([], [])


# ---------------------------------------------------------------------------------- hosted, and at home


def test_the_workflow_publishes_what_make_docs_builds():
    text = (ROOT / ".github" / "workflows" / "pages.yml").read_text("utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert any(step.get("run") == "make docs" for step in steps)
    (upload,) = [step for step in steps if "upload-pages-artifact" in step.get("uses", "")]
    assert upload["with"]["path"] == "docs/_build/site"
    assert jobs["deploy"]["needs"] == "build"
    assert jobs["deploy"]["permissions"] == {"pages": "write", "id-token": "write"}


def test_open_says_what_to_do_where_nothing_is_built(tmp_path, monkeypatch, course: Course):
    monkeypatch.setattr(commands, "SITE", tmp_path)
    done = course.command("open")
    assert done.returncode == 2 and "make docs" in done.stderr and "docs/index.html" in done.stderr


def test_open_serves_the_book_and_opens_it(tmp_path, monkeypatch, course: Course):
    opened = []
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.html").write_text("the book", encoding="utf-8")

    def look(address):
        opened.append(address)
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "SITE", tmp_path)
    monkeypatch.setattr(commands.webbrowser, "open", look)
    done = course.command("open", "--port", "8169")
    assert opened == ["http://localhost:8169/docs/index.html"] and done.returncode == 0
