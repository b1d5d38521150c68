"""What the runtime is compared with: Transformers in float32, and the eager graphs behind the runtime's own host code.

Legend: T tokens, V vocab_size, H hidden_size of the target, h of the drafter, W window, N tokens with the pending one.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from export import embeddings, package
from export.graphs import CrossDecoder as CrossDecoderGraph
from export.graphs import Drafter as DrafterGraph
from export.graphs import SelfDecoder as SelfDecoderGraph
from export.quant import RECIPES, tables
from export.weights import fill, open_drafter, open_target
from runtime_py import manifest as contract
from runtime_py.cache import KVCache
from runtime_py.drafting import DraftPolicy
from runtime_py.graph import Graph, load_graph
from runtime_py.loading import Pair
from runtime_py.loading import load as load_pair
from runtime_py.manifest import FULL, SLIDING, TokensSpec
from runtime_py.measure import draft_statistics
from runtime_py.models import CrossDecoder, Drafter, SelfDecoder, Target
from runtime_py.speculative import Round, generate
from runtime_py.text import Text

from .pairs import TINY
from .threads import THREADS

torch.set_num_threads(1)  # tiny matrices: handing them to a second thread costs more than it gives

Array = np.ndarray
PairFolders = tuple[Path, Path]
TYPES = {SLIDING: "sliding_attention", FULL: "full_attention"}


class TargetRows(NamedTuple):
    """logits [T, V], hidden [T, H] (after the final norm), kv: Transformers' type -> k, v [1, heads, T, D]."""

    logits: Array
    hidden: Array
    kv: dict[str, tuple[Tensor, Tensor]]


class DraftStep(NamedTuple):
    """hidden [h] after the drafter's final norm, state [H], logits [V] (Transformers) or of the candidates (ours)."""

    hidden: Array
    state: Array
    logits: Array
    candidates: Array | None = None


class Transformers:
    """A pair loaded in the checkpoint's dtype, so that the embedding scale is rounded to it, then float32."""

    def __init__(self, pair: PairFolders):
        self.target = Gemma4ForCausalLM.from_pretrained(pair[0]).float().eval()
        self.drafter = Gemma4AssistantForCausalLM.from_pretrained(pair[1]).float().eval()
        self.window = self.target.config.sliding_window
        self._made = {}

    @torch.inference_mode()
    def rows(self, ids: list[int]) -> TargetRows:
        """The whole sequence in one call, without a cache."""
        out = self.target(
            input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True, return_shared_kv_states=True
        )
        return TargetRows(out.logits[0].numpy(), out.hidden_states[-1][0].numpy(), dict(out.shared_kv_states))

    def committed(self, rows: TargetRows, tokens: int) -> dict[str, tuple[Tensor, Tensor]]:
        """What a drafter may see when `tokens` are known: rows 0..N-2 of the full donor, the last W of the sliding one."""
        first = {"full_attention": 0, "sliding_attention": max(0, tokens - 1 - self.window)}
        return {kind: tuple(part[:, :, first[kind] : tokens - 1] for part in rows.kv[kind]) for kind in first}

    @torch.inference_mode()
    def draft_step(self, kv: dict, position: int, token: int, state: Array) -> DraftStep:
        """One call of the assistant: `token`, and the hidden row or state [H] that goes with it."""
        embeds = self.target.get_input_embeddings()(torch.tensor([[token]]))
        with _kept_output(self.drafter.model.norm) as kept:
            out = self.drafter(
                inputs_embeds=torch.cat([embeds, torch.from_numpy(state)[None, None]], -1),
                position_ids=torch.tensor([[position]]),
                attention_mask=None,
                shared_kv_states=kv,
            )
        return DraftStep(kept[-1][0, 0].numpy(), out.last_hidden_state[0, 0].numpy(), out.logits[0, 0].numpy())

    def plain(self, prompt: list[int], new_tokens: int) -> list[int]:
        """Greedy ids after the prompt."""
        return self._once(self._generate, prompt, new_tokens)

    def assisted(self, prompt: list[int], new_tokens: int, drafts: int) -> tuple[list[int], list[list[int]]]:
        """Greedy ids after the prompt, and what the assistant drafted in every round."""
        return self._once(self._assisted, prompt, new_tokens, drafts)

    def _once(self, method: Callable, prompt: list[int], *args: int):
        key = (method.__name__, tuple(prompt), *args)
        if key not in self._made:
            self._made[key] = method(prompt, *args)
        return self._made[key]

    def _assisted(self, prompt: list[int], new_tokens: int, drafts: int) -> tuple[list[int], list[list[int]]]:
        rounds = []
        original = SinglePositionMultiTokenCandidateGenerator.get_candidates

        def get_candidates(generator, input_ids, *args, **kwargs):
            candidates, logits = original(generator, input_ids, *args, **kwargs)
            if logits is not None:
                rounds.append(candidates[0, input_ids.shape[1] :].tolist())
            return candidates, logits

        self.drafter.generation_config.num_assistant_tokens = drafts
        with mock.patch.object(SinglePositionMultiTokenCandidateGenerator, "get_candidates", get_candidates):
            return self._generate(prompt, new_tokens, assistant_model=self.drafter), rounds

    def _generate(self, prompt: list[int], new_tokens: int, **settings) -> list[int]:
        ids = torch.tensor([prompt])
        settings |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens, "do_sample": False}
        return self.target.generate(ids, **settings)[0, len(prompt) :].tolist()


