"""Bodies of warpgroups in roles compile to what fits, and their products wait for nothing; and nobody chooses a body
that no GPU has confirmed."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from kerngen.arch import ARCHES, DEVICES, Target
from kerngen.compiler.compile import compile_cubin, supported_targets
from kerngen.compiler.render import render
from kerngen.templates import find_kernel, kernel_names
from kerngen.templates.kernel import Body, Kernel
from kerngen.tuning.space import candidates, space_of


def _has_warpgroups(kernel: Kernel, body: Body) -> bool:
    included = set(re.findall(r"common/([\w/]+\.cuh)", (kernel.folder / body.template).read_text()))
    return bool(included & {"pipeline/warp_specialized.cuh", "attention/wgmma_tile_copy.cuh"})


BODIES = [(k, b) for k in map(find_kernel, kernel_names()) for b in k.spec.BODIES if _has_warpgroups(k, b)]
SAMPLE = 3  # configurations of each that are compiled
DRAWS = 1000  # of a problem, until one is valid


def _valid(kernel: Kernel, body: Body, target: Target) -> list[tuple[Any, Any]]:
    """SAMPLE problems of the kernel's cases and benchmarks, each with a configuration of `body` that may run it."""
    rng = random.Random(8)
    cases = [*kernel.bench.BENCH_CASES, *kernel.cases.CASES]
    rng.shuffle(cases)
    found: list[tuple[Any, Any]] = []
    for case in cases:
        if kernel.why_unsupported(case.problem, target) is not None:
            continue
        choices = body.choices(case.problem, target)
        for _ in range(DRAWS):
            config = kernel.config_type(**{name: rng.choice(values) for name, values in choices.items()})
            if kernel.why_invalid(case.problem, config, target) is None:
                found.append((case.problem, config))
                break
        if len(found) == SAMPLE:
            break
    return found


@pytest.mark.parametrize(("kernel", "body"), BODIES, ids=lambda v: getattr(v, "template", getattr(v, "name", "")))
def test_they_compile_to_what_fits(kernel: Kernel, body: Body) -> None:
    arches = [a for a in ARCHES.values() if body.serves(a) and a.number in supported_targets()]
    assert arches
    for arch in arches:
        target, found = Target.of(arch), _valid(kernel, body, Target.of(arch))
        assert len(found) == SAMPLE
        for problem, config in found:
            assert kernel.body(config, arch) is body
            cubin = compile_cubin(render(kernel, problem, config, target), arch)
            for launch in kernel.launches(problem, config, target):
                takes, threads = cubin.entries[launch.entry], launch.block[0]
                assert takes.spill_store_bytes <= getattr(kernel.spec, "MAX_SPILL_BYTES", 0), config
                assert takes.registers * threads <= arch.regs_per_sm, config
                assert launch.smem_bytes + takes.static_smem_bytes <= arch.max_smem_bytes, config
                assert launch.grid[0] % launch.cluster[0] == 0
                assert "wgmma" not in cubin.log or "serialized" not in cubin.log, config


def test_one_that_no_gpu_has_confirmed_is_in_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, target = find_kernel("w4a16_gemm"), Target.of(DEVICES["H200"])
    problem = kernel.bench.BENCH_CASES[-1].problem
    assert any(
        kernel.body(c, target.arch).template == "wgmma_ws.cu.jinja" for c in candidates(kernel, problem, target).valid
    )
    bodies = tuple(replace(b, proven=b.template != "wgmma_ws.cu.jinja") for b in kernel.spec.BODIES)
    monkeypatch.setattr(kernel.spec, "BODIES", bodies)
    assert all(kernel.body(c, target.arch).proven for c in candidates(kernel, problem, target).valid)
    assert len(space_of(kernel, problem, target)) == sum(b.proven for b in kernel.bodies(target.arch))
