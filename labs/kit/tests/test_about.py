"""Every page says what it is, and its own address where SITE_URL has one."""

import re
import shutil

import pytest

from labs.kit.browser.about import CARD, describe, site_url

NAME = re.compile(r'<meta (?:name|property)="([^"]+)" content="([^"]*)">')
PAGE = "<html><head><title>A &amp; B</title></head><body><article>{}</article></body></html>"
WORDS = "The memory of an engine is a pool of blocks, as <b>vLLM</b> has it."


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "docs" / "page.html"
    path.parent.mkdir()
    path.write_text(PAGE.format(f'<p>Short.</p><p>{WORDS}</p><img alt="" src="../_images/x.png">'), "utf-8")
    return path


def said(path) -> dict[str, str]:
    text = path.read_text("utf-8")
    found = NAME.findall(text)
    assert len(found) == len(dict(found)), "twice"
    return dict(found)


def test_a_page_has_its_title_and_first_words_and_without_a_setting_no_address(page, tmp_path, monkeypatch):
    monkeypatch.delenv("SITE_URL", raising=False)
    describe(tmp_path)
    words = "The memory of an engine is a pool of blocks, as vLLM has it."
    assert said(page)["description"] == said(page)["og:description"] == words
    assert said(page)["og:title"] == "A &amp; B"
    assert "og:url" not in said(page) and "canonical" not in page.read_text("utf-8")


def test_with_an_address_all_is_absolute_and_a_second_build_replaces_it(page, tmp_path, monkeypatch):
    for url in ("https://one.example/x", "https://two.example/engine/"):
        monkeypatch.setenv("SITE_URL", url)
        describe(tmp_path)
    assert said(page)["og:url"] == "https://two.example/engine/docs/page.html"
    assert said(page)["og:image"] == "https://two.example/engine/_images/x.png"
    link = 'rel="canonical" href="https://two.example/engine/docs/page.html"'
    assert page.read_text("utf-8").count(link) == 1
    page.write_text(PAGE.format(""), "utf-8")
    describe(tmp_path)
    assert said(page)["og:image"] == f"https://two.example/engine/{CARD}"


@pytest.mark.parametrize("wrong", ["course.example", "https://a b", 'https://x"y', "https://x/?a=1"])
def test_what_is_no_address_is_refused(wrong, monkeypatch):
    monkeypatch.setenv("SITE_URL", wrong)
    with pytest.raises(ValueError, match="SITE_URL must be an address"):
        site_url()


def test_every_page_of_the_site_says_what_it_is_and_its_picture_is_there(site, tmp_path, monkeypatch):
    for path in site.rglob("*.html"):
        if path.name != "shell.html" and path != site / "index.html":
            about = said(path)
            assert 20 < len(about["description"]) < 320 and about["og:title"], path
    monkeypatch.setenv("SITE_URL", "https://a.example/")
    for name in ("docs/index.html", "docs/concepts/09-paging.html"):
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(site / name, copy)
    describe(tmp_path)
    for name in ("docs/index.html", "docs/concepts/09-paging.html"):
        picture = said(tmp_path / name)["og:image"].removeprefix("https://a.example/")
        assert (site / picture).is_file(), picture
