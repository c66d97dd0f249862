"""Each item to what embeds its kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kerngen.errors import UsageError
from kerngen.runtime.media.config import BOTH, MediaConfig
from kerngen.runtime.media.options import WORDS, part_of
from kerngen.runtime.media.towers.audio import AudioTower, require_sound
from kerngen.runtime.media.towers.vision import VisionTower, require_image
from kerngen.runtime.media.values import Media


class Tower(Protocol):
    """Embeds one kind of media. weights: its tensors, as a dataclass."""

    weights: Any

    def embed(self, items: Sequence[Media]) -> list[Tensor]:
        """[num_tokens, H] of each item, in the activations' dtype, on their device. They take the place of the rows of
        the embedding table, after its scale. Raises UsageError for an item that does not fit.
        """


def require_fits(config: MediaConfig, item: Media) -> None:
    """Raises UsageError for an item that was not made for a model of that config, which its towers would refuse."""
    if item.kind == "audio" and (audio := config.audio) is not None:
        frames = len(item.data)
        require_sound(item, audio.num_features, frames if audio.encoder is None else -(-frames // 4))
    elif item.kind != "audio" and config.vision is not None:
        require_image(item, config.vision)


@dataclass(frozen=True, slots=True)
class Towers:
    """What a model embeds media with; None for what it does not take, or was not loaded."""

    vision: Tower | None = None
    audio: Tower | None = None

    @property
    def weights(self) -> tuple[Any, ...]:
        return tuple(tower.weights for tower in (self.vision, self.audio) if tower is not None)

    def warm_up(self) -> None:
        """As VisionTower.warm_up and AudioTower.warm_up: torch computes what the others do."""
        for tower in (self.vision, self.audio):
            if isinstance(tower, VisionTower | AudioTower):
                tower.warm_up()

    def embed(self, items: Sequence[Media]) -> list[Tensor]:
        """As Tower.embed, of items of any kind in any order. Raises UsageError for a kind that has no tower."""
        found: dict[int, Tensor] = {}
        for part in BOTH:
            mine = [i for i, item in enumerate(items) if part_of(item.kind) == part]
            if not mine:
                continue
            if (tower := getattr(self, part)) is None:
                raise UsageError(f"the model has nothing loaded that embeds {WORDS[part]}")
            found |= zip(mine, tower.embed([items[i] for i in mine]), strict=True)
        return [found[i] for i in range(len(items))]