class _kept_output:
    """Outputs of a module while the block runs."""

    def __init__(self, module: nn.Module):
        self._module, self._kept = module, []

    def __enter__(self) -> list[Tensor]:
        self._hook = self._module.register_forward_hook(lambda _m, _args, output: self._kept.append(output))
        return self._kept

    def __exit__(self, *_exception) -> None:
        self._hook.remove()


@functools.cache
def transformers_pair(pair: PairFolders) -> Transformers:
    return Transformers(pair)


class EagerGraph:
    """A filled graph module as the runtime calls it."""

    def __init__(self, module: nn.Module):
        self.module = module

    @torch.inference_mode()
    def __call__(self, feeds: dict[str, Array]) -> dict[str, Array]:
        args = [torch.from_numpy(np.ascontiguousarray(feeds[spec.name])) for spec in self.module.inputs]
        for spec, arg in zip(self.module.inputs, args, strict=True):
            assert arg.dtype == getattr(torch, spec.dtype), spec.name
        return {spec.name: out.numpy() for spec, out in zip(self.module.outputs, self.module(*args), strict=True)}


@dataclass(frozen=True)
class Models:
    """One pair on one kind of graph. manifest: whole, or the three parts of one that the models read."""

    manifest: contract.Manifest | SimpleNamespace
    bundle: Path
    backend: str
    graphs: dict[str, Graph]
    target: Target
    drafter: "RecordingDrafter"
    tokens: TokensSpec
    new_cache: Callable[[], KVCache]

    def generate(self, prompt: list[int], new_tokens: int, drafts: int) -> tuple[list[int], list[Round]]:
        ids, drafter = list(prompt), self.drafter if drafts else None
        request = (self.new_cache(), ids, new_tokens, self.tokens, DraftPolicy(drafts))
        rounds = list(generate(self.target, drafter, *request))
        return ids[len(prompt) :], rounds


@dataclass
class DraftRound:
    """What one block of drafts was made from, and what came out; steps [count]."""

    tokens: int  # N
    pending: int
    hidden: Array  # [H], first
    drafts: list[int] = field(default_factory=list)
    steps: list[DraftStep] = field(default_factory=list)


class RecordingDrafter(Drafter):
    """Keeps every round."""

    def __init__(self, manifest, graph: Graph, bundle: Path, target: Target):
        super().__init__(manifest, self._call, bundle, target)
        self._inner, self._last, self.rounds = graph, {}, []

    def _call(self, feeds: dict[str, Array]) -> dict[str, Array]:
        self._last = self._inner(feeds)
        return self._last

    def draft(self, cache: KVCache, token: int, hidden: Array, count: int) -> list[int]:
        self.rounds.append(DraftRound(cache.length + 1, token, hidden.copy()))
        return super().draft(cache, token, hidden, count)

    def step(self, block: dict[str, Array], token: int, state: Array) -> tuple[int, Array]:
        drafted, state = super().step(block, token, state)
        hidden = self._last["hidden"][0]
        if self._head:
            candidates, logits = self._head.candidates(hidden)
        else:
            candidates, logits = np.arange(self._last["logits"].shape[1]), self._last["logits"][0]
        self.rounds[-1].drafts.append(drafted)
        kept = hidden.copy(), state[0].copy(), logits.copy()  # outputs last until the next call
        self.rounds[-1].steps.append(DraftStep(*kept, candidates))
        return drafted, state


