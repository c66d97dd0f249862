"""What the documentation site is built of: each page in its place, each public name and command in the reference.

`make docs` builds it, which takes longer, and fails where a link leads nowhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, normpath
from types import ModuleType

import click
import pytest
from command import ROOT

import kerngen
from kerngen.cli import cli


@pytest.fixture(scope="module")
def build() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    try:
        import build

        yield build
    finally:
        sys.path.remove(str(ROOT / "docs" / "site"))


@pytest.fixture(scope="module")
def contents(build: ModuleType) -> dict[str, str | Path]:
    found: dict[str, str | Path] = build.contents()
    return found


def test_every_page_has_one_place(build: ModuleType, contents: dict[str, str | Path]) -> None:
    copied = set(build.sitemap.COPIED.values())
    written = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    assert {p.relative_to(ROOT).as_posix() for p in written} <= copied
    shown = [page for pages in build.sitemap.NAVIGATION.values() for page in pages]
    assert len(shown) == len(set(shown))
    assert {p for p in contents if re.fullmatch(r"[\w-]+\.md|(?!files)[\w-]+/[\w-]+\.md", p)} == set(shown)


def test_links_lead_to_pages_and_files_of_the_site(build: ModuleType, contents: dict[str, str | Path]) -> None:
    for page in build.sitemap.COPIED | build.sitemap.MADE:
        text = contents[page]
        assert isinstance(text, str)
        targets = {normpath(f"{dirname(page)}/{link.split('#')[0]}").lstrip("/") for link in build.sitemap.links(text)}
        assert {t for t in targets if t not in contents and f"extra/{t}" not in contents} == set(), page
    assert "files/examples/serving/grafana.json" in contents


def test_a_link_is_moved_with_its_page(build: ModuleType) -> None:
    text = (
        "[a](docs/runtime.md#a-chat) [b](examples/cluster) [c](https://x/docs/runtime.md) [d](nowhere.md) [e](#use)\n"
        '<img src="examples/tiny/prompt.txt">\n'
        "```python\nf[0](docs/runtime.md)\n```\n[f](Makefile)\n"
    )
    moved, taken = build.sitemap.moved(text, "index.md")
    assert moved == (
        "[a](runtime.md#a-chat) [b](cluster.md) [c](https://x/docs/runtime.md) [d](nowhere.md) [e](#use)\n"
        '<img src="beside/examples/tiny/prompt.txt">\n'
        "```python\nf[0](docs/runtime.md)\n```\n[f](files/Makefile)\n"
    )
    assert taken == {"extra/beside/examples/tiny/prompt.txt": "examples/tiny/prompt.txt", "files/Makefile": "Makefile"}


def test_every_public_name_is_in_the_reference(build: ModuleType, contents: dict[str, str | Path]) -> None:
    def shown(module: str) -> set[str]:
        page = str(contents[f"reference/{module}.rst"])
        return {*re.findall(r"^\.\. auto\w+:: (\w+)$", page, re.M), *re.findall(r"^``(\w+)`` is", page, re.M)}

    for module in (kerngen, kerngen.ops):
        assert shown(module.__name__) == {n for n in module.__all__ if n not in ("__version__", "ops")}
    told = re.findall(r"\bkerngen\.([\w.]*\w)\b", (ROOT / "docs" / "library.md").read_text())
    modules = {m.name for m in build.sitemap.MODULES}
    for name in {f"kerngen.{n}" for n in told if "NAME" not in n} - modules:
        assert name.rpartition(".")[2] in shown(name.rpartition(".")[0]), name


def test_an_op_says_what_it_takes_and_returns(contents: dict[str, str | Path]) -> None:
    for name in kerngen.ops.__all__:
        assert "return" in getattr(kerngen.ops, name).__annotations__ or name == "W4Weights", name
        assert getattr(kerngen.ops, name).__doc__, name


def test_every_command_and_option_is_in_the_reference(contents: dict[str, str | Path]) -> None:
    def walk(command: click.Command, path: str, context: click.Context | None) -> Iterator[tuple[str, click.Command]]:
        here = click.Context(command, info_name=path, parent=context)
        yield path, command
        if isinstance(command, click.Group):
            for name in command.list_commands(here):
                if (found := command.get_command(here, name)) is not None:
                    yield from walk(found, f"{path} {name}", here)

    count = 0
    for path, command in walk(cli, "kerngen", None):
        page = str(
            contents["reference/commands.md" if path == "kerngen" else f"reference/commands/{path.split()[1]}.md"]
        )
        section = (
            page if path == "kerngen" else re.split(r"^#+ kerngen .*$", page.split(f"# {path}\n")[1], flags=re.M)[0]
        )
        for option in (o for o in command.params if isinstance(o, click.Option) and not o.hidden):
            assert any(re.search(rf"^`(?:-\w, )?{o}\b", section, re.M) for o in option.opts), f"{path} {option.opts}"
            count += 1
    assert count > 100


def test_a_docstring_is_shown_as_it_is_meant(build: ModuleType) -> None:
    from docstrings import as_rst

    lines = ["softmax(q k^T) for `n` tokens: a * b_ | c.", "",
             "q [B, d]; caches, int32. n, window: how", "many. Raises E.", "", "    a", "", "    b", ""]  # fmt: skip
    assert as_rst(lines, ["q", "n", "window"]) == [
        r"softmax(q k^T) for ``n`` tokens: a \* b\_ \| c.", "",
        "| ``q`` [B, d]; caches, int32.", "| ``n``, ``window``: how many.", "| Raises E.", "",
        ".. code-block:: text", "", "       a", "", "       b", "",
    ]  # fmt: skip
