"""`kerngen run --prompts FILE`: JSON lines in, JSON lines out, in order, all of them in flight together."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

import click

from kerngen.errors import KerngenError, UnknownName, UsageError
from kerngen.runtime.prompt_file import Job, Outcomes
from kerngen.runtime.sampling import Sampling
from kerngen.system.progress import Reporter

if TYPE_CHECKING:
    from kerngen.runtime.completion import Completion
    from kerngen.runtime.session import Session

MAX_LINE_BYTES = 16 << 20
ENDLESS_BYTES = 256 << 20  # of a line, which is passed over: one that has more is of no text (/dev/zero)
CHECKED_LINES = 1000  # read before anything starts; a file that ends within them is refused whole if one is bad
CHECKED_BYTES = 64 << 20
SHOWN_LINES = 10  # of those that are bad
SAMPLING = ("temperature", "top_k", "top_p", "seed")
FIELDS = ("prompt", "messages", "max_new_tokens", *SAMPLING, "stop", "id")
EXAMPLE = 'one JSON object a line, for example: {"prompt": "Why is the sky blue?"}'


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a line does not say. sampling: by name, as in Sampling. system: stands before what has no system turn."""

    max_new_tokens: int
    sampling: Mapping[str, Any]
    stop: tuple[str, ...] = ()
    chat: bool = True
    system: str | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input: number from 1, id and what it asks for as they were given, or what is wrong with it."""

    number: int
    id: str | int | None
    asks: dict[str, Any] | KerngenError
    num_bytes: int

    def job(self, defaults: Defaults) -> Job | KerngenError:
        if isinstance(asks := self.asks, KerngenError):
            return asks
        prompt = asks["prompt"] if "prompt" in asks else asks["messages"]
        if defaults.system is not None:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            prompt = with_system(defaults.system, messages)
        sampling = {**defaults.sampling, **{name: asks[name] for name in SAMPLING if name in asks}}
        return Job(prompt, asks.get("max_new_tokens", defaults.max_new_tokens), Sampling(**sampling),
                   asks.get("stop", defaults.stop), defaults.chat)  # fmt: skip


def with_system(text: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with a system turn, unless they have one."""
    return (
        messages if messages[0]["role"] in ("system", "developer") else [{"role": "system", "content": text}, *messages]
    )


def read_lines(file: IO[bytes], *, chat: bool = True) -> Iterator[Line]:
    """The lines of `file` that are not blank. chat: they go through the chat template.

    Raises UsageError for a line that does not end.
    """
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            num_bytes = len(raw)
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(MAX_LINE_BYTES)
                num_bytes += len(raw)
                if num_bytes > ENDLESS_BYTES:
                    raise UsageError(f"line {number} does not end within {ENDLESS_BYTES:,} B", hint=EXAMPLE)
            yield Line(number, None, UsageError(f"it has more than {MAX_LINE_BYTES:,} B", hint=EXAMPLE), 0)
        elif raw.strip():
            yield parse_line(number, raw, chat=chat)


def parse_line(number: int, raw: bytes, *, chat: bool = True) -> Line:
    """Never raises: what is wrong is what the line has in place of what it asks for."""
    id_: str | int | None = None
    try:
        try:
            given = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as e:  # UnicodeDecodeError is a ValueError too
            raise UsageError(f"it is not JSON: {e}", hint=EXAMPLE) from e
        if not isinstance(given, dict):
            raise UsageError(f"it is {_brief(given)}, no object", hint=EXAMPLE)
        given = {name: value for name, value in given.items() if value is not None}
        _require(given, "id", (str, int), "a text or a whole number")
        id_ = given.get("id")
        _check(given, chat)
        return Line(number, id_, given, len(raw))
    except UsageError as e:
        return Line(number, id_, e, len(raw))


def _check(given: dict[str, Any], chat: bool) -> None:
    """Raises UsageError. stop becomes a tuple."""
    for name in given:
        if name not in FIELDS:
            raise UnknownName("field", name, FIELDS)
    for name in ("max_new_tokens", "top_k", "seed"):
        _require(given, name, (int,), "a whole number")
    for name in ("temperature", "top_p"):
        _require(given, name, (int, float), "a number")
    if given.get("max_new_tokens", 1) < 1:
        raise UsageError(f"max_new_tokens is {given['max_new_tokens']}; at least 1 token is made")
    Sampling(**{name: given[name] for name in SAMPLING if name in given})
    stop = given.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(s, str) and s for s in stop):
        raise UsageError(f"stop is {_brief(stop)}; it must be a text or a list of texts, none of them empty")
    if "stop" in given:
        given["stop"] = tuple(stop)
    if ("prompt" in given) == ("messages" in given):
        which = "both prompt and messages" if "prompt" in given else "neither prompt nor messages"
        raise UsageError(f"it has {which}", hint="give one of them")
    if "prompt" in given:
        if not isinstance(given["prompt"], str) or not given["prompt"]:
            raise UsageError(f"prompt is {_brief(given['prompt'])}; it must be a text that is not empty")
    elif not chat:
        raise UsageError("messages need the chat template", hint="leave --no-chat out, or give a prompt")
    elif not _are_messages(given["messages"]):
        raise UsageError(f'messages is {_brief(given["messages"])}; it must be a list of {{"role": …, "content": …}}')


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in value
    )  # fmt: skip


