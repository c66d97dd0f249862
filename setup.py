"""What pyproject.toml cannot say: a source distribution has the links by which a checkout finds its own trees."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

LINKS = ("kerngen/runtime", "kerngen/templates", "kerngen/tuning_db")


class LinkedSdist(sdist):
    def make_release_tree(self, base_dir: str, files: Sequence[str]) -> None:
        super().make_release_tree(base_dir, files)
        for link in LINKS:
            (Path(base_dir) / link).symlink_to(os.readlink(link))


setup(cmdclass={"sdist": LinkedSdist})
