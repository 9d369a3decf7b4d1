"""A serving engine: what it defaults to, what it keeps for itself, and how it divides a card, by version.

An engine file holds eras, oldest first. An era's figures hold from its version on, until a later era
says otherwise; `at` merges them for one version.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from gpucalc.line import Line
from gpucalc.spec.base import Spec
from gpucalc.spec.engine_speed import EngineSpeed
from gpucalc.spec.figure import Figure
from gpucalc.spec.version import version_key


class CardSize(Spec):
    """What an engine defaults to on cards from a size on, and what SGLang then keeps free on them.

    `but_not` names what a GPU's id must not start with; such a card is taken for a smaller one.
    graph_requests: the largest batch captured, by tensor-parallel ranks.
    """

    at_least: Figure
    but_not: tuple[str, ...] = ()
    max_num_seqs: Figure | None = None
    max_num_batched_tokens: Figure | None = None
    graph_requests: dict[int, Figure] | None = None
    static_fraction: Figure | None = None
    reserve: Figure | None = None
    reserve_per_rank: Figure | None = None
    reserve_least: Figure | None = None


class EngineEra(Spec):
    """What an engine does from one version on. Every figure may be missing: the engine has no such thing.

    Dictionaries are keyed by the tensor-parallel ranks a figure was seen at; `of_ranks` takes the largest
    listed size not above the one asked for.
    """

    since: str
    # Defaults.
    block_size: Figure | None = None  # tokens per cache block
    max_num_seqs: Figure | None = None
    max_num_batched_tokens: Figure | None = None
    cards: tuple[CardSize, ...] = ()  # defaults that depend on the card, the smallest first
    memory_fraction: Figure | None = None  # gpu_memory_utilization, free_gpu_memory_fraction
    # mem_fraction_static: by ranks, or what is left of the card beside a reserve.
    static_fraction: dict[int, Figure] | None = None
    reserve: Figure | None = None
    reserve_per_token: Figure | None = None  # of a prompt chunk
    reserve_least_tokens: Figure | None = None
    reserve_per_graph_request: Figure | None = None  # of the largest batch captured
    reserve_per_attention_rank: Figure | None = None  # and request captured, more above 300 requests
    reserve_attention_ranks: Figure | None = None  # where there are several
    reserve_per_rank: Figure | None = None
    reserve_drafting: Figure | None = None  # with a draft head
    reserve_draft_model: Figure | None = None  # with a model that drafts
    # The profiled peak of activations: the larger of two regimes.
    sampler_bytes_per_logit: Figure | None = None
    sampler_stream_copies: Figure | None = None  # copies of the residual stream alive while sampling
    forward_stream_copies: Figure | None = None  # the same inside the widest layer
    moe_workspaces: Figure | None = None  # of tokens x top_k, kept by the fused expert kernels
    profiles_longest_prompt: Figure | None = None  # 1: prefills a whole max_model_len below the limit
    longest_profiled_prompt: Figure | None = None
    encoder_cache_copies: Figure | None = None  # of image embeddings, per batched token
    # Outside the tensors.
    non_torch: dict[int, Figure] | None = None
    non_torch_pcie: dict[int, Figure] | None = None  # where no NVLink joins the ranks
    pre_existing: dict[int, Figure] | None = None  # in use before the engine looks
    pre_existing_pcie: dict[int, Figure] | None = None
    others_in_budget: Figure | None = None  # 1: what others hold on the card is taken off the budget
    budget_must_be_free: Figure | None = None  # 1: refuses to start where less than the budget is free
    graph_base: Figure | None = None
    graph_per_layer: Figure | None = None
    graph_moe: Figure | None = None  # of routed experts, divided over tensor-parallel ranks
    graph_mxfp4: Figure | None = None  # in its place where experts are in MXFP4
    graph_sizes: Figure | None = None  # batch sizes captured where the pool above was seen
    graphs_subtracted: Figure | None = None  # 1: an estimate of the graphs is taken off the cache
    warmup_bytes_per_logit: Figure | None = None  # the sampler's dry run after the cache is allocated
    # Weights.
    least_capability: dict[str, str] | None = None  # by format, of the compute capabilities of NVIDIA's cards
    mxfp4_hidden_multiple: Figure | None = None  # experts are padded to these
    mxfp4_intermediate_multiple: Figure | None = None
    # The cache.
    hybrid_groups: Figure | None = None  # 1: sliding and recurrent layers have pages of their own
    state_element_bytes: Figure | None = None  # of recurrent state
    prints_requests: Figure | None = None  # 1: printed tokens are max_concurrency x max_model_len
    state_to_cache: Figure | None = None  # bytes of recurrent state per byte of cache
    sliding_to_full: Figure | None = None  # tokens of sliding-window cache per token of full cache
    # Engines that allocate for the run at hand.
    micro_batch_tokens: Figure | None = None  # llama.cpp's ubatch
    logit_copies: Figure | None = None  # fp32 logits of a micro-batch
    drafts_outside_pool: Figure | None = None  # 1: what drafts lies beside weights and cache, in what is kept
    attention_scores: Figure | None = None  # 1: no flash attention until asked for
    prefill_ffn_copies: Figure | None = None  # of the feed-forward width, alive in an unchunked prefill
    prefill_stream_copies: Figure | None = None

    def line(self, name: str) -> Line:
        """A figure as a leaf of an answer. Raises KeyError where the engine has none."""
        figure = getattr(self, name)
        if not isinstance(figure, Figure):
            raise KeyError(name)
        return figure.line(name)

    def number(self, name: str, otherwise: float) -> float:
        """A figure's value, or what its absence means."""
        figure = getattr(self, name)
        return figure.si if isinstance(figure, Figure) else otherwise

    def of_ranks(self, name: str, ranks: int) -> Line | None:
        """The figure for that many tensor-parallel ranks, None where the engine has none."""
        table: dict[int, Figure] | None = getattr(self, name)
        return of_size(table, ranks).line(name) if table else None

    def multiplies(self, quant: str, vendor: str, compute_capability: str) -> str | None:
        """The compute capability weights of that format need where a card has less, None where it has it."""
        least = (self.least_capability or {}).get(quant)
        own = version_key(compute_capability)
        if least is None or vendor != "NVIDIA" or own is None or own >= (version_key(least) or ()):
            return None
        return least

    def card(self, gpu: str, memory_bytes: float) -> CardSize | None:
        """The defaults of the largest listed size that a card reaches, None where none is listed."""
        reached = [
            size
            for size in self.cards
            if size.at_least.si <= memory_bytes and not gpu.startswith(size.but_not)
        ]
        return reached[-1] if reached else None


