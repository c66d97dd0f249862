"""The contract of a kernel folder (templates/kernel.py), held by every folder there is, without a GPU.

A new folder is picked up by its name alone. Every kernel is compiled for every arch that it serves, its cases by turns
for the arches that share all of a kernel's bodies, each distinct source once, in two processes: the slowest part of the
host tests, by far. Of an arch's share those are compiled that have a value of a field which no other does (`_telling`);
`--every-case` compiles all of it. `-k NAME` takes one kernel or one arch.
"""

from __future__ import annotations

import os
import random
import re
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from io import BytesIO
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from elftools.elf.elffile import ELFFile

from kerngen.arch import ARCHES, Arch, Target, find_arch
from kerngen.compiler.cache import CachedCompiler, CompileCache
from kerngen.compiler.compile import Cubin, compile_ptx, supported_targets
from kerngen.compiler.render import render
from kerngen.errors import ConfigRefused
from kerngen.runtime.launcher import require_layout
from kerngen.templates import Case, Kernel, find_kernel, kernel_names
from kerngen.templates.contract import ARG_KINDS
from kerngen.templates.kernel import POINTERS, Arg, describe, fields_of, spread, static_fields
from kerngen.tuning.space import space_of, space_size

KERNELS = tuple(find_kernel(name) for name in kernel_names())
EACH_KERNEL = pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
EACH_ARCH = pytest.mark.parametrize("arch", ARCHES.values(), ids=str)
SAMPLE = 1500  # configurations of a space that is too large to walk
# Inputs of more tokens of KV or bytes are made on GPUs: here they take seconds and gigabytes, and the same code.
MOST_KEYS, MOST_BYTES = 50_000, 20 << 20
# Arches whose bodies are the same but for what fits: they share the cases of a kernel that has no body for one of them
# alone, and each case is compiled for one of them. The two oldest share them whatever their bodies are: all of their
# cases are those of newer ones, too, and tests/gpu runs each on both.
SHARING = (("sm80", "sm86", "sm89", "sm90", "sm100", "sm120"),)
OLDEST = ("sm70", "sm75")
# Names that hold digits and are no figures.
NAMES = re.compile(r"\b(?:sm_?\d+|compute_\d+|bf16|fp(?:8|16|32)|int\d+|m\d+n\d+k\d+)\b")
# How a refusal says what serves instead, where no figure decides.
INSTEAD = re.compile(r"\b(?:use|serves?|instead)\b")


class Builds:
    """The distinct sources of a kernel's cases on an arch, compiled in the background."""

    def __init__(self, compiler: CachedCompiler, every_case: bool) -> None:
        self._compiler, self._every_case = compiler, every_case
        self._begun: dict[tuple[str, str], list[tuple[Case, Any, Future[Cubin]]]] = {}

    def begin(self, kernel: Kernel, arch: Arch) -> None:
        """Start compiling; nothing is done where that was done, or where this NVRTC has no such target."""
        if (kernel.name, arch.name) in self._begun or arch.number not in supported_targets():
            return
        sources = _sources(kernel, arch) if self._every_case else _telling(kernel, arch)
        self._begun[kernel.name, arch.name] = [
            (case, config, self._compiler.submit(source, arch)) for source, (case, config) in sources.items()
        ]

    def finish(self, kernel: Kernel, arch: Arch) -> Iterator[tuple[Case, Any, Cubin]]:
        """(case, configuration, cubin) of each distinct source. Raises CompileError."""
        self.begin(kernel, arch)
        for case, config, future in self._begun.pop((kernel.name, arch.name)):
            yield case, config, future.result(timeout=300)


def _sources(kernel: Kernel, arch: Arch) -> dict[str, tuple[Case, Any]]:
    """Each distinct source of the arch's share of the cases, with the first case that it serves and its config."""
    sources: dict[str, tuple[Case, Any]] = {}
    for case in _compiled_for(kernel, arch):
        if kernel.why_unsupported(case.problem, Target.of(arch)) is None:
            config = kernel.default_config(case.problem, Target.of(arch))
            sources.setdefault(render(kernel, case.problem, config, Target.of(arch)), (case, config))
    return sources


