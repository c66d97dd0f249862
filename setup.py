"""What pyproject.toml cannot say: the links of a source distribution, and README as a package index can show it."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
LINKS = ("kerngen/runtime", "kerngen/templates", "kerngen/tuning_db")
_PICTURE = re.compile(r"<picture>.*?</picture>\n?|!\[[^\]]*\]\(\s*(?!\w+:)[^)]*\)\n?", re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(\s*(?!\w+:|#)([^)\s]+)\)")
_IMAGE = re.compile(r"""(!\[[^\]]*\]\(\s*|\bsrc(?:set)?=")(?!\w+:)([^)"\s]+)""")


class LinkedSdist(sdist):
    """A source distribution has the links by which a checkout finds its own trees."""

    def make_release_tree(self, base_dir: str, files: Sequence[str]) -> None:
        super().make_release_tree(base_dir, files)
        for link in LINKS:
            (Path(base_dir) / link).symlink_to(os.readlink(link))


def long_description(readme: str, repository: str | None, version: str) -> str:
    """README for a page that lies beside none of its files.

    Links lead to `repository` (https://host/owner/name) at the tag of `version`. Without an address they become their
    words, and pictures go: what is left is whole.
    """
    if repository is None:
        return _LINK.sub(r"\1", _PICTURE.sub("", readme))
    base = repository.rstrip("/")
    linked = _LINK.sub(rf"[\1]({base}/blob/v{version}/\2)", readme)
    return _IMAGE.sub(rf"\1{base}/raw/v{version}/\2", linked)


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shown = long_description((ROOT / "README.md").read_text(encoding="utf-8"),
                             project.get("urls", {}).get("Repository"), project["version"])  # fmt: skip
    setup(cmdclass={"sdist": LinkedSdist}, long_description=shown, long_description_content_type="text/markdown")


if __name__ == "__main__":
    main()
