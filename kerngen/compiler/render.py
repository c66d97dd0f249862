"""Template to source: a kernel's body for one problem, configuration and architecture, as one self-contained text.

Everything that decides the machine code is in the text (common/ is inlined, the arch is a constant), so the text is
the identity of a build. Never imports CuPy or torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream

from kerngen.arch import Arch, Target
from kerngen.compiler.source import Origin, Source, place_of, reason_of, shown
from kerngen.errors import KerngenError, TemplateError
from kerngen.templates.kernel import Kernel, fields_of, static_fields

_INCLUDE = re.compile(r'^[ \t]*#include "(common/[\w./]+)"[^\n]*$', re.MULTILINE)
_FEATURES = ("has_bf16", "has_cp_async", "has_ldmatrix", "has_mma16816", "has_tma", "has_wgmma", "has_pdl")


def render(kernel: Kernel, problem: Any, config: Any, target: Target) -> Source:
    """The CUDA source of `kernel` for `problem` and `config` on `target`: the same for every board of its arch.

    Raises ConfigRefused if the configuration cannot run there, TemplateError if the template is wrong.
    """
    kernel.require_valid(problem, config, target)
    return source_of(kernel, problem, config, target.arch)


def source_of(kernel: Kernel, problem: Any, config: Any, arch: Arch) -> Source:
    """As `render`, of a configuration that need not be valid: what an older build was made from, say.

    The template sees `p` (the compiled-in fields of the problem: a RUNTIME field is undefined there), `c` (the
    config), `k` (the spec's constants) and `arch`, and nothing of a board.
    """
    path = kernel.folder / kernel.body(config, arch).template
    try:
        text = _environment().get_template(str(path)).render(
            p=_Fields("p", static_fields(problem), problem.RUNTIME),
            c=_Fields("c", fields_of(config)),
            k=_Fields("k", kernel.constants(problem, config, arch)),
            arch=arch,
        )  # fmt: skip
    except KerngenError:
        raise
    except Exception as e:  # Jinja's own, and whatever an expression in the template does
        raise _template_error(e, path, kernel.folder.parent) from e
    return assemble(_chunks(text), arch, kernel.shared)


class Renderer:
    """Renders as `render`, each text once: problems that differ at launch alone share it.

    One belongs to one listing of builds, during which no template changes.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Source] = {}

    def __call__(self, kernel: Kernel, problem: Any, config: Any, target: Target) -> Source:
        """Raises as `render`."""
        kernel.require_valid(problem, config, target)
        key = kernel.folder, tuple(static_fields(problem).values()), config, target.arch
        if (made := self._made.get(key)) is None:
            made = self._made[key] = source_of(kernel, problem, config, target.arch)
        return made


def assemble(chunks: Iterable[Chunk], arch: Arch, shared: tuple[Path, ...]) -> Source:
    """One text: the arch's constants, then `chunks` with what they include of the folders `shared`."""
    out = _Writer()
    out.add(_header(arch))
    _inline(chunks, shared, out)
    return out.source()


def _header(arch: Arch) -> str:
    flags = "".join(f"constexpr bool {f.upper()} = {_literal(getattr(arch, f))};\n" for f in _FEATURES)
    return f"constexpr int ARCH = {arch.number};\n{flags}"


def _template_error(error: Exception, template: Path, root: Path) -> TemplateError:
    reason = str(error.message) if isinstance(error, jinja2.TemplateError) else reason_of(error)
    path, line = place_of(error, root) or (template, 0)
    if not line:
        return TemplateError(f"{shown(path)}: {reason}")
    text = path.read_text().splitlines()[line - 1 : line]
    return TemplateError("\n    ".join([f"{shown(path)}:{line}: {reason}", *map(str.strip, text)]))


# -- what a template sees


