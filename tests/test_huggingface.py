"""transformers models: cut without hints, saved and loaded in their own way."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import sapwood as sw
from sapwood.storage.huggingface import from_pretrained, save_pretrained
from tests.helpers import build, halve, outputs, size
from tests.zoo.torchvision_models import import_torchvision

transformers = pytest.importorskip("transformers")
with contextlib.suppress(ImportError):
    import_torchvision()  # transformers imports it; its fake registrations must be skipped

TOKENS = {"input_ids": torch.arange(2 * 12).view(2, 12) % 50}


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.BertForSequenceClassification(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


MODELS = {"llama": llama, "bert": bert, "gpt2": gpt2}


def inputs_for(name: str) -> dict[str, Any]:
    return TOKENS if name == "bert" else {**TOKENS, "use_cache": False}


@pytest.mark.parametrize("name", MODELS)
def test_heads_and_hidden_channels_go_without_a_hint(name: str) -> None:
    model = MODELS[name]()
    done = halve(model, inputs_for(name))
    assert done.check.passed and done.check.max_error < 1e-4 and not done.plan.notes
    body = [n for n, _ in model.named_parameters() if "embed" not in n and "wte" not in n and "wpe" not in n]
    left = sum(dict(done.model.named_parameters())[n].numel() for n in body)
    assert left / sum(dict(model.named_parameters())[n].numel() for n in body) < 0.35
    if name == "llama":
        attention = done.model.model.layers[0].self_attn
        assert attention.q_proj.weight.shape[0] == 16 and attention.k_proj.weight.shape[0] == 8
        assert done.model.lm_head.weight is done.model.model.embed_tokens.weight


@pytest.mark.parametrize("name", MODELS)
def test_save_pretrained_and_back(name: str, tmp_path: Path) -> None:
    done = halve(MODELS[name](), inputs_for(name))
    save_pretrained(done.model, done.plan, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["sapwood"]["keep"] and config["sapwood"]["achieved"]["params"] < 10**6
    assert not hasattr(done.model.config, "sapwood")
    small = from_pretrained(tmp_path)
    assert type(small) is type(done.model) and size(small) == size(done.model)
    for a, b in zip(outputs(small, inputs_for(name)), outputs(done.model, inputs_for(name)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", MODELS)
def test_a_bundle_builds_its_model_by_itself(name: str, tmp_path: Path) -> None:
    done = halve(MODELS[name](), inputs_for(name))
    sw.save(tmp_path, done.model, done.plan)
    small = sw.load(tmp_path)
    assert torch.equal(outputs(small, inputs_for(name))[0], outputs(done.model, inputs_for(name))[0])
    with torch.device("meta"):
        empty = MODELS[name]()
    filled = sw.load(tmp_path, empty)
    assert torch.equal(outputs(filled, inputs_for(name))[0], outputs(done.model, inputs_for(name))[0])


def test_what_transformers_wrote_is_plain(tmp_path: Path) -> None:
    done = halve(llama(), inputs_for("llama"))
    save_pretrained(done.model, done.plan, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) <= set(done.model.state_dict())


def test_other_models_and_folders_are_refused(tmp_path: Path) -> None:
    model, inputs = build("plain_chain")
    done = halve(model, inputs)
    with pytest.raises(sw.SapwoodError, match="transformers model"):
        save_pretrained(done.model, done.plan, tmp_path)
    with pytest.raises(sw.SapwoodError, match=r"config\.json"):
        from_pretrained(tmp_path)
    llama().save_pretrained(tmp_path)
    with pytest.raises(sw.SapwoodError, match="what was cut"):
        from_pretrained(tmp_path)
