"""Builds the site from the whole repository: pages outside `docs/` become pages too, other files become links to the
source. A link to nothing ends the build."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = "project"  # where pages lie in the site that are not in `docs/`
PAGES = ("*.md", "benchmarks/*/README.md", "benchmarks/*/results/*.png", "examples/**/README.md", "examples/**/*.ipynb")
LINK = re.compile(r"(\]\()([^)#\s]+)")
CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            uri = f"{OUTSIDE}/{path.relative_to(ROOT).as_posix()}"
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    in_repository = here.removeprefix(f"{OUTSIDE}/") if here.startswith(f"{OUTSIDE}/") else f"docs/{here}"

    def moved(link: re.Match[str]) -> str:
        target = link[2]
        if re.match(r"[a-z]+:|/", target):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), target))
        if not (ROOT / path).exists():
            raise PluginError(f"{in_repository}: links to {target}, which is not there")
        inside = path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"
        if (ROOT / path).is_dir() and files.get_file_from_path(f"{inside}/README.md"):
            inside = f"{inside}/README.md"
        if files.get_file_from_path(inside) is None:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            return f"{link[1]}{config.repo_url}/{kind}/main/{path}"
        return link[1] + posixpath.relpath(inside, posixpath.dirname(here) or ".")

    parts = CODE.split(markdown)
    return "".join(part if number % 2 else LINK.sub(moved, part) for number, part in enumerate(parts))