def of_size(table: dict[int, Figure], size: int) -> Figure:
    """The figure of the largest listed size not above the one asked for, else of the smallest."""
    below = [listed for listed in table if listed <= size]
    return table[max(below) if below else min(table)]


class LaunchFlag(Spec):
    """A flag of the engine's command: the setting it takes, the version it came with and the one it left.

    says: the setting, where flags of other versions say the same another way. lacking: what is to be said of
    a version without any of them.
    """

    key: str
    flag: str
    since: str = "0"
    until: str | None = None
    says: str | None = None
    lacking: str | None = None

    def known_at(self, version: tuple[int, ...] | None) -> bool:
        """Whether the command of that version has the flag; a version without numbers is the newest."""
        if version is None:
            return self.until is None
        return (version_key(self.since) or ()) <= version and (
            self.until is None or version < (version_key(self.until) or ())
        )


class Launch(Spec):
    """The command that starts the server. `{model}` stands for the checkpoint, `{file}` for a local file.

    options: settings without a flag and their path in a file of options, which `options_flag` names.
    source: where the flags and their versions were read.
    """

    since: str = "0"
    command: str
    flags: tuple[LaunchFlag, ...]
    source: tuple[str, ...]
    options: dict[str, str] = Field(default_factory=dict)
    options_flag: LaunchFlag | None = None
    several_nodes: str | None = None  # what a copy over several machines needs beside
    quantizations: dict[str, str] = Field(default_factory=dict)  # our names and the engine's, where it asks
    kv_dtypes: dict[str, str] = Field(default_factory=dict)


