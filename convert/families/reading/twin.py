"""A small twin of a checkpoint's class: narrow layers of each kind, random weights, short windows; and the proof of a reading.

What decides what an attention computes stays as the config has it: head sizes, norms, biases, RoPE, scales, kinds of layers.
A reading of the config is right if the twin's attention computes what the record says (`attention.forward`).
"""

import contextlib
import copy
import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import set_module_tensor_to_device

from attention.auto import from_config
from attention.forward import Block, output_of
from attention.record import Attention, Record
from convert.families.base import Family, decoder_of

_SHORT = 6  # tokens: what windows become, and lengths from which on a class does something else, so that texts pass them
_LENGTHS = re.compile("window|chunk|original_max_position|span|horizon")
_VOCABULARY = 64
_LIMITS = (  # of numbers in the config, by their names
    (_LENGTHS, _SHORT),
    (re.compile("intermediate|ffn|n_inner|mlp_hidden"), 32),
    (re.compile("_experts$"), 16),
    (re.compile("_token_id$"), _VOCABULARY - 1),
)
_MOST = 300_000_000  # parameters
_FAR = 1 << 13  # position, at which angles are still exact enough to show a scale that is wrong by a hundredth
_FARTHEST = 1 << 17  # position; a class whose angles are fp32 is too inexact beyond
EQUAL = 2e-5  # of the size of an output: what fp32 rounds
_ANGLE = 1e-7  # the same for each position that a text starts at: what fp32 angles cost


@dataclass(frozen=True)
class Shape:
    """What a twin has of everything.

    Attributes:
        heads: Query heads; two share a KV head.
        layers: The first layers of the source, besides one of each kind.
        tokens: Of its text.
        weights: Their size, over the root of their inputs. At 1.6 logits reach a cap, and no softmax is flat.
        equal: What an output may differ by, relative to its largest value.
    """

    heads: int = 4
    layers: int = 4
    tokens: int = 20
    weights: float = 1.6
    equal: float = EQUAL


SMALL = Shape()
# Shows what depends on the width, on layers further on, on longer texts, and clamps that only large numbers reach.
OTHER = Shape(6, 13, 400, 5.0, 2e-3)


@dataclass(frozen=True)
class Call:
    """One call of a module.

    Attributes:
        read: Its input.
        gave: Its output, the first of several.
        cosines: Of RoPE, `[…, T, columns]`, if it was given any.
        times: How often the module was called before.
    """

    read: torch.Tensor
    gave: torch.Tensor
    cosines: torch.Tensor | None = None
    times: int = 0


