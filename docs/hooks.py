"""Hooks of MkDocs: the site also has the pages outside docs/, and links to other files lead to the repository.

The pages are written for GitHub, where links are paths between files. MkDocs itself warns of a link that leads nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "docker/README.md": "docker.md",
}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)[^)#\s]+")


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    on_site = {Path(file.abs_src_path): file.src_uri for file in files if file.abs_src_path}
    folder = Path(page.file.abs_src_path).parent

    def rewritten(link: re.Match[str]) -> str:
        target = (folder / link[0]).resolve()
        if target in on_site:
            return on_site[target]  # all pages lie in one folder
        return in_repository(target, config.repo_url) if target.exists() else link[0]

    return LINK.sub(rewritten, markdown)


def in_repository(path: Path, repository_url: str) -> str:
    if not repository_url:
        return path.as_uri()
    return f"{repository_url.rstrip('/')}/{'tree' if path.is_dir() else 'blob'}/HEAD/{path.relative_to(ROOT)}"
