"""Reads results files of the two grammars of before, `kerngen-text 1` and `kerngen-outlook 1`, as those of today.

`kerngen-text 1` had whole configurations in each trial, and a problem for each cell:

    problem dtype=fp16 hidden=5376 | batch=8
     num_tokens=64
      = 16.602 measured r1+53.77 final n=15 16.52..16.71 min 16.49 err 0.0039 0.01 | block_m=2 @a91f03c2b7d0
      + 17.021 predicted roofline-3 | block_m=4 @0c3fb1a2d4e5
      ! wrong_result measured r1+12.5 "[3, 4] is off by 0.5" | block_m=8 @77aa01c2b3d4

`kerngen-outlook 1` is today's grammar with another head: `predicted roofline-5 nvrtc 12.9` in place of a model.
Nothing writes these any more, so a file that is not just as it was written is taken, too.
"""

from __future__ import annotations

from typing import Any

from kerngen.tuning_db.dist import results_parser
from kerngen.tuning_db.dist.fields_text import Line, read_lines
from kerngen.tuning_db.dist.results_file import Config, ResultsFile, Trial
from kerngen.tuning_db.dist.results_parser import SOURCE, ProblemLines, Reading


def parse_any(text: str, where: str = "text") -> ResultsFile:
    """The results file that `text` is, of the grammar that its first word names. Raises DatabaseError."""
    for kind in (_Measured, _Predicted):
        if text.startswith(f"{kind.format} "):
            reading = kind()
            read_lines(text, where, reading.take)
            return reading.file(where)
    return results_parser.parse(text, where)


class _Former(Reading):
    """Says of no configuration which revision its body had: what it holds is of the very sources that it names."""

    @staticmethod
    def config(line: Line) -> Config:
        return Config(line.pairs("@"), line.word(SOURCE, "the source's digest", after="@"), revision=0)


class _Predicted(_Former):
    format, version = "kerngen-outlook", 1

    def take_body(self, line: Line) -> None:
        if self.at == 3:
            line.expect("predicted ")
            self.models.append(self.model(line))
        else:
            super().take_body(line)


class _Measured(_Former):
    """Each cell is a problem of its own."""

    format, version = "kerngen-text", 1

    def __init__(self) -> None:
        super().__init__()
        self.runtime: dict[str, Any] = {}

    def take_body(self, line: Line) -> None:
        if line.take("problem "):
            self.problems.append(ProblemLines(line.pairs("|")))
            line.expect("|")
            self.runtime = line.pairs("") if line.take(" ") else {}
        elif line.take("  ", unless=("  # ",)):
            self._trial(line)
        elif line.take(" ", unless=("  ",)):
            (point, *others) = self.points(line, self.runtime)
            if others or point.trials:
                raise ValueError("the trials of a point stand below it")
            self.problem().points.append(point)
        else:
            super().take_body(line)

    def _trial(self, line: Line) -> None:
        won, us = self.result(line)
        line.expect(" " if us is not None else "wrong_result ")
        if line.take("predicted "):
            model = self.model(line)
            if model not in self.models:
                self.models.append(model)
            who: dict[str, Any] = {"model": self.models.index(model)}
        else:
            line.expect("measured ")
            who = self.measured(line, us)
        reason = "" if us is not None else line.reason()
        line.expect(" | ")
        config, configs = self.config(line), self.problem().configs
        if config not in configs:
            configs.append(config)
        self.add(Trial(configs.index(config), us, won, **who, reason=reason))
