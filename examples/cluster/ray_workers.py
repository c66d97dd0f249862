"""Starts a worker on every GPU of a Ray cluster, and waits for them.

ray job submit --runtime-env-json '{"pip": ["kerngen[cuda12,pg]"]}' -- python ray_workers.py postgresql+psycopg://...
"""

from __future__ import annotations

import subprocess
import sys

COMMAND = ["kerngen", "worker", "--kind", "measure", "--until-empty"]


def main() -> int:
    """Exit code: 0 if all workers ended well."""
    import ray

    ray.init()
    # Ray shows a task the GPUs that it has, by CUDA_VISIBLE_DEVICES; one that dies is started again, elsewhere perhaps.
    start = ray.remote(num_gpus=1, num_cpus=8, max_retries=3)(subprocess.call)
    workers = int(ray.cluster_resources().get("GPU", 0))
    codes = ray.get([start.remote([*COMMAND, "--db", sys.argv[1]]) for _ in range(workers)])
    return max(codes, default=1)


if __name__ == "__main__":
    sys.exit(main())
