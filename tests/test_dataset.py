"""Do the rows of a step depend on the seed and the global batch only, and resume exactly?

A reference, written here from DESIGN.md's words with whole documents in memory, is what streams,
splits, workers and resumed positions are held against.
"""

import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dataset
from dataset import (
    PIECE_CHARS,
    Corpus,
    StepRows,
    Tokenizer,
    build_loader,
    load_tokenizer,
    open_corpus,
    split_text,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "data" / "sample.parquet"
TOKENIZER_FILE = ROOT / "tests" / "data" / "tokenizer.json"
BOS, EOS, PAD = 0, 1, 2
LONG_TEXTS = (" " * 200_000, "a" * 150_000, "word " * 40_000, "\u4e2d" * 70_000)
BROKEN = b"caf\xe9 \xed\xa0\x80 end"  # Latin-1, and a lone surrogate
NUM_BROKEN = 2


def make_texts() -> list[bytes | None]:
    """Documents of many lengths, with everything that a dataset should not hold."""
    lengths = np.random.default_rng(5).integers(1, 400, size=90)
    prose = pq.read_table(SAMPLE).column("text")[0].as_py()
    texts: list[bytes | None] = [prose[n : n + n].encode() for n in lengths.tolist()]
    for place, text in ((3, None), (10, b""), (11, b""), (40, None), (41, None), (89, b"")):
        texts[place] = text
    for place, long_text in zip((7, 30, 55, 80), LONG_TEXTS, strict=True):
        texts[place] = long_text.encode()
    texts[20] = texts[70] = BROKEN
    return texts


def write_parquet(path: Path, texts: Sequence[bytes | None], *, group_rows: int) -> None:
    """A file whose column `text` says string, whatever the bytes are."""
    column = pa.array(texts, pa.binary())
    column = pa.Array.from_buffers(pa.string(), len(column), column.buffers(), column.null_count)
    table = pa.table({"number": pa.array(range(len(texts))), "text": column})
    pq.write_table(table, path, row_group_size=group_rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of 40, 33 and 17 documents in groups of 7, 11 and 17."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = make_texts()
    write_parquet(folder / "a.parquet", texts[:40], group_rows=7)
    write_parquet(folder / "b.parquet", texts[40:73], group_rows=11)
    write_parquet(folder / "c.parquet", texts[73:], group_rows=17)
    return folder


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    return open_corpus(str(folder))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(TOKENIZER_FILE))


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    """A quick one: a token a byte."""
    return Tokenizer("bytes", 259, (BOS,), (EOS,), PAD, encode_bytes)


def encode_bytes(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]


@pytest.fixture(scope="module")
def tekken() -> Tokenizer:
    return load_tokenizer("tekken")


def take(corpus: Corpus, tokenizer: Tokenizer, *, num_steps: int, **options: Any) -> list[StepRows]:
    """The first steps of a loader; by default one process reads all rows of a batch of 6."""
    options = {"sequence_length": 128, "global_rows": 6, "seed": 3} | options
    options.setdefault("rows", range(options["global_rows"]))
    loader = build_loader(corpus, tokenizer, **options)
    try:
        return list(itertools.islice(loader, num_steps))
    finally:
        loader.close()


def step_hashes(*shares: Sequence[StepRows]) -> list[str]:
    """One hash a step over the rows of all shares, in row order."""
    hashes = []
    for parts in zip(*shares, strict=True):
        digest = hashlib.sha256()
        for tensors in ([p.input_ids_RT for p in parts], [p.labels_RT for p in parts]):
            digest.update(torch.cat(tensors).numpy().tobytes())
        hashes.append(digest.hexdigest())
    return hashes


def positions_of(*shares: StepRows) -> list[tuple[int, int]]:
    return [position for share in shares for position in share.positions]


def shuffled_texts(corpus: Corpus, *, seed: int, num_passes: int) -> list[bytes | None]:
    """The documents in order, read the plain way, by what the loader itself says of one row."""
    by_group = []
    for file, index in zip(corpus.group_files, corpus.group_indices, strict=True):
        column = pq.ParquetFile(corpus.files[file]).read_row_group(int(index), ["text"])["text"]
        by_group.append(column.cast(pa.binary()).to_pylist())
    texts: list[bytes | None] = []
    for pass_index in range(num_passes):
        for group in dataset._permutation(len(by_group), seed, pass_index, 0):
            rows = dataset._permutation(len(by_group[group]), seed, pass_index, int(group) + 1)
            texts += [by_group[group][row] for row in rows]
    return texts


def reference_stream(
    corpus: Corpus, tokenizer: Tokenizer, *, row: int, global_rows: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, whether each is the first of its document) of one packed row over two passes."""
    tokens, is_first = [], []
    for raw in shuffled_texts(corpus, seed=seed, num_passes=2)[row::global_rows]:
        ids = tokenizer.encode(raw.decode("utf-8", "replace")) if raw else []
        tokens += ids
        is_first += [True] + [False] * (len(ids) - 1) if ids else []
    return np.array(tokens), np.array(is_first)


# Rows


def test_packed_rows_are_the_joined_documents(corpus: Corpus, tokenizer: Tokenizer) -> None:
    steps = take(corpus, tokenizer, num_steps=150)
    for row in range(6):
        tokens, is_first = reference_stream(corpus, tokenizer, row=row, global_rows=6, seed=3)
        num_windows = min(150, len(tokens) // 129)
        assert num_windows > 10
        windows = tokens[: num_windows * 129].reshape(num_windows, 129)
        starts = is_first[: num_windows * 129].reshape(num_windows, 129)
        inputs = np.stack([step.input_ids_RT[row].numpy() for step in steps[:num_windows]])
        labels = np.stack([step.labels_RT[row].numpy() for step in steps[:num_windows]])
        np.testing.assert_array_equal(inputs, windows[:, :-1])
        np.testing.assert_array_equal(labels, np.where(starts[:, 1:], -100, windows[:, 1:]))


def test_padded_rows_are_one_document_each(corpus: Corpus, tokenizer: Tokenizer) -> None:
    texts = shuffled_texts(corpus, seed=3, num_passes=3)
    steps = take(corpus, tokenizer, num_steps=40, packing=False)  # 240 documents: into the third
    num_skipped = num_truncated = num_short = 0
    for step_index, step in enumerate(steps):
        for row in range(6):
            raw = texts[step_index * 6 + row]
            ids = tokenizer.encode(raw.decode("utf-8", "replace"))[:129] if raw else []
            num_counted = max(0, len(ids) - 1)
            num_skipped += not raw
            num_truncated += len(ids) == 129
            num_short += 0 < len(ids) < 129
            assert step.input_ids_RT[row].tolist() == (ids + [PAD] * 129)[:128]
            expected = ids[1:] + [-100] * (128 - num_counted)
            assert step.labels_RT[row].tolist() == expected
    assert min(num_skipped, num_truncated, num_short) > 5
    assert sum(step.num_skipped_documents for step in steps) == num_skipped
    assert steps[-1].positions == tuple((240 + row, 0) for row in range(6))


@pytest.mark.parametrize("packing", [True, False])
def test_shapes_types_and_counts(corpus: Corpus, tokenizer: Tokenizer, packing: bool) -> None:
    for step in take(corpus, tokenizer, num_steps=20, packing=packing):
        assert step.input_ids_RT.shape == step.labels_RT.shape == (6, 128)
        assert step.input_ids_RT.dtype == step.labels_RT.dtype == torch.int64
        assert step.input_ids_RT.is_contiguous()
        assert step.labels_RT.is_contiguous()
        assert step.num_training_tokens == int((step.labels_RT != -100).sum())


def test_real_eos_counts_where_pad_is_eos(corpus: Corpus, tmp_path: Path) -> None:
    """The tokenizer has no token for padding, so EOS fills."""
    content = json.loads(TOKENIZER_FILE.read_text())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "<pad>"]
    content["model"]["vocab"]["<filler>"] = content["model"]["vocab"].pop("<pad>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.pad_id,) == tokenizer.suffix == (EOS,)
    num_eos = 0
    for step in take(corpus, tokenizer, num_steps=20, packing=False):
        for inputs, labels in zip(step.input_ids_RT, step.labels_RT, strict=True):
            if EOS in labels:
                num_eos += 1
                length = int((labels != -100).sum())
                assert labels[length - 1] == EOS
                assert (labels[length:] == -100).all()
                assert (inputs[length:] == EOS).all()
    assert num_eos > 20


def test_sample_has_99_pct_training_tokens(tekken: Tokenizer) -> None:
    """Almost all, but not all: targets that cross into the next document are masked."""
    steps = take(open_corpus(str(SAMPLE)), tekken, num_steps=10, sequence_length=2048)
    share = sum(s.num_training_tokens for s in steps) / sum(s.labels_RT.numel() for s in steps)
    assert 0.99 <= share < 1
    for step in steps:
        next_ids_RT = step.input_ids_RT[:, 1:]
        masked = step.labels_RT[:, :-1] == -100
        assert (next_ids_RT[masked] == tekken.prefix[0]).all()
        assert (next_ids_RT[~masked] != tekken.prefix[0]).all()


def test_every_document_once_a_pass_and_each_pass_anew(byte_tokenizer: Tokenizer) -> None:
    corpus = open_corpus(str(SAMPLE))
    steps = take(corpus, byte_tokenizer, num_steps=436, global_rows=5, packing=False)
    rows = [row.numpy().tobytes() for step in steps for row in step.input_ids_RT]
    first, second = rows[:1090], rows[1090:]
    assert sorted(first) == sorted(second)
    assert len(set(first)) > 1000
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 20


def test_order_is_the_same_everywhere() -> None:
    """Recorded once: a change would silently change the data of every published run."""
    assert dataset._permutation(10, 42, 0, 0).tolist() == [4, 8, 1, 9, 3, 6, 0, 7, 2, 5]


# Splits and resuming


@pytest.mark.parametrize("packing", [True, False])
def test_all_splits_give_the_same_rows(corpus: Corpus, tokenizer: Tokenizer, packing: bool) -> None:
    """12 rows over 1, 2, 3, 4, 6 and 12 ranks; accumulation only cuts a rank's rows further."""
    options = {"num_steps": 12, "global_rows": 12, "packing": packing}
    whole = take(corpus, tokenizer, **options)
    expected = step_hashes(whole)
    assert len(set(expected)) == 12
    for num_ranks in (2, 3, 4, 6, 12):
        size = 12 // num_ranks
        shares = [
            take(corpus, tokenizer, rows=range(r * size, (r + 1) * size), **options)
            for r in range(num_ranks)
        ]
        assert step_hashes(*shares) == expected
        for step, *parts in zip(whole, *shares, strict=True):
            assert positions_of(*parts) == list(step.positions)
            assert sum(p.num_training_tokens for p in parts) == step.num_training_tokens
            assert sum(p.num_skipped_documents for p in parts) == step.num_skipped_documents
            assert sum(p.num_repaired_documents for p in parts) == step.num_repaired_documents


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 2), (1, 5), (2, 3), (3, 7)])
def test_all_workers_give_the_same_rows(
    corpus: Corpus, tokenizer: Tokenizer, num_ranks: int, num_workers: int
) -> None:
    whole = take(corpus, tokenizer, num_steps=10)
    size = 6 // num_ranks
    shares = [
        take(
            corpus,
            tokenizer,
            num_steps=10,
            rows=range(r * size, (r + 1) * size),
            num_workers=num_workers,
        )
        for r in range(num_ranks)
    ]
    assert step_hashes(*shares) == step_hashes(whole)
    assert sum(s.num_skipped_documents for share in shares for s in share) == sum(
        s.num_skipped_documents for s in whole
    )


