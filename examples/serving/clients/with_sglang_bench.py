"""SGLang's `bench_serving` against `kerngen serve`: its backends for OpenAI's API and for vLLM.

    python examples/serving/clients/with_sglang_bench.py URL KEY MODEL

The benchmark is SGLang's own, from its wheel; see standing_in.py.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from standing_in import stand_in

PROMPTS, INPUT, OUTPUT = 6, 24, 12


def main(url: str, key: str, folder: str) -> None:
    os.environ["OPENAI_API_KEY"] = key
    stand_in("sglang", ("sglang.benchmark",), {
        "sglang.srt.disaggregation.utils": {"FAKE_BOOTSTRAP_HOST": "2.2.2.2"},
        "sglang.srt.utils.network": {
            "resolve_base_url": lambda base_url, host, port: base_url,
            "resolve_host_port": lambda base_url, host, port: (host, port),
        },
    })  # fmt: skip
    from sglang.benchmark import serving  # type: ignore[import-not-found]

    for backend, more in (
        ("vllm", []),
        ("sglang-oai", ["--return-logprob", "--top-logprobs-num", "2"]),
        ("sglang-oai", ["--disable-stream"]),
        ("vllm-chat", []),
        ("sglang-oai-chat", ["--disable-stream"]),
        ("sglang-oai-chat", ["--extra-request-body", '{"stream_options": {"include_usage": true}}']),
    ):  # fmt: skip
        with tempfile.TemporaryDirectory() as out:
            written = Path(out) / "result.jsonl"
            sys.argv = ["bench_serving", "--backend", backend, "--base-url", url.removesuffix("/v1"),
                        "--dataset-name", "random-ids", "--random-input-len", str(INPUT), "--random-output-len",
                        str(OUTPUT), "--random-range-ratio", "1", "--num-prompts", str(PROMPTS), "--tokenizer", folder,
                        "--warmup-requests", "1", "--output-file", str(written), "--output-details",
                        "--disable-tqdm", *more]  # fmt: skip
            serving.cli_main()
            told = json.loads(written.read_text().splitlines()[-1])
        assert told["completed"] == PROMPTS, told
        assert not any(told["errors"]), told["errors"]
        print(f"{backend} {' '.join(more)}: {told['total_output_tokens']} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
