"""One HTML file with everything in it. It asks for nothing over a network, and its own policy forbids it to."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import jinja2

from kerngen import __version__
from kerngen.errors import UsageError
from kerngen.report.figure import Section
from kerngen.system.files import open_regular, publish, require_place, unwritable

HERE = Path(__file__).parent
MADE_BY = '<meta name="generator" content="kerngen">'  # in every page's first bytes
_HEAD_BYTES = 4096


def document(
    made: Sequence[Section],
    *,
    title: str,
    lead: str,
    source: str,
    kernels: Sequence[str] = (),
    devices: Sequence[str] = (),
    data: str = "",
) -> str:
    """The whole file. lead, source: below its title. kernels, devices: what it can be narrowed to, if there are any.

    data: JSON that it carries along (see `carried`), with no "<" in it.
    """
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    if "<" in data:
        raise ValueError("what a page carries along could end its element")
    return _template().render(
        title=title, lead=lead, source=source, sections=made, style=style, script=script, policy=policy, data=data,
        version=__version__, at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), made_by=MADE_BY,
        devices=devices, kernels=kernels,
    )  # fmt: skip


def carried(text: str) -> str | None:
    """The JSON that the page `text` carries along; None where it is no page that carries any."""
    if MADE_BY not in text[:_HEAD_BYTES]:
        return None
    _, begun, rest = text.partition('<script type="application/json" id="data">')
    return rest.partition("</script>")[0] if begun else None


def require_page_place(path: Path) -> None:
    """To be asked before the work that a page is of. Raises KerngenError where no file can be made at `path`,
    UsageError where there is one that is no page of kerngen's: it may be what somebody did not mean to lose.
    """
    require_place(path)
    try:
        with open_regular(path) as f:
            head = f.read(_HEAD_BYTES)
    except FileNotFoundError:
        return
    except OSError as e:
        raise unwritable(path, e) from e
    if head and MADE_BY.encode() not in head:
        raise UsageError(f"{path} is there, and is no page of kerngen's", hint="name another file, or remove that one")


def write_document(path: Path, content: str) -> int:
    """Put the page at `path`, whole or not at all; its bytes. Raises KerngenError where it cannot lie there."""
    data = content.encode(errors="backslashreplace")  # the name of a file need not be UTF-8
    try:
        publish(data, path)
    except OSError as e:
        raise unwritable(path, e) from e
    return len(data)


@cache
def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template("page.html.jinja")