class EngineSpec(Spec):
    """One engine as the catalogue describes it."""

    id: str
    name: str
    aliases: tuple[str, ...] = ()
    default_version: str
    newest: str  # release of which anything here was read
    # Makers whose accelerators it runs on, with the least compute capability where that has numbers; empty
    # for an engine that runs wherever its framework does.
    hardware: dict[str, str] = Field(default_factory=dict)
    hardware_source: tuple[str, ...] = ()
    # Kinds of model (a config.json's model_type) and the release that first serves them. A kind that is not
    # listed is older than the releases read, or was not looked for.
    serves_since: dict[str, str] = Field(default_factory=dict)
    # The least compute capability of NVIDIA's cards that a kind of model needs, where above `hardware`.
    serves_on: dict[str, str] = Field(default_factory=dict)
    serves_source: tuple[str, ...] = ()
    # Formats of weights it does not read, and what is to be said of them; gguf: any of llama.cpp's.
    unread: dict[str, str] = Field(default_factory=dict)
    draft_vocab_difference: int = 0  # words that a model that drafts may have more or less
    eras: tuple[EngineEra, ...] = Field(min_length=1)
    speed: EngineSpeed | None = None
    launch: tuple[Launch, ...] = ()  # from the oldest version to the newest
    notes: tuple[str, ...] = ()

    @field_validator("eras")
    @classmethod
    def _in_order(cls, eras: tuple[EngineEra, ...]) -> tuple[EngineEra, ...]:
        since = [version_key(era.since) or () for era in eras]
        if since != sorted(since):
            raise ValueError("eras must be listed from the oldest version to the newest")
        return eras

    def at(self, version: str) -> EngineEra:
        """Everything known of that version: later eras win over earlier ones, figure by figure.

        A version that does not read as numbers is taken as the newest.
        """
        wanted = version_key(version)
        merged: dict[str, Any] = {}
        for era in self.eras:
            if wanted is None or (version_key(era.since) or ()) <= wanted:
                merged |= {name: getattr(era, name) for name in era.model_fields_set}
        if not merged:
            merged = {name: getattr(self.eras[0], name) for name in self.eras[0].model_fields_set}
        return EngineEra.model_construct(**merged)

    def runs_on(self, vendor: str, compute_capability: str) -> bool:
        """Whether the engine has kernels for a card."""
        if not self.hardware:
            return True
        least = self.hardware.get(vendor)
        own, needed = version_key(compute_capability), version_key(least or "0")
        return least is not None and (own is None or needed is None or own >= needed)

    def serves_from(self, architecture: str | None, version: str) -> str | None:
        """The release that first serves a kind of model, where that version is older; None otherwise."""
        first = self.serves_since.get(architecture or "")
        wanted = version_key(version)
        if first is None or wanted is None or (version_key(first) or ()) <= wanted:
            return None
        return first

    def needs_capability(self, architecture: str | None, vendor: str, compute_capability: str) -> str | None:
        """The compute capability a kind of model needs, where a card of that vendor is below."""
        least = self.serves_on.get(architecture or "")
        own = version_key(compute_capability)
        if least is None or vendor != "NVIDIA" or own is None or own >= (version_key(least) or ()):
            return None
        return least

    def launch_at(self, version: str) -> Launch | None:
        """The command of that version, None where the engine has no server."""
        wanted = version_key(version)
        known = [one for one in self.launch if wanted is None or (version_key(one.since) or ()) <= wanted]
        return known[-1] if known else None
