"""kerngen's docstrings as Sphinx reads them: plain text with `code`, drawings that are indented, and what the
parameters are, one sentence after the other. Here each of those begins a line of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_CODE = re.compile(r"(`[^`\n]+`)")
_RST = re.compile(r"([\\*|_])")
_ENDS = r"(?<=[.)\]]) (?=%s)"


def as_rst(lines: Iterable[str], parameters: Iterable[str]) -> list[str]:
    """Lines of reStructuredText that show this docstring. parameters: of the function, or a class's fields."""
    names = "|".join(sorted(map(re.escape, parameters), key=len, reverse=True))
    begins = r"(?:Returns|Raises|Source:)\b" + (rf"|(?:{names})(?:, (?:{names}))*(?::| \[)" if names else "")
    return [line for block in _blocks(lines) for line in _shown(block, begins, names)]


def _blocks(lines: Iterable[str]) -> Iterator[list[str]]:
    """Paragraphs; what is indented is one, with the empty lines within."""
    block: list[str] = []
    for line in [*lines, ""]:
        drawn = bool(block) and block[0].startswith("  ")
        ends = line.startswith("  ") != drawn if line.strip() else not drawn
        if block and ends:
            yield block
            block = []
        if line.strip() or block:
            block.append(line)
    if block:
        yield block


def _shown(block: list[str], begins: str, names: str) -> Iterator[str]:
    if block[0].startswith("  "):
        drawing = "\n".join(block).rstrip().splitlines()
        yield from (".. code-block:: text", "", *(f"   {line}".rstrip() for line in drawing), "")
        return
    text = " ".join(line.strip() for line in block)
    sentences = re.split(_ENDS % f"(?:{begins})", text)
    margin = "| " if len(sentences) > 1 else ""
    yield from (*(f"{margin}{_marked(sentence, names)}" for sentence in sentences), "")


def _marked(text: str, names: str) -> str:
    """Inline: `code` is code, the names with which a line begins too, and nothing else is markup."""
    head = ""
    if names and (m := re.match(rf"(?:{names})(?:, (?:{names}))*(?=:| \[)", text)):
        head, text = ", ".join(f"``{name}``" for name in m[0].split(", ")), text[m.end() :]
    parts = _CODE.split(text)
    return head + "".join(f"`{p}`" if i % 2 else _RST.sub(r"\\\1", p) for i, p in enumerate(parts))
