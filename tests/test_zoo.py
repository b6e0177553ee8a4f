"""A subset of each section of the zoo, as ``make zoo`` runs all of it."""

from __future__ import annotations

import importlib
import importlib.util
import statistics

import pytest

import sapwood as sw
from tests.zoo import SECTIONS, entry
from tests.zoo.harness import Row, randomise, run_entry

ROWS: dict[tuple[str, str], Row] = {}


LONG = ("video/mvit_v2_s", "maxvit_t", "swin_v2_t", "video/swin3d_t")  # left to ``make zoo``


def cases() -> list[tuple[str, str]]:
    found = [(s, n) for s in SECTIONS for n in importlib.import_module(f"tests.zoo.{s}_models").QUICK]
    return [(s, n) for s, n in found if n not in LONG]


@pytest.mark.parametrize(("section", "name"), cases(), ids=lambda part: part)
def test_quick_zoo(section: str, name: str) -> None:
    for needed in {"torchvision", section}:  # timm and transformers import torchvision
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    found = entry(section, name)
    row = ROWS[section, name] = run_entry(found.name, found.build, found.inputs, count_flops=False)
    assert row.ok, row.problem or f"{row.status}, error {row.max_error}"
    assert row.left_whole == 0
    assert row.body_left <= 0.70  # of the weights; half of the channels are asked for


@pytest.mark.parametrize("section", SECTIONS)
def test_most_cuts_leave_a_quarter(section: str) -> None:
    own = [row for (part, _), row in ROWS.items() if part == section]
    if len(own) < sum(part == section for part, _ in cases()):
        pytest.skip("needs the rows of the whole quick zoo, in one process (pytest without -n)")
    assert statistics.median(r.body_left for r in own) <= 0.30


HEADS = {
    "BertForSequenceClassification": ("attention.self.query.weight", "intermediate.dense.weight"),
    "GPT2LMHeadModel": ("attn.c_attn.weight", "mlp.c_fc.weight"),
    "LlamaForCausalLM": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "mlp.up_proj.weight"),
    "ViTForImageClassification": ("attention.q_proj.weight", "mlp.fc1.weight"),
    "SwinForImageClassification": ("attention.q_proj.weight", "mlp.fc1.weight"),
}


@pytest.mark.parametrize("name", [*HEADS, "one key for each query"])
def test_attention_loses_heads_or_their_width_without_a_hint(name: str) -> None:
    for needed in ("torchvision", "transformers"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    from tests.zoo import transformers_models as zoo

    if name in HEADS:
        found = entry("transformers", f"transformers/{name}")
        model, inputs, ends = randomise(found.build()), found.inputs(), HEADS[name]
    else:
        model = randomise(zoo.build("LlamaForCausalLM", {**zoo.TEXT, "num_key_value_heads": 4}))
        inputs, ends = zoo.tokens()(), HEADS["LlamaForCausalLM"]
    done = sw.prune(model, inputs, sw.Budget(channels=0.5), allocate="uniform")
    small, seen = dict(done.model.named_parameters()), 0
    for key, tensor in model.named_parameters():
        if key.endswith(ends):
            assert [2 * n for n in small[key].shape] == list(tensor.shape), key
            seen += 1
    assert seen >= 2 * len(ends) and not done.plan.notes
