"""Build the documentation site: `make docs`. It fails where a link leads nowhere, as where anything else is wrong."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import commands
import performance
import records
import sitemap

from kerngen import errors
from kerngen.errors import KerngenError

HERE = Path(__file__).resolve().parent


def contents() -> dict[str, str | Path]:
    """Path in the source of the site -> its text, or the file that it is a copy of."""
    made: dict[str, str | Path] = {sitemap.COMMANDS: commands.index(), **commands.pages(), **dict(_library())}
    texts = {page: (sitemap.ROOT / source).read_text() for page, source in sitemap.COPIED.items()}
    texts |= {f"experiments/{name}.md": text for name, text in records.pages(records.read()).items()}
    texts |= {f"performance/{name}.md": text for name, text in performance.tables().items()}
    for page, text in texts.items():
        text, taken = sitemap.moved(text, page)
        made[page] = text + sitemap.toctrees() if page == sitemap.HOME else text
        made |= {ours: sitemap.ROOT / theirs for ours, theirs in taken.items()}
    return made


def _library() -> Iterator[tuple[str, str]]:
    """The reference of the library: a page for each module, what is public of it by its docstring."""
    shown: dict[object, str] = {}
    for module in sitemap.MODULES:
        lines = [*_heading(module.name, "="), module.says, "", f".. currentmodule:: {module.name}", ""]
        found = {name: getattr(import_module(module.name), name) for name in module.public()}
        raised = [name for name, value in found.items() if inspect.isclass(value) and issubclass(value, KerngenError)]
        for name, value in ((n, v) for n, v in found.items() if n not in raised):
            kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
            known = shown.setdefault(value, f"{module.name}.{name}") if kind != "data" else f"{module.name}.{name}"
            if known == f"{module.name}.{name}":
                lines += [f".. auto{kind}:: {name}", ""]
            else:
                lines += [f"``{name}`` is :py:obj:`{known}`.", ""]
        if raised:
            lines += _heading("Errors", "-")
            drawing = (errors.__doc__ or "").splitlines()[2:]
            lines += [".. code-block:: text", "", *(f"   {line}" for line in drawing), ""]
            lines += [line for name in raised for line in (f".. autoexception:: {name}", "")]
        yield module.page, "\n".join(lines)
    told = "[As a library](../library.md) shows how it is used."
    tree = ["```{toctree}", ":maxdepth: 1", "", *(m.name for m in sitemap.MODULES), "```", ""]
    yield sitemap.LIBRARY, "\n".join(["# Library", "", told, "", *tree])


def _heading(text: str, line: str) -> list[str]:
    return [text, line * len(text), ""]


def write(source: Path) -> None:
    """Put `contents` there, and take away what is not among them. What did not change keeps its time, for Sphinx."""
    made = contents()
    for path, content in made.items():
        place = source / path
        place.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content.read_bytes()
        if not place.is_file() or place.read_bytes() != data:
            place.write_bytes(data)
    for old in [p for p in source.rglob("*") if p.is_file() and p.relative_to(source).as_posix() not in made]:
        old.unlink()


def main(out: Path) -> int:
    """Build the pages in out/html; their source is in out/source."""
    from sphinx.cmd.build import build_main

    write(out / "source")
    options = ["-q", "-W", "--keep-going", "-b", "html", "-c", str(HERE), "-d", str(out / "doctrees")]
    code = build_main([*options, str(out / "source"), str(out / "html")])
    if not code:
        print(out / "html" / "index.html")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else sitemap.ROOT / "build" / "docs"))
