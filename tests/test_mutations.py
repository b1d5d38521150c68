"""Each known way to hand the drafter something wrong, seeded on purpose, must make a check fail.

Text stays right under nearly all of these: only acceptance falls, and by some of them hardly. So there are two checks:
an acceptance floor per place in the block, which catches the big ones, and the drafter's logits step by step against
Transformers, in rounds after a rejection and past the window, which catches the small ones. `pytest -s` is not needed
to see the table of both figures.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from runtime_py.cache import KVCache
from runtime_py.manifest import FULL, SLIDING
from runtime_py.models import Target, TargetOutput
from runtime_py.speculative import Round

from . import tolerances
from .pairs import PairShape
from .reference import (
    DraftRound,
    EagerGraph,
    HfParityCache,
    HfParityDrafter,
    Models,
    RecordingDrafter,
    Transformers,
    acceptance,
    build,
    check_steps,
    eager_graphs,
    eager_models,
    file_models,
    prompts_of,
    transformers_pair,
)

NEW_TOKENS, PROMPTS, PROMPTS_WITH_LOGITS = 64, 12, 4
BIG_VOCABULARY = PairShape(
    vocab=66_560,
    centroids=256,
    hidden=32,
    intermediate=32,
    per_layer=8,
    drafter_hidden=32,
    layers=4,
    period=2,
    shared=2,
)


@dataclass(frozen=True)
class Run:
    """One generation. known[i]: the text up to the pending token when drafted[i] was made; before[i]: the round that
    led to it."""

    rounds: list[Round]
    drafted: list[DraftRound]
    known: list[list[int]]

    @property
    def before(self) -> list[Round]:
        return self.rounds[: len(self.drafted)]


def run(models: Models, prompt: list[int]) -> Run:
    models.drafter.rounds.clear()
    _, rounds = models.generate(prompt, NEW_TOKENS, 3)
    known, text = [], list(prompt)
    for entry in rounds:
        text = [*text, *entry.tokens]
        known.append(text)
    drafted = list(models.drafter.rounds)
    return Run(rounds, drafted, known[: len(drafted)])


def acceptance_holds(runs: list[Run]) -> tuple[bool, list[float]]:
    """-> whether every place is above its floor, the shares accepted at each place"""
    places = acceptance([entry for one in runs for entry in one.rounds]).places
    return all(have >= floor for have, floor in zip(places, tolerances.ACCEPTANCE_PLACES, strict=True)), places


def logits_hold(reference: Transformers, runs: list[Run]) -> tuple[bool, float]:
    """-> whether all candidate logits are Transformers', the largest difference in their standard deviations.

    Looked at: up to six rounds that follow a rejection and two past the window, of every run.
    """
    worst = 0.0
    for one in runs:
        rejected = [i for i, entry in enumerate(one.before) if entry.accepted < entry.drafted][:6]
        past_window = [i for i, text in enumerate(one.known) if len(text) > reference.window + 8][-2:]
        for i in {*rejected, *past_window}:
            worst = max(worst, check_steps(reference, one.known[i], one.drafted[i]).in_deviations)
    return worst <= tolerances.DRAFTER_DEVIATIONS, worst


class BeforeNorm(EagerGraph):
    """A graph that gives what the final norm reads in place of what comes out of it."""

    def __init__(self, module: torch.nn.Module, output: str):
        super().__init__(module)
        self._output, self._unnormed = output, None

    def __call__(self, feeds):
        hook = self.module.norm.register_forward_pre_hook(lambda _module, args: setattr(self, "_unnormed", args[0]))
        outputs = super().__call__(feeds)
        hook.remove()
        with torch.inference_mode():
            state = self._output == "state"
            outputs[self._output] = (self.module.post_projection(self._unnormed) if state else self._unnormed).numpy()
        return outputs


def other_rows(choose: Callable[[int, int], int]) -> type[Target]:
    """A target whose hidden row i is row choose(i, last) when it verifies."""

    class OtherRows(Target):
        def forward(self, cache: KVCache, ids: list[int], last_row_only: bool = False) -> TargetOutput:
            output = super().forward(cache, ids, last_row_only)
            last = len(output.hidden) - 1
            return replace(output, hidden=output.hidden[[choose(i, last) for i in range(last + 1)]])

    return OtherRows


class Unscaled(RecordingDrafter):
    """Gets token embeddings without sqrt(hidden_size)."""

    def __init__(self, manifest, graph, bundle, target):
        super().__init__(manifest, graph, bundle, target)
        scale = manifest.backends["onnx"].token_table.multiplier
        self._target = type("Unscaled", (), {"embed": staticmethod(lambda ids: target.embed(ids) / scale)})


class StaleFullRow(HfParityDrafter):
    """One rejected row of the full donor, none of the sliding one."""

    def block_inputs(self, cache: HfParityCache):
        block = super().block_inputs(cache)
        block[f"k_{SLIDING}"], block[f"v_{SLIDING}"] = cache.donor_rows(SLIDING)
        return block


class StaleSlidingRows(HfParityDrafter):
    def block_inputs(self, cache: HfParityCache):
        block = super().block_inputs(cache)
        block[f"k_{FULL}"], block[f"v_{FULL}"] = cache.donor_rows(FULL)
        return block


class CommitsOneMore(KVCache):
    def commit(self, new_k, new_v, rows: int) -> None:
        super().commit(new_k, new_v, min(rows + 1, len(new_k[0])))


class InverseOrdering(RecordingDrafter):
    """Head and ids in the order of the inverse permutation, as an exporter would write them that takes one for the
    other: every token has its own logit, but stands in a wrong cluster."""

    def __init__(self, manifest, graph, bundle, target):
        super().__init__(manifest, graph, bundle, target)
        head = self._head
        place = np.argsort(head._ids, axis=None)  # of each token
        rows = np.asarray(head._table).reshape(len(place), -1)
        head._table = rows[place][place].reshape(head._table.shape)
        head._ids = place.reshape(head._ids.shape)


class SixteenBitIds(RecordingDrafter):
    def __init__(self, manifest, graph, bundle, target):
        super().__init__(manifest, graph, bundle, target)
        self._head._ids = self._head._ids.astype(np.int16)


def rebuilt(models: Models, graphs: dict | None = None, offset: int = 0, **classes) -> Models:
    manifest = models.manifest
    drafter = replace(manifest.drafter, position_offset=manifest.drafter.position_offset + offset)
    return build(replace(manifest, drafter=drafter), models.bundle, {**models.graphs, **(graphs or {})}, **classes)


MUTATIONS = {
    "hidden before the norm": lambda m, eager: rebuilt(
        m, {"cross_decoder": BeforeNorm(eager["cross_decoder"].module, "hidden")}
    ),
    "row - 1": lambda m, _: rebuilt(m, target=other_rows(lambda i, last: max(i - 1, 0))),
    "row - 1 after partial acceptance": lambda m, _: rebuilt(
        m, target=other_rows(lambda i, last: max(i - 1, 0) if i < last else last)
    ),
    "row + 1 after partial acceptance": lambda m, _: rebuilt(m, target=other_rows(lambda i, last: min(i + 1, last))),
    "last row of the block": lambda m, _: rebuilt(m, target=other_rows(lambda i, last: last)),
    "position - 1": lambda m, _: rebuilt(m, offset=-1),
    "position + 1": lambda m, _: rebuilt(m, offset=1),
    "projection before the norm": lambda m, eager: rebuilt(
        m, {"drafter": BeforeNorm(eager["drafter"].module, "state")}
    ),
    "embedding unscaled": lambda m, _: rebuilt(m, drafter=Unscaled),
    "stale row, full": lambda m, _: rebuilt(m, drafter=StaleFullRow, cache=HfParityCache),
    "stale rows, sliding": lambda m, _: rebuilt(m, drafter=StaleSlidingRows, cache=HfParityCache),
    "rejected row committed": lambda m, _: rebuilt(m, cache=CommitsOneMore),
    "inverse permutation": lambda m, _: rebuilt(m, drafter=InverseOrdering),
}


@pytest.fixture(scope="module")
def trained(bundle_of, pair_of):
    """Check one variant of the trained pair -> (acceptance holds, places), (logits hold, deviations)."""
    bundle, reference = bundle_of("tiny", "fp32"), transformers_pair(pair_of("tiny"))
    models, eager, prompts = file_models(bundle), eager_graphs(pair_of("tiny"), "fp32"), prompts_of(bundle, PROMPTS)

    @functools.cache
    def check(name: str | None):
        variant = MUTATIONS[name](models, eager) if name else models
        runs = [run(variant, prompt) for prompt in prompts]
        return acceptance_holds(runs), logits_hold(reference, runs[:PROMPTS_WITH_LOGITS])

    return check


def test_the_pair_as_it_is_passes_both_checks(trained):
    (accepted, places), (equal, deviations) = trained(None)
    assert accepted, places
    assert equal, deviations


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(trained, name):
    (accepted, places), (equal, deviations) = trained(name)
    assert not (accepted and equal), (places, deviations)


def test_16_bit_token_ids_are_caught(pair_of, tmp_path):
    """Half of this vocabulary lies past 32,767, some past 65,535."""
    pair = pair_of(BIG_VOCABULARY)
    models, reference = eager_models(pair, tmp_path / "tables"), transformers_pair(pair)
    prompt = [2, 40_000, 66_000, 5]
    assert logits_hold(reference, [run(models, prompt)])[0]
    assert max(max(entry.drafts) for entry in models.drafter.rounds) > 32_767
    narrow = build(models.manifest, models.bundle, models.graphs, drafter=SixteenBitIds)
    assert not logits_hold(reference, [run(narrow, prompt)])[0]


def test_table_of_mutations(trained, capsys):
    """Not a check of its own: what each mutation costs, and which check saw it."""
    rows = [("unmutated", trained(None)), *((name, trained(name)) for name in MUTATIONS)]
    with capsys.disabled():
        print(f"\n{'':34}accepted at place 1, 2, 3    drafter logits, deviations from Transformers")
        for name, ((accepted, places), (equal, deviations)) in rows:
            shares = "  ".join(f"{share:.3f}" for share in places)
            print(
                f"{name:34}{shares}  {'   ' if accepted else 'low'}    {deviations:9.5f}  {'' if equal else 'differ'}"
            )
