"""Drafts of Gemma-4's MTP drafters by kerngen's heads: which class serves vLLM's drafter is a module a release."""

from __future__ import annotations

from typing import Any

import vllm
from vllm import ModelRegistry
from vllm.model_executor.models import config as models

from kerngen.vllm.plugin import release_of

NAME = "Gemma4MTPModel"


def install() -> None:
    """Have vLLM make the drafter by this release's class, and ask it for tokens. vLLM imports that class when a model
    asks for it.
    """
    release = release_of(vllm.__version__).replace(".", "_")
    ModelRegistry.register_model(NAME, f"kerngen.vllm.head_v{release}:Gemma4MTP")
    made: dict[Any, Any] = {}
    for name, config in models.MODELS_CONFIG_MAP.items():  # by the model that is drafted for
        if issubclass(config, models.Gemma4Config) and not issubclass(config, AsksForTokens):
            if config not in made:
                made[config] = type(config.__name__, (AsksForTokens, config), {})
            models.MODELS_CONFIG_MAP[name] = made[config]


class AsksForTokens:
    """Before a model's configuration in vLLM's list: its drafter is asked for tokens, not for logits."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """As of the class that stands behind this one; and vLLM's `use_local_argmax_reduction` for an MTP drafter that
        drafts greedily. vLLM has it off: without this plug-in only heads with centroids give tokens.
        """
        super().verify_and_update_config(vllm_config)  # type: ignore[misc]
        drafting = vllm_config.speculative_config
        model = None if drafting is None else drafting.draft_model_config
        if model is None or NAME not in model.architectures or drafting.use_heterogeneous_vocab:
            return
        if drafting.draft_sample_method == "greedy":
            drafting.use_local_argmax_reduction = True
