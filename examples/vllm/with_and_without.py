"""Compare a model in vLLM with kerngen's plug-in and without: time per token, 80 chats, start, log-probabilities.

    python examples/vllm/with_and_without.py google/gemma-4-31B-it-qat-w4a16-ct --tensor-parallel-size 2
    python examples/vllm/with_and_without.py gemma-4-31b --generated
    python examples/vllm/with_and_without.py gemma-4-26b-a4b --generated --loads one,many --json 26b.json

Use the Python that has both vLLM and kerngen. vLLM starts once for each arm, one after the other:

    without  vLLM's own kernels (KERNGEN_VLLM is made empty)
    with     kerngen's: the parts that KERNGEN_VLLM names, all if it is unset
    eager    vLLM's own without torch.compile and CUDA graphs, for its log-probabilities alone: how far they are from
             those of `without` is what vLLM's own choice of code changes

Loads, greedy and with generated prompts; the first two are timed three times:

    one      a sequence, context 512: ms a token
    many     32 sequences, context 2048: ms a step, which gives each a token
    chats    80 requests at once, 1024 tokens each way: output tokens/s, median s to the first token

Each arm is printed beside the first: the median, the least and the most, and the ratio. Log-probabilities are of 396
tokens of four prompts. If an arm fails, those before it are printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SERVING = Path(__file__).resolve().parents[1] / "serving"
ARMS = {"without": {"KERNGEN_VLLM": ""}, "with": {}, "eager": {"KERNGEN_VLLM": ""}}
# Sequences, tokens of each prompt, tokens of a short and of a long answer, whose difference is timed.
STEPS = {"one": (1, 512, 17, 145), "many": (32, 2048, 9, 73)}
CHATS = 80, 1024, 1024  # at once, tokens of a prompt, of an answer
GRAPHS = [1, 2, 4, 8, 16, 32, 64, 80]  # batches of CUDA graphs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name or folder, as for `vllm serve`; with --generated: gemma-4-31b, ...")
    parser.add_argument("--generated", action="store_true",
                        help="random weights of a released model's shapes, the same in each arm")  # fmt: skip
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs (%(default)s)")
    parser.add_argument("--max-model-len", type=int, default=3072, metavar="N",
                        help="%(default)s; the loads need 2121 tokens")  # fmt: skip
    parser.add_argument(
        "--loads", default="one,many,chats", help="%(default)s, or some of them; empty: log-probabilities alone"
    )
    parser.add_argument("--arms", default=",".join(ARMS), help="%(default)s, or some of them")
    parser.add_argument(
        "--engine",
        type=json.loads,
        default={},
        metavar="JSON",
        help='more arguments of vllm.LLM: \'{"kv_cache_dtype": "fp8"}\'',
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every measurement, by arm")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for said, known in ((options.arms, ARMS), (options.loads, (*STEPS, "chats", ""))):
        if unknown := set(said.split(",")) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(filter(None, known))}")
    if options.arm is not None:
        return options.json.write_text(json.dumps(measured(options)))
    if "with" in options.arms.split(",") and os.environ.get("KERNGEN_VLLM") == "":
        parser.error("KERNGEN_VLLM is empty here: `with` would be `without`; unset it, or name parts")
    if find_spec("vllm") is None:
        parser.error(f"vLLM is not in this environment: {sys.executable} -m pip install 'vllm==0.26.*'")
    if options.json is not None and not options.json.parent.is_dir():  # not after an hour of measuring
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kerngen-vllm-") as folder:
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # steps are timed without another process's say
        command = [sys.executable, __file__, *sys.argv[1:]]
        if options.generated:
            sys.path.insert(0, str(SERVING))
            import peer

            from kerngen.errors import KerngenError

            try:
                command[2 + sys.argv[1:].index(options.model)] = peer.generated(options.model, Path(folder))
            except KerngenError as e:
                parser.error(" ".join(filter(None, (f"--generated: {e.message};", e.hint))))
            environment["PYTHONPATH"] = peer.environment(Path(folder))["PYTHONPATH"]
        for arm in options.arms.split(","):
            out = Path(folder) / f"{arm}.json"
            ended = subprocess.run([*command, "--arm", arm, "--json", str(out)],
                                   env=os.environ | environment | ARMS[arm])  # fmt: skip
            if ended.returncode != 0:
                print(f"{arm} ended with code {ended.returncode}: what vLLM said is above", file=sys.stderr)
                break
            found[arm] = json.loads(out.read_text())
    if options.json is not None:
        options.json.write_text(json.dumps(found))
    if found:
        print_arms(found)
    if len(found) < len(options.arms.split(",")):
        sys.exit(1)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """What one arm gives. Times are of wall clock, ms a token or s; log-probabilities those of given prompts."""
    began = time.monotonic()
    import torch
    from vllm import LLM, SamplingParams

    is_eager = options.arm == "eager"
    llm = LLM(
        model=options.model, load_format="dummy" if options.generated else "auto", skip_tokenizer_init=True,
        tensor_parallel_size=options.tensor_parallel_size, max_model_len=options.max_model_len, max_num_seqs=CHATS[0],
        max_num_batched_tokens=8192, gpu_memory_utilization=0.85, disable_log_stats=True,
        enforce_eager=is_eager, compilation_config={} if is_eager else {"cudagraph_capture_sizes": GRAPHS},
        **options.engine,
    )  # fmt: skip
    found: dict[str, Any] = {"start_s": time.monotonic() - began}
    random = torch.Generator().manual_seed(7)

    def prompts(count: int, length: int) -> list[Any]:
        ids = [torch.randint(10, 200_000, (length,), generator=random).tolist() for _ in range(count)]
        return [{"prompt_token_ids": each} for each in ids]

    def answers(of: list[Any], tokens: int, **more: Any) -> list[Any]:
        params = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True, **more)
        return llm.generate(of, params, use_tqdm=False)

    def seconds(of: list[Any], tokens: int) -> float:
        start = time.perf_counter()
        answers(of, tokens)
        return time.perf_counter() - start

    asked = prompts(4, 100)
    told = [answer.prompt_logprobs[1:] for answer in answers(asked, 8, prompt_logprobs=1)]
    pairs = [(of, token) for prompt, one in zip(asked, told, strict=True)
             for token, of in zip(prompt["prompt_token_ids"][1:], one, strict=True)]  # fmt: skip
    found["logprobs"] = [of[token].logprob for of, token in pairs]
    found["best"] = [min(of, key=lambda token: of[token].rank) for of, _ in pairs]
    loads = [] if is_eager else options.loads.split(",")
    for name, (count, length, short, long) in STEPS.items():
        if name in loads:
            of = prompts(count, length)
            answers(of, short)  # what is compiled at its first use
            times = [seconds(of, long) - seconds(of, short) for _ in range(3)]
            found[f"{name}_ms"] = [each / (long - short) * 1e3 for each in times]
    if "chats" in loads:
        found["chats"] = chats(llm, prompts(CHATS[0], CHATS[1]), SamplingParams)
    return found


def chats(llm: Any, prompts: list[Any], params: Any) -> dict[str, float]:
    """All at once: output tokens a second, and the median time to a first token."""
    engine, first, tokens, start = llm.llm_engine, {}, 0, time.perf_counter()
    for n, prompt in enumerate(prompts):
        engine.add_request(f"chat-{n}", prompt, params(max_tokens=CHATS[2], temperature=0, detokenize=False,
                                                       ignore_eos=True))  # fmt: skip
    while engine.has_unfinished_requests():
        for answer in engine.step():
            if answer.outputs and answer.outputs[0].token_ids:
                first.setdefault(answer.request_id, time.perf_counter() - start)
            if answer.finished:
                tokens += len(answer.outputs[0].token_ids)
    return {"tokens_s": tokens / (time.perf_counter() - start), "first_token_s": statistics.median(first.values())}


def print_arms(found: dict[str, Any]) -> None:
    """Each arm beside the first; its times beside the first that has any, which `eager` has not."""
    base = next(iter(found.values()))
    timed = next((one for arm, one in found.items() if arm != "eager"), base)
    for arm, one in found.items():
        print(f"{arm}: ready in {one['start_s']:.1f} s")
        for name in (f"{step}_ms" for step in STEPS if f"{step}_ms" in one):
            mine, other = statistics.median(one[name]), statistics.median(timed[name])
            print(f"  {name}: {mine:.3f} a token ({min(one[name]):.3f}-{max(one[name]):.3f}), {other / mine:.2f}x")
        for name, value in one.get("chats", {}).items():
            print(f"  chats, {name}: {value:.2f} ({value / timed['chats'][name]:.2f} of the first arm's)")
        apart = [abs(a - b) for a, b in zip(one["logprobs"], base["logprobs"], strict=True)]
        same = statistics.mean(a == b for a, b in zip(one["best"], base["best"], strict=True))
        print(f"  log-probabilities: {statistics.mean(apart):.4f} apart in the mean, {max(apart):.4f} at most; the"
              f" likeliest token the same {same:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
