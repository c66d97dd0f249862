"""What the documentation site consists of: its pages in their order, where each comes from, where its links lead.

A page is a Markdown file of the repository, or is generated: what was tried and measured, from its data; the reference
of the commands (commands.py); that of the library, from its docstrings. No part of it is written twice, and no link of
the repository has to know of the site.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from performance import TABLES

ROOT = Path(__file__).resolve().parents[2]
HOME = "index.md"

# Page -> the file that it is a copy of.
COPIED = {HOME: "README.md", "examples.md": "examples/README.md", "cluster.md": "examples/cluster/README.md",
          "in-vllm.md": "examples/vllm/README.md",
          "shipped.md": "tuning_db/prebuilt/README.md", "contributing.md": "CONTRIBUTING.md",
          "changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md"}  # fmt: skip
COPIED |= {path.name: f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))}
# Page -> the data that it is made of, by docs/site/records.py and docs/site/performance.py.
MADE = {
    f"{path.parent.name}/{path.stem}.md": path.relative_to(ROOT).as_posix()
    for path in [*sorted((ROOT / "data/experiments").glob("*.toml")),
                 *(ROOT / f"data/performance/{name}.toml" for name in TABLES)]
}  # fmt: skip

COMMANDS = "reference/commands.md"
LIBRARY = "reference/library.md"
# What the sidebar shows, in this order: page -> its name there, where that is not its title.
NAVIGATION: Mapping[str, Mapping[str, str]] = {
    "Start": {
        HOME: "kerngen",
        "quick-start.md": "",
        "models.md": "",
        "examples.md": "",
    },
    "Measured": {
        "performance.md": "",
        **{page: "" for page in MADE if page.startswith("performance/")},
        "experiments.md": "",
        **{page: "" for page in MADE if page.startswith("experiments/")},
    },
    "Run": {"runtime.md": "", "gguf.md": "", "media.md": "", "library.md": "As a library"},
    "Serve": {"serving.md": "An OpenAI-compatible server", "vllm.md": "", "vllm-parts.md": "", "in-vllm.md": ""},
    "Tune": {"tuning.md": "", "prediction.md": "", "tuning-database.md": "", "cluster.md": ""},
    "Ship": {"shipping.md": "", "shipped.md": ""},
    "Extend": {"architecture.md": "Architecture", "kernels.md": "", "add-a-kernel.md": "", "contributing.md": ""},
    "Reference": {COMMANDS: "", LIBRARY: "", "changelog.md": "", "security.md": ""},
}


@dataclass(frozen=True, slots=True)
class Module:
    """A page of the library's reference. names: what of it is public; None for what its __all__ says."""

    name: str
    says: str
    names: tuple[str, ...] | None = None

    @property
    def page(self) -> str:
        return f"reference/{self.name}.rst"

    def public(self) -> tuple[str, ...]:
        """Its names, without `__version__` and modules, which have pages of their own."""
        if self.names is not None:
            return self.names
        path = ROOT.joinpath(*self.name.split("."))
        tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
        listed = next(ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign)
                      and n.value is not None and "__all__" in ast.unparse(n).split("=")[0])  # fmt: skip
        pages = {m.name for m in MODULES}
        return tuple(n for n in listed if not n.startswith("__") and f"{self.name}.{n}" not in pages)


# What docs/library.md calls the library, what docs/add-a-kernel.md builds on, and what the examples import beside.
MODULES = (
    Module("kerngen", "One kernel at a time, text, and every error. A name is imported when it is first used."),
    Module("kerngen.ops", "Kernels on torch tensors; each is ``torch.ops.kerngen.NAME`` too."),
    Module(
        "kerngen.arch",
        "Where: architectures, boards, and both as a target.",
        ("Arch", "Device", "Target", "find_arch", "find_device"),
    ),
    Module("kerngen.runtime.sampling", "What may be asked of a token.", ("Sampling",)),
    Module("kerngen.runtime.weights.safetensors", "Tensors of a checkpoint's file, mapped.", ("SafetensorsFile",)),
    Module("kerngen.runtime.weights.mapped", "What any such file gives.", ("MappedFile",)),
    Module("kerngen.runtime.engine", "Many requests at once, token by token."),
    Module("kerngen.tuning_db", "What was measured and predicted, and what is chosen by it."),
    Module("kerngen.compiler.render", "A kernel's source for a problem, a configuration and a target.", ("render",)),
    Module(
        "kerngen.compiler.compile",
        "Machine code of a source, on any machine.",
        ("Cubin", "compile_cubin", "supported_targets"),
    ),
    Module("kerngen.templates", "The kernels at hand.", ("find_kernel", "kernel_names")),
    Module(
        "kerngen.templates.kernel",
        "The contract of a kernel's folder.",
        ("Spec", "Problem", "Body", "Arg", "TensorMap", "Launch", "Cost", "Traffic", "Case", "Tolerance", "Kernel"),
    ),
    Module("kerngen.templates.call", "A kernel call as a value, and the ops that make it.", ("Call", "Op", "op")),
)

_FENCED = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_ATTRIBUTE = re.compile(r"""(\b(?:src|srcset|href)=")([^"]+)(")""")  # of HTML, which Sphinx takes as it is
_ELSEWHERE = re.compile(r"\w+:|#")


def links(text: str) -> Iterator[str]:
    """What a page's links lead to, as it has them; none of code, none of the web."""
    prose = _FENCED.sub("", text)
    found = (m[2] for pattern in (_LINK, _ATTRIBUTE) for m in pattern.finditer(prose))
    yield from (link for link in found if not _ELSEWHERE.match(link))


def moved(text: str, page: str) -> tuple[str, dict[str, str]]:
    """The text of `page` with its links as the site has them, and the files that it takes along: theirs -> ours.

    A link to a file that is a page, or that one is made of, leads to that page; to any other file of the repository, to
    a copy of it. A link that leads nowhere stays as it is: Sphinx says so, and the build fails.
    """
    sources = COPIED | MADE
    folder = PurePosixPath(sources[page]).parent
    pages = {source: name for name, source in sources.items()}
    taken: dict[str, str] = {}

    def place(m: re.Match[str]) -> str:
        target, hash_, anchor = m[2].partition("#")
        if _ELSEWHERE.match(m[2]):
            return m[0]
        path = normpath(str(folder / target))
        name = pages.get(path) or pages.get(f"{path}/README.md")
        if name is None and (ROOT / path).is_file():
            in_html = m.re is _ATTRIBUTE  # which Sphinx does not read: it is copied beside the pages as it lies
            name = f"beside/{path}" if in_html else f"files/{path}"
            taken[f"extra/{name}" if in_html else name] = path
        if name is None:
            return m[0]
        return f"{m[1]}{relpath(name, PurePosixPath(page).parent)}{hash_}{anchor}{m[3]}"

    pieces, at = [], 0
    for fence in [*_FENCED.finditer(text), None]:
        prose = text[at : fence.start() if fence else len(text)]
        pieces += [_ATTRIBUTE.sub(place, _LINK.sub(place, prose)), fence[0] if fence else ""]
        at = fence.end() if fence else len(text)
    return "".join(pieces), taken


def toctrees() -> str:
    """The sidebar, for the end of the first page."""
    trees = []
    for caption, pages in NAVIGATION.items():
        entries = [f"{name} <{plain(page)}>" if name else plain(page) for page, name in pages.items() if page != HOME]
        trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```", ""]))
    return "\n" + "\n".join(trees)


def plain(page: str) -> str:
    return page.removesuffix(".md").removesuffix(".rst")