class StepCheck(NamedTuple):
    """worst: largest |difference| of hidden, state and logits; a token that only one head has as a candidate counts.
    in_deviations: of our candidates' logits from those of a dense head, in standard deviations of the latter.
    same_drafts: each step drafted Transformers' token."""

    worst: float
    in_deviations: float
    same_drafts: bool


def check_steps(reference: Transformers, ids: list[int], entry: DraftRound) -> StepCheck:
    """A recorded round against the assistant on committed rows. ids: the text up to the pending token. Steps after the
    first get the recorded drafts, so that one difference does not become the next."""
    rows = reference.rows(ids[:-1])
    kv, state, token = reference.committed(rows, len(ids)), rows.hidden[-1], ids[-1]
    worst, in_deviations, same = 0.0, 0.0, True
    for step, drafted in zip(entry.steps, entry.drafts, strict=True):
        want = reference.draft_step(kv, len(ids) - 1, token, state)
        if not step.candidates.min() >= 0 or len(want.logits) <= step.candidates.max():
            return StepCheck(np.inf, np.inf, False)
        difference = np.abs(want.logits[step.candidates] - step.logits).max()
        dense = (reference.drafter.lm_head.weight.detach() @ torch.from_numpy(want.hidden)).numpy()
        in_deviations = max(in_deviations, np.abs(dense[step.candidates] - step.logits).max() / dense.std())
        parts = (np.abs(want.hidden - step.hidden).max(), np.abs(want.state - step.state).max())
        worst, same = max(worst, difference, *parts), same and drafted == int(want.logits.argmax())
        token, state = drafted, want.state
    return StepCheck(worst, in_deviations, same)


class Acceptance(NamedTuple):
    """places[i]: share of the drafts at place i of their block that were accepted."""

    places: list[float]
    overall: float


def acceptance(rounds: list[Round]) -> Acceptance:
    found = draft_statistics(rounds)
    places = [place["accepted"] / place["drafted"] for place in found["per_position"]]
    return Acceptance(places, found["accepted"] / found["drafted"])


def build(manifest, bundle: Path, graphs: dict[str, Graph], backend: str = "onnx", **classes) -> Models:
    """classes: target, drafter, cache: test doubles of the runtime's."""
    self_decoder = SelfDecoder(manifest, graphs["self_decoder"])
    cross_decoder = CrossDecoder(manifest, graphs["cross_decoder"])
    target = classes.get("target", Target)(manifest, backend, self_decoder, cross_decoder, bundle)
    drafter = classes.get("drafter", RecordingDrafter)(manifest, graphs["drafter"], bundle, target)
    cache, size = classes.get("cache", KVCache), min(512, manifest.backends[backend].max_context_tokens)
    new_cache = functools.partial(cache, manifest.kv, target.group, size)
    return Models(manifest, bundle, backend, graphs, target, drafter, manifest.tokens, new_cache)


def file_models(bundle: Path) -> Models:
    """The pair as exported, on the one backend that the bundle holds."""
    manifest = contract.load(bundle)
    (backend,) = manifest.backends
    threads = THREADS[backend]
    graphs = {name: load_graph(bundle, manifest, name, backend, threads) for name in contract.GRAPHS}
    return build(manifest, bundle, graphs, backend)


def load_tiny(bundle: Path, draft_tokens: int | None, drafter: str = "auto") -> Pair:
    """A bundle of one backend, with that backend's number of threads."""
    (backend,) = contract.load(bundle).backends
    return load_pair(bundle, THREADS[backend], draft_tokens, backend=backend, drafter=drafter)


def prompts_of(bundle: Path, count: int) -> list[list[int]]:
    """Ids of the first held-out prompts of the trained pair, two raw ones to a chat."""
    text = Text(bundle, contract.load(bundle))
    return [
        text.encode_prompt(prompt["text"])
        if prompt["kind"] == "raw"
        else text.encode_chat([{"role": "user", "content": prompt["text"]}])
        for prompt in json.loads((TINY / "prompts.json").read_text(encoding="utf-8"))[:count]
    ]


