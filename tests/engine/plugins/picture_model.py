"""Gemma 4 for text and pictures, where a picture comes as the embeddings of its tokens.

The releases' own class stands on transformers' processor and that on torchvision, of which
PyPI has no build for a torch without CUDA. What offloading sees of a picture is the same:
placeholder tokens that every picture has, and vLLM's hash of the picture in the block hashes.
"""

import torch
from transformers import BatchFeature
from vllm.model_executor.models.gemma4 import Gemma4ForCausalLM
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
)


class Info(BaseProcessingInfo):
    def get_supported_mm_limits(self):
        return {"image": None}

    def get_supported_mm_processor_kwargs(self):
        return {}


class DummyInputs(BaseDummyInputsBuilder[Info]):
    def get_dummy_text(self, mm_counts) -> str:
        return self.info.get_tokenizer().unk_token * mm_counts["image"]

    def get_dummy_mm_data(self, seq_len, mm_counts, mm_options):
        config = self.info.get_hf_config()
        picture = torch.zeros(config.picture_tokens, config.hidden_size)
        return {"image": [picture] * mm_counts["image"]}


class Processor(BaseMultiModalProcessor[Info]):
    def _call_hf_processor(self, prompt, **kwargs) -> BatchFeature:
        return BatchFeature({"input_ids": [self.info.get_tokenizer().encode(prompt)]})

    def _get_mm_fields_config(self, hf_inputs, hf_processor_mm_kwargs):
        return {"image_embeds": MultiModalFieldConfig.batched("image")}

    def _get_prompt_updates(self, mm_items, hf_processor_mm_kwargs, out_mm_kwargs):
        config = self.info.get_hf_config()
        placeholder = [config.picture_token_id]
        replacement = placeholder * config.picture_tokens
        return [PromptReplacement("image", target=placeholder, replacement=replacement)]


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=DummyInputs)
class Gemma4WithPictures(Gemma4ForCausalLM, SupportsMultiModal):
    def get_language_model(self):
        return self

    def embed_multimodal(self, image_embeds, **kwargs):
        return list(image_embeds)

    def embed_input_ids(self, input_ids, multimodal_embeddings=None, *, is_multimodal=None):
        embeddings = super().embed_input_ids(input_ids)
        if multimodal_embeddings:
            embeddings[is_multimodal] = torch.cat(tuple(multimodal_embeddings))
        return embeddings
