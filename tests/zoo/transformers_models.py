"""Model types of transformers, in tiny random configurations; nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.zoo.torchvision_models import Entry, import_torchvision

TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {**TEXT, "num_key_value_heads": 2}
VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}
SPEECH = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": (32, 32, 32),
    "conv_kernel": (10, 3, 2),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 32,
}
BART = {
    "vocab_size": 96,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5 = {
    "vocab_size": 96,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}

Inputs = Callable[[], Any]


def tokens(length: int = 12, vocab: int = 96) -> Inputs:
    def make() -> Any:
        ids = torch.randint(3, vocab, (2, length), generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return make


def pairs(length: int = 12) -> Inputs:
    def make() -> Any:
        found = tokens(length)()
        return {**found, "decoder_input_ids": found["input_ids"][:, :8].clone()}

    return make


def images(size: int = 32) -> Inputs:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


def waves(length: int = 4000) -> Inputs:
    return lambda: {"input_values": torch.randn(2, length)}


def spectra(key: str, *shape: int, decoder: bool = False) -> Inputs:
    def make() -> Any:
        found: dict[str, Any] = {key: torch.randn(2, *shape)}
        if decoder:
            found["decoder_input_ids"] = torch.randint(3, 96, (2, 6))
        return found

    return make


def both() -> Any:
    return {**tokens()(), "pixel_values": torch.randn(2, 3, 32, 32)}


LIST: tuple[tuple[str, dict[str, Any], Inputs], ...] = (
    # encoders
    ("BertForSequenceClassification", TEXT, tokens()),
    ("RobertaForMaskedLM", TEXT, tokens()),
    ("XLMRobertaForSequenceClassification", TEXT, tokens()),
    (
        "DistilBertForSequenceClassification",
        {"vocab_size": 96, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
        tokens(),
    ),
    ("AlbertForSequenceClassification", {**TEXT, "embedding_size": 32}, tokens()),
    ("ElectraForSequenceClassification", {**TEXT, "embedding_size": 32}, tokens()),
    ("DebertaForSequenceClassification", TEXT, tokens()),
    (
        "DebertaV2ForSequenceClassification",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        tokens(),
    ),
    ("MPNetForSequenceClassification", TEXT, tokens()),
    ("ConvBertForSequenceClassification", {**TEXT, "embedding_size": 64}, tokens()),
    ("SqueezeBertForSequenceClassification", {**TEXT, "embedding_size": 64}, tokens()),
    ("RoFormerForSequenceClassification", {**TEXT, "embedding_size": 64}, tokens()),
    ("FNetForSequenceClassification", TEXT, lambda: {"input_ids": tokens()()["input_ids"]}),
    (
        "MobileBertForSequenceClassification",
        {**TEXT, "embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
        tokens(),
    ),
    (
        "ModernBertForSequenceClassification",
        {**TEXT, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8},
        tokens(),
    ),
    ("RemBertForSequenceClassification", {**TEXT, "input_embedding_size": 32, "output_embedding_size": 64}, tokens()),
    ("EsmForSequenceClassification", {**TEXT, "position_embedding_type": "rotary"}, tokens()),
    (
        "XLNetForSequenceClassification",
        {"vocab_size": 96, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128},
        tokens(),
    ),
    # decoders
    ("GPT2LMHeadModel", {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}, tokens()),
    (
        "GPTNeoForCausalLM",
        {
            "vocab_size": 96,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
        },
        tokens(),
    ),
    ("GPTNeoXForCausalLM", TEXT, tokens()),
    (
        "GPTJForCausalLM",
        {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8},
        tokens(),
    ),
    ("OPTForCausalLM", {**TEXT, "ffn_dim": 128, "word_embed_proj_dim": 64}, tokens()),
    ("BloomForCausalLM", {"vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4}, tokens()),
    ("LlamaForCausalLM", LLAMA, tokens()),
    ("MistralForCausalLM", LLAMA, tokens()),
    ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}, tokens()),
    ("Qwen2ForCausalLM", {**LLAMA, "tie_word_embeddings": True}, tokens()),
    ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 16}, tokens()),
    (
        "Qwen2MoeForCausalLM",
        {
            **LLAMA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
        tokens(),
    ),
    ("GemmaForCausalLM", {**LLAMA, "head_dim": 16}, tokens()),
    ("Gemma2ForCausalLM", {**LLAMA, "head_dim": 16}, tokens()),
    ("Gemma3ForCausalLM", {**LLAMA, "head_dim": 16}, tokens()),
    ("PhiForCausalLM", TEXT, tokens()),
    ("Phi3ForCausalLM", LLAMA, tokens()),
    (
        "FalconForCausalLM",
        {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        tokens(),
    ),
    ("Starcoder2ForCausalLM", LLAMA, tokens()),
    ("StableLmForCausalLM", LLAMA, tokens()),
    ("OlmoForCausalLM", LLAMA, tokens()),
    ("Olmo2ForCausalLM", LLAMA, tokens()),
    ("CohereForCausalLM", LLAMA, tokens()),
    ("GraniteForCausalLM", LLAMA, tokens()),
    ("MptForCausalLM", {"vocab_size": 96, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}, tokens()),
    (
        "CodeGenForCausalLM",
        {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8},
        tokens(),
    ),
    ("MambaForCausalLM", {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}, tokens()),
    (
        "Mamba2ForCausalLM",
        {
            "vocab_size": 96,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 8,
        },
        tokens(),
    ),
    # encoder-decoders
    ("T5ForConditionalGeneration", T5, pairs()),
    ("MT5ForConditionalGeneration", T5, pairs()),
    ("LongT5ForConditionalGeneration", {**T5, "encoder_attention_type": "local", "local_radius": 4}, pairs()),
    ("BartForConditionalGeneration", BART, pairs()),
    ("MBartForConditionalGeneration", BART, pairs()),
    ("PegasusForConditionalGeneration", BART, pairs()),
    ("BlenderbotForConditionalGeneration", BART, pairs()),
    ("M2M100ForConditionalGeneration", BART, pairs()),
    ("MarianMTModel", BART, pairs()),
    # vision
    ("ViTForImageClassification", VISION, images()),
    ("DeiTForImageClassification", VISION, images()),
    ("BeitForImageClassification", {**VISION, "use_relative_position_bias": True}, images()),
    ("Dinov2ForImageClassification", {**VISION, "mlp_ratio": 2}, images()),
    (
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 32,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        images(),
    ),
    (
        "Swinv2ForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 32,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        images(),
    ),
    ("ConvNextForImageClassification", {"hidden_sizes": [32, 64], "depths": [1, 2], "num_stages": 2}, images()),
    ("ConvNextV2ForImageClassification", {"hidden_sizes": [32, 64], "depths": [1, 2], "num_stages": 2}, images()),
    ("SegformerForImageClassification", {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1]}, images(64)),
    (
        "PvtForImageClassification",
        {"hidden_sizes": [16, 32, 80, 64], "depths": [1, 1, 1, 1], "image_size": 64},
        images(64),
    ),
    ("PoolFormerForImageClassification", {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1]}, images(64)),
    ("LevitForImageClassification", {"image_size": 64, "hidden_sizes": [32, 48, 64], "depths": [1, 1, 1]}, images(64)),
    (
        "MobileViTForImageClassification",
        {"image_size": 64, "hidden_sizes": [32, 48, 64], "neck_hidden_sizes": [8, 16, 32, 48, 64, 80, 96]},
        images(64),
    ),
    ("MobileNetV2ForImageClassification", {"image_size": 64}, images(64)),
    ("ResNetForImageClassification", {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 2]}, images(64)),
    (
        "RegNetForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 2], "groups_width": 16},
        images(64),
    ),
    # speech and sound
    ("Wav2Vec2ForCTC", SPEECH, waves()),
    ("HubertForCTC", SPEECH, waves()),
    ("WavLMForCTC", SPEECH, waves()),
    (
        "WhisperForConditionalGeneration",
        {**BART, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32},
        spectra("input_features", 16, 40, decoder=True),
    ),
    (
        "Speech2TextForConditionalGeneration",
        {**BART, "input_feat_per_channel": 16, "conv_channels": 32, "max_source_positions": 64},
        spectra("input_features", 40, 16, decoder=True),
    ),
    (
        "ASTForAudioClassification",
        {k: v for k, v in VISION.items() if k != "image_size"} | {"max_length": 32, "num_mel_bins": 16},
        spectra("input_values", 32, 16),
    ),
    # two kinds of input
    ("CLIPModel", {"text_config": TEXT, "vision_config": VISION, "projection_dim": 32}, both),
    ("SiglipModel", {"text_config": TEXT, "vision_config": VISION}, both),
)


def everything() -> Iterator[Entry]:
    for name, config, inputs in LIST:
        yield Entry(f"transformers/{name}", lambda name=name, config=config: build(name, config), inputs)


def build(name: str, config: dict[str, Any]) -> nn.Module:
    import_torchvision()
    library = importlib.import_module("transformers")
    kind = getattr(library, name)
    torch.manual_seed(0)
    made: nn.Module = kind(kind.config_class(**config)).eval()
    return made


QUICK = tuple(
    f"transformers/{name}"
    for name in (
        "BertForSequenceClassification",
        "DebertaV2ForSequenceClassification",
        "ModernBertForSequenceClassification",
        "GPT2LMHeadModel",
        "BloomForCausalLM",
        "OPTForCausalLM",
        "LlamaForCausalLM",
        "Qwen3ForCausalLM",
        "Gemma3ForCausalLM",
        "Phi3ForCausalLM",
        "MambaForCausalLM",
        "T5ForConditionalGeneration",
        "BartForConditionalGeneration",
        "ViTForImageClassification",
        "SwinForImageClassification",
        "SegformerForImageClassification",
        "Wav2Vec2ForCTC",
        "WhisperForConditionalGeneration",
        "CLIPModel",
    )
)
