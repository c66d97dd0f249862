"""What benches print as JSON, in the shape of an H200's runs, for tests that draw it or hold one against another."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kerngen.report.bench.runs import run_of
from kerngen.workload.steps import Step

READ, MATMUL = 4500.0, 750.0  # GB/s, TFLOP/s
ENVIRONMENT = {"gpu": "H200", "driver": "580.1", "torch": "2.11.0", "cuda": "13.0"}
LIMITS = {"environment": ENVIRONMENT, "read_gbps": READ, "matmul_tflops": MATMUL}


def case(kernel: str, name: str, us: float, megabytes: float, gflops: float, **beside: Any) -> dict[str, Any]:
    gbps, tflops = megabytes * 1e3 / us, gflops * 1e3 / us
    return {
        "kernel": kernel, "case": name, "p50_us": us, "p10_us": 0.998 * us, "p90_us": 1.002 * us, "min_us": 0.99 * us,
        "gbps": gbps, "tflops": tflops, "share_read": gbps / READ, "share_matmul": tflops / MATMUL, **beside,
    }  # fmt: skip


def kernel_run(times: float = 1.0) -> dict[str, Any]:
    rows = [
        case("w4a16_gemm", "43008x5376_g32_bf16_m1", 31.0 * times, 130.0, 0.46, baseline_marlin_us=47.0,
             baseline_machete_us="RuntimeError: group 32"),
        case("w4a16_gemm", "43008x5376_g32_bf16_m4096", 2400.0 * times, 570.0, 1890.0, baseline_marlin_us=5000.0),
        case("rmsnorm", "h5376_t1", 2.0, 0.02, 0.0),
        {"kernel": "rmsnorm", "case": "h5376_t8192", "error": "it was refused"},
    ]  # fmt: skip
    return run_of("kernel", {**LIMITS, "copy_gbps": 4100.0, "rows": rows})


def model_run(times: float = 1.0, *, floor_ms: float = 4.09) -> dict[str, Any]:
    rows = [
        {"context": context, "batch": 1, "runs": 5, "tokens": 128, "prefill_ms": prefill * times,
         "step_ms": step * times, "step_ms_min": 0.997 * step * times, "step_ms_max": 1.004 * step * times,
         "acceptance_length": 1.0, "floor_ms": floor_ms}
        for context, step, prefill in ((512, 5.231, 48.9), (8192, 5.534, 711.0), (131072, 8.36, 18900.0))
    ]  # fmt: skip
    return run_of("model", {"model": "gemma-4-31b", "device": "H200", "backend": "cuda", "dtype": "bfloat16",
                            "read_gbps": READ if floor_ms else 0.0, "rows": rows})  # fmt: skip


def profile_run(times: float = 1.0, step: Step | None = None) -> dict[str, Any]:
    """Of thirteen kernels: more than there are colours."""
    given = [("attn_decode", 60, 7400.0, 32e9, 9e11), ("w4a16_gemm", 240, 6127.0, 16.5e9, 1.9e12),
             ("add_norm", 120, 351.0, 1.7e8, 0), ("at::native::vectorized_elementwise_kernel", 1, 40.0, 0, 0),
             *((f"small_{i}", 1, 40.0 - i, 1e6, 0) for i in range(8)), ("(idle)", 3, 1.0, 0, 0)]  # fmt: skip
    rows = [
        {"kernel": kernel, "launches": launches, "moved_us": us * times, "each_us": us / launches, "bytes": int(size),
         "flops": int(flops), "floor_us": size / READ / 1e3}
        for kernel, launches, us, size, flops in given
    ]  # fmt: skip
    return run_of("profile", {"model": "gemma-4-31b", "step": asdict(step or Step.decode(32, 2048)),
                              "step_us": sum(r["moved_us"] for r in rows), "rows": rows, **LIMITS})  # fmt: skip


def step_run(times: float = 1.0, names: tuple[str, ...] = ("untuned", "a.sqlite", "b.sqlite")) -> dict[str, Any]:
    others = names[1:]
    steps = [
        {"name": step.name, "step": asdict(step), "weight": weight, "base_us": us * times, "num_calls": 50,
         "ratios": {n: {"median": ratio, "spread": 0.002, "base_us": us} for n in others},
         "num_tuned": dict.fromkeys(names, 40)}
        for step, weight, us, ratio in (
            (Step.decode(1, 512), 1.0, 5231.0, 0.97), (Step.draft(1, 512), 0.25, 270.0, 1.01),
            (Step.verify(1, 4, 512), 1.0, 5965.0, 1.001),
        )
    ]  # fmt: skip
    return run_of("step", {"model": "gemma-4-31b", "contenders": list(names), "means": dict.fromkeys(others, 0.985),
                           "steps": steps, **LIMITS})  # fmt: skip


RUNS = {"kernel": kernel_run, "model": model_run, "profile": profile_run, "step": step_run}
