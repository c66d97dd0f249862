"""guidellm against `kerngen serve`, end to end, and the report that it writes.

python examples/serving/clients/with_guidellm.py URL KEY MODEL
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REQUESTS, INPUT, OUTPUT = 8, 24, 12


def main(url: str, key: str, folder: str) -> None:
    for way, profile in (("/v1/chat/completions", "kind=concurrent,streams=2"),
                         ("/v1/completions", "kind=constant,rate=4")):  # fmt: skip
        with tempfile.TemporaryDirectory() as out:
            written = Path(out) / "report.json"
            subprocess.run([
                Path(sys.executable).with_name("guidellm"), "run", "--disable-console",
                "--backend", f"kind=openai_http,target={url.removesuffix('/v1')},api_key={key},request_format={way}",
                "--tokenizer", f"kind=hf_auto,model={folder}",
                "--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}",
                "--profile", profile, "--constraint", f"kind=max_requests,count={REQUESTS}",
                "--output", f"kind=json,path={written}",
            ], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})  # fmt: skip
            (report,) = json.loads(written.read_text())["benchmarks"]
        totals = report["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0), totals
        for request in report["requests"]["successful"]:
            assert request["output_tokens"] == OUTPUT, "it asks to go on behind the end: ignore_eos"
            assert request["prompt_tokens"] >= INPUT
            assert 0 < request["time_to_first_token_ms"] <= request["request_latency"] * 1e3
        ttft = report["metrics"]["time_to_first_token_ms"]["successful"]["median"]
        print(f"{way}, {profile}: {totals['successful']} requests of {OUTPUT} tokens, {ttft:.0f} ms to the first one")


if __name__ == "__main__":
    main(*sys.argv[1:])