def test_rows_depend_on_the_global_batch_and_the_seed(corpus: Corpus, tokenizer: Tokenizer) -> None:
    hashes = {
        step_hashes(take(corpus, tokenizer, num_steps=1, seed=seed, global_rows=rows))[0]
        for seed in (0, 1)
        for rows in (5, 6)
    }
    assert len(hashes) == 4


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_resuming_is_never_having_stopped(
    data: st.DataObject, corpus: Corpus, byte_tokenizer: Tokenizer
) -> None:
    """Stop after any step, any number of times, with any split after it."""
    options = {
        "global_rows": data.draw(st.sampled_from([1, 4, 6])),
        "sequence_length": data.draw(st.sampled_from([1, 17, 500])),
        "packing": data.draw(st.booleans()),
        "seed": data.draw(st.integers(0, 2**40)),
    }
    global_rows = options["global_rows"]
    stretches = data.draw(st.lists(st.integers(1, 12), min_size=2, max_size=4))
    expected = step_hashes(take(corpus, byte_tokenizer, num_steps=sum(stretches), **options))
    positions, hashes = None, []
    for num_steps in stretches:
        num_ranks = data.draw(st.sampled_from([n for n in (1, 2, 3) if global_rows % n == 0]))
        size = global_rows // num_ranks
        shares = [
            take(
                corpus,
                byte_tokenizer,
                num_steps=num_steps,
                rows=range(r * size, (r + 1) * size),
                positions=positions,
                **options,
            )
            for r in range(num_ranks)
        ]
        hashes += step_hashes(*shares)
        positions = positions_of(*(share[-1] for share in shares))
    assert hashes == expected