class Twin:
    """A twin of the class of `config`, fp32.

    Of a class that has a decoder inside, all else stays without weights.

    Attributes:
        shape: Its sizes.
        config: The small config.
        lists: The names of the source's lists that have an entry for each layer.
        layers: The source's layer that each layer of the twin stands for.
        model: The class, with random weights.
        stored: The names of parameters and buffers in checkpoints by those in the class, to which loading may rename them.
    """

    def __init__(self, config: Any, shape: Shape = SMALL) -> None:
        from accelerate import init_empty_weights
        from transformers.initialization import no_init_weights

        self.shape, self.lists = shape, per_layer(config)
        self.config, self.layers = _shrunk(config, shape)
        ways = {"attn_implementation": "eager", "experts_implementation": "eager"}
        with _silent(), init_empty_weights(include_buffers=False), no_init_weights():
            self.model = from_config(self.config, dtype=torch.float32, **ways).eval()
        self.model.tie_weights()
        self._fill()

    def _fill(self) -> None:
        """Give the decoder, its embeddings and its head random weights; models inside it, such as one that sees, have none."""
        from transformers import PreTrainedConfig
        from transformers.core_model_loading import revert_weight_conversion

        parts, inside = [self.model], self.decoder is not self.config
        if inside:
            parts = [self.model.get_decoder(), self.model.get_input_embeddings(), self.model.get_output_embeddings()]
        wanted = {id(weight) for part in parts for weight in part.parameters()}
        for module in (module for part in parts for module in part.modules()):
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig) and not isinstance(config, type(self.decoder)):
                wanted -= {id(weight) for weight in module.parameters()}
        found = [(name, weight) for name, weight in self.model.named_parameters() if id(weight) in wanted]
        if (size := sum(weight.numel() for _, weight in found)) > _MOST:
            raise ValueError(f"{size:,} parameters are left of it, which is not small")
        generator = torch.Generator().manual_seed(0)
        for name, weight in found:
            drawn = torch.randn(weight.shape, generator=generator)
            # gains and biases are vectors
            value = drawn * self.shape.weights * weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.6 + 0.4 * drawn
            set_module_tensor_to_device(self.model, name, "cpu", value=value)
        self.model.tie_weights()
        self.model.requires_grad_(False)
        # Around a decoder, tensors are known by their names in the class, and so is what is made of several, such as experts.
        state = self.model.state_dict()
        written = {} if inside else {id(tensor): name for name, tensor in revert_weight_conversion(self.model, state).items()}
        self.stored = {name: written.get(id(tensor), name) for name, tensor in state.items()}

    @property
    def decoder(self) -> Any:
        """The part of the small config that describes the decoder."""
        return decoder_of(self.config)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Parameters by their names in checkpoints; shared ones have several."""
        return {self.stored.get(name, name): tensor for name, tensor in self.model.named_parameters(remove_duplicate=False)}

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by their names in checkpoints."""
        return {self.stored[name]: tensor for name, tensor in self.model.state_dict().items()}

    @property
    def farthest(self) -> int:
        """The last position that a text can start at."""
        return max(0, min(self._positions or 0, _FARTHEST) - self.shape.tokens)

    @property
    def _positions(self) -> int | None:
        """How many positions the class has, if its config says."""
        stated = getattr(self.decoder, "max_position_embeddings", None)
        return stated if isinstance(stated, int) and stated > 0 else None

    def calls(self, start: int = 0) -> dict[str, Call]:
        """The calls of all modules by path, in a forward pass over a text whose first position is `start`."""
        found: dict[str, Call] = {}

        def note(path: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            states = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.is_floating_point()]
            given = kwargs.get("hidden_states", states[0] if states else None)
            gave = output[0] if isinstance(output, tuple) else output
            if given is not None and isinstance(gave, torch.Tensor):
                angles = kwargs.get("position_embeddings")
                times = found[path].times + 1 if path in found else 0
                found[path] = Call(given, gave, angles[0] if isinstance(angles, tuple) else None, times)

        with contextlib.ExitStack() as hooks:
            for path, module in self.model.named_modules():
                hooks.enter_context(module.register_forward_hook(partial(note, path), with_kwargs=True))
            self.logits(self.text(), start)
        return found

    def text(self) -> torch.Tensor:
        """Tokens `[1, T]`, no more than there are positions."""
        count, generator = min(self.shape.tokens, self._positions or self.shape.tokens), torch.Generator().manual_seed(1)
        return torch.randint(3, _VOCABULARY - 1, (1, count), generator=generator)

    def logits(self, ids: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Of tokens `[1, T]`, whose first position is `start` if the class takes positions."""
        takes = "position_ids" in inspect.signature(self.model.forward).parameters
        positions = {"position_ids": start + torch.arange(ids.shape[1])[None]} if takes else {}
        with _silent(), torch.no_grad():
            logits: torch.Tensor = self.model(ids, use_cache=False, **positions).logits
        return logits


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without transformers' warnings: they are about the small config, of which the user knows nothing."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def near(a: torch.Tensor, b: torch.Tensor, share: float = EQUAL) -> bool:
    """Whether they differ by at most a share of the larger's largest value."""
    return a.shape == b.shape and bool((a - b).abs().max() <= share * b.abs().max())


def computed(record: Record, x: torch.Tensor, start: int = 0) -> torch.Tensor:
    """What a record computes of inputs `[1, T, E]`, the first at position `start`."""
    return output_of(record, Block(x[0], range(start, start + x.shape[1])))[None]


def disproof(family: Family, twin: Twin, starts: Sequence[int] = ()) -> str | None:
    """What a family says wrongly of a twin's class, or None: the layer, and where in a text.

    Args:
        family: Of the class, bound to any config.
        twin: Of the class.
        starts: Positions at which the texts begin; without any, the first, a far one and the last possible one.
    """
    state = {name: tensor.double() for name, tensor in twin.state.items() if tensor.is_floating_point()}
    family = family.of(twin.config)
    for start in dict.fromkeys(starts or (0, min(_FAR, twin.farthest), twin.farthest)):
        calls = twin.calls(start)
        for layer, stands_for in enumerate(twin.layers):
            module, output, wanted = family.module(layer), family.output(layer), family.shapes(layer)
            for name in (*wanted, module, output):
                if name not in state and name not in calls:
                    return f"layer {stands_for} of its class has no {name}"
            ours = family.split({name: state[name] for name in wanted}, layer)
            assert isinstance(ours, Attention), "random weights are no latent that a family reads"
            if family.traits.clip is not None:
                ours = ours.on_projected_inputs(family.traits.clip)
            read, gave = calls[module].read.double(), calls[output].gave.double()
            if not near(computed(ours, read, start), gave, twin.shape.equal + start * _ANGLE):
                return f"layer {stands_for} computes something else than its config says, at positions from {start} on"
    return None


def mixes_otherwise(twin: Twin, outputs: Sequence[str]) -> bool:
    """Whether tokens still reach others without the attention whose output projections these are. It leaves them at zero."""
    with torch.no_grad():
        for path in outputs:
            for parameter in twin.model.get_submodule(path).parameters():
                parameter.zero_()
    usual, changed = twin.text(), twin.text()
    changed[0, 0] = 3 if changed[0, 0] != 3 else 4
    return not near(twin.logits(usual)[:, 1:], twin.logits(changed)[:, 1:])


def kinds(config: Any, lists: Sequence[str]) -> list[tuple[Any, ...]]:
    """What the config says of each layer in these lists; layers of a kind have the same."""
    config = decoder_of(config)
    return [tuple(getattr(config, name)[layer] for name in lists) for layer in range(config.num_hidden_layers)]


def per_layer(config: Any) -> tuple[str, ...]:
    """The names of a config's lists that have one entry for each layer."""
    config = decoder_of(config)
    count, found = config.num_hidden_layers, []
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == count > 1:
            plain = all(isinstance(one, (str, int, float, type(None))) for one in value)
            found += [name] if plain and len(set(value)) < count else []  # else indices
    return tuple(sorted(found))


def _shrunk(whole: Any, shape: Shape) -> tuple[Any, list[int]]:
    """The small config, and the source's layers that its own stand for: the first few, and one of each kind."""
    changed, config = copy.deepcopy(whole), decoder_of(whole)
    small, lists, count = decoder_of(changed), per_layer(whole), config.num_hidden_layers
    of_layers = kinds(whole, lists)
    kept = sorted({*range(min(count, shape.layers)), *(of_layers.index(kind) for kind in of_layers)})
    for name, value in vars(config).items():
        if name in lists:
            setattr(small, name, [value[layer] for layer in kept])
        elif isinstance(value, int) and not isinstance(value, bool):
            setattr(small, name, min([value, *(most for pattern, most in _LIMITS if pattern.search(name))]))
    small.num_hidden_layers, small.vocab_size = len(kept), _VOCABULARY
    _narrow(small, config, shape.heads)
    if isinstance(rope := getattr(config, "rope_parameters", None), dict):
        small.rope_parameters = _shortened(rope)
    return changed, kept


def _narrow(small: Any, config: Any, few: int) -> None:
    """Make heads few, and the model as narrow as that makes it. Two query heads share a KV head where the config can say so."""
    heads = config.num_attention_heads
    stated = getattr(config, "head_dim", None)
    dim = stated or config.hidden_size // heads
    one_or_all = getattr(config, "kv_lora_rank", None) or hasattr(config, "multi_query")
    small.num_attention_heads = few
    for name in ("num_key_value_heads", "num_kv_heads"):
        if (groups := getattr(config, name, None)) is not None:
            setattr(small, name, min(groups, few) if one_or_all else few // 2)
    small.hidden_size = (few + 1 if stated and config.hidden_size != heads * dim else few) * dim


def _shortened(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE that passes the length from which on it behaves otherwise, where it has one."""
    if any(isinstance(value, dict) for value in parameters.values()):  # one for each kind of layer
        return {name: _shortened(value) if isinstance(value, dict) else value for name, value in parameters.items()}
    by_length = parameters.get("rope_type") in ("longrope", "dynamic")
    return {name: _SHORT if by_length and _LENGTHS.search(name) and value else value for name, value in parameters.items()}
