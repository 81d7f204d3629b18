"""`make docs`: the site is built; every page and picture is there, and every link in it leads
somewhere."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from conftest import REPOSITORY, run

PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CHANGELOG.md",
    REPOSITORY / "SECURITY.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]


class Page(HTMLParser):
    """What a page links to, what it loads, the names that a link to it can have behind its #,
    and its text."""

    def __init__(self, path: Path):
        super().__init__()
        self.links, self.loaded, self.names, self.text = set(), set(), {"", "__top"}, ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]):
        values = {name: value or "" for name, value in attributes}
        self.names |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon"):
            self.loaded.add(values["href"])
        if tag in ("img", "script", "iframe", "source") and "src" in values:
            self.loaded.add(values["src"])

    def handle_data(self, data: str):
        self.text += data


def faults(site: Path) -> list[str]:
    """Links that lead nowhere, and what a browser would fetch from elsewhere."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in sorted(page.links | page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    found.append(f"{path.name} loads {link}")
                continue
            # 404.html may be shown for any folder.
            folder = site.resolve() if link.startswith("/") else path.parent
            target = (folder / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file() or (
                target in pages and unquote(parts.fragment) not in pages[target].names
            ):
                found.append(f"{path.name}: {link}")
    return found


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="one">1</h1><a href="#one"></a><a href="b.html#two">2</a>'
    )
    (tmp_path / "b.html").write_text(
        '<p id="two"></p><a href="https://example.org/"></a><img src="c.svg">'
    )
    (tmp_path / "c.svg").write_text("<svg></svg>")
    assert faults(tmp_path) == []
    (tmp_path / "b.html").write_text(
        '<a href="a.html#no"></a><a href="#no"></a><script src="//x.org/y"></script>'
    )
    (tmp_path / "c.svg").unlink()
    wrong = ["a.html: b.html#two", "b.html loads //x.org/y", "b.html: #no", "b.html: a.html#no"]
    assert sorted(faults(tmp_path)) == sorted(wrong)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    made = run("make", "docs", f"SITE={folder}", timeout=300)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


def built(page: Path, site: Path) -> Path:
    """A page keeps its place; README is the index of its folder."""
    name = "index" if page.stem == "README" else page.stem
    return site / page.parent.relative_to(REPOSITORY) / f"{name}.html"


@pytest.mark.matrix
def test_links_lead_somewhere_and_nothing_is_fetched(site):
    assert faults(site) == []
    style = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", style)


@pytest.mark.matrix
def test_every_page_and_picture_is_there(site):
    for page in PAGES:
        text, shown = page.read_text(), Page(built(page, site))
        assert re.search(r"^# (.+)$", text, re.M)[1].replace("`", "") in shown.text, page
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
            assert picture in shown.loaded, f"{page}: {picture}"
    front = Page(site / "index.html").links
    chapters = [path.stem for path in PAGES if re.match(r"\d\d_|appendix_", path.name)]
    assert [name for name in chapters if f"docs/{name}.html" not in front] == []


@pytest.mark.matrix
def test_markdown_is_read_as_on_github(site):
    """As many tables, items and blocks as the file has: a list without a blank line above it
    would be a paragraph."""
    for page in PAGES:
        html = re.search(r"<article.*?</article>", built(page, site).read_text(), re.S)[0]
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        assert html.count("<table>") == len(re.findall(r"^\|[ :|-]*---[ :|-]*\|$", text, re.M)), (
            page
        )
        assert html.count("<li>") == len(re.findall(r"^ *(?:[-*]|\d+\.) ", text, re.M)), page
        assert html.count("<pre") == len(re.findall(r"^```\w*$", page.read_text(), re.M)) / 2, page