def _telling(kernel: Kernel, arch: Arch) -> dict[str, tuple[Case, Any]]:
    """Of _sources, so many that no value goes uncompiled.

    A source counts for what is compiled in: of its body, the dtypes, each value of the problem's fields and each of the
    configuration's. One of the arches that share the bodies compiles it, and each of them something of each body. Left
    out are other problems for what is compiled, a value again with other dtypes or beside other values, and of a size
    that has many values those between (`_is_telling`).
    """
    return _divided(kernel.name, tuple(_sharing(kernel, arch)))[arch.name]


@cache
def _divided(name: str, sharing: tuple[str, ...]) -> dict[str, dict[str, tuple[Case, Any]]]:
    """What each arch compiles of what they share: always the source that counts for the most that is still missing."""
    kernel = find_kernel(name)
    sources = {a: _sources(kernel, find_arch(a)) for a in sharing}
    values = {(a, source): _values(kernel, find_arch(a), *of) for a in sharing for source, of in sources[a].items()}
    missing, chosen = set().union(*values.values()), list[tuple[str, str]]()
    while missing:
        chosen.append(best := max(values, key=lambda built: len(values[built] & missing)))
        missing -= values[best]
    for built in sorted(
        chosen, key=lambda built: len(built[1]), reverse=True
    ):  # those chosen later may have its values
        if values[built] <= set().union(*(values[other] for other in chosen if other != built)):
            chosen.remove(built)
    return {a: {source: of for source, of in sources[a].items() if (a, source) in chosen} for a in sharing}


def _values(kernel: Kernel, arch: Arch, case: Case, config: Any) -> set[Hashable]:
    """What a case's source is compiled for. Its first says that the arch compiles each body: with each dtype, where no
    older one shares its bodies.
    """
    problem, body, group = static_fields(case.problem), kernel.body(config, arch).template, _sharing(kernel, arch)[0]
    kind = (arch.name if arch.name in OLDEST else "", body, *(v for k, v in problem.items() if k.endswith("dtype")))
    return {
        (arch.name, *(kind if arch.name in (group, *OLDEST) else kind[:2])),
        *((body, "problem", k, v) for k, v in problem.items() if _is_telling(kernel, k, v)),
        *((group, *kind[:2], "config", k, v) for k, v in fields_of(config).items()),
    }


def _is_telling(kernel: Kernel, field: str, value: Any) -> bool:
    """Of a size that the cases give more than four values, only the least, the largest and the oddest one are."""
    sizes = _sizes(kernel.name).get(field, ())
    return len(sizes) <= 4 or value in (min(sizes), max(sizes), min(sizes, key=lambda n: (n & -n, n)))


@cache
def _sizes(kernel: str) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for case in find_kernel(kernel).cases.CASES:
        for name, value in static_fields(case.problem).items():
            if isinstance(value, int) and not isinstance(value, bool):
                found.setdefault(name, set()).add(value)
    return found


def _sharing(kernel: Kernel, arch: Arch) -> list[str]:
    """The arches that take turns with this one, itself included, oldest first."""
    if arch.name in OLDEST:
        return list(OLDEST)
    group = next((names for names in SHARING if arch.name in names), (arch.name,))
    return [name for name in group if _bodies(kernel, find_arch(name)) == _bodies(kernel, arch)]


def _compiled_for(kernel: Kernel, arch: Arch) -> list[Case]:
    """The arch's share of the cases. Of two that differ in fp16 and bf16 alone, in two instructions then, both only
    where a body serves that serves no older arch with bf16.
    """
    problems = {c.problem for c in kernel.cases.CASES}

    def has_twin(case: Case) -> bool:
        fields = fields_of(case.problem)
        twin = {k: "bf16" if v == "fp16" else v for k, v in fields.items() if k == "dtype" or k.endswith("_dtype")}
        return "fp16" in fields.values() and replace(case.problem, **twin) in problems

    sharing, mine = _sharing(kernel, arch), []
    for turn, case in enumerate(kernel.cases.CASES):
        serving = [n for n in sharing if kernel.why_unsupported(case.problem, Target.of(find_arch(n))) is None]
        if serving and serving[turn % len(serving)] == arch.name:
            mine.append(case)
    known = {body for older in ARCHES.values() if older.has_bf16 and older.number < find_arch(sharing[0]).number
             for body in _bodies(kernel, older)}  # fmt: skip
    with_twins = not known.issuperset(_bodies(kernel, arch))
    return [c for c in mine if with_twins or not has_twin(c)]


