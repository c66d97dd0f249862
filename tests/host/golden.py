"""The golden file of defaults: what each kernel's default_config answers for a sample of problems, on six boards.

    make golden     # rewrites tests/host/defaults.txt, after a default was changed on purpose: review its diff

Below a board's name a line is `KERNEL PROBLEM -> CONFIG`, both by the fields that differ from their defaults. Sampled
are the steps below of the released models, of which a board has one line for each configuration of a kernel, and
PROBLEMS, which lie at the edges of a choice and have a line each. test_defaults.py compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kerngen.arch import Target, find_device
from kerngen.templates import find_kernel
from kerngen.templates.kernel import defaults_of, fields_of, parse_fields
from kerngen.workload.workload import MODELS, find_workload

PATH = Path(__file__).parent / "defaults.txt"
HEADER = "# What default_config answers for a sample of problems. `make golden` rewrites it (tests/host/golden.py)."
# (phase, sequences, keys of each, tokens of each, tokens of a prefill's chunk)
FEW = (
    ("decode", 1, 8192, 1, 0),
    ("decode", 8, 2048, 1, 0),
    ("verify", 1, 8192, 4, 0),
    ("draft", 1, 8192, 1, 0),
    ("prefill", 1, 8192, 0, 2048),
)  # fmt: skip
MANY = (
    *FEW,
    ("decode", 1, 512, 1, 0),
    ("decode", 32, 8192, 1, 0),
    ("verify", 1, 512, 5, 0),
    ("verify", 8, 8192, 4, 0),
    ("prefill", 1, 512, 0, 512),
    ("prefill", 1, 8192, 0, 64),
)  # fmt: skip
BOARDS = {"H200": MANY, "H100": FEW, "V100": FEW, "A100": FEW, "RTX4090": FEW, "RTX5090": FEW}

Answer = tuple[str, Any, Any]  # kernel, problem, configuration


def _attention() -> Iterator[str]:
    """One sequence and several, few rows and many, q ready and made in the launch: where another body is chosen."""
    heads = "head_dim=512,num_q_heads={},num_kv_heads={},q_len={},batch={},kv_len={}"
    for at in (
        (16, 2, 5, 7, 1024), (32, 4, 5, 6, 512), (32, 4, 8, 4, 16384), (32, 4, 8, 16, 4096), (32, 4, 5, 33, 4096),
        (32, 4, 1, 1, 8192), (32, 4, 4, 1, 8192), (32, 4, 4, 1, 2048), (32, 4, 1, 1, 512), (16, 2, 5, 1, 8192),
        (16, 1, 4, 1, 8192), (8, 1, 4, 1, 262144), (16, 2, 5, 7, 5003), (16, 2, 5, 13, 4999), (32, 4, 1, 8, 4096),
        (32, 4, 1, 12, 4096), (32, 4, 4, 12, 4096), (32, 4, 4, 17, 4096), (32, 4, 4, 17, 1024), (32, 4, 1, 32, 4096),
        (32, 4, 4, 2, 1024), (16, 1, 4, 8, 5003), (16, 1, 4, 8, 32768), (16, 1, 5, 8, 5003),
    ):  # fmt: skip
        yield heads.format(*at)
    for at in (
        (32, 4, 1, 1, 8192), (32, 4, 1, 1, 131072), (32, 4, 1, 1, 2048), (32, 4, 4, 2, 2048), (32, 4, 2, 1, 8192),
        (32, 4, 4, 1, 8192), (32, 4, 5, 1, 8192), (32, 4, 8, 1, 8192), (32, 4, 4, 1, 16384), (32, 4, 4, 2, 8192),
        (32, 4, 4, 1, 512), (32, 4, 4, 1, 2048), (32, 4, 4, 1, 64), (16, 2, 4, 1, 8192), (16, 2, 4, 1, 2048),
        (16, 1, 1, 1, 8192), (16, 1, 2, 1, 8192), (16, 1, 4, 1, 8192), (16, 1, 8, 1, 8192), (16, 1, 4, 2, 8192),
        (16, 1, 4, 1, 2048), (16, 1, 4, 1, 131072), (16, 1, 4, 1, 1024), (8, 1, 4, 1, 512), (8, 2, 4, 1, 1024),
    ):  # fmt: skip
        yield heads.format(*at) + ",source=qk,num_rotated_pairs=64"
    narrow = "head_dim=256,num_q_heads={},num_kv_heads={},q_len={},batch={},kv_len={},window={}"
    for at in (
        (32, 16, 1, 1, 8192, 1024), (32, 16, 4, 1, 8192, 1024), (32, 16, 5, 1, 8192, 1024), (32, 16, 1, 2, 8192, 1024),
        (32, 16, 1, 1, 512, 1024), (32, 16, 1, 32, 1024, 1024), (8, 2, 1, 4, 4096, 512), (16, 8, 1, 16, 4096, 1024),
        (16, 8, 4, 26, 600, 0),
    ):  # fmt: skip
        yield narrow.format(*at)
    for at in (
        (32, 16, 1, 1, 8192, 1024), (32, 16, 4, 1, 8192, 1024), (32, 16, 1, 16, 1024, 1024),
        (32, 16, 1, 32, 1024, 1024), (8, 2, 4, 1, 8192, 512), (8, 2, 1, 16, 8192, 512),
    ):  # fmt: skip
        yield narrow.format(*at) + ",source=qkv,num_rotated_pairs=128"
    yield "num_q_heads=32,num_kv_heads=8,kv_len=8192"


def _prefill() -> Iterator[str]:
    for tokens in (1, 64, 512, 1024, 8192):
        yield f"head_dim=512,num_q_heads=32,num_kv_heads=4,page_size=64,num_tokens={tokens},kv_len=8192"
    yield "head_dim=256,num_q_heads=32,num_kv_heads=16,page_size=64,num_tokens=64"


def _products() -> Iterator[str]:
    """Of 1, 4, 8 and more tokens: long rows and short ones, many strips and few."""
    matrices = (
        (43008, 5376), (16384, 5376), (5376, 8192), (5376, 16384), (5376, 21504), (30720, 3840), (8192, 3840),
        (20480, 2560), (8192, 2816), (4224, 2816), (4096, 2560), (2560, 10240), (2560, 2048), (12288, 1536),
        (2048, 1536), (1536, 12288), (2816, 4096),
    )  # fmt: skip
    yield from (f"n={n},k={k},num_tokens=4" for n, k in matrices)
    for n, k in ((43008, 5376), (16384, 5376), (5376, 8192), (5376, 21504), (20480, 2560), (2560, 10240), (2048, 2560)):
        yield f"n={n},k={k},num_tokens=8"
    yield from (f"n={n},k={k},num_tokens=1" for n, k in ((43008, 5376), (10752, 2560), (3840, 4096)))
    yield from (f"n=43008,k=5376,num_tokens={tokens}" for tokens in (16, 32, 64))
    yield from (f"n={n},k={k},group_size=128,num_tokens=4" for n, k in ((8192, 21504), (8192, 8192), (43008, 5376)))
    yield from ("n=12288,k=1536,group_size=128,num_tokens=2048", "n=4224,k=2816,group_size=128,num_tokens=1024")
    yield from (f"n=5376,k={k},num_tokens={tokens}" for k in (5344, 5376) for tokens in (16, 32, 64, 4096))
    yield from (f"n=5376,k=8192,num_tokens=512,row_invariant={on}" for on in (False, True))
    for weights, group in (("int8", 32), ("int8", 16), ("int4_min", 32), ("int8_min", 32)):
        for tokens in (1, 8, 64, 2048):
            yield f"n=43008,k=5376,group_size={group},num_tokens={tokens},weights={weights}"
    yield "n=5376,k=8192,num_tokens=1,fp16_scales=True"


def _experts() -> Iterator[str]:
    """The 26B-A4B's in int4, in Q4_K_M, and in Q8_0."""
    yield from (f"num_experts=128,top_k=8,hidden=2816,inner=704,num_tokens={tokens}" for tokens in (1, 4, 8, 512, 2048))
    for up, down in (("int4_min", "int8_min"), ("int8", "int8")):
        for tokens in (1, 4, 8, 64, 2048):
            yield (f"num_experts=128,top_k=8,hidden=2816,inner=704,num_tokens={tokens},up_weights={up},"
                   f"down_weights={down},fp16_scales=True")  # fmt: skip


