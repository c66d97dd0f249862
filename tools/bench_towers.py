"""Times what embeds images and sounds, with generated weights, on this machine's GPU or CPU.

    python -m tools.bench_towers gemma-4-31b gemma-4-e4b

A figure is milliseconds of one call, median of the samples, from the host's memory to embeddings on the device: for a
batch of square images of a budget of tokens, as uint8 patches, or for a sound, as frames. "host" is until the call
returns, which is what an engine waits at least; "eager" is without CUDA graphs. TFLOP are of an image's matrix products
and attention.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median

import click
import numpy as np
import torch

from kerngen.errors import KerngenError
from kerngen.runtime.backend import open_backend
from kerngen.runtime.media.config import MediaConfig, VisionConfig
from kerngen.runtime.media.towers.audio import AudioTower, SampleEmbedder
from kerngen.runtime.media.towers.vision import PatchEmbedder, VisionTower
from kerngen.runtime.media.values import Media
from kerngen.runtime.weights.synthetic import synthetic_towers
from kerngen.workload.workload import find_media

WARM_UP = 3  # calls: the first runs one by one, the second is captured


@dataclass(frozen=True, slots=True)
class Row:
    """tokens: of an item. ms, host_ms: of a call for `batch` items. eager_ms: None where there are no graphs.
    tflop: None for sounds.
    """

    model: str
    kind: str
    batch: int
    tokens: int
    ms: float
    host_ms: float
    eager_ms: float | None
    tflop: float | None


def square(config: VisionConfig, budget: int, seed: int) -> Media:
    """A random square image of as many tokens as fit in `budget`."""
    side = math.isqrt(budget) * config.pooling
    patches = np.random.default_rng(seed).integers(0, 256, (side * side, 3 * config.patch_size**2), dtype=np.uint8)
    return Media.of("image", patches, (side, side), (side // config.pooling) ** 2)


def tflop(config: VisionConfig, hidden_size: int, patches: int) -> float:
    """Of one image of so many patches: two for each weight and patch, four for each pair of patches and channel."""
    width, tokens = config.hidden_size, patches // config.pooling**2
    pixels, projector = 3 * config.patch_size**2 * width * patches, width * hidden_size * tokens
    if (e := config.encoder) is None:
        return 2 * (pixels + projector) / 1e12
    inner = e.num_heads * e.head_dim
    layer = (4 * inner + 3 * e.intermediate_size) * width * patches + 2 * inner * patches**2
    return 2 * (pixels + projector + e.num_layers * layer) / 1e12


def timed(run: Callable[[], object], device: torch.device, samples: int) -> tuple[float, float]:
    """(milliseconds until the result is there, until the call returns), medians."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(WARM_UP):
        run()
    whole, host = [], []
    for _ in range(samples):
        wait()
        began = time.perf_counter()
        run()
        host.append(time.perf_counter() - began)
        wait()
        whole.append(time.perf_counter() - began)
    return median(whole) * 1e3, median(host) * 1e3


def measure(
    model: str, tower: VisionTower | PatchEmbedder, hidden_size: int, batch: int, budget: int, samples: int
) -> Row:
    config, device = tower.config, tower.weights.patches.device
    items = [square(config, budget, seed) for seed in range(batch)]
    ms, host_ms = timed(lambda: tower.embed(items), device, samples)
    eager = None
    if device.type == "cuda":
        eager = timed(lambda: tower.embed(items, graphs=False), device, samples)[0]
    flop = batch * tflop(config, hidden_size, len(items[0].data))
    return Row(model, "image", batch, items[0].num_tokens, ms, host_ms, eager, flop)


def measure_sound(model: str, tower: AudioTower | SampleEmbedder, seconds: float, samples: int) -> Row:
    config, device = tower.config, tower.weights.projection.device
    frames, each = (round(seconds * 100), 4) if config.encoder else (round(seconds * 25), 1)
    data = np.random.default_rng(0).normal(size=(frames, config.num_features)).astype(np.float32)
    item = Media.of("audio", data, (frames, 1), -(-frames // each))
    ms, host_ms = timed(lambda: tower.embed([item]), device, samples)
    return Row(model, "sound", 1, item.num_tokens, ms, host_ms, None, None)


HEADER = f"{'model':18} {'of':>6} {'items':>6} {'tokens':>6} {'ms':>9} {'host':>9} {'eager':>9} {'TFLOP/s':>8}"


def line(r: Row) -> str:
    eager = "-" if r.eager_ms is None else f"{r.eager_ms:.2f}"
    rate = "-" if r.tflop is None else f"{r.tflop / r.ms * 1e3:.1f}"
    return f"{r.model:18} {r.kind:>6} {r.batch:6} {r.tokens:6} {r.ms:9.2f} {r.host_ms:9.2f} {eager:>9} {rate:>8}"


@click.command()
@click.argument("models", nargs=-1, required=True)
@click.option("--tokens", default="70,280,1120", show_default=True, help="Budgets of an image's tokens.")
@click.option("--batch", default="1,4", show_default=True, help="Numbers of images that go through together.")
@click.option("--seconds", type=click.FloatRange(0), default=30.0, show_default=True,
              help="Of a sound, for models that hear; 0 for none.")  # fmt: skip
@click.option("--samples", type=click.IntRange(1), default=20, show_default=True)
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), default=None, help="Default: the device's own.")
@click.option("--device", default=None, help="For example cpu, cuda:1. Default: a GPU where there is one.")
@click.option(
    "--backend",
    type=click.Choice(["auto", "cuda", "torch"]),
    default="auto",
    show_default=True,
    help="What norms, heads and gates are made by: cuda, our kernels; auto for these on a GPU.",
)
@click.option("--json", "as_json", is_flag=True)
def main(models: tuple[str, ...], tokens: str, batch: str, seconds: float, samples: int, dtype: str | None,
         device: str | None, backend: str, as_json: bool) -> None:  # fmt: skip
    """Time what embeds images and sounds of MODELS: released models, or folders with a config.json."""
    budgets, batches = ([int(n) for n in option.split(",")] for option in (tokens, batch))
    rows: list[Row] = []

    def tell(row: Row) -> None:
        rows.append(row)
        if not as_json:
            click.echo(line(row))

    found = [(model, _config_of(model)) for model in models]
    if not as_json:
        click.echo(HEADER)
    for model, config in found:
        ops = open_backend(backend, device=device or ("cuda" if torch.cuda.is_available() else "cpu"), dtype=dtype)
        towers = synthetic_towers(config, ops)
        if not isinstance(towers.vision, VisionTower | PatchEmbedder):
            raise TypeError(f"{type(towers.vision)} has another input")
        for budget, count in product(budgets, batches):
            tell(measure(model, towers.vision, config.hidden_size, count, budget, samples))
        if seconds and isinstance(towers.audio, AudioTower | SampleEmbedder):
            tell(measure_sound(model, towers.audio, seconds, samples))
    if as_json:
        click.echo(json.dumps([asdict(r) for r in rows]))


def _config_of(model: str) -> MediaConfig:
    try:
        config = find_media(model)
    except KerngenError as e:
        raise click.ClickException(str(e)) from e
    if config is None or config.vision is None:
        raise click.ClickException(f"{model} takes no images")
    return config


if __name__ == "__main__":
    main()
