"""What the Tab key offers for an option's value, or an argument: by the names that these have in all commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import click
from click.shell_completion import CompletionItem

_FILE = "file"  # shells complete the names of files by themselves


def teach(command: click.Command, path: str = "") -> None:
    """Have `command`, and all below it, complete values. path: the commands that it lies in, and its name."""
    path = f"{path} {command.name}"
    for parameter in command.params:
        key = parameter.name or ""
        names = _ARGUMENTS.get((path, key)) or _PARAMETERS.get(key)
        if names is not None and not isinstance(parameter.type, (click.Path, click.Choice)) and not _is_flag(parameter):
            parameter.shell_complete = partial(_complete, names)  # type: ignore[method-assign]
    if isinstance(command, click.Group):
        for sub in command.commands.values():
            teach(sub, path)


def _is_flag(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and parameter.is_flag


def _complete(names: Callable[[], Iterable[str]], ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Of a list, its last element."""
    before, comma, begun = incomplete.rpartition(",")
    values = list(names())
    found = [v for v in values if v != _FILE and v.lower().startswith(begun.lower())]
    if _FILE in values and not comma and (not found or "/" in begun):
        return [CompletionItem(incomplete, type=_FILE)]
    return [CompletionItem(before + comma + v) for v in found]


def _arches() -> Iterable[str]:
    from kerngen.arch import ARCHES

    return ARCHES


def _boards() -> Iterable[str]:
    from kerngen.boards import DEVICES

    return [*DEVICES, _FILE]


def _arches_and_boards() -> Iterable[str]:
    return [*_arches(), *_boards()]


def _kernels() -> Iterable[str]:
    from kerngen.templates import kernel_names

    return kernel_names()


def _models() -> Iterable[str]:
    import kerngen

    released = Path(kerngen.__file__).parent / "runtime" / "released"
    return [*sorted(p.name for p in released.iterdir() if p.is_dir()), _FILE]


def _processors() -> Iterable[str]:
    return ["cpu", "cuda", "cuda:0", "cuda:1"]


def _files() -> Iterable[str]:
    return [_FILE]


_PARAMETERS = {
    "arch_name": _arches, "arch_names": _arches, "kernels": _kernels, "model": _models, "models": _models,
    "device": _processors, "device_name": _boards, "device_names": _boards, "devices": _boards,
    "draft": _files, "db_url": _files, "bundle": _files, "prompts": _files, "file": _files, "files": _files,
    "before": _files, "after": _files, "into": _files,
}  # fmt: skip
_ARGUMENTS = {
    (" kernel show", "name"): _kernels, (" kernel check", "names"): _kernels, (" bench kernel", "names"): _kernels,
    (" bench model", "name"): _models, (" bench profile", "name"): _models, (" bench step", "name"): _models,
    (" db explain", "subject"): _kernels, (" db show", "subject"): _kernels, (" db revoke", "subject"): _kernels,
    (" arch show", "name"): _arches_and_boards,
}  # fmt: skip
