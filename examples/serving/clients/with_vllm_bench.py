"""`vllm bench serve` against `kerngen serve`: its two backends for OpenAI's API, and the result that it writes.

    python examples/serving/clients/with_vllm_bench.py URL KEY MODEL

The benchmark is vLLM's own, from its wheel; see standing_in.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from standing_in import stand_in
from transformers import AutoTokenizer

PROMPTS, INPUT, OUTPUT = 6, 24, 12


def main(url: str, key: str, folder: str) -> None:
    def tokenizer(name: str, *_: Any, **__: Any) -> Any:
        return AutoTokenizer.from_pretrained(name)

    stand_in("vllm", ("vllm.benchmarks", "vllm.utils.argparse_utils"), {
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.tokenizers": {"get_tokenizer": tokenizer},
        "vllm.utils.import_utils": {"PlaceholderModule": lambda name: name},
        "vllm.utils.gc_utils": {"freeze_gc_heap": lambda: None},
        "vllm.utils.network_utils": {"join_host_port": lambda host, port: f"{host}:{port}"},
        "vllm.utils.mistral": {"is_mistral_tokenizer": lambda _: False},
    })  # fmt: skip
    from vllm.benchmarks import serve  # type: ignore[import-not-found]

    os.environ["OPENAI_API_KEY"] = key
    for backend, endpoint, more in (
        ("openai", "/completions", ["--logprobs", "2", "--ignore-eos"]),
        ("openai", "/completions", ["--extra-body", '{"n": 1, "best_of": 1, "use_beam_search": false}']),
        ("openai-chat", "/chat/completions", ["--ignore-eos", "--num-warmups", "1", "--max-concurrency", "2"]),
        ("openai-chat", "/chat/completions", ["--extra-body", '{"stream_options": {"include_usage": true, '
                                              '"continuous_usage_stats": true}, "ignore_eos": true}']),
    ):  # fmt: skip
        parser = argparse.ArgumentParser()
        serve.add_cli_args(parser)
        with tempfile.TemporaryDirectory() as out:
            arguments = parser.parse_args([
                "--backend", backend, "--base-url", url.removesuffix("/v1"), "--endpoint", f"/v1{endpoint}",
                "--tokenizer", folder, "--dataset-name", "random", "--random-input-len", str(INPUT),
                "--random-output-len", str(OUTPUT), "--num-prompts", str(PROMPTS), "--temperature", "0",
                "--header", f"Authorization=Bearer {key}",  # of the call that asks for the model's name
                "--save-result", "--save-detailed", "--result-dir", out, "--result-filename", "result.json", *more,
            ])  # fmt: skip
            asyncio.run(serve.main_async(arguments))
            told = json.loads((Path(out) / "result.json").read_text())
        assert (told["completed"], told["failed"]) == (PROMPTS, 0), told["errors"]
        assert told["model_id"], "asked of the server"
        if "--ignore-eos" in more or "ignore_eos" in more[-1]:
            assert told["output_lens"] == [OUTPUT] * PROMPTS, told["output_lens"]
        assert all(ttft > 0 for ttft in told["ttfts"])
        drafted = told.get("spec_decode_acceptance_rate")
        print(f"{backend} {' '.join(more)}: {told['total_output_tokens']} tokens, drafts accepted: {drafted}")


if __name__ == "__main__":
    main(*sys.argv[1:])