def _bodies(kernel: Kernel, arch: Arch) -> list[int]:
    """Which of the kernel's bodies serve `arch`, by number."""
    return [i for i, body in enumerate(kernel.spec.BODIES) if body.serves(arch)]


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Builds]:
    with CachedCompiler(2, CompileCache(tmp_path_factory.mktemp("compiled"))) as compiler:
        yield Builds(compiler, request.config.getoption("--every-case", default=False))


@EACH_KERNEL
@EACH_ARCH
def test_every_case_builds_within_the_limits(
    kernel: Kernel, arch: Arch, builds: Builds, request: pytest.FixtureRequest
) -> None:
    if arch.number not in supported_targets():
        pytest.skip(f"this NVRTC cannot target {arch}: pip install 'kerngen[cuda12]'")
    builds.begin(kernel, arch)
    _begin_the_next(request, builds)
    count, complaints = 0, []
    for case, config, cubin in builds.finish(kernel, arch):
        count += 1
        complaints += [f"{case} {describe(config)}: {c}" for c in _complaints(kernel, case, config, arch, cubin)]
    assert not complaints, f"{count} sources of {kernel.name} for {arch}:\n" + "\n".join(complaints)


@EACH_KERNEL
def test_every_case_is_compiled_for_an_arch_that_takes_its_dtype(kernel: Kernel) -> None:
    """Turns must leave none out: each case for one of those without bf16, and for one of those with it."""
    newer, older = (tuple(a for a in ARCHES.values() if a.has_bf16 is has) for has in (True, False))
    for arches in (older, newer):

        def served(cases: Iterable[Case], arch: Arch) -> set[str]:
            return {c.name for c in cases if kernel.why_unsupported(c.problem, Target.of(arch)) is None}

        wanted = {name for arch in arches for name in served(kernel.cases.CASES, arch)}
        compiled = {name for arch in arches for name in served(_compiled_for(kernel, arch), arch)}
        assert compiled == wanted, f"compiled for none of {', '.join(map(str, arches))}"


@EACH_KERNEL
def test_what_is_compiled_leaves_no_value_out(kernel: Kernel) -> None:
    """Of what the cases of all arches ask for; and every arch that is served compiles something."""
    asked: dict[str, set[Any]] = {"all": set(), "some": set()}
    for arch in ARCHES.values():
        every, telling = _sources(kernel, arch), _telling(kernel, arch)
        assert telling.keys() <= every.keys()
        assert bool(telling) == bool(every)
        for name, chosen in (("all", every), ("some", telling)):
            for case, config in chosen.values():
                fields = {**static_fields(case.problem), "body": kernel.body(config, arch).template}
                group = _sharing(kernel, arch)[0]
                asked[name] |= {(k, v) for k, v in fields.items() if _is_telling(kernel, k, v)} | {
                    (group, *v) for v in fields_of(config).items()
                }
                asked[name] |= {(str(arch), fields["body"])}
    assert asked["some"] == asked["all"]


