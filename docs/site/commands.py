"""The reference of the commands, from what `kerngen COMMAND --help` says: one page for each verb and group."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from kerngen.cli import COMMANDS, cli

PAGE = "reference/commands/{}.md"
_EXAMPLE = re.compile(r"^\s*Example:\s+(kerngen .*)$", re.MULTILINE)
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|])")


def pages() -> dict[str, str]:
    """Page -> its Markdown, of every command that `kerngen --help` lists."""
    context = click.Context(cli, info_name="kerngen")
    made = {}
    for name in COMMANDS:
        if (command := cli.get_command(context, name)) is None:
            raise LookupError(f"kerngen has no command {name}, which its help lists")
        made[PAGE.format(name)] = "\n".join(_section(command, f"kerngen {name}", context, 1))
    return made


def index() -> str:
    """The page that lists them."""
    rows = [f"| [`kerngen {name}`](commands/{name}.md) | {_said(says)} |" for name, (_, says) in COMMANDS.items()]
    options = list(_options(cli, click.Context(cli, info_name="kerngen")))
    tree = ["```{toctree}", ":hidden:", "", *(f"kerngen {name} <commands/{name}>" for name in COMMANDS), "```", ""]
    says = "What `kerngen COMMAND --help` says."
    return "\n".join(["# Commands", "", says, "", "| command | |", "|---|---|", *rows, "",
                      "Options before the command:", "", *options, *tree])  # fmt: skip


def _section(command: click.Command, path: str, parent: click.Context, level: int) -> Iterator[str]:
    context = click.Context(command, info_name=path.rsplit(" ", 1)[1], parent=parent)
    help_text = re.sub(r"^\s*\b$", "", (command.help or "").replace("\b", ""), flags=re.MULTILINE)
    yield from (f"{'#' * level} {path}", "")
    for paragraph in re.split(r"\n\s*\n", _EXAMPLE.sub("", help_text).strip()):
        yield from (_said(" ".join(paragraph.split())), "")
    if examples := _EXAMPLE.findall(help_text):
        yield from ("```console", *(f"$ {example}" for example in examples), "```", "")
    if not isinstance(command, click.Group):
        yield from (f"Usage: `{' '.join([path, *command.collect_usage_pieces(context)])}`", "")
    yield from _options(command, context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if (inner := command.get_command(context, name)) is not None:
                yield from _section(inner, f"{path} {name}", context, level + 1)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    """A definition list of what --help lists, but for --help itself."""
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and record[1] and "--help" not in parameter.opts:
            yield from (f"`{record[0]}`", f": {_said(record[1])}", "")


def _said(text: str) -> str:
    """Plain text as Markdown; what stands between backticks stays code."""
    parts = re.split(r"(`[^`\n]+`)", text)
    return "".join(part if i % 2 else _MARKDOWN.sub(r"\\\1", part) for i, part in enumerate(parts))