def _heads() -> Iterator[str]:
    for hidden, tokens, bits in (
        (2816, 8, 7), (2816, 16, 7), (3840, 8, 7), (5376, 1, 7), (5376, 5, 7), (5376, 8, 7), (2560, 1, 6),
    ):  # fmt: skip
        yield f"hidden={hidden},num_tokens={tokens},bits={bits}"


PROBLEMS = {
    "attn_decode": (tuple(_attention()), ("H200",)),
    "attn_prefill": (tuple(_prefill()), ("H200",)),
    "w4a16_gemm": (tuple(_products()), ("H200", "H100")),
    "w4a16_norm": (
        tuple(f"n=5376,k=21504,num_tokens={m},has_scalar=True" for m in (1, 4, 5, 8)), ("H200", "H100", "RTX5090"),
    ),
    "moe_w4a16": (tuple(_experts()), ("H200", "RTX5090")),
    "greedy_head": (tuple(_heads()), ("H200", "H100")),
    "moe_combine": (
        ("num_tokens=8", "num_tokens=2048", "has_norms=False,num_tokens=1", "has_norms=False,num_tokens=2048"),
        ("H200",),
    ),
    "moe_route": (tuple(f"num_tokens={m}" for m in (1, 512)), ("H200",)),  # no step here asks for these two
    "softcap_argmax": (tuple(f"num_tokens={m}" for m in (1, 32)), ("H200",)),
    "check_pages": (("batch=1",), ("H200",)),
    "qkv_norm_rope_2d": (
        ("num_tokens=576", "num_tokens=2304", "num_heads=12,head_dim=64,has_bounds=True,num_tokens=2304"), ("H200",),
    ),
    "attn_relative": (("num_tokens=750",), ("H200",)),
    "glu_conv": (("num_tokens=750",), ("H200",)),
    "mel_conv": (("num_tokens=1500",), ("H200",)),
    "residual_norms": (
        ("num_tokens=750", "has_last=True,num_tokens=750", "has_post=False,num_tokens=750"), ("H200",),
    ),
    "silu": (("num_tokens=750",), ("H200",)),
    "exchange_best": (("num_tokens=1", "ranks=4,width=2816,num_tokens=64", "width=131072,source=logits"), ("H200",)),
    "exchange_norm": (
        ("ranks=2,num_tokens=1", "ranks=4,num_tokens=64", "ranks=8,num_tokens=1",
         "hidden=2816,top_k=8,has_scalar=True,num_tokens=8"), ("H200",),
    ),
    "gather_kv": (
        ("num_keys=8192", "head_dim=256,num_kv_heads=16,heads=16,num_keys=8192", "page_size=16,num_keys=64"), ("H200",),
    ),
    "key_means": (("num_tokens=2048", "num_kv_heads=2,num_tokens=128"), ("H200",)),
    "kv_write": (("num_tokens=1", "num_tokens=4096"), ("H200",)),
    "tile_lists": (("num_tokens=2048",), ("H200",)),
    "tile_scores": (("num_tokens=2048", "num_q_heads=16,num_kv_heads=2,num_tokens=128,kv_len=131072"), ("H200",)),
    "ple_block": (tuple(f"num_tokens={m}" for m in (1, 2, 8, 16, 17, 64)), ("H200",)),
}  # fmt: skip


