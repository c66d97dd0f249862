"""`kerngen kernel new`: a folder that works, to be made into a kernel."""

from __future__ import annotations

import keyword
import os
import re
from pathlib import Path

import click

from kerngen.errors import UsageError

SCAFFOLD = Path(__file__).resolve().parents[1] / "scaffold"
PLACEHOLDER = "new_kernel"  # what the scaffold is called in its own files
# Words of C++ that are names in Python: the entry point has the kernel's name.
CPP = """
alignas alignof asm auto bool case catch char const constexpr const_cast decltype default delete do double dynamic_cast
enum explicit export extern float friend goto inline int long main mutable namespace new noexcept nullptr operator
private protected public register reinterpret_cast short signed sizeof static static_assert static_cast struct switch
template this thread_local throw typedef typeid typename union unsigned using virtual void volatile wchar_t
"""


@click.command()
@click.argument("name")
@click.option("--templates", "root", type=click.Path(file_okay=False, path_type=Path), default=None, metavar="DIR",
              help="Where to put it. Default: the first folder of KERNGEN_TEMPLATES, else ./kernels.")  # fmt: skip
def new(name: str, root: Path | None) -> None:
    """Make a folder that compiles and passes the contract suite (out = x * weight), to be made into a kernel.

    \b
    Example:
      kerngen kernel new scale_rows --templates kernels
    """
    from kerngen.templates import TEMPLATES_VARIABLE, rescan

    named = [p for p in os.environ.get(TEMPLATES_VARIABLE, "").split(os.pathsep) if p]
    root = root or Path(named[0] if named else "kernels")
    _require_name(name)
    folder = root / name
    if folder.exists():
        raise UsageError(f"{folder} is there already", hint="take another name, or remove it")
    folder.mkdir(parents=True)
    made = []
    for path in sorted(p for p in SCAFFOLD.iterdir() if p.suffix in (".py", ".jinja")):
        (folder / path.name).write_text(re.sub(rf"\b{PLACEHOLDER}\b", name, path.read_text()))
        made.append(path.name)
    rescan()
    click.echo(f"made {folder}: {', '.join(made)}")
    if root.resolve() not in (Path(p).resolve() for p in named):
        click.echo(f"use it:  export {TEMPLATES_VARIABLE}={root.resolve()}    (or kerngen --templates {root} ...)")
    click.echo(f"look:    kerngen kernel show {name} --arch sm90")


def _require_name(name: str) -> None:
    """Raises UsageError unless `name` can be a package of Python, an entry point in C++, and no kernel has it."""
    from kerngen.templates import kernel_names
    from kerngen.templates.kernel import ROOT

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or name in CPP.split():
        raise UsageError(f"{name!r} cannot name a Python package and a C++ function",
                         hint="small letters, digits and _, and no keyword: kerngen kernel new scale_rows")  # fmt: skip
    if name == "common" or (ROOT / f"{name}.py").exists():
        raise UsageError(f"{name} is a name of kerngen.templates' own", hint="take another name")
    if name in kernel_names():
        raise UsageError(f"there is a kernel {name} already", hint="list them: kerngen kernel ls")
