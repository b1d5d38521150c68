"""Tables that the host maps, at every number of bits: rows are the dequantized weights bit for bit, and only the rows that
are asked for are unpacked."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from export import embeddings, weights
from export.config import TargetConfig
from export.quant import QuantSpec, dequantize, quantize
from export.weights import Weights, open_drafter
from runtime_py import manifest as contract
from runtime_py.embeddings import EmbeddingTable
from runtime_py.models import CentroidHead

from .pairs import PairShape

SPECS = [None, QuantSpec(8, None), QuantSpec(8, 64), QuantSpec(4, 32, True), QuantSpec(4, 128), QuantSpec(4, 3, True)]
specs = pytest.mark.parametrize("spec", SPECS, ids=str)


class Checkpoint:
    """One tensor."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor
        self.tensors = {"table": SimpleNamespace(file="none", key="table", dtype="F32")}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self._tensor[start:stop]


def written(folder, tensor: torch.Tensor, spec: QuantSpec | None, **options) -> tuple[contract.TableSpec, list]:
    (folder / embeddings.FOLDER).mkdir(exist_ok=True)
    source, errors = Weights(Checkpoint(tensor), TargetConfig), []
    return embeddings.write_table(source, "table", "some", folder, spec, errors, **options), errors


def reference(tensor: torch.Tensor, spec: QuantSpec | None, multiplier: float) -> np.ndarray:
    rows = dequantize(*quantize(tensor, spec), spec.width(tensor.shape[1])) if spec else tensor
    return rows.numpy() * np.float32(multiplier)


@specs
@pytest.mark.parametrize("columns", [1, 7, 32, 33, 96, 129, 256])
def test_rows_are_the_dequantized_ones(tmp_path, spec, columns):
    """Widths that are no multiple of a block, and odd ones."""
    torch.manual_seed(columns)
    tensor = torch.randn(50, columns)
    table, (error,) = written(tmp_path, tensor, spec, multiplier=1.25)
    want, ids = reference(tensor, spec, 1.25), [49, 0, 7, 7]
    assert np.array_equal(EmbeddingTable(tmp_path, table).rows(ids), want[ids])
    assert error.bits == table.bits == (spec.bits if spec else 32)
    stored = sum((tmp_path / part.file).stat().st_size for part in (table.data, table.scales) if part)
    assert stored == sum(part.size_bytes for part in (table.data, table.scales) if part)
    if columns % 2 == 0 and (spec is None or columns % spec.width(columns) == 0):
        assert stored == weights.written_bytes(50, columns, spec)


@specs
@pytest.mark.parametrize("elements", [1, 300, 1000])
def test_pieces_of_a_stream_join(tmp_path, monkeypatch, spec, elements):
    monkeypatch.setattr(weights, "CHUNK_ELEMENTS", elements)
    torch.manual_seed(0)
    tensor, order = torch.randn(37, 99), torch.randperm(37)
    table, _ = written(tmp_path, tensor, spec, order=order)
    assert np.array_equal(EmbeddingTable(tmp_path, table).rows(range(37)), reference(tensor, spec, 1.0)[order])


@specs
def test_only_the_rows_asked_for_are_read(tmp_path, spec):
    table, _ = written(tmp_path, torch.randn(50, 33), spec)
    found = EmbeddingTable(tmp_path, table)
    assert isinstance(found._data, np.memmap) and not found._data.flags.owndata
    asked = []
    data = found._data
    found._data = type("Rows", (), {"__getitem__": lambda self, ids: asked.append(ids) or data[ids]})()
    assert found.rows([3, 9]).shape == (2, 33) and asked == [[3, 9]]


@specs
@pytest.mark.parametrize("hidden", [32, 48])
def test_logits_of_the_centroid_head_are_those_of_its_rows(pair_of, tmp_path, spec, hidden):
    drafter = open_drafter(str(pair_of(PairShape(layers=4, period=2, shared=2, drafter_hidden=hidden))[1]))
    (tmp_path / embeddings.FOLDER).mkdir()
    head = embeddings.write_centroid_head(drafter, tmp_path, spec, [])
    state = np.random.default_rng(0).standard_normal(hidden).astype(np.float32)
    ids, logits = CentroidHead(tmp_path, head).candidates(state)
    place = np.argsort(
        EmbeddingTable(tmp_path, dataclasses.replace(_one_column(head), multiplier=1.0)).rows(range(512))[:, 0]
    )
    rows = EmbeddingTable(tmp_path, head.table).rows(place[ids])
    assert len(ids) == 4 * 16 and np.allclose(logits, rows @ state, rtol=1e-4, atol=1e-4)


def _one_column(head: contract.CentroidHeadSpec) -> contract.TableSpec:
    """The token ids as a table of floats: row j is the id of the head's row j."""
    data = dataclasses.replace(head.token_ordering, shape=(512, 1))
    return contract.TableSpec(data, None, 32, 0, 1, 1, 1.0)


def test_a_table_in_the_head_is_the_table_of_its_own(bundle_of, pair_of, tmp_path):
    """onnxruntime's layout of the same weights, blocks and bits."""
    bundle = bundle_of("tiny", "small")
    shared = contract.load(bundle).backends["onnx"].token_table
    assert (shared.bits, shared.zero_point, shared.data.file) == (4, 8, "onnx/cross_decoder.onnx.data")
    (tmp_path / embeddings.FOLDER).mkdir()
    target = weights.open_target(str(pair_of("tiny")[0]))
    form = target, "embed_tokens.weight", "token", tmp_path, QuantSpec(4, 128, True), [], shared.multiplier
    own = embeddings.write_table(*form)
    assert (bundle / "embeddings/token.bin").exists() is False and own.data.size_bytes == shared.data.size_bytes
    ids = range(own.data.shape[0])
    assert np.array_equal(EmbeddingTable(bundle, shared).rows(ids), EmbeddingTable(tmp_path, own).rows(ids))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 8}, "has 32 columns of 16 stored, expected 32"),
        ({"bits": 3}, "3 bits and dtype uint8 do not go together"),
        ({"bits": 32}, "32 bits and dtype uint8 do not go together"),
        ({"scales": None}, "block 32, 4 bits and scales do not go together"),
        ({"block": 16}, "do not fit rows of 32 in blocks of 16"),
    ],
)
def test_a_table_that_cannot_be(tmp_path, changes, message):
    table, _ = written(tmp_path, torch.randn(5, 32), QuantSpec(4, 32, True))
    contract._validate_table(table, 32, "some")
    with pytest.raises(ValueError, match=f"some: .*{message}"):
        contract._validate_table(dataclasses.replace(table, **changes), 32, "some")
