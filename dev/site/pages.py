"""Tell mkdocs which pages the site of `make docs` has, and in which order. mkdocs.yml names this
file.

Every page has the same place in the site as in the repository, so that links lead to the same
files in both.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [
    REPOSITORY / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
    REPOSITORY / "CHANGELOG.md",
    REPOSITORY / "SECURITY.md",
    REPOSITORY / "dev/tested.md",
    REPOSITORY / "docs/labs/README.md",
]


def linked_files() -> set[Path]:
    """The files that pages link to and that are not pages: pictures, scripts."""
    found = set()
    for page in PAGES:
        for link in re.findall(r"(?:\]\(|srcset=\")(?!\w+:)([^)#\"]+)", page.read_text()):
            target = (page.parent / link).resolve()
            if target.is_file() and target.is_relative_to(REPOSITORY) and target not in PAGES:
                found.add(target)
    return found


def on_config(config):
    """The front page, the chapters of each part by their numbers, the other pages in the order of
    README."""
    readme, *others = [str(page.relative_to(REPOSITORY)) for page in PAGES]
    chapters = [name for name in others if re.match(r"docs/\d\d_", name)]
    linked = re.findall(r"\]\((docs/\w+\.md)", PAGES[0].read_text())
    others = [name for name in dict.fromkeys([*linked, *others]) if name not in chapters]
    config.nav = [{"Start": readme}, {"Half a day": chapters[:7]}]
    config.nav += [{"Why it works": chapters[7:]}, {"Look up": others}]
    return config


def on_files(files, config):
    """Instead of everything in docs/: the pages, and the files that they link to."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    names = [str(path.relative_to(REPOSITORY)) for path in [*PAGES, *sorted(linked_files())]]
    names += [*config.extra_css, *config.extra["polyfills"]]
    folders = str(REPOSITORY), config.site_dir, config.use_directory_urls
    return Files([*theme, *(File(name, *folders) for name in names)])


def on_page_markdown(markdown, page, config, files):
    """Renders Markdown inside a folded answer, as GitHub does by itself. A picture for dark pages
    follows the site's own switch."""
    picture = r'<picture><source [^>]*srcset="([^"]+)">!\[(.*?)\]\(([^)]+)\)</picture>'
    markdown = re.sub(picture, r"![\2](\3#only-light)![\2](\1#only-dark)", markdown)
    return markdown.replace("<details>", '<details markdown="1">')


def on_page_content(html, page, config, files):
    """A line does not end within the dashes of an option."""

    def keep(found: re.Match) -> str:
        option = r'\1<span class="option">\2</span>'
        return re.sub(r"(^|\s)(--?\w+)", option, found[0]) if found[1] is None else found[0]

    # Without the attributes that a block of code has
    return re.sub(r"(<pre.*?</pre>)|(?<=<code>)[^<]*", keep, html, flags=re.S)