def _begin_the_next(request: pytest.FixtureRequest, builds: Builds) -> None:
    """Begin what the next test waits for, so that both processes stay busy."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    after = request.session.items[request.session.items.index(request.node) + 1 :][:1]
    for item in after:
        if isinstance(item, pytest.Function) and item.originalname == request.node.originalname:
            builds.begin(item.callspec.params["kernel"], item.callspec.params["arch"])


def _launch_bounds(image: bytes) -> dict[str, int]:
    """Entry -> the most threads a block, from its __launch_bounds__ (EIATTR_MAX_THREADS of its .nv.info section)."""
    found, prefix = {}, ".nv.info."
    for section in ELFFile(BytesIO(image)).iter_sections():
        data, at = section.data() if section.name.startswith(prefix) else b"", 0
        while at + 4 <= len(data):  # format and code, then the size of what follows where the format is 4, else a value
            form, code, size = data[at], data[at + 1], int.from_bytes(data[at + 2 : at + 4], "little")
            at += 4
            if form == 4 and code == 5:
                found[section.name.removeprefix(prefix)] = prod(struct.unpack_from("<3I", data, at))
            at += size if form == 4 else 0
    return found


def _complaints(kernel: Kernel, case: Case, config: Any, arch: Arch, cubin: Cubin) -> Iterator[str]:
    """Where cubin and spec disagree, and what no launch could hold."""
    if set(cubin.entries) != set(args := kernel.body(config, arch).args):
        yield f"entries {sorted(cubin.entries)}, the body's args {sorted(args)}"
        return
    launches = kernel.launches(case.problem, config, Target.of(arch))
    bounds = _launch_bounds(cubin.image)
    smem = max(cubin.entries[x.entry].static_smem_bytes + x.smem_bytes for x in launches)
    if smem != (said := kernel.smem_bytes(case.problem, config, Target.of(arch))):
        yield f"{smem:,} B of shared memory (static + dynamic); spec.smem_bytes says {said:,}"
    if smem > arch.max_smem_bytes:
        yield f"{smem:,} B of shared memory; {arch} allows {arch.max_smem_bytes:,}"
    for x in launches:
        r, threads = cubin.entries[x.entry], prod(x.block)
        if max(spilled := (r.spill_store_bytes, r.spill_load_bytes)) > (most := kernel.max_spill_bytes):
            yield f"{x.entry} spills {spilled[0]} + {spilled[1]} B a thread; spec.MAX_SPILL_BYTES is {most}"
        if r.stack_bytes and not most:
            yield f"{x.entry} has a stack of {r.stack_bytes} B"
        if not 1 <= threads <= 1024:
            yield f"{x.entry}: {threads} threads a block"
        # Registers are dealt to warps by four, so a bound rounded up to them is what the block takes; a spec says where
        # it is more, since another launch's block needs registers beside this one's.
        wanted = getattr(kernel.spec, "bound_threads", lambda *_: {})(case.problem, config, arch)
        most_wanted = wanted.get(x.entry, -(-threads // 128) * 128)
        if not threads <= (most := bounds.get(x.entry, threads)) <= most_wanted:
            yield f"{x.entry} is launched with {threads} threads a block; its __launch_bounds__ say {most}"
        if r.registers * threads > arch.regs_per_sm:
            yield f"{x.entry}: {r.registers} registers x {threads} threads; an SM has {arch.regs_per_sm:,}"
        if not (1 <= x.grid[0] < 2**31 and all(1 <= n <= 65535 for n in x.grid[1:])):
            yield f"{x.entry}: grid {x.grid}"
        if (x.pdl and not arch.has_pdl) or (prod(x.cluster) > 1 and not arch.has_clusters):
            yield f"{x.entry}: pdl={x.pdl}, cluster={x.cluster}, which {arch} lacks"


@EACH_KERNEL
@EACH_ARCH
def test_unsupported_cases_say_what_serves(kernel: Kernel, arch: Arch) -> None:
    reasons = Counter(kernel.why_unsupported(c.problem, Target.of(arch)) for c in kernel.cases.CASES)
    reasons.pop(None, None)
    named = {f.name for made in (kernel.problem_type, kernel.config_type) for f in fields(made)}
    for why in reasons:
        assert why is not None
        assert _has_figure(why) or INSTEAD.search(why), why
        assert set(re.findall(r"\b([a-z]\w*)=", why)) <= named, f"it has no such field: {why}"
        assert "bf16" not in why or arch.has_bf16 or "fp16" in why.replace("bf16", ""), f"fp16 serves there: {why}"
    if reasons:  # nothing is left out without being counted
        count = len(kernel.cases.CASES)
        pytest.skip("; ".join(f"{n} of {count} cases of {kernel.name}: {why}" for why, n in reasons.items()))


@EACH_KERNEL
@EACH_ARCH
def test_refusals_say_why_and_leave_something(kernel: Kernel, arch: Arch) -> None:
    mute, drawn, valid = set(), Counter[str](), Counter[str]()  # by body
    for problem, config in _points(kernel, arch):
        why = kernel.why_invalid(problem, config, Target.of(arch))
        body = str(kernel.body(config, arch).when)
        drawn[body] += 1
        valid[body] += why is None
        if why is not None and not _has_figure(why) and not INSTEAD.search(why):
            mute.add(f"{describe(problem)} {describe(config)}: {why}")
    assert not mute, "no figure, and nothing that serves instead:\n" + "\n".join(sorted(mute)[:20])
    rare = {b for b in drawn if not valid[b]}
    for problem, config in _points(kernel, arch, 16 * SAMPLE) if rare else ():  # a body may be valid one time in 500
        body = str(kernel.body(config, arch).when)
        if body in rare and kernel.why_invalid(problem, config, Target.of(arch)) is None:
            rare.discard(body)
        if not rare:
            break
    assert not rare, f"of {drawn} configurations only {valid} are valid on {arch}"


@EACH_KERNEL
def test_a_number_below_the_space_is_refused(kernel: Kernel) -> None:
    """Specs divide by fields that their spaces have no zero of; a user may write one."""
    for arch in ("sm70", "sm90"):
        target = Target.of(find_arch(arch))
        served = [c.problem for c in kernel.cases.CASES if kernel.why_unsupported(c.problem, target) is None]
        for problem in served[:6]:
            default = kernel.default_config(problem, target)
            space = space_of(kernel, problem, target)
            for name in fields_of(default):
                known = {value for part in space for value in part.get(name, ())}
                for wrong in {0, -1} - known if any(type(value) is int for value in known) else ():
                    with pytest.raises(ConfigRefused):
                        kernel.require_valid(problem, replace(default, **{name: wrong}), target)


def _args(kernel: Kernel) -> list[Arg]:
    """The arguments of every entry of every body."""
    return [a for body in kernel.spec.BODIES for args in body.args.values() for a in args]


def _has_figure(text: str) -> bool:
    return re.search(r"\d", NAMES.sub("", text)) is not None


def _points(kernel: Kernel, arch: Arch, sample: int = SAMPLE) -> Iterator[tuple[Any, Any]]:
    """(problem, configuration): all of them, or `sample` from a fixed seed."""
    cases = [*kernel.cases.CASES, *kernel.bench.BENCH_CASES]
    problems = list({c.problem: None for c in cases if kernel.why_unsupported(c.problem, Target.of(arch)) is None})
    draw = random.Random(0)
    spaces = [(p, part) for p in problems for part in space_of(kernel, p, Target.of(arch))]
    if sum(space_size((part,)) for _, part in spaces) <= sample:
        for problem, part in spaces:
            for values in product(*part.values()):
                yield problem, kernel.config_type(**dict(zip(part, values, strict=True)))
        return
    for _ in range(sample):
        problem, part = draw.choice(spaces)
        yield problem, kernel.config_type(**{name: draw.choice(values) for name, values in part.items()})


@EACH_KERNEL
def test_default_is_valid_everywhere(kernel: Kernel) -> None:
    for arch, case in product(ARCHES.values(), (*kernel.cases.CASES, *kernel.bench.BENCH_CASES)):
        if kernel.why_unsupported(case.problem, Target.of(arch)) is None:
            config = kernel.default_config(case.problem, Target.of(arch))
            why = kernel.why_invalid(case.problem, config, Target.of(arch))
            assert why is None, f"{case} on {arch}: the default {describe(config)} is refused: {why}"
            assert kernel.workspace_bytes(case.problem, config, Target.of(arch)) >= 0
            if kernel.workspace_bytes(case.problem, config, Target.of(arch)):
                assert any(a.name == "workspace" for a in _args(kernel))


@EACH_KERNEL
def test_names_are_consistent(kernel: Kernel) -> None:
    names = [c.name for c in kernel.cases.CASES]
    assert len(set(names)) == len(names), f"twice: {[n for n, count in Counter(names).items() if count > 1]}"
    pointers = {a.name for a in _args(kernel) if a.kind in POINTERS}
    assert set(kernel.outputs) <= pointers
    assert {a.kind for a in _args(kernel)} <= set(ARG_KINDS)
    problem, config = kernel.cases.CASES[0].problem, kernel.config_type()
    assert set(problem.RUNTIME) <= set(fields_of(problem))
    assert problem.DYNAMIC in ("", *problem.RUNTIME)
    for target in map(Target.of, ARCHES.values()):
        for part in () if kernel.why_unsupported(problem, target) else space_of(kernel, problem, target):
            assert set(part) <= set(fields_of(config)), "a space varies what Config does not have"
            for name, values in part.items():
                assert list(values) == sorted(set(values)), f"the candidates of {name} are not ascending: {values}"
    assert kernel.cases.case_for(problem).problem == problem
    for case in kernel.bench.BENCH_CASES:
        assert kernel.cost(case.problem).bytes > 0


@EACH_KERNEL
def test_pointers_ask_for_no_more_alignment_than_slices_have(kernel: Kernel) -> None:
    """A prompt's chunk is a slice of its ids: what is read one by one may start at any element."""
    inputs = kernel.cases.inputs(kernel.cases.CASES[0], torch.device("cpu"))
    for a in _args(kernel):
        value = inputs.get(a.name)
        if isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32) and value.dim() == 1:
            assert a.align <= value.element_size(), f"{a.name} must start at a multiple of {a.align} bytes"