def _require(given: dict[str, Any], name: str, kinds: tuple[type, ...], what: str) -> None:
    if name in given and type(given[name]) not in kinds:  # True is an int to isinstance
        raise UsageError(f"{name} is {_brief(given[name])}; it must be {what}")


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


# ---- the file --------------------------------------------------------------------------------------------------------


@contextmanager
def opened(name: str) -> Iterator[IO[bytes]]:
    """The file of that name, "-" for standard input. Raises UsageError where there is none to read."""
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(name, "rb")  # noqa: SIM115  closed below
    except OSError as e:
        raise UsageError(f"--prompts {name}: {e.strerror}", hint="a file of JSON lines, or - for standard input") from e
    with file:
        yield file


def checked_lines(file: IO[bytes], *, chat: bool = True) -> tuple[Iterator[Line], int | None]:
    """The lines, and how many there are, None where only the end will tell.

    The first CHECKED_LINES are read at once. Raises UsageError if these are all and some are bad, if all of them are
    bad, or if there are none.
    """
    start = file.tell() if _is_regular(file) else 0
    first: list[Line] = []
    lines, num_bytes = read_lines(file, chat=chat), 0
    for line in lines:
        first.append(line)
        num_bytes += line.num_bytes
        if len(first) == CHECKED_LINES or num_bytes > CHECKED_BYTES:
            if all(isinstance(line.asks, KerngenError) for line in first):
                raise _refusal(first, len(first))
            return chain(first, lines), _num_lines(file, start) if _is_regular(file) else None
    if not first:
        raise UsageError("there are no prompts", hint=EXAMPLE)
    if bad := [line for line in first if isinstance(line.asks, KerngenError)]:
        raise _refusal(bad, len(first))
    return iter(first), len(first)


def _refusal(bad: list[Line], num_lines: int) -> UsageError:
    parts = [f"{len(bad)} of {num_lines} lines cannot be run; nothing was started"]
    for line in bad[:SHOWN_LINES]:
        message, _, hint = str(line.asks).partition("\n")
        parts.append(f"  line {line.number}: {message}{f' ({hint.strip()})' if hint else ''}")
    if more := len(bad) - SHOWN_LINES:
        parts += [f"  and {more} more"] if more > 0 else []
    return UsageError("\n".join(parts), hint="mend or remove them, and start again")


def _is_regular(file: IO[bytes]) -> bool:
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):  # a stream without a file
        return False


def _num_lines(file: IO[bytes], start: int) -> int:
    """Lines from `start` to the end of a file, blank ones included; the place in it stays."""
    here = file.tell()
    file.seek(start)
    count, last = 0, b"\n"
    while block := file.read(1 << 20):
        count, last = count + block.count(b"\n"), block
    file.seek(here)
    return count + (not last.endswith(b"\n"))


# ---- the run ---------------------------------------------------------------------------------------------------------


def run_lines(session: Session, lines: Iterable[Line], total: int | None, defaults: Defaults) -> int:
    """Answer `lines`, each on stdout as soon as it is its turn, and say on stderr how far it is. Returns the exit code.

    Where it is stopped, what is complete beyond the line that is awaited is printed too.
    """
    asked: dict[int, tuple[int, str | int | None]] = {}  # number and id of what was not printed yet

    def jobs() -> Iterator[Job | KerngenError]:
        for i, line in enumerate(lines):
            asked[i] = line.number, line.id
            yield line.job(defaults)

    outcomes, num_done, num_failed, num_tokens = Outcomes(session, jobs()), 0, 0, 0
    with Reporter("prompts") as bar:
        try:
            for i, outcome in outcomes:
                bar.print(json.dumps(report(*asked.pop(i), outcome)))
                num_done += 1
                if isinstance(outcome, KerngenError):
                    num_failed += 1
                else:
                    num_tokens += outcome.stats.num_tokens
                rate = num_tokens / max(bar.elapsed_s, 1e-9)
                bar.update(num_done, total, f"{outcomes.num_running} in flight, {rate:.1f} tokens/s")
        except BaseException:
            for i, outcome in outcomes.finished():
                bar.print(json.dumps(report(*asked[i], outcome)))
            raise
        finally:
            outcomes.close()
        seconds = bar.elapsed_s
    failed = f", {num_failed} of them failed" if num_failed else ""
    click.echo(f"{num_done} prompts{failed}: {num_tokens} tokens in {seconds:.1f} s "
               f"({num_tokens / max(seconds, 1e-9):.1f}/s)", err=True)  # fmt: skip
    return 1 if num_failed else 0


def report(number: int, id_: str | int | None, outcome: Completion | KerngenError) -> dict[str, Any]:
    """What stands on stdout for a line of the input."""
    about: dict[str, Any] = {"line": number} if id_ is None else {"line": number, "id": id_}
    if isinstance(outcome, KerngenError):
        hint = {} if outcome.hint is None else {"hint": outcome.hint}
        return {**about, "error": f"{type(outcome).__name__}: {outcome.message}", **hint}
    stats = outcome.stats
    return {
        **about,
        "text": outcome.text,
        "stop_reason": outcome.stop_reason,
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_tokens": stats.num_tokens,
        "acceptance_length": stats.acceptance_length,
    }
