"""aiperf against `kerngen serve`, end to end, and the result that it writes.

python examples/serving/clients/with_aiperf.py URL KEY MODEL
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

REQUESTS, INPUT, OUTPUT = 6, 24, 12


def main(url: str, key: str, folder: str) -> None:
    for kind, more in (("chat", ["--streaming", "--concurrency", "2"]),
                       ("completions", ["--request-rate", "4", "--use-server-token-count"])):  # fmt: skip
        with tempfile.TemporaryDirectory() as out:
            subprocess.run([
                Path(sys.executable).with_name("aiperf"), "profile", "--model", Path(folder).name,
                "--url", url.removesuffix("/v1"), "--api-key", key, "--endpoint-type", kind, "--tokenizer", folder,
                "--request-count", str(REQUESTS), "--warmup-request-count", "1",
                "--synthetic-input-tokens-mean", str(INPUT), "--synthetic-input-tokens-stddev", "0",
                "--output-tokens-mean", str(OUTPUT), "--extra-inputs", "ignore_eos:true", "--workers-max", "1",
                "--no-gpu-telemetry", "--ui", "none", "--output-artifact-dir", out, *more,
            ], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
            told = json.loads((Path(out) / "profile_export_aiperf.json").read_text())
            scraped = json.loads((Path(out) / "server_metrics_export.json").read_text())
        assert told["request_count"]["avg"] == REQUESTS, told["error_summary"]
        assert not told["error_summary"]
        assert not told["was_cancelled"]
        assert told["usage_completion_tokens"]["min"] == told["usage_completion_tokens"]["max"] == OUTPUT
        assert "vllm:time_to_first_token_seconds" in json.dumps(scraped), "it reads /metrics meanwhile"
        if "--streaming" in more:
            assert 0 < told["time_to_first_token"]["min"] <= told["request_latency"]["max"]
        print(f"{kind} {' '.join(more)}: {REQUESTS} requests, {told['request_latency']['p50']:.0f} ms each")


if __name__ == "__main__":
    main(*sys.argv[1:])
