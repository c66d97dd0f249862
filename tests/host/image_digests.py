"""What transformers' processors make of images, as digests in image_digests.json, and the images.

They need torchvision, which kerngen does not: where it is installed, `python tests/host/image_digests.py` writes the
file anew. What it holds was recorded with the versions that it names.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILE = Path(__file__).with_name("image_digests.json")
BUDGETS = (70, 140, 280, 560, 1120)
SIZES = ((1, 1), (3, 900), (900, 3), (22, 385), (768, 768), (480, 640), (1080, 1920), (1024, 1024), (48, 48), (100, 7),
         (333, 517), (1, 1200), (2500, 2))  # fmt: skip
UNIFIED_SIZES = ((480, 640), (22, 385), (1, 1200))
VIDEO = (75, 90, 120)  # frames, height, width
FPS = 0.7


def picture(height: int, width: int, channels: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    """uint8 [height, width, channels]: a ramp with noise, so that an antialiased resize has something to do."""
    numbers = np.arange(height * width * channels, dtype=np.uint64) + np.uint64(seed * 1_000_003)
    noise = (numbers * np.uint64(2654435761) >> np.uint64(13)) % np.uint64(97)
    ramp = np.add.outer(np.arange(height) * 150 // height, np.arange(width) * 9 // width)
    return (noise.reshape(height, width, channels) + ramp[..., None].astype(np.uint64)).astype(np.uint8)


def digest(patches: NDArray[np.uint8]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(patches).data, digest_size=12).hexdigest()


def _of_pixel_values(values: Any, num_patches: int, tolerance: float = 0.0) -> str:
    """Of float32 pixel_values [N, features], which are uint8 * (1 / 255) but for `tolerance`."""
    import torch

    seen = torch.round(values[:num_patches] * 255).to(torch.uint8)
    assert (seen * (1 / 255) - values[:num_patches]).abs().max() <= tolerance
    return digest(seen.numpy())


def _positions(positions: Any, num_patches: int) -> tuple[int, int]:
    """(rows, columns) that positions (x, y) count, row after row."""
    import torch

    columns, rows = (positions[:num_patches].max(0).values + 1).tolist()
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
    assert torch.equal(positions[:num_patches], grid)
    assert (positions[num_patches:] == -1).all()
    return rows, columns


def _main() -> None:
    import torch
    import torchvision
    import transformers
    from transformers.models.gemma4.image_processing_gemma4 import Gemma4ImageProcessor
    from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor
    from transformers.models.gemma4_unified.image_processing_gemma4_unified import Gemma4UnifiedImageProcessor
    from transformers.video_utils import VideoMetadata

    versions = {m.__name__: m.__version__ for m in (torch, torchvision, transformers)}
    found: dict[str, Any] = {"versions": versions, "images": {}, "unified": {}}
    for name, processor, sizes, pooling in (("images", Gemma4ImageProcessor(), SIZES, 9),
                                            ("unified", Gemma4UnifiedImageProcessor(), UNIFIED_SIZES, 1)):  # fmt: skip
        for height, width in sizes:
            for budget in BUDGETS:
                image = torch.from_numpy(picture(height, width)).permute(2, 0, 1)
                out = processor(images=[image], max_soft_tokens=budget, return_tensors="pt")
                count = int(out["num_soft_tokens_per_image"][0])
                grid = _positions(out["image_position_ids"][0], count * pooling)
                told = _of_pixel_values(out["pixel_values"][0], count * pooling)
                found[name][f"{height}x{width} at {budget}"] = [count, *grid, told]
    frames, height, width = VIDEO
    video = np.stack([picture(height, width, seed=n) for n in range(frames)])
    about = VideoMetadata(total_num_frames=frames, fps=FPS, duration=frames / FPS)
    out = Gemma4VideoProcessor()(videos=[video], video_metadata=[about], return_tensors="pt", return_metadata=True)
    count = 9 * int(out["num_soft_tokens_per_video"][0])
    times = [f"{int(s // 60):02d}:{int(s % 60):02d}" for s in out["video_metadata"][0].timestamps]
    of_frames = [_of_pixel_values(frame, count, 6e-8) for frame in out["pixel_values_videos"]]  # which are uint8 / 255
    found["video"] = [list(both) for both in zip(times, of_frames, strict=True)]
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{FILE}: {len(found['images'])} images, {len(found['video'])} frames", file=sys.stderr)


if __name__ == "__main__":
    _main()