def test_resumes_deep_in_a_later_pass_with_workers(corpus: Corpus, tokenizer: Tokenizer) -> None:
    options = {"packing": True, "global_rows": 4, "sequence_length": 4000}
    steps = take(corpus, tokenizer, num_steps=90, **options)
    positions = steps[59].positions
    assert max(document for document, _ in positions) > corpus.num_documents
    assert any(offset > 0 for _, offset in positions)
    resumed = take(corpus, tokenizer, num_steps=30, positions=positions, num_workers=3, **options)
    assert step_hashes(resumed) == step_hashes(steps[60:])


def test_resuming_reads_nothing_that_lies_before(
    corpus: Corpus, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row group before the first position, and no text of a stream before its position."""
    read, documents = [], []
    read_group = dataset.Documents._read_group

    def spy(self: dataset.Documents, pass_index: int, place: int) -> dict[int, bytes | None]:
        texts = read_group(self, pass_index, place)
        read.append((pass_index, place))
        documents.extend(texts)
        return texts

    monkeypatch.setattr(dataset.Documents, "_read_group", spy)
    first = 7 * corpus.num_documents + 46
    positions = [(first, 0), (first + 25, 0)]
    take(corpus, byte_tokenizer, num_steps=1, global_rows=2, positions=positions)
    assert {pass_index for pass_index, _ in read} == {7}
    assert 2 <= len(read) <= 5
    assert min(d for d in documents if d % 2 == 0) >= positions[0][0]
    assert min(d for d in documents if d % 2 == 1) >= positions[1][0]


def test_each_row_group_is_read_once(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams run apart, and still no group of 64 is read twice, and few texts are held."""
    read = []
    read_group = dataset.Documents._read_group

    def spy(self: dataset.Documents, pass_index: int, place: int) -> dict[int, bytes | None]:
        read.append((pass_index, place))
        held = sum(len(texts) for texts in self._held.values())
        assert held < 300, "the table of 1,090 documents is being held"
        return read_group(self, pass_index, place)

    monkeypatch.setattr(dataset.Documents, "_read_group", spy)
    corpus = open_corpus(str(SAMPLE))
    take(corpus, byte_tokenizer, num_steps=420, global_rows=8, sequence_length=2048)
    assert len(read) == len(set(read)) > len(corpus.group_rows)


def test_a_row_group_dropped_too_early_is_read_again(
    corpus: Corpus, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = step_hashes(take(corpus, tokenizer, num_steps=60))
    monkeypatch.setattr(dataset, "MAX_HELD_GROUPS", 1)
    assert step_hashes(take(corpus, tokenizer, num_steps=60)) == expected


@pytest.mark.parametrize(
    "positions", [[(0, 0), (1, 0)], [(0, 0), (2, 0), (1, 0)], [(0, 0), (4, 0), (9, 0)]]
)
def test_positions_of_another_global_batch_are_refused(
    corpus: Corpus, tokenizer: Tokenizer, positions: list[tuple[int, int]]
) -> None:
    with pytest.raises(ValueError, match="3 rows"):
        take(corpus, tokenizer, num_steps=1, global_rows=3, positions=positions)


# Documents of every kind


def test_unusable_documents_are_counted(corpus: Corpus, tokenizer: Tokenizer) -> None:
    steps = take(corpus, tokenizer, num_steps=15, packing=False)  # 90 documents: one pass
    texts = make_texts()
    assert sum(step.num_skipped_documents for step in steps) == sum(not text for text in texts)
    assert sum(step.num_repaired_documents for step in steps) == NUM_BROKEN


@pytest.mark.parametrize(
    "text",
    [*LONG_TEXTS, " " * 1_000_000, "\t\n" * 500_000, "AAAAaaaa" * 100_000, "no spaces" * 9_000],
    ids=lambda text: f"{text[:4]!r}x{len(text)}",
)
def test_huge_lines_are_tokenized_in_pieces(tekken: Tokenizer, text: str) -> None:
    pieces = list(split_text(text))
    assert "".join(pieces) == text
    assert len(pieces) > 1
    assert max(map(len, pieces)) <= PIECE_CHARS
    ids = tekken.encode(text)
    assert (ids[0], ids[-1]) == (*tekken.prefix, *tekken.suffix)
    assert 10 < len(ids) < len(text) * 2


def test_pieces_give_the_ids_of_the_whole(tekken: Tokenizer, tokenizer: Tokenizer) -> None:
    """10 MB of prose in one line: cut 150 times and more, and every id as if it were not."""
    prose = " ".join(pq.read_table(SAMPLE).column("text").to_pylist())
    line = prose.replace("\n", " ")[:200_000]
    line = line + "  " + line[::-1] + " !\u00a0" + line
    assert tekken.encode(line)[1:-1] == tekken.encode_plain(line)
    assert tokenizer.encode(line)[1:-1] == tokenizer.encode_plain(line)
    for gap in range(2, 6):  # wherever a piece ends, it is not inside a run of spaces
        spaced = ("word" + " " * gap) * 40_000
        assert tekken.encode(spaced)[1:-1] == tekken.encode_plain(spaced)
    start_s = time.perf_counter()
    assert len(tekken.encode(prose + prose[: 10_000_000 - len(prose)])) > 2_000_000
    assert time.perf_counter() - start_s < 30


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab \n\u4e2d", max_size=300), st.integers(1, 20))
def test_pieces_join_to_the_text(text: str, limit: int) -> None:
    before = dataset.PIECE_CHARS
    dataset.PIECE_CHARS = limit
    try:
        pieces = list(split_text(text))
    finally:
        dataset.PIECE_CHARS = before
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= limit
    assert all(pieces) or not text


def test_a_huge_document_is_not_tokenized_beyond_its_row(tmp_path: Path, tokenizer: Tokenizer):
    seen = []

    def encode_plain(text: str) -> list[int]:
        seen.append(text)
        return tokenizer.encode_plain(text)

    write_parquet(tmp_path / "a.parquet", [b"word " * 2_000_000], group_rows=1)
    lazy = Tokenizer("lazy", 512, (BOS,), (EOS,), PAD, encode_plain)
    for packing in (True, False):
        seen.clear()
        corpus = open_corpus(str(tmp_path / "a.parquet"))
        take(corpus, lazy, num_steps=1, global_rows=1, packing=packing)
        assert len(seen) == 1


STRING_TYPES = (
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
)


@pytest.mark.parametrize("kind", STRING_TYPES, ids=str)
def test_types_of_strings(tmp_path: Path, tokenizer: Tokenizer, kind: pa.DataType) -> None:
    texts = ["first text", None, "second text"]
    column = pa.array(texts)
    column = column.dictionary_encode() if pa.types.is_dictionary(kind) else column.cast(kind)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    corpus = open_corpus(str(tmp_path / "a.parquet"))
    step = take(corpus, tokenizer, num_steps=1, global_rows=3, packing=False)[0]
    expected = [tokenizer.encode(text) if text else [] for text in texts]
    rows = [[i for i in row if i != PAD] for row in step.input_ids_RT.tolist()]
    assert sorted(rows) == sorted(expected)
    assert step.num_skipped_documents == 1


def test_a_file_without_strings_among_others(folder: Path, tmp_path: Path, tokenizer: Tokenizer):
    shutil.copytree(folder, tmp_path / "mixed")
    pq.write_table(pa.table({"text": [1, 2, 3, 4]}), tmp_path / "mixed" / "d.parquet")
    mixed = open_corpus(str(tmp_path / "mixed"))
    assert mixed.num_documents == 94
    steps = take(mixed, tokenizer, num_steps=47, global_rows=2, packing=False)
    texts = make_texts()
    assert sum(s.num_skipped_documents for s in steps) == sum(not text for text in texts) + 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_nothing_but_nulls_ends(tmp_path: Path, tokenizer: Tokenizer, num_workers: int) -> None:
    write_parquet(tmp_path / "a.parquet", [None, b""] * 4, group_rows=3)
    corpus = open_corpus(str(tmp_path / "a.parquet"))
    with pytest.raises(ValueError, match=r"\Athe dataset holds no text[^\n]*\Z"):
        take(corpus, tokenizer, num_steps=1, global_rows=2, num_workers=num_workers)
    assert not worker_pids()


def test_one_text_among_nulls_is_found(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_parquet(tmp_path / "a.parquet", [b"alone", *[None] * 39], group_rows=10)
    corpus = open_corpus(str(tmp_path / "a.parquet"))
    step = take(corpus, tokenizer, num_steps=1, global_rows=40, sequence_length=8)[0]
    document = tokenizer.encode("alone")
    assert step.input_ids_RT.tolist() == [(document * 9)[:8]] * 40


# Corpus


def test_file_folder_and_glob(folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    assert open_corpus(str(folder / "*.parquet")).fingerprint == corpus.fingerprint
    assert open_corpus(str(folder / "[ab].parquet")).num_documents == 73
    assert open_corpus(str(folder / "c.parquet")).num_documents == 17
    assert corpus.num_documents == 90
    assert corpus.group_rows.tolist() == [7] * 5 + [5] + [11] * 3 + [17]
    shutil.copytree(folder, tmp_path / "copy")
    assert open_corpus(str(tmp_path / "copy")).fingerprint == corpus.fingerprint


def test_fingerprint_changes_with_the_files(folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "a.parquet").rename(tmp_path / "copy" / "aa.parquet")
    renamed = open_corpus(str(tmp_path / "copy")).fingerprint
    write_parquet(tmp_path / "copy" / "aa.parquet", make_texts()[:40], group_rows=8)
    regrouped = open_corpus(str(tmp_path / "copy")).fingerprint
    assert len({corpus.fingerprint, renamed, regrouped}) == 3


def damage(path: Path, case: str) -> Path:
    """Write one kind of bad input and return what a user would pass."""
    file = path / "bad.parquet"
    if case == "garbage":
        file.write_bytes(b"PAR1 this is no parquet file PAR1")
    elif case == "zero bytes":
        file.touch()
    elif case == "torn":
        file.write_bytes(SAMPLE.read_bytes()[:100_000])
    elif case == "no text column":
        pq.write_table(pa.table({"words": ["a"], "size": [1]}), file)
    elif case == "no strings":
        pq.write_table(pa.table({"text": [1, 2]}), file)
    elif case == "no rows":
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), file)
    elif case == "empty folder":
        return path
    elif case == "glob":
        return path / "*.parquet"
    return file


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing", "is no parquet file"),
        ("empty folder", "no folder with"),
        ("glob", "no glob"),
        ("garbage", "no readable parquet file"),
        ("zero bytes", "no readable parquet file"),
        ("torn", "no readable parquet file"),
        ("no text column", r"no column `text` \(it has words, size\)"),
        ("no strings", "holds no strings"),
        ("no rows", "holds no documents"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, case: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        open_corpus(str(damage(tmp_path, case)))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_damaged_data_is_one_line(tmp_path: Path, tokenizer: Tokenizer, num_workers: int) -> None:
    content = bytearray(SAMPLE.read_bytes())
    content[4:200_000] = bytes(199_996)
    (tmp_path / "a.parquet").write_bytes(content)
    corpus = open_corpus(str(tmp_path / "a.parquet"))
    with pytest.raises(ValueError, match=r"\A\S*a.parquet cannot be read: [^\n]*\Z"):
        take(corpus, tokenizer, num_steps=400, num_workers=num_workers, packing=False)


def test_fewer_documents_than_rows(corpus: Corpus, byte_tokenizer: Tokenizer) -> None:
    assert len(take(corpus, byte_tokenizer, num_steps=1, global_rows=90)) == 1
    with pytest.raises(ValueError, match="90 documents, fewer than the 91 rows"):
        take(corpus, byte_tokenizer, num_steps=1, global_rows=91)


# Tokenizers


def test_tekken_is_what_the_library_gives(tekken: Tokenizer) -> None:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    library = MistralTokenizer.v3(is_tekken=True).instruct_tokenizer.tokenizer
    assert (tekken.vocab_size, tekken.prefix, tekken.suffix) == (131_072, (1,), (2,))
    assert tekken.vocab_size == library.n_words
    assert (*tekken.prefix, *tekken.suffix) == (library.bos_id, library.eos_id)
    texts = pq.read_table(SAMPLE).column("text").to_pylist()[:200]
    for text in ["Hello world", "</s> is no token in a text", "\U0001f600 \u4e2d\n\n", *texts]:
        assert tekken.encode(text) == library.encode(text, bos=True, eos=True)


def test_tekken_loads_quickly() -> None:
    start_s = time.process_time()  # of this process alone: others may use the machine
    load_tokenizer("tekken")
    assert time.process_time() - start_s < 3  # about 0.7


@pytest.mark.parametrize("path", [TOKENIZER_FILE, TOKENIZER_FILE.parent], ids=["file", "folder"])
def test_tokenizer_file_and_folder(path: Path) -> None:
    tokenizer = load_tokenizer(str(path))
    backend = tokenizers.Tokenizer.from_file(str(TOKENIZER_FILE))
    assert tokenizer.vocab_size == 512
    assert (tokenizer.prefix, tokenizer.suffix, tokenizer.pad_id) == ((BOS,), (EOS,), PAD)
    for text in ("Call me Ishmael.", "", " \n", "\u4e2d"):
        assert tokenizer.encode(text) == backend.encode(text).ids
    assert pickle.loads(pickle.dumps(tokenizer)).encode("whale") == tokenizer.encode("whale")


def test_a_saved_truncation_and_added_tokens(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(TOKENIZER_FILE))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.add_tokens(["<extra>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.vocab_size == 513
    assert tokenizer.encode("<extra> " * 3).count(512) == 3
    assert (len(tokenizer.prefix), len(tokenizer.suffix)) == (1, 1)


def test_a_tokenizer_without_bos_and_eos(tmp_path: Path, corpus: Corpus) -> None:
    content = json.loads(TOKENIZER_FILE.read_text()) | {"post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.prefix, tokenizer.suffix) == ((), ())
    steps = take(corpus, tokenizer, num_steps=20)
    tokens, is_first = reference_stream(corpus, tokenizer, row=0, global_rows=6, seed=3)
    inputs = np.stack([step.input_ids_RT[0].numpy() for step in steps])
    labels = np.stack([step.labels_RT[0].numpy() for step in steps])
    np.testing.assert_array_equal(inputs, tokens[: 20 * 129].reshape(20, 129)[:, :-1])
    starts = is_first[: 20 * 129].reshape(20, 129)[:, 1:]
    assert starts.any()
    np.testing.assert_array_equal(labels == -100, starts)


@pytest.mark.parametrize("name", ["no/such/thing", "missing/tokenizer.json", "FOLDER", "GARBAGE"])
def test_bad_tokenizers_are_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "garbage.json").write_text('{"a": 1}')
    name = {"FOLDER": str(tmp_path), "GARBAGE": str(tmp_path / "garbage.json")}.get(name, name)
    with pytest.raises(ValueError, match=name.split("/")[-1]) as caught:
        load_tokenizer(name)
    assert "\n" not in str(caught.value)


STAND_IN = """
import time
class AutoTokenizer:
    @staticmethod
    def from_pretrained(name, local_files_only):
        if local_files_only:
            raise OSError("not cached\\nand more lines")
        time.sleep(60)
"""


def test_a_hub_out_of_reach_fails_within_5_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that takes the connection and never answers, with a stand-in for transformers."""
    import socket

    (tmp_path / "transformers.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        start_s = time.perf_counter()
        with pytest.raises(ValueError, match=r"\Atokenizer some/model .*out of reach[^\n]*\Z"):
            load_tokenizer("some/model")
        assert time.perf_counter() - start_s < 5
    monkeypatch.delitem(sys.modules, "transformers", raising=False)


def test_a_hub_id_without_transformers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs transformers; install it"):
        load_tokenizer("some/model")


# Workers


def worker_pids() -> list[int]:
    return [p.pid for p in multiprocessing.active_children() if p.pid]


def test_closing_stops_the_workers(corpus: Corpus, tokenizer: Tokenizer) -> None:
    before = set(worker_pids())
    loader = build_loader(
        corpus,
        tokenizer,
        sequence_length=64,
        rows=range(3),
        global_rows=3,
        seed=0,
        num_workers=8,
    )
    next(loader)
    assert len(set(worker_pids()) - before) == 3  # one a row at most
    start_s = time.perf_counter()
    loader.close()
    loader.close()
    assert time.perf_counter() - start_s < 4
    assert set(worker_pids()) <= before


def test_workers_outlive_stop_signals_from_others(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Slurm signals every process of a step; the trainer still wants rows to stop cleanly."""
    loader = build_loader(
        corpus, tokenizer, sequence_length=64, rows=range(2), global_rows=2, seed=0, num_workers=2
    )
    next(loader)
    sender = multiprocessing.get_context("fork").Process(
        target=lambda pids: [os.kill(p, s) for p in pids for s in (signal.SIGINT, signal.SIGTERM)],
        args=(worker_pids(),),
    )
    sender.start()
    sender.join(10)
    time.sleep(0.3)
    rows = [next(loader) for _ in range(20)]
    expected = take(corpus, tokenizer, num_steps=21, sequence_length=64, global_rows=2, seed=0)
    assert step_hashes(rows) == step_hashes(expected[1:])
    children = multiprocessing.active_children()
    assert len(children) == 2
    for child in children:
        child.terminate()  # the parent's own counts
        child.join(5)
        assert child.exitcode == 0
    loader.close()


def test_the_global_random_state_is_left_alone(corpus: Corpus, tokenizer: Tokenizer) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    for num_workers in (0, 2):
        take(corpus, tokenizer, num_steps=2, num_workers=num_workers)
        assert torch.equal(torch.get_rng_state(), state)
