"""`kerngen serve` with the options that vLLM's users type."""

from __future__ import annotations

import re

import pytest
from command import Kerngen

from kerngen.cli.serve import serve
from kerngen.cli.vllm_options import INSTEAD
from kerngen.runtime.serve import server
from kerngen.runtime.serve.server import Settings

OURS = {name for option in serve.params for name in option.opts}


def test_those_that_mean_the_same_are_names_of_ours(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Settings] = []
    monkeypatch.setattr(server, "run", lambda settings, **_: found.append(settings) or 0)
    cpu = "serve", "m", "--device", "cpu"
    kerngen.ok(*cpu, "--max-model-len", "128", "--max-num-seqs=3", "--served-model-name", "gpt",
               "--tensor-parallel-size", "2")  # fmt: skip
    kerngen.ok(*cpu, "--max_model_len", "128", "--max_num_seqs", "3", "--served_model_name", "gpt",
               "--tensor_parallel_size=2")  # fmt: skip
    kerngen.ok(*cpu, "--context", "128", "--max-batch", "3", "--name", "gpt", "--tensor-parallel", "2")
    said = [(s.context, s.max_batch, s.names, s.load["tensor_parallel"]) for s in found]
    assert said == [(128, 3, ("gpt",), 2)] * 3


@pytest.mark.parametrize("typed", ["-tp 2", "--swap-space=4", "--swap_space 4",
                                   "--gpu-memory-utilization 0.9", "--enforce-eager", "--model x"])  # fmt: skip
def test_others_are_refused_with_the_way_on(kerngen: Kerngen, typed: str) -> None:
    for args in (["m", *typed.split()], [*typed.split(), "m"]):
        code, out, err = kerngen("serve", *args)
        name = re.split("[ =]", typed)[0]
        assert (code, out) == (2, "")
        assert f"there is no {name}, which vLLM has: {INSTEAD[name.lstrip('-').replace('_', '-')]}" in err


def test_what_is_named_instead_is_there() -> None:
    assert not OURS & {f"--{name}" for name in INSTEAD}, "an option of ours would be refused"
    for name, instead in INSTEAD.items():
        named = set(re.findall(r"--[a-z][a-z-]+", instead)) - {"--plan"}  # of kerngen run
        assert named <= OURS, name


def test_a_value_may_look_like_one(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Settings] = []
    monkeypatch.setattr(server, "run", lambda settings, **_: found.append(settings) or 0)
    kerngen.ok("serve", "--name", "tp", "--", "model")
    assert (found[0].names, found[0].load["folder"]) == (("tp",), "model")
    code, _, err = kerngen("serve", "m", "--nothing")
    assert (code, "No such option" in err) == (2, True)