def eager_graphs(
    pair: PairFolders, recipe: str, backend: str = "onnx", kv_dtype: str = "float32"
) -> dict[str, EagerGraph]:
    target, drafter = open_target(str(pair[0])), open_drafter(str(pair[1]))
    sources = {SelfDecoderGraph: target, CrossDecoderGraph: target, DrafterGraph: drafter}
    return {
        graph.name: EagerGraph(fill(graph(weights.config, RECIPES[backend][recipe], kv_dtype), weights))
        for graph, weights in sources.items()
    }


def eager_models(pair: PairFolders, folder: Path, recipe: str = "fp32", kv_dtype: str = "float32") -> Models:
    """Without any .onnx file: the tables in `folder`, eager graphs, and the manifest's parts that the models read."""
    target, drafter, errors = open_target(str(pair[0])), open_drafter(str(pair[1])), []
    config, drafter_config = target.config, drafter.config
    (folder / embeddings.FOLDER).mkdir(parents=True)

    specs = tables(recipe, config.per_layer_input_size)

    def table(tensor: str, name: str, multiplier: float) -> contract.TableSpec:
        return embeddings.write_table(target, tensor, name, folder, specs[name], errors, multiplier)

    target_spec = SimpleNamespace(
        vocab_size=config.vocab_size,
        num_layers=len(config.layers),
        num_own_kv_layers=len(config.own_layers),
        query_heads=config.query_heads,
        max_context_tokens=config.max_context_tokens,
        inv_freq=config.inv_freq,
        per_layer_table=table("embed_tokens_per_layer.weight", "per_layer", config.per_layer_scale),
    )
    centroids = drafter_config.num_centroids is not None
    head = embeddings.write_centroid_head(drafter, folder, specs["drafter_head"], errors) if centroids else None
    drafter_spec = SimpleNamespace(inv_freq=drafter_config.inv_freq, position_offset=-1, centroid_head=head)
    layers = (
        contract.KVLayerSpec(layer.index, layer.type, config.kv_heads, layer.head_dim) for layer in config.own_layers
    )
    kv = contract.KVSpec(config.window, contract.CHUNK_ROWS, tuple(layers), config.donors, kv_dtype)
    backend = SimpleNamespace(
        max_context_tokens=config.max_context_tokens,
        token_table=table("embed_tokens.weight", "token", config.embedding_scale),
    )
    manifest = SimpleNamespace(
        backends={"onnx": backend}, target=target_spec, drafter=drafter_spec, kv=kv, tokens=package.tokens_spec(target)
    )
    return build(manifest, folder, eager_graphs(pair, recipe, kv_dtype=kv_dtype))


class HfParityCache(KVCache):
    """Hands a drafter the donor rows that Transformers would, rejected ones included.

    Its verify call returns the kept rows (all of the full layer, at most W-1 of the sliding one) and the block's, the
    rejected too; the generator cuts both to N rows, and the assistant's mask leaves the last W+1 of the sliding ones.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self._seen = dict.fromkeys(self.spec.donors)  # k, v: all committed rows, then the last rejected ones
        self._call_start, self._in_prefill = 0, True

    def commit(self, new_k: list[Array], new_v: list[Array], rows: int) -> None:
        self._call_start = 0 if self._in_prefill else self.length
        for kind, layer in self.spec.donors.items():
            old = self._seen[kind] or (new_k[layer][:0], new_v[layer][:0])
            new = (new_k[layer], new_v[layer])
            self._seen[kind] = [np.concatenate([a[: self.length], b]) for a, b in zip(old, new, strict=True)]
        super().commit(new_k, new_v, rows)

    def drafter_rows(self, kind: str) -> list[Array]:
        self._in_prefill = False
        window, tokens = self.spec.window, self.length + 1
        if kind == FULL:
            return [part[:tokens] for part in self._seen[kind]]
        first = max(0, self._call_start - (window - 1))
        return [part[first:][:tokens][-(window + 1) :] for part in self._seen[kind]]


class HfParityDrafter(RecordingDrafter):
    def block_inputs(self, cache: HfParityCache) -> dict[str, Array]:
        block = super().block_inputs(cache)
        for kind in TYPES:
            block[f"k_{kind}"], block[f"v_{kind}"] = cache.drafter_rows(kind)
        return block
