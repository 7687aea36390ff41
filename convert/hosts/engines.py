"""Checkpoints of kvfold that engines take: the sizes of a latent, and the command that serves them.

Output classes name the engines that run them (`Host.engines`). docs/serving.md says what was run, and with which versions.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from attention.errors import Refusal
from attention.formats import FORMATS, SERVED
from attention.spec import AttentionSpec
from convert.families import Family
from convert.hosts import Host


@dataclass(frozen=True)
class CacheOption:
    """A format in which an engine stores its cache.

    Attributes:
        form: Its name in `attention.formats`.
        option: What tells the engine.
        tried: Whether a result was run so. If not, nothing is known of what it loses there.
    """

    form: str
    option: str
    tried: bool = True


@dataclass(frozen=True)
class Engine:
    """Software that generates text with a checkpoint.

    Attributes:
        name: As on the command line.
        serve: The command that serves a checkpoint, with `{path}` and `{eager}` (`Host.eager`); "" if it is a library.
        latents: The sizes (R, P) of a latent and its RoPE key that its latent attention takes; empty for any.
        plain_queries: Beside a latent of keys and values, queries must have one too, except in models of so many layers, whose
            queries must have none. None if it runs either.
        caches: The formats in which it stores its cache, besides that of its default.
    """

    name: str
    serve: str = ""
    latents: tuple[tuple[int, int], ...] = ()
    plain_queries: tuple[int, ...] | None = None
    caches: tuple[CacheOption, ...] = ()

    def objection(self, host: Host, family: Family, spec: AttentionSpec) -> str | None:
        """Why it does not run an attention of these sizes in an output class; None if it does."""
        if self.name not in host.engines(family):
            return f"{self.name} does not run {host.name}, as far as was tried"
        if spec.kv_lora_rank and self.query_latent(spec) is not bool(spec.q_lora_rank):
            whether = "with" if self.query_latent(spec) else "without"
            return f"{self.name} takes models of {spec.num_layers} layers {whether} a latent of queries"
        if reason := self.kept_objection(spec):
            return reason
        size = (spec.kv_lora_rank, spec.qk_rope_head_dim)
        if spec.kv_lora_rank and self.latents and size not in self.latents:
            return f"{self.name} takes latents of {_listed(self.latents)}, not of {size[0]}+{size[1]}"
        return None

    def kept_objection(self, spec: AttentionSpec) -> str | None:
        """Why it does not run an attention in which layers are kept; None if it does, or if none are."""
        if not spec.kept or not self.serve:
            return None
        return f"{self.name} runs one kind of attention in all layers, and some are to stay as they are"

    def stores(self, host: Host, spec: AttentionSpec) -> list[CacheOption]:
        """The formats in which it stores the cache of an attention of these sizes in an output class that it runs."""
        if self.serve and host.code and spec.kv_lora_rank:  # `attention.models.vllm` refuses them
            return []
        return [cache for cache in self.caches if spec.takes(cache.form)]

    def query_latent(self, spec: AttentionSpec) -> bool:
        """Whether an attention with a latent has to have one of queries; what it has, if the engine runs either."""
        return bool(spec.q_lora_rank) if self.plain_queries is None else spec.num_layers not in self.plain_queries

    def fitting(self, values: int) -> tuple[int, int]:
        """The largest (R, P) that it takes within `values` numbers per layer and token.

        Raises:
            Refusal: There is none, or it takes any.
        """
        within = [size for size in self.latents if sum(size) <= values]
        if not within:
            sizes = _listed(self.latents)
            raise Refusal(f"{self.name} takes latents of {sizes}, and the budget leaves {values} numbers per layer and token")
        return max(within)


_PACKED = [name for name, form in FORMATS.items() if form.bits < 16]
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("transformers", caches=tuple(CacheOption(name, f'attention.load(…, cache_dtype="{name}")') for name in _PACKED)),
        Engine(
            "vllm",
            "vllm serve {path}{eager}",
            latents=((256, 64), (448, 64), (512, 64)),
            caches=tuple(
                CacheOption(name, f"--kv-cache-dtype {name}", tried=False)
                for name in ("fp8", *(name for name, form in SERVED.items() if form.engine.startswith("vLLM")))
            ),
        ),
        Engine(
            "llama.cpp",
            "convert_hf_to_gguf.py {path} && llama-server -m {path}/*.gguf",
            plain_queries=(26, 27),
            caches=tuple(CacheOption(name, f"-fa on -ctk {name} -ctv {name}") for name in ("q8_0", "q4_0")),
        ),
    )
}


def running(host: Host, family: Family, spec: AttentionSpec) -> list[str]:
    """The engines that run an attention of these sizes in an output class."""
    return [name for name, engine in ENGINES.items() if engine.objection(host, family, spec) is None]


def storing(host: Host, family: Family, spec: AttentionSpec, form: str) -> list[str]:
    """The engines that run it and store its cache in that format; of those where nobody tried, that is said."""
    found = [(name, cache) for name in running(host, family, spec) for cache in ENGINES[name].stores(host, spec)]
    return [name if cache.tried else f"{name} (not tried)" for name, cache in found if cache.form == form]


def engine_of(name: str | None) -> Engine | None:
    """The engine of that name; None for no engine in particular.

    Raises:
        Refusal: None has it.
    """
    if name is None or name in ENGINES:
        return ENGINES.get(name or "")
    raise Refusal(f"no engine {name!r} is known", hint=f"choose {', '.join(ENGINES)}, or leave it out")


def _listed(sizes: Iterable[tuple[int, int]]) -> str:
    *others, last = (f"{rank}+{rope}" for rank, rope in sizes)
    return f"{', '.join(others)} or {last}"
