"""The page of a bench's run. It carries the run along, so that a later one can be held against the page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kerngen.errors import UsageError
from kerngen.report.bench import kernel, model, profile, step
from kerngen.report.bench.runs import Run, as_data, gpu_of, read_run
from kerngen.report.document import document, require_page_place, write_document
from kerngen.report.figure import Section

SUBJECTS = {"kernel": kernel, "model": model, "profile": profile, "step": step}


def prepared(page: Path | None, against: Path | None, bench: str, alike: Mapping[str, Any]) -> Run | None:
    """The run that this one is held against, if any. To be asked before the bench begins, which takes minutes.

    alike: what both have to have in common. Raises UsageError, KerngenError, OSError where the page cannot be made.
    """
    if page is None:
        if against is not None:
            raise UsageError("--against is for a page", hint="name one with --report FILE")
        return None
    require_page_place(page)
    if against is None:
        return None
    run = read_run(against, bench)
    try:
        SUBJECTS[bench].sections(run, run)  # whatever it lacks is said now
        _content(run, run)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
        raise UsageError(f"{against} is not what kerngen bench {bench} wrote ({type(e).__name__}: {e})") from None
    for name, value in alike.items():
        if run[name] != value:
            raise UsageError(f"{against} is of another {name}: {_told(run[name])}, and not {_told(value)}")
    return run


def _told(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def write_page(path: Path, run: Run, last: Run | None = None) -> str:
    """Draw `run`, beside `last` where there is one; returns what was made, in words."""
    made, content = _content(run, last)
    num_bytes = write_document(path, content)
    count = sum(len(s.figures) for s in made)
    return f"{path}: {count} figure{'s' * (count != 1)}, {num_bytes / 1e3:.0f} kB"


def _content(run: Run, last: Run | None) -> tuple[list[Section], str]:
    subject = SUBJECTS[run["bench"]]
    made: list[Section] = subject.sections(run, last)
    environment = {k: v for k, v in run.get("environment", {}).items() if k in ("driver", "torch", "cuda")}
    about = ", ".join(f"{name} {value}" for name, value in environment.items())
    lead = f"kerngen bench {run['bench']} on {gpu_of(run)}{f' ({about})' if about else ''}."
    source = "This page carries its run along: kerngen bench ... --report NEW --against THIS holds another against it."
    return made, document(made, title=subject.title(run), lead=lead, source=source, data=as_data(run))
