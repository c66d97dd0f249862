"""What config.json says of images and sound: as transformers reads it, and refused where it contradicts itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import (
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedAudioConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedTextConfig,
    Gemma4UnifiedVisionConfig,
    Gemma4VisionConfig,
)

from kerngen.errors import CheckpointError
from kerngen.runtime.media.config import MediaConfig, read_media_config, read_placeholders
from kerngen.workload.workload import MODELS, RELEASED


def released(name: str) -> MediaConfig:
    found = read_media_config(json.loads((RELEASED / name / "config.json").read_text()))
    assert found is not None
    return found


def written(config: Any) -> dict[str, Any]:
    """config.json as transformers writes it."""
    content: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return content


def test_defaults_are_those_of_transformers() -> None:
    """An empty section, and all that transformers writes of one, say the same."""
    text = {"hidden_size": 64}
    towers = Gemma4Config(
        text_config=Gemma4TextConfig(**text), vision_config=Gemma4VisionConfig(), audio_config=Gemma4AudioConfig()
    )
    empty = {"model_type": "gemma4", "text_config": text, "vision_config": {}, "audio_config": {}}
    assert read_media_config(written(towers)) == read_media_config(empty)
    unified = Gemma4UnifiedConfig(
        text_config=Gemma4UnifiedTextConfig(**text),
        vision_config=Gemma4UnifiedVisionConfig(),
        audio_config=Gemma4UnifiedAudioConfig(),
    )
    empty["model_type"] = "gemma4_unified"
    found = read_media_config(empty)
    assert read_media_config(written(unified)) == found
    assert found is not None
    assert found.bidirectional


@pytest.mark.parametrize("name", MODELS)
def test_released_models_take_what_they_are_known_to(name: str) -> None:
    found = released(name)
    assert found.vision is not None
    assert found.vision.default_tokens == 280
    assert found.vision.patch_size * found.vision.pooling == 48
    small = name in ("gemma-4-e2b", "gemma-4-e4b")
    assert found.bidirectional is not small
    assert (found.audio is not None) is (small or name == "gemma-4-12b")
    assert (found.vision.encoder is None) is (name == "gemma-4-12b")
    if found.vision.encoder is not None:
        assert (found.vision.encoder.clips, found.vision.encoder.standardizes) == (small, not small)
    assert (found.image_id, found.audio_id, found.video_id) == (258_880, 258_881, 258_884)


def test_a_model_of_text_alone_has_none() -> None:
    assert read_media_config({"model_type": "gemma4_text", "hidden_size": 64}) is None
    empty = {"model_type": "gemma4", "text_config": {}, "vision_config": None, "audio_config": None}
    assert read_media_config(empty) is None


@pytest.mark.parametrize(("config", "ids"), [
    ({}, {}),
    ({"image_token_id": 7, "audio_token_id": None}, {"image": 7}),
    ({"vision_config": {}}, {"image": 258_880, "video": 258_884, "audio": 258_881}),
    ({"audio_config": {}, "audio_token_id": 0}, {"image": 258_880, "video": 258_884, "audio": 0}),
])  # fmt: skip
def test_placeholders_are_known_to_who_reads_no_media_too(config: dict[str, Any], ids: dict[str, int]) -> None:
    assert read_placeholders({"model_type": "gemma4", "text_config": {"hidden_size": 64}, **config}) == ids
    found = read_media_config({"model_type": "gemma4", "text_config": {"hidden_size": 64}, **config})
    assert found is None or found.placeholders == ids


VISION: list[tuple[dict[str, Any], str]] = [
    ({"num_key_value_heads": 4}, "num_key_value_heads 4 is not num_attention_heads 12"),
    ({"head_dim": 66}, "head_dim 66 is no multiple of 4"),
    ({"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
    ({"attention_bias": True}, "attention_bias is true"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
    ({"patch_size": 0}, "patch_size is 0"),
    ({"pooling_kernel_size": 100}, "more than 1,024 pixels"),
    ({"use_clipped_linears": "yes"}, "use_clipped_linears is 'yes'"),
    ({"model_type": "siglip"}, "model_type is 'siglip'; known: gemma4_vision, gemma4_unified_vision"),
    ({"model_type": "gemma4_unified_vision", "model_patch_size": 32}, "model_patch_size is not patch_size 16 times"),
    ({"model_type": "gemma4_unified_vision", "output_proj_dims": 32}, "output_proj_dims is not mm_embed_dim 3840"),
]
AUDIO: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 7}, "does not split over 7 heads"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"subsampling_conv_channels": 128}, "subsampling_conv_channels must be"),
    ({"subsampling_conv_channels": [128, -1]}, "subsampling_conv_channels: channels is -1"),
    ({"attention_context_right": 2}, "attention_context_right is not 0"),
    ({"attention_chunk_size": 24}, "attention_chunk_size is not attention_context_left 13 less one"),
    ({"model_type": "gemma4_unified_audio", "hidden_size": 641}, "hidden_size is not audio_embed_dim 640"),
]


@pytest.mark.parametrize(("section", "values", "complaint"), [
    *(("vision_config", *case) for case in VISION), *(("audio_config", *case) for case in AUDIO),
    ("text_config", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    ("image_token_id", "<image>", "image_token_id is '<image>'"),
])  # fmt: skip
def test_what_contradicts_itself_is_refused(section: str, values: Any, complaint: str) -> None:
    config: dict[str, Any] = {
        "model_type": "gemma4", "text_config": {"hidden_size": 64}, "vision_config": {}, "audio_config": {},
    }  # fmt: skip
    config[section] = values if isinstance(values, str) else config[section] | values
    with pytest.raises(CheckpointError, match=complaint) as caught:
        read_media_config(config, "some/config.json")
    assert caught.value.message.startswith("some/config.json")
