"""Whether kvfold's class holds a type that experiments found: a small twin of full size has to lose nothing there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attention.errors import Refusal, one_line
from attention.record import Attention

if TYPE_CHECKING:
    import torch

    from attention.record import Record
    from convert.families import Family
    from convert.families.reading.twin import Twin
    from convert.hosts.base import Host
    from convert.methods.latent import LatentMethod

_ALIKE = 1e-4  # of the largest logit


def require_held(host: Host, family: Family, method: LatentMethod | None = None) -> None:
    """Refuse a found type that kvfold's class does not hold. Rows of types were tested.

    Args:
        host: The output class.
        family: Of the source, bound to its config.
        method: Of MLA, any: at full size each is exact. None for GQA and MQA.

    Raises:
        Refusal: The twin's logits change, or it does not run.
    """
    if family.is_row or host.kind != "kvfold":
        return
    from attention.models.modeling_kvfold import require_decoding
    from convert.families.reading.twin import Twin, near

    hint = "GQA and MQA stay in its own class" if family.shares_heads else "`convert eval` measures it all the same"
    try:
        twin = Twin(family.config)
        before = twin.logits(twin.text())
        made = _full_size(host, family.of(twin.config), twin, method)
        after = made(twin.text(), use_cache=False).logits
        require_decoding(made)
    except Exception as error:  # classes raise errors of many kinds
        said = f"a small model of {family.config.model_type} in {host.name}'s class does not run: {one_line(error, 200)}"
        raise Refusal(said, hint=hint) from None
    if not near(after, before, _ALIKE):
        raise Refusal(f"{host.name}'s class does not compute what {family.config.model_type} does, on a small model", hint=hint)


def _full_size(host: Host, family: Family, twin: Twin, method: LatentMethod | None) -> Any:
    """The twin in the host's class, with all its KV heads or as MLA of full size."""
    from attention.models.configuration_kvfold import KvfoldConfig
    from attention.models.modeling_kvfold import KvfoldForCausalLM
    from convert.methods.latent import Allocation
    from convert.methods.statistics import Statistics

    config, spec, rotary = twin.config, family.spec, family.first_rotary
    pairs = tuple(pair for pair in range(len(rotary.frequencies)) for _ in range(spec.num_kv_heads)) if rotary else ()
    target = spec.latent(family.latent_dims(2 * len(pairs)), 2 * len(pairs)) if method else spec
    allocation = Allocation(target.kv_lora_rank or 0, pairs, rotary=rotary)
    state, layout = twin.model.state_dict(), host.layout(family)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(spec.num_layers):
        record: Record = family.split({name: state.pop(name) for name in family.shapes(layer)}, layer)
        assert isinstance(record, Attention), "experiments find heads"
        statistics = Statistics.assumed(config.hidden_size)
        if host.reads_projections(family):
            record = record.on_projected_inputs(family.traits.clip)
            assert record.projections is not None
            statistics = statistics.behind(record.projections)
        if method:
            record = method.factor(record, allocation, statistics)
        tensors |= layout.join(record, target, layer)
    tensors |= {kept: tensor for name, tensor in state.items() if (kept := layout.beside(name)) is not None}
    chosen = rotary.select(pairs, "half") if rotary and method else None
    model = KvfoldForCausalLM(KvfoldConfig(**host.config(config.to_dict(), family, target, chosen))).float().eval()
    model.load_state_dict(tensors)
    return model