def text_of(value: Any) -> str:
    """A Problem or Config as `parse_fields` reads it, without fields that have their default; `-` if none is left."""
    usual = defaults_of(type(value))
    return ",".join(f"{k}={v}" for k, v in fields_of(value).items() if v != usual[k]) or "-"


def index_of(kernel: str, problem: Any, config: Any) -> str:
    return f"{kernel} {text_of(problem)} -> {text_of(config)}"


def problem_of(line: str) -> tuple[str, Any]:
    """(kernel, problem) of a line. Raises KerngenError where no kernel or field is called so any more."""
    kernel, text = line.partition(" -> ")[0].split(" ")
    return kernel, parse_fields(find_kernel(kernel).problem_type, "" if text == "-" else text)


def sections(text: str) -> Iterator[tuple[str, str]]:
    """(board, line) of what a golden file says."""
    board = ""
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            board = line.strip("[]")
        elif not line.startswith("#"):
            yield board, line


def answers(board: str) -> list[Answer]:
    """What the file should have of a board, by kernel and by the problems' fields."""
    target, found, told = Target.of(find_device(board)), set[Answer](), set[tuple[str, Any]]()
    for name, (texts, boards) in PROBLEMS.items():
        kernel = find_kernel(name)
        problems = [parse_fields(kernel.problem_type, text) for text in texts if board in boards]
        found |= {(name, p, kernel.default_config(p, target)) for p in problems}
    told |= {(kernel, config) for kernel, _, config in found}
    for model in MODELS:
        load = find_workload(model, target.arch)
        for phase, batch, context, q_len, chunk in BOARDS[board]:
            for item, _ in load.step(phase, batch, context, q_len, chunk=chunk):
                config = find_kernel(item.kernel).default_config(item.problem, target)
                if (item.kernel, config) not in told:
                    told.add((item.kernel, config))
                    found.add((item.kernel, item.problem, config))
    return sorted(found, key=lambda answer: (answer[0], tuple(fields_of(answer[1]).values())))


def main() -> None:
    parts = [HEADER]
    for board in BOARDS:
        parts += [f"\n[{board}]", *(index_of(*answer) for answer in answers(board))]
    PATH.write_text("\n".join(parts) + "\n")
    print(f"{PATH}: {len(parts) - len(BOARDS) - 1} problems on {len(BOARDS)} boards")


if __name__ == "__main__":
    main()
