"""What has to come out alike: a layer's tensors behind split and join, and tokens in every way to decode.

It imports nothing of kvfold, so that scripts use it which run where kvfold is not installed.
"""

from typing import Any

import torch


def comes_back(family: Any, config: Any, layer: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """Join is the inverse of split, bit for bit; the record in between."""
    family = family.of(config)
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in family.shapes(layer).items()}
    record = family.split(tensors, layer)
    back = family.join(record, family.spec, layer)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == dtype
        assert torch.equal(back[name], tensor), name
    return record


def decodes_alike(model: Any, ids: torch.Tensor, static: bool = True, count: int = 8) -> torch.Tensor:
    """Greedy tokens without a cache, which are those with one, with a static one, and behind padding."""
    asked: dict[str, Any] = {"max_new_tokens": count, "do_sample": False}
    padded, mask = torch.nn.functional.pad(ids, (3, 0)), torch.nn.functional.pad(torch.ones_like(ids), (3, 0))
    with torch.inference_mode():
        whole: torch.Tensor = model.generate(ids, use_cache=False, **asked)
        assert torch.equal(model.generate(ids, **asked), whole)
        assert torch.equal(model.generate(padded, attention_mask=mask, **asked)[:, 3:], whole)
        if static:
            assert torch.equal(model.generate(ids, cache_implementation="static", **asked), whole)
    return whole


def reads_its_cache(model: Any, close: float = 1e-4) -> int:
    """A token over the cache of those before it has the logits that it has with them; how many KV heads the cache has."""
    ids = torch.randint(4, 89, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        last, whole = model(ids[:, -1:], past_key_values=cache).logits, model(ids).logits
    torch.testing.assert_close(last[:, -1], whole[:, -1], rtol=close, atol=close)
    return int(cache.layers[-1].keys.shape[1])
