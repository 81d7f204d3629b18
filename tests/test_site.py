"""`make docs`: every page and picture is there, every link leads somewhere, and nothing is fetched
from elsewhere."""

import itertools
import re
from pathlib import Path

import pytest

from conftest import REPOSITORY, run

pytestmark = pytest.mark.matrix

PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CHANGELOG.md",
    REPOSITORY / "SECURITY.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
    REPOSITORY / "dev/tested.md",
    REPOSITORY / "docs/labs/README.md",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    made = run("make", "docs", f"SITE={folder}", timeout=300)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


def built(page: Path, site: Path) -> str:
    """A page keeps its place; README is the index of its folder."""
    name = "index" if page.stem == "README" else page.stem
    return (site / page.parent.relative_to(REPOSITORY) / f"{name}.html").read_text()


def test_nothing_is_fetched(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:img|script|iframe|source)\b[^>]*\bsrc=[\"']?([^\"' >]+)", text)
        links = re.findall(r"<link\b[^>]*>", text)
        loaded += [link for link in links if re.search("rel=[\"']?(stylesheet|icon)", link)]
        assert loaded or page.name == "memory.html", page  # which loads nothing
        assert not [link for link in loaded if re.search("(https?:)?//", link)], page
    style = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", style)


def test_every_page_and_picture_is_there(site):
    for page in PAGES:
        text, html = page.read_text(), built(page, site)
        words = re.sub(r"<[^>]+>", "", html)
        assert re.search(r"^# (.+)$", text, re.M)[1].replace("`", "") in words, page
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
            assert f'src="{picture}"' in html, f"{page}: {picture}"
    front = (site / "index.html").read_text()
    chapters = [path.stem for path in PAGES if re.match(r"\d\d_|appendix_", path.name)]
    assert [name for name in chapters if f"docs/{name}.html" not in front] == []
    # The navigation is above the page's own text.
    navigation = front.partition("<article")[0]
    tutorial = [name for name in chapters if name[0].isdigit()]
    shown = re.findall(r'href="docs/(\w+)\.html"', navigation)
    assert list(dict.fromkeys(shown))[: len(tutorial)] == tutorial


def test_each_chapter_leads_to_the_next():
    chapters = [path for path in PAGES if re.match(r"\d\d_", path.name)]
    for chapter, following in itertools.pairwise(chapters):
        [link] = re.findall(r"^Next: \[.*\]\((.*)\)\.?$", chapter.read_text(), re.M)
        assert link == following.name, chapter.name


def test_markdown_is_read_as_on_github(site):
    """As many tables, items and blocks as the file has: a list without a blank line above it
    would be a paragraph."""
    for page in PAGES:
        html = re.search(r"<article.*?</article>", built(page, site), re.S)[0]
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        tables = re.findall(r"^\|[ :|-]*---[ :|-]*\|$", text, re.M)
        assert html.count("<table>") == len(tables), page
        assert html.count("<li>") == len(re.findall(r"^ *(?:[-*]|\d+\.) ", text, re.M)), page
        assert html.count("<pre") == len(re.findall(r"^```\w*$", page.read_text(), re.M)) / 2, page
