"""Fallbacks: operations that we have no kernel for, each with the reason. Their torch code is `runtime.ops.fallbacks`.

This list is the only way past the kernels: `ops/kernels.py` tells the executor each time that it goes it, `run`, `tune`
and `doctor` print it, and a workload's `missing` is what its record met of it.
"""

# name -> why torch computes it
FALLBACKS = {
    "dense matrices": "more than 16 tokens: cuBLAS through torch, a well-kept library where kerngen adds nothing",
    "dense experts": "no grouped kernel for 16-bit weights yet: torch multiplies one expert after the other",
    # of a divided model alone
    "sums of routed experts": "ranks without shared memory, or of many tokens, exchange sums; else exchange_norm adds",
    "the chosen token's logit": "ranks without shared memory compare choices by it; exchange_best does so for others",
}
