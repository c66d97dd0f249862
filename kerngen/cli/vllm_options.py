"""Options of `vllm serve` that people type: which of ours does that, or why there is none.

Those with the same meaning are second names of ours, in serve.py. Source: vLLM 0.33, `vllm serve --help`.
"""

from __future__ import annotations

from typing import Any

import click

_ONE_GPU = "--tensor-parallel N divides a model among N GPUs, --replicas N serves whole ones on N; --device says which"
_DIVIDED = "--tensor-parallel N divides the model among N GPUs"
_CACHE = "the cache is as large as --context and --max-batch say; kerngen run MODEL --plan says what fits"
_AS_IT_IS = "the checkpoint's own is used; leave it out"
_READ = "Gemma-4's calls and thoughts are read as they are; leave it out"
_SCHEDULED = "prompts are prefilled in chunks beside those who decode, and prefixes are shared; leave it out"
_DRAFTS = "--draft says which drafter, --num-draft-tokens how many"
_PROXY = "put a proxy before it"
_NOT_LOGGED = "requests are not logged; leave it out; /metrics counts them"
_MEDIA = "--media says what is read beside text, --max-media-items how much of it"
_LORA = "adapters are not served: merge it into its checkpoint"
INSTEAD = {
    "tp": _DIVIDED, "pipeline-parallel-size": _ONE_GPU, "pp": _ONE_GPU,
    "dp": "--replicas says how many engines", "enable-expert-parallel": _ONE_GPU,
    "distributed-executor-backend": _ONE_GPU,
    "gpu-memory-utilization": _CACHE, "kv-cache-memory-bytes": _CACHE, "num-gpu-blocks-override": _CACHE,
    "block-size": _CACHE, "swap-space": "sequences without room are computed again later; leave it out",
    "cpu-offload-gb": "weights stay on the GPU; kerngen run MODEL --plan says what fits",
    "quantization": "weights are used as they are stored: name a checkpoint that is quantised; "
                    "--draft-weights int4 makes the drafter smaller",
    "model": "MODEL is the first argument", "revision": "MODEL@REVISION is the first argument",
    "download-dir": "HF_HOME says where downloads are kept", "hf-token": "HF_TOKEN has it",
    "load-format": "the folder says it; leave it out",
    "tokenizer": _AS_IT_IS, "tokenizer-mode": _AS_IT_IS, "chat-template": _AS_IT_IS, "generation-config": _AS_IT_IS,
    "hf-config-path": _AS_IT_IS, "config-format": _AS_IT_IS,
    "override-generation-config": "a request has its own temperature, top_p and top_k",
    "default-chat-template-kwargs": "a request has its own chat_template_kwargs",
    "seed": "a request has its own seed",
    "trust-remote-code": "no code of a checkpoint is ever run; leave it out",
    "enable-auto-tool-choice": _READ, "tool-call-parser": _READ, "reasoning-parser": _READ, "enable-reasoning": _READ,
    "enforce-eager": "steps are captured before the port answers; leave it out; --backend torch runs without kernels",
    "compilation-config": "steps are captured before the port answers; leave it out",
    "max-num-batched-tokens": _SCHEDULED, "enable-chunked-prefill": _SCHEDULED, "enable-prefix-caching": _SCHEDULED,
    "async-scheduling": _SCHEDULED, "no-enable-prefix-caching": "prefixes are always shared; leave it out",
    "speculative-config": _DRAFTS, "speculative-model": _DRAFTS, "num-speculative-tokens": _DRAFTS,
    "enable-lora": _LORA, "lora-modules": _LORA,
    "limit-mm-per-prompt": _MEDIA, "mm-processor-kwargs": "a request has its own mm_processor_kwargs",
    "language-model-only": "text alone is read unless --media says more; leave it out",
    "allowed-media-domains": "--allow-media-host HOST, once for each",
    "allowed-local-media-path": "files of the server are not read; clients send data: URLs",
    "structured-outputs-config": "llguidance guides answers; leave it out",
    "guided-decoding-backend": "llguidance guides answers; leave it out",
    "max-logprobs": "a request has at most 20; leave it out",
    "ssl-keyfile": _PROXY, "ssl-certfile": _PROXY, "root-path": _PROXY,
    "disable-log-requests": _NOT_LOGGED, "disable-log-stats": _NOT_LOGGED, "enable-log-requests": _NOT_LOGGED,
    "uvicorn-log-level": _NOT_LOGGED,
}  # fmt: skip


class ServeCommand(click.Command):
    """Knows what vLLM's users type; as there, a - in an option's name may be a _."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_settings["token_normalize_func"] = lambda name: name.replace("_", "-")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for arg in args[: args.index("--") if "--" in args else None]:
            typed = arg.partition("=")[0]
            name = typed.lstrip("-").replace("_", "-")
            if typed.startswith("-" if len(name) == 2 else "--") and name in INSTEAD:
                raise click.UsageError(f"there is no {typed}, which vLLM has: {INSTEAD[name]}", ctx)
        return super().parse_args(ctx, args)