def _few_cases(kernel: Kernel) -> Iterator[Case]:
    """Of those that are not large so many that each value of each field and option occurs."""
    left: list[tuple[Case, set[Hashable]]] = []
    for case in kernel.cases.CASES:
        if getattr(case.problem, "kv_len", 0) <= MOST_KEYS and kernel.cost(case.problem).bytes <= MOST_BYTES:
            options = ((k, str(v)) for k, v in case.options.items())
            left.append((case, {*fields_of(case.problem).items(), *options, kernel.outputs_of(case.problem)}))
    missing: set[Hashable] = set().union(*(values for _, values in left))
    while missing:
        case, values = max(left, key=lambda one: len(one[1] & missing))
        missing -= values
        yield case


@EACH_KERNEL
def test_inputs_name_every_argument_and_poison_every_output(kernel: Kernel) -> None:
    """A kernel that writes nothing, or not all, must not pass: no output holds its right values beforehand."""
    args = {a.name: a for a in _args(kernel) if a.kind != "map"}
    kinds = {name: a.kind for name, a in args.items()}
    names = kinds.keys() - {"workspace"}
    written = set()
    for case in _few_cases(kernel):
        inputs = kernel.cases.inputs(case, torch.device("cpu"))
        assert set(inputs) == names, case.name
        for name, kind in kinds.items():
            if name != "workspace":
                assert isinstance(inputs[name], tuple) == (kind == "ptrs"), f"{case}: {name} is declared {kind}"
        for name, shown, value in spread(inputs):
            is_tensor, kind = value is None or isinstance(value, torch.Tensor), kinds[name]
            assert is_tensor == (kind in POINTERS), f"{case}: {shown} is {type(value)}, declared {kind}"
            if isinstance(value, torch.Tensor):
                require_layout(kernel.name, args[name], shown, value, case.problem)
        expected = kernel.reference.expected(case.problem, inputs)
        assert set(expected) == {n for n in kernel.outputs_of(case.problem) if inputs[n] is not None}, case.name
        written |= set(expected)
        tensors = {shown: value for _, shown, value in spread(inputs)}
        for output, shown, right in spread(expected):
            assert right.shape == tensors[shown].shape, f"{case}: {shown}"
            right, given = (kernel.values_of(case.problem, output, x) for x in (right, tensors[shown]))
            exact = torch.float32 if given.is_floating_point() else torch.float64
            assert right.dtype in (torch.float32, exact), f"{case}: {shown} is {right.dtype}"
            held = given.to(right.dtype)
            same = (held == right) | (held.isnan() & right.isnan())
            in_place = any(value is tensors[shown] for name, _, value in spread(inputs) if name != output)
            assert right.numel() == 0 or in_place or not bool(same.all()), f"{case}: {shown} is right before the launch"
        tolerance = kernel.reference.tolerance(case.problem)
        assert tolerance.why
        assert 0 <= tolerance.rtol < 1
    assert written == set(kernel.outputs)