class _Flag(str):
    """A bool as C++ writes it, which in a template's conditions is what it says."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return self == "true"


def _literal(value: object) -> object:
    return _Flag(str(value).lower()) if isinstance(value, bool) else value


class _Fields:
    """p, c or k in a template: values as C++ writes them. What is not there is an error that lists what is."""

    def __init__(self, letter: str, values: Mapping[str, Any], hidden: tuple[str, ...] = ()) -> None:
        self.__dict__.update({name: _literal(value) for name, value in values.items()})
        self._why_not: Callable[[str], str] = lambda name: _why_undefined(letter, name, tuple(values), hidden)


def _why_undefined(letter: str, name: str, known: tuple[str, ...], hidden: tuple[str, ...]) -> str:
    if name in hidden:
        return f"{letter}.{name} is a RUNTIME field of the problem: one cubin serves all its values"
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f"did you mean {letter}.{close[0]}? " if close else ""
    return f"there is no {letter}.{name}; {guess}known: {', '.join(known) or 'none'}"


class _Undefined(jinja2.StrictUndefined):
    @property
    def _undefined_message(self) -> str:
        if isinstance(self._undefined_obj, _Fields) and self._undefined_name is not None:
            return self._undefined_obj._why_not(self._undefined_name)
        return super()._undefined_message


# -- Jinja, told to say where each piece of text comes from


# What stands before a piece: its file and line, and whether it is the template's text or a value.
_MARK = re.compile("\x02([^\x03]*):(\\d+):(text|value)\x03")
_CAPTURES = ("set", "macro", "call", "filter")  # what is inside is a value, which the template may look at: no marks


class _Marks(Extension):
    """Puts a mark before each piece of a template's text and before each value in it. `_chunks` takes them out."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        captures, statement = 0, list[Token]()
        for token in stream:
            if token.type == "block_begin":
                statement = []
            statement.append(token)
            if token.type == "block_end":
                word = statement[1].value
                opens = word in _CAPTURES and not (word == "set" and any(t.type == "assign" for t in statement))
                captures += opens - (word.removeprefix("end") in _CAPTURES and word.startswith("end"))
            if not captures and token.type == "data":
                yield Token(token.lineno, "data", f"\x02{stream.name}:{token.lineno}:text\x03{token.value}")
                continue
            if not captures and token.type == "variable_begin":
                yield Token(token.lineno, "data", f"\x02{stream.name}:{token.lineno}:value\x03")
            yield token


class _Loader(jinja2.BaseLoader):
    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Callable[[], bool]]:
        path = Path(template)
        try:
            text, made = path.read_text(), path.stat().st_mtime_ns
        except OSError as e:
            raise jinja2.TemplateNotFound(template, f"cannot read {shown(path)}: {e.strerror or e}") from e
        return text, template, lambda: path.is_file() and path.stat().st_mtime_ns == made


class _Environment(jinja2.Environment):
    def join_path(self, template: str, parent: str) -> str:
        """What {% include "template" %} in `parent` means: a file beside it, or KERNEL/FILE of the same root."""
        folder = Path(parent).parent
        beside = folder / template
        return str(beside if beside.is_file() else folder.parent / template)


@cache
def _environment() -> jinja2.Environment:
    return _Environment(
        loader=_Loader(),
        undefined=_Undefined,
        extensions=[_Marks],
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


# -- one text out of many, and where its lines come from


class Chunk(NamedTuple):
    """Whole lines of `file`, from `line` on."""

    text: str
    file: str = ""
    line: int = 0


class _Writer:
    """Puts chunks together, and remembers where each came from."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._origins: list[Origin] = []
        self._at = 1

    def add(self, text: str, file: str = "", line: int = 0) -> None:
        if not text:
            return
        last = self._origins[-1] if self._origins else None
        if last is None or file != last.file or line - last.line != self._at - last.at:
            self._origins.append(Origin(self._at, file, line))
        self._parts.append(text)
        self._at += text.count("\n")

    def source(self) -> Source:
        return Source("".join(self._parts), self._origins)


def _chunks(marked: str) -> Iterator[Chunk]:
    """What Jinja made, without the marks. A line is from where its first character is from."""
    pieces = _MARK.split(marked)
    begun, file, line = "", "", 0  # a line without its end, and where that is from
    for name, number, kind, text in zip(pieces[1::4], pieces[2::4], pieces[3::4], pieces[4::4], strict=True):
        at = int(number)
        while text:
            if not begun:
                file, line = name, at
            # the end of the line that was begun, or all whole lines of the template's; of a value's each by itself
            end = 1 + (text.find("\n") if begun or kind == "value" else text.rfind("\n"))
            if not end:
                begun += text
                break
            yield Chunk(begun + text[:end], file, line)
            at += text.count("\n", 0, end) if kind == "text" else 0
            begun, text = "", text[end:]
    yield Chunk(begun, file, line)


def _inline(chunks: Iterable[Chunk], folders: tuple[Path, ...], out: _Writer) -> None:
    """Write `chunks`, with each `#include "common/FILE"` replaced by the file: once, later ones by nothing."""
    seen: set[str] = set()

    def write(chunk: Chunk) -> None:
        text, file, line = chunk
        at = 0
        for match in _INCLUDE.finditer(text) if "#include" in text else ():  # most files have none: a third of the time
            out.add(text[at : match.start()], file, line)
            line += text.count("\n", at, match.start())
            at = match.end()
            if (name := match[1]) not in seen:
                seen.add(name)
                path = _shared_file(name, folders, file, line)
                out.add(f"// ---- {name}\n")
                write(Chunk(path.read_text(), str(path), 1))
                out.add(f"// ---- end {name}")
        out.add(text[at:], file, line)

    for chunk in chunks:
        write(chunk)


def _shared_file(name: str, folders: tuple[Path, ...], file: str, line: int) -> Path:
    for folder in folders:
        if (path := folder.parent / name).is_file():
            return path
    looked = " or ".join(shown(folder) for folder in folders)
    raise TemplateError(f'{shown(file)}:{line}: #include "{name}": no such file in {looked}')
