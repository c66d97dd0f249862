"""Prose against the tree: a file or a module that a page, a docstring or a comment names is there."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import kerngen

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("kerngen", "runtime", "templates", "tuning_db", "tools", "examples")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
# A file by name or path: what lies behind a URL, a variable part (NAME.py) or a glob is none.
_FILE = re.compile(
    r"(?<![\w./<{*@-])((?:[\w-]+/)*[\w.-]*[a-z0-9_]\.(?:py|cuh\.jinja|cu\.jinja|cuh))(?![\w.(*{<]*[\w(*{<])"
)
_MODULE = re.compile(
    r"(?<![\w./-])(?:kerngen|runtime|tuning_db)(?!\.(?:md|svg|toml)\b)(?:\.[a-z_][a-z0-9_]*)+(?:\.[A-Za-z_]\w*)?(?![\w*{<])"
)
# Files of other projects: where their code is the source of ours, and what alembic and this guide's reader have.
_FOREIGN = re.compile(
    r"modeling_gemma4\w*\.py|candidate_generator\.py|configuration_utils\.py|sampler\.py of|vllm/|entrypoints/|"
    r"ggml-org/llama\.cpp|gguf_reader\.py|tool_parsers/|reasoning/|marlin_utils\.py|mixed_precision/|env\.py|kernels/scale_rows/|kerngen\.ops\.scale_rows"
)


def _sources() -> Iterator[Path]:
    for tree in SOURCES:
        for path in sorted((ROOT / tree).rglob("*")):
            if path.suffix in (".py", ".cuh", ".jinja") and path.is_file() and "__pycache__" not in path.parts:
                yield path


@cache
def _there() -> frozenset[str]:
    """Every file of the repository as it may be named: by its name, and by any end of its path."""
    named = set[str]()
    for tree in (*SOURCES, "tests", "docs"):
        for path in (ROOT / tree).rglob("*"):
            if path.suffix in (".py", ".cuh", ".jinja"):
                parts = path.relative_to(ROOT).parts
                named.update("/".join(parts[i:]) for i in range(len(parts)))
                if parts[0] in ("runtime", "templates", "tuning_db"):
                    named.add("/".join(("kerngen", *parts)))  # as a symlink of the package has it
    return frozenset(named)


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of a page or a header, and of the comments and docstrings of a Python file."""
    text = path.read_text()
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (
            token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        ):
            yield from enumerate(token.string.splitlines(), token.start[0])
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token.type


def missing_files(text: str) -> list[str]:
    """Of the files that `text` names, those that are not there."""
    if _FOREIGN.search(text):
        return []
    return [name for name in _FILE.findall(text) if name not in _there()]


def missing_modules(text: str) -> list[str]:
    """Of the modules, and names in modules, that `text` names, those that are not there."""
    if _FOREIGN.search(text):
        return []
    return [name for name in _MODULE.findall(text) if not _resolves(name)]


@cache
def _resolves(name: str) -> bool:
    """Without importing anything heavy: modules are found by their files, what is in them by their text."""
    *parts, last = name.removeprefix("kerngen.").split(".")
    path = Path(kerngen.__file__).parent.joinpath(*parts)
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if (path / f"{last}.py").is_file() or (path / last).is_dir():
        return True
    return source.is_file() and re.search(rf"\b{last}\b", source.read_text()) is not None


def test_what_is_not_there_is_found() -> None:
    assert missing_files("see kerngen/binding.py and values.py, or `tuning_db/serve/lookup.py`.") == [
        "kerngen/binding.py", "tuning_db/serve/lookup.py",
    ]  # fmt: skip
    assert missing_files("#include common/posted.cuh") == ["common/posted.cuh"]
    assert missing_modules("kerngen.render, kerngen.compiler.render.render and kerngen.KerngenError") == [
        "kerngen.render"
    ]
    assert missing_modules("in `runtime.ops.outside.FALLBACKS`") == ["runtime.ops.outside.FALLBACKS"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages_name_files_and_modules_that_are_there(page: Path) -> None:
    modules = page.name != "CHANGELOG.md"  # which says where a module was before
    lines = [(i, [*missing_files(line), *(missing_modules(line) if modules else ())]) for i, line in _prose(page)]
    assert [(i, names) for i, names in lines if names] == []


def test_comments_and_docstrings_name_files_and_modules_that_are_there() -> None:
    lines = [
        (path, i, [*missing_files(line), *missing_modules(line)]) for path in _sources() for i, line in _prose(path)
    ]
    assert len(lines) > 10_000, "nothing was read"
    assert [f"{path.relative_to(ROOT)}:{i}: {', '.join(names)}" for path, i, names in lines if names] == []
