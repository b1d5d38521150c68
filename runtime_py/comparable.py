"""Which bundles can be compared, and how they are to be run: told before either is loaded."""

from dataclasses import dataclass
from pathlib import Path

from . import manifest as contract
from .loading import choose_backend
from .manifest import RANDOM_WEIGHTS, Manifest

DEFAULT_CONTEXT = 512  # tokens of a window, with its bos
REMEDY = "give two bundles that were exported from the same checkpoint"


@dataclass(frozen=True)
class Plan:
    """bundles, backends: of the bundle and maybe of its reference. context: tokens of a window. draft_tokens: of a block."""

    bundles: tuple[Path, ...]
    backends: tuple[str, ...]
    context: int
    draft_tokens: int


def choose_plan(
    bundle: Path,
    against: Path | None,
    backend: str,
    against_backend: str | None,
    context: int | None,
    draft_tokens: int | None,
) -> Plan:
    """Options as on the command line, None where nothing was said. ValueError if they or the bundles do not go together."""
    if context is not None and context < 2:
        raise ValueError(f"--context {context} is below 2; a window holds bos and at least one token")
    if against_backend and not against:
        raise ValueError(f"--against-backend {against_backend} needs --against BUNDLE")
    bundles = (bundle, against) if against else (bundle,)
    manifests = [contract.load(path) for path in bundles]
    backends = [choose_backend(manifests[0], backend)]
    if against:
        check_comparable(*manifests)
        usual = backends[0] if backends[0] in manifests[1].backends else "auto"
        backends.append(choose_backend(manifests[1], against_backend or usual))
    most = [manifest.backends[name].max_context_tokens for manifest, name in zip(manifests, backends, strict=True)]
    return Plan(
        bundles=bundles,
        backends=tuple(backends),
        context=context or min(DEFAULT_CONTEXT, *most),
        draft_tokens=manifests[0].drafter.num_draft_tokens if draft_tokens is None else draft_tokens,
    )


def check_comparable(bundle: Manifest, against: Manifest) -> None:
    """ValueError names what differs: only bundles of one checkpoint, with one vocabulary, can be compared."""
    sizes = bundle.target.vocab_size, against.target.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(f"vocabularies of {sizes[0]} and {sizes[1]} tokens cannot be compared; {REMEDY}")
    tokenizers = tuple(manifest.files["tokenizer.json"].sha256 for manifest in (bundle, against))
    facts = {"tokenizer.json": tokenizers, "bos": (bundle.tokens.bos, against.tokens.bos)}
    for what, (ours, theirs) in {**facts, **_checkpoint_facts(bundle, against)}.items():
        if ours != theirs:
            told = str(ours)[:12], str(theirs)[:12]  # of a hash its beginning
            raise ValueError(f"not the same checkpoint: {what} is {told[0]}, in the reference {told[1]}; {REMEDY}")


def _checkpoint_facts(bundle: Manifest, against: Manifest) -> dict[str, tuple[object, object]]:
    """What of each checkpoint -> in both bundles. Random weights lie in no file, their seed tells them apart."""
    facts = {}
    for who, ours in bundle.checkpoints.items():
        theirs = against.checkpoints[who]
        for name in sorted(ours.files.keys() | theirs.files.keys()):
            facts[f"{who} {name}"] = ours.files.get(name, "absent"), theirs.files.get(name, "absent")
        if RANDOM_WEIGHTS in (ours.source, theirs.source):
            facts[f"{who} weights"] = ours.revision, theirs.revision
    return facts