@EACH_KERNEL
@EACH_ARCH
def test_runtime_fields_are_not_compiled_in(kernel: Kernel, arch: Arch) -> None:
    """One cubin serves all values of the RUNTIME fields: for a configuration that is valid for both a template sees the
    same, and so of the first case gives the same source.
    """
    compared = 0
    distinct = {str(static_fields(c.problem)): c.problem for c in kernel.cases.CASES}
    served = [p for p in distinct.values() if kernel.why_unsupported(p, Target.of(arch)) is None]
    for problem in served:
        config = kernel.default_config(problem, Target.of(arch))
        for name, factor in product(problem.RUNTIME, (0.5, 2, 7)):
            other, where = replace(problem, **{name: int(getattr(problem, name) * factor) + 1}), f"{problem}: {name}"
            if kernel.why_invalid(other, config, Target.of(arch)) is None:
                seen, others = ((static_fields(p), kernel.constants(p, config, arch)) for p in (problem, other))
                assert others == seen, where
                if not compared:
                    texts = {render(kernel, p, config, Target.of(arch)) for p in (problem, other)}
                    assert len(texts) == 1, where
                compared += 1
    assert compared or not kernel.problem_type.RUNTIME or not served


@EACH_KERNEL
@EACH_ARCH
def test_what_a_configuration_chooses_is_compiled_in(kernel: Kernel, arch: Arch) -> None:
    """A yes or no, in a body's space or what chooses the body, gives another source than the opposite does."""
    target, rng = Target.of(arch), random.Random(9)
    rendered = cache(lambda problem, config: render(kernel, problem, config, target))  # small spaces are drawn often
    served = [c.problem for c in kernel.cases.CASES if kernel.why_unsupported(c.problem, target) is None]
    for body, problem in product(kernel.bodies(arch) if served else (), rng.sample(served, min(len(served), 6))):
        choices = body.choices(problem, target)
        for _ in range(40):
            config = kernel.config_type(**{name: rng.choice(values) for name, values in choices.items()})
            if kernel.why_invalid(problem, config, target) is not None:
                continue
            source = rendered(problem, config)
            for name in (n for n, values in choices.items() if isinstance(values[0], bool)):
                other = replace(config, **{name: not getattr(config, name)})
                if kernel.why_invalid(problem, other, target) is None:
                    with suppress(ConfigRefused):  # no body has it so
                        assert rendered(problem, other) != source, f"{name} of {describe(config)}"


@EACH_KERNEL
def test_entries_launched_with_pdl_wait(kernel: Kernel) -> None:
    """Without griddepcontrol.wait an entry would read what the kernel before it still writes."""
    arch = find_arch("sm90")
    for case in (kernel.cases.CASES[0], kernel.cases.CASES[-1]):
        config = kernel.default_config(case.problem, Target.of(arch))
        ptx = compile_ptx(render(kernel, case.problem, config, Target.of(arch)), arch).image.decode().rstrip("\0")
        bodies = dict(re.findall(r"\.entry (\w+)(.*?)(?=\.entry |\Z)", ptx, flags=re.DOTALL))
        assert set(bodies) == set(kernel.body(config, arch).args)
        for launch in kernel.launches(case.problem, config, Target.of(arch)):
            if launch.pdl:
                assert "griddepcontrol.wait" in bodies[launch.entry], f"{case}: {launch.entry} never waits"


def test_specs_load_neither_torch_nor_cupy() -> None:
    imports = "; ".join(f"import kerngen.templates.{name}.spec" for name in kernel_names())
    code = f"import sys; {imports}; print([m for m in ('torch', 'cupy', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
