"""What is given to others: the source distribution has all that git has, and stands by itself; versions are whole."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from command import ROOT
from packaging.requirements import Requirement

import kerngen

RELATIVE = re.compile(r"""(?:\]\(|\bsrc(?:set)?=")\s*(?!\w+:|#)([^)"\s]+)""")
MADE = re.compile(r"PKG-INFO|setup\.cfg|kerngen\.egg-info/.*")


def _tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("no git here, so nothing says which files are kerngen's")
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True, check=True)  # fmt: skip
    return sorted(name for name in listed.stdout.split("\0") if name and (ROOT / name).exists())


def test_the_source_distribution_is_complete(tmp_path: Path) -> None:
    tracked = _tracked()
    for name in tracked:
        place = tmp_path / "source" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to((ROOT / name).readlink() if (ROOT / name).is_symlink() else ROOT / name)
    build = [
        sys.executable,
        "setup.py",
        "--quiet",
        "sdist",
        "--formats=tar",
        "--dist-dir=../dist",
    ]  # gzip takes seconds
    done = subprocess.run(build, cwd=tmp_path / "source", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "dist").glob("*.tar")
    assert archive.name == f"kerngen-{kerngen.__version__}.tar"
    with tarfile.open(archive) as file:
        members = {m.name.partition("/")[2]: m for m in file if not m.isdir()}
    assert sorted(name for name in members if not MADE.fullmatch(name)) == tracked
    links = {name: m.linkname for name, m in members.items() if m.issym()}
    assert links == {f"kerngen/{tree}": f"../{tree}" for tree in ("runtime", "templates", "tuning_db")}


def test_versions_and_the_licence_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == kerngen.__version__
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited), "what the format asks for"
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    assert [a["name"] for a in cited["authors"]] == [a["name"] for a in project["authors"]]
    (licence,) = project["license-files"]
    assert "Apache License\n                           Version 2.0" in (ROOT / licence).read_text()
    sections = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert len(sections) == len(set(sections))
    assert sections[1] == kerngen.__version__, "what a version changed is written down"


def test_an_index_shows_a_readme_whose_links_lead_somewhere() -> None:
    """Its page lies beside none of our files. Without an address the words stay, and no link and no picture does."""
    spec = importlib.util.spec_from_file_location("kerngen_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    readme = (ROOT / "README.md").read_text()
    relative = set(RELATIVE.findall(readme))
    assert relative
    linked = module.long_description(readme, "https://forge.example/o/kerngen/", "9.8")
    bare = module.long_description(readme, None, "9.8")
    assert not RELATIVE.findall(linked) + RELATIVE.findall(bare)
    for link in relative:
        assert re.search(rf"https://forge.example/o/kerngen/(blob|raw)/v9.8/{re.escape(link)}[)\"]", linked), link
    assert 'src="https://forge.example/o/kerngen/raw/v9.8/docs/pictures/h200-light.svg"' in linked
    assert "[Apache 2.0](" in linked
    assert "Apache 2.0. CITATION.cff says" in bare
    assert "<picture>" not in bare
    assert "![" not in bare


def test_all_that_an_installation_brings_is_pinned() -> None:
    """From pyproject.toml on, as far as packages are installed: each must be in constraints.txt."""
    pinned = {_plain(n) for n in re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [
        *project["dependencies"],
        *(line for name, lines in extras.items() if name not in ("cuda13", "vllm") for line in lines),
    ]
    seen: set[tuple[str, str]] = set()
    while asked:
        line = asked.pop()
        name, wanted = re.match(r"([\w.-]+)(?:\[([\w,.-]+)\])?", line).groups()  # type: ignore[union-attr]
        for extra in ["", *(wanted or "").split(",")]:
            if (_plain(name), extra) not in seen:
                seen.add((_plain(name), extra))
                asked += _required(name, extra)
    names = {name for name, _ in seen}
    assert names > {"torch", "sympy", "mpmath", "psycopg-binary"}
    assert sorted(names - pinned - {"kerngen"}) == []  # of an extra that brings another


def _required(name: str, extra: str) -> list[str]:
    """What an installed package asks for on this machine, by itself or for its `extra`; nothing if it is not here."""
    try:
        lines = distribution(name).requires or []
    except PackageNotFoundError:
        return []
    found = map(Requirement, lines)
    return [str(r) for r in found if (r.marker.evaluate({"extra": extra}) if r.marker else not extra)]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
