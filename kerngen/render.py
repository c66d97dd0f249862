"""Template to source: a kernel's body for one problem, configuration and architecture, as one self-contained text.

Everything that decides the machine code is in the text (common/ is inlined, the arch is a constant), so the text is
the identity of a build. Never imports CuPy or torch.
"""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import jinja2

from kerngen.arch import Arch, Target
from kerngen.errors import KerngenError
from kerngen.templates.kernel import ROOT, Kernel, fields_of, static_fields

_INCLUDE = re.compile(r'^[ \t]*#include "(common/[\w.]+)"[^\n]*$', re.MULTILINE)
_FEATURES = ("has_bf16", "has_cp_async", "has_ldmatrix", "has_mma16816", "has_tma", "has_wgmma", "has_pdl")


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _literal(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


def render(kernel: Kernel, problem: Any, config: Any, target: Target) -> str:
    """The CUDA source of `kernel` for `problem` and `config` on `target`: the same for every board of its arch.

    Raises ConfigRefused if the configuration cannot run there, KerngenError if the template is wrong.
    """
    kernel.require_valid(problem, config, target)
    return source_of(kernel, problem, config, target.arch)


def source_of(kernel: Kernel, problem: Any, config: Any, arch: Arch) -> str:
    """As `render`, of a configuration that need not be valid: what an older build was made from, say.

    The template sees `p` (the compiled-in fields of the problem: a RUNTIME field is undefined there), `c` (the
    config) and `arch`, and nothing of a board.
    """
    body = f"{kernel.name}/{kernel.body(config, arch).template}"
    try:
        text = (
            _environment()
            .get_template(body)
            .render(
                p=SimpleNamespace(**{k: _literal(v) for k, v in static_fields(problem).items()}),
                c=SimpleNamespace(**{k: _literal(v) for k, v in fields_of(config).items()}),
                arch=arch,
            )
        )
    except jinja2.TemplateError as e:
        raise KerngenError(f"templates/{body}: {e}") from e
    return _header(arch) + _inline(text, seen=set())


def _header(arch: Arch) -> str:
    flags = "".join(f"constexpr bool {f.upper()} = {_literal(getattr(arch, f))};\n" for f in _FEATURES)
    return f"constexpr int ARCH = {arch.number};\n{flags}"


def _inline(text: str, seen: set[str]) -> str:
    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in seen:
            return ""
        seen.add(name)
        path = ROOT / name
        if not path.is_file():
            raise KerngenError(f"#include {name!r}: no such file in templates/common")
        return f"// ---- {name}\n{_inline(path.read_text(), seen)}// ---- end {name}"

    return _INCLUDE.sub(replace, text)
