"""Sphinx: pages in CommonMark (MyST), the library's docstrings (autodoc); a page that is read fetches nothing else."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from pathlib import Path

from docstrings import as_rst
from sphinx.application import Sphinx
from sphinx.config import Config

import kerngen

project, author, copyright = "kerngen", "the kerngen authors", "the kerngen authors"
version = release = kerngen.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
highlight_language = "text"
suppress_warnings = ["myst.header", "misc.highlighting_failure"]  # pages may leave out a level; Jinja is no CUDA
exclude_patterns = ["extra/**", "files/**"]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4  # named as GitHub names them

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
add_module_names = False
python_maximum_signature_line_length = 88

smartquotes = False  # "--model" is two hyphens
html_theme = "furo"
html_title = "kerngen"
html_copy_source = False
html_show_search_summary = False  # it would fetch pages, which a browser refuses where the site is a folder
html_show_sphinx = False
html_show_copyright = False
html_static_path = [str(Path(__file__).with_name("site.css"))]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": False}
# What is copied are the commands: no prompt, and nothing of what they printed.
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
copybutton_copy_empty_lines = False


def _docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    if what == "data":  # what is said of its type is not said of it
        lines.clear()
        return
    fields = list(getattr(obj, "__annotations__", {})) if inspect.isclass(obj) else []
    with suppress(TypeError, ValueError):  # without a signature
        fields += inspect.signature(obj).parameters  # type: ignore[arg-type]
    lines[:] = as_rst(lines, fields)


def _skipped(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Fields of tuples, whose docstrings Python made; the class's says what they are."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def _signature(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """Without what is no Python in it, nor the parameters of a protocol or an error, which say nothing."""
    if inspect.isclass(obj) and (getattr(obj, "_is_protocol", False) or issubclass(obj, BaseException)):
        return "", returns
    if signature is not None:
        signature = re.sub(r"<function (\w+)>", r"\1", signature.replace("<factory>", "..."))
    return signature, returns


def _beside(app: Sphinx, config: Config) -> None:
    """What build.py put beside the pages for their HTML."""
    if (extra := Path(app.srcdir) / "extra").is_dir():
        config.html_extra_path = [str(extra)]


def setup(app: Sphinx) -> None:
    app.connect("config-inited", _beside)
    app.connect("autodoc-skip-member", _skipped)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _docstring)
