"""Tune one kernel by prediction into a database of its own, then ask that database what to run. Needs no GPU.

python examples/lookup_a_winner.py

`kerngen tune` does this with a search; here it is by hand: compile some configurations, file what the cost model says
of each, derive the winner, look it up as the runtime would, for a problem between two tuned points and for one outside.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from kerngen.arch import Target, find_arch
from kerngen.compiler.compile import compile_cubin
from kerngen.compiler.render import render
from kerngen.cost.predict import predict
from kerngen.templates import find_kernel
from kerngen.templates.kernel import describe, fields_of, static_fields
from kerngen.templates.w4a16_gemm.spec import Problem
from kerngen.tuning_db import Measurement, Store, lookup, miss_report, problem_key

CONFIGS = (
    {"block_m": 8, "block_n": 64, "warps_k": 2, "num_stages": 2},
    {"block_m": 8, "block_n": 128, "warps_k": 1, "num_stages": 4},
    {"block_m": 8, "block_n": 128, "warps_k": 2, "num_stages": 4},
)


def main() -> None:
    """Fill a database with two tuned points of one GEMM on sm90 and look three problems up."""
    arch = find_arch("sm90")
    target = Target.of(arch)  # of its usual board, an H200
    kernel = find_kernel("w4a16_gemm")
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "tuning.db") as store:
        for num_tokens in (1, 8):
            problem = Problem(n=4096, k=4096, num_tokens=num_tokens)
            key = problem_key(kernel, problem)
            for fields in CONFIGS:
                config = kernel.config_type(**fields)
                if why := kernel.why_invalid(problem, config, target):
                    print(f"refused {describe(config)}: {why}")
                    continue
                source = render(kernel, problem, config, target)
                cubin = compile_cubin(source, arch)
                guess = predict(kernel, problem, config, target, cubin.entries)
                print(f"{num_tokens} tokens, {describe(config)}: {guess.latency_us:.2f} us, {guess.explain()}")
                build = store.add_build(cubin, kernel.name, source, fields_of(config), static_fields(problem))
                store.add_measurement(
                    Measurement(
                        key, arch.name, target.device, fields_of(config), build,
                        "ok", "predicted", model=guess.model, p50_us=guess.latency_us,
                    )
                )  # fmt: skip
            store.recompute_winners(kernel, key.static_key, target)

        for num_tokens in (1, 5, 64):
            problem = Problem(n=4096, k=4096, num_tokens=num_tokens)
            winner = lookup([store], kernel, problem, target)
            if winner is None:
                print(f"\n{num_tokens} tokens: no winner, the default configuration would run")
                print(miss_report([store], kernel, problem, target))
            else:
                print(f"\n{num_tokens} tokens: {kernel.config_type(**winner.config)}")
                print(f"  {winner.provenance} {winner.latency_us:.2f} us on {winner.device}; {winner.reason}")


if __name__ == "__main__":
    main()
