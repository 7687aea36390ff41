"""Every tensor of every family has a name and a role, each found from the other; what is fused or transposed comes apart."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SWITCHES, tiny_config, tiny_model

from attention.errors import Failure
from convert.families import FAMILIES, Family
from convert.families.names import NameTable, Place, Row
from eval.inputs.reader import Reader

GPT2 = FAMILIES["gpt2"].names
THREE = tuple(f"layers.{{layer}}.mlp.shared.{part}" for part in ("gate", "up", "down"))
MLP = ("gate", "up", "down")
ROLES = {
    *("embedding", "positions", "padding_positions", "embedding_projection", "embedding_norm", "final_norm", "head_projection"),
    "head",
    *(f"layers.{{layer}}.{role}" for role in (
        "attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm", "mlp.activation", "mlp.router",
        "mlp.shared_router", *(f"mlp.{part}" for part in MLP), *(f"mlp.experts.{{expert}}.{part}" for part in MLP),
        *(f"mlp.experts.{part}" for part in MLP), *(f"mlp.shared.{part}" for part in MLP),
    )),
}  # fmt: skip
NUMBER = re.compile(r"\{(\w+)\}")
FUSED = NameTable([Row("decoder.{layer}.all", THREE), Row("turned.{layer}", ("layers.{layer}.mlp.up",), transposed=True)])


ROWS: list[tuple[str, dict[str, Any]]] = [
    *((model_type, {}) for model_type in FAMILIES),
    ("falcon", {"parallel_attn": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1}),
]


@pytest.fixture(scope="module", params=ROWS, ids=lambda row: "-".join([row[0], *row[1]]))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Reader, Family]:
    """A checkpoint with every switch on: its config, its tensors and their family."""
    model_type, changes = request.param
    model = tiny_model(tiny_config(model_type, **dict.fromkeys((*SWITCHES, "mlp_bias"), True), **changes))
    path = tmp_path_factory.mktemp(model_type)
    model.save_pretrained(path)
    return model.config, Reader(path), FAMILIES[model_type].of(model.config)


def test_every_tensor_of_a_checkpoint_is_an_attentions_or_has_a_place(saved: tuple[Any, Reader, Family]) -> None:
    config, reader, family = saved
    attention = {name for layer in range(config.num_hidden_layers) for name in family.shapes(layer)}
    assert attention < reader.infos.keys()
    roles: list[str] = []
    for name in reader.infos.keys() - attention:
        place = family.names.place(name)
        assert place is not None, name
        assert place.name == name
        for role in place.roles:
            assert family.names.holding(role) == place
        roles += place.roles
        tensor = reader[name]
        parts = place.split(tensor)
        assert tuple(parts) == place.roles
        assert torch.equal(place.join(parts).to(tensor.dtype), tensor)
    assert len(set(roles)) == len(roles)
    assert all(family.names.place(name) is None for name in attention)


def test_roles_mean_what_the_class_does(saved: tuple[Any, Reader, Family]) -> None:
    config, reader, family = saved
    names = family.names
    shapes: dict[str, tuple[int, ...]] = {}
    for name in reader.infos:
        if place := names.place(name):
            shapes |= {role: tuple(part.shape) for role, part in place.split(reader[name]).items()}
    width, vocabulary = config.hidden_size, config.vocab_size
    assert shapes["embedding.weight"] == (vocabulary, width)
    assert shapes.get("head.weight", (vocabulary, width)) == (vocabulary, width)
    into = {shape[-2:] for role, shape in shapes.items() if role.endswith(("gate.weight", "up.weight"))}
    out = {shape[-2:] for role, shape in shapes.items() if role.endswith("down.weight")}
    assert into
    assert {(wide, narrow) for narrow, wide in into} == out
    assert all(shape[-1] == width for shape in into)
    assert all(shape == (width,) for role, shape in shapes.items() if "norm." in role)


def test_fused_projections_are_the_gate_and_then_what_it_multiplies() -> None:
    model = tiny_model(tiny_config("glm"))
    mlp, place = model.model.layers[1].mlp, FAMILIES["glm"].names.place("model.layers.1.mlp.gate_up_proj.weight")
    parts = place.split(mlp.gate_up_proj.weight.detach())
    x = torch.randn(3, 64)
    gate, up = (x @ parts[f"layers.1.mlp.{part}.weight"].T for part in ("gate", "up"))
    torch.testing.assert_close(mlp.down_proj(torch.nn.functional.silu(gate) * up), mlp(x))


def test_gpt2_by_its_table() -> None:
    up = GPT2.place("transformer.h.11.mlp.c_fc.weight")
    assert up == Place("transformer.h.11.mlp.c_fc.weight", ("layers.11.mlp.up.weight",), transposed=True)
    bias = GPT2.place("transformer.h.11.mlp.c_fc.bias")
    assert bias == Place("transformer.h.11.mlp.c_fc.bias", ("layers.11.mlp.up.bias",))
    assert GPT2.place("transformer.wpe.weight") == Place("transformer.wpe.weight", ("positions.weight",))
    assert GPT2.holding("layers.3.mlp.down.weight") == Place(
        "transformer.h.3.mlp.c_proj.weight", ("layers.3.mlp.down.weight",), transposed=True
    )
    weight = torch.randn(8, 32)
    assert torch.equal(up.split(weight)["layers.11.mlp.up.weight"], weight.T)


@pytest.mark.parametrize(
    "name",
    [
        "transformer.h.11.attn.c_attn.weight", "transformer.h.011.ln_1.weight", "transformer.h.-1.ln_1.weight",
        "transformer.h.1.2.ln_1.weight", "transformer.h.{layer}.ln_1.weight", "transformer.h.x.ln_1.weight",
        "transformer_wte.weight", "atransformer.wte.weight", "transformer.wte", "wte.weight", "", ".", "weight",
        "transformer.wte\n.weight", "transformer.h.1٣.ln_1.weight",
    ],
)  # fmt: skip
def test_other_names_have_no_place(name: str) -> None:
    assert GPT2.place(name) is None
    assert GPT2.holding(name) is None


def test_last_parts_stay_as_they_are() -> None:
    names = FAMILIES["apertus"].names
    assert names.place("model.layers.2.mlp.act_fn.alpha_p") == Place(
        "model.layers.2.mlp.act_fn.alpha_p", ("layers.2.mlp.activation.alpha_p",)
    )
    assert FUSED.place("decoder.2.all.alpha_p") is None, "nothing is known of how such parts would be fused"
    assert FUSED.holding("layers.2.mlp.shared.up.alpha_p") is None


@settings(deadline=None)
@given(data=st.data())
def test_join_is_the_inverse_of_split(data: st.DataObject) -> None:
    roles = tuple(f"r{i}" for i in range(data.draw(st.integers(1, 4), "roles")))
    last = data.draw(st.sampled_from(["weight", "bias"]), "last part")
    place = Place(f"x.{last}", roles, last == "weight" and data.draw(st.booleans(), "transposed"))
    dims = data.draw(st.lists(st.integers(1, 4), min_size=1 if last == "bias" else 2, max_size=3), "shape of a part")
    generator = torch.Generator().manual_seed(0)
    parts = {role: torch.randn(dims, generator=generator) for role in roles}
    whole = place.join(parts)
    back = place.split(whole)
    assert tuple(back) == roles
    assert all(torch.equal(back[role], parts[role]) for role in roles)


@pytest.mark.parametrize("shape", [(7, 5), (5,), ()], ids=str)
def test_what_does_not_divide_fails(shape: tuple[int, ...]) -> None:
    place = FUSED.place("decoder.0.all.weight")
    with pytest.raises(Failure, match=r"decoder\.0\.all\.weight is \[.*\] and should hold 3 projections of equal size"):
        place.split(torch.zeros(shape))


def test_a_first_part_of_its_own_size() -> None:
    place = FAMILIES["opt"].names.holding("positions.weight")
    stored = torch.randn(7, 5)
    parts = place.split(stored)
    assert torch.equal(parts["positions.weight"], stored[2:]), "behind two rows that only padding reads"
    assert torch.equal(place.join(parts), stored)
    with pytest.raises(Failure, match=r"is \[2, 5\] and should hold 2 rows of padding_positions\.weight and then positions"):
        place.split(stored[:2])
    with pytest.raises(Failure, match=r"holds 2 rows of padding_positions\.weight and then positions\.weight, and there are"):
        place.join(dict.fromkeys(parts, stored[:3]))


def test_gains_that_are_stored_less_one() -> None:
    names = FAMILIES["nemotron"].names
    places = (names.place(f"model.{part}") for part in ("norm.weight", "norm.bias", "layers.0.mlp.up_proj.weight"))
    assert [place.offset for place in places] == [1, 0, 0], "a bias is stored as it is"


def test_a_vector_is_not_transposed() -> None:
    place = FUSED.place("turned.0.weight")
    with pytest.raises(Failure, match=r"turned\.0\.weight is \[4\] and should be a matrix"):
        place.split(torch.zeros(4))
    with pytest.raises(Failure, match=r"layers\.0\.mlp\.up\.weight is \[4\] and should be a matrix"):
        place.join({"layers.0.mlp.up.weight": torch.zeros(4)})


def test_parts_of_unequal_size_are_not_joined() -> None:
    place = FUSED.place("decoder.0.all.weight")
    shapes = dict(zip(place.roles, [(2, 3), (3, 3), (2, 3)], strict=True))
    message = r"all\.weight holds 3 projections of equal size, and there are layers\.0\.mlp\.shared\.gate\.weight \[2, 3\] and"
    with pytest.raises(Failure, match=message):
        place.join({role: torch.zeros(shape) for role, shape in shapes.items()})


def test_replacing_rows() -> None:
    changed = GPT2.replacing(
        Row("transformer.h.{layer}.ln_2", ("layers.{layer}.attention_output_norm",)),
        Row("norm", ("final_norm",)),
        without=("positions",),
    )
    assert changed.holding("layers.0.mlp_norm.weight") is None, "its path is another role's now"
    assert changed.place("transformer.ln_f.weight") is None, "its role is at another path now"
    assert changed.place("transformer.wpe.weight") is None
    assert changed.place("transformer.wte.weight") == GPT2.place("transformer.wte.weight")
    assert len(changed.rows) == len(GPT2.rows) - 1


def test_no_table_contradicts_itself_and_every_role_is_of_some_use() -> None:
    used = set()
    for name, family in FAMILIES.items():
        rows = family.names.rows
        roles = [role for row in rows for role in row.roles]
        assert len({row.name for row in rows}) == len(rows), name
        assert len(set(roles)) == len(roles), name
        assert all(set(NUMBER.findall(role)) == set(NUMBER.findall(row.name)) for row in rows for role in row.roles), name
        used |= set(roles)
    assert used == ROLES
