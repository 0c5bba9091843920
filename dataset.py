"""Which rows does a rank train on at each step?

Parquet files with a `text` column become an endless sequence of global batches. A global batch has
G rows, and each row is a stream of its own over the shuffled documents (see DESIGN.md, "The data"),
so the rows depend on the seed and on G only, never on how ranks, accumulation and loader workers
share them, and G pairs (document, offset) say where to resume.

Tensor names end in shape letters: R rows of this rank, T sequence length.
"""

import collections
import functools
import glob
import hashlib
import importlib.util
import itertools
import os
import re
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

IGNORED_LABEL = -100
# tiktoken fails on a run of a million spaces (its regex stack is full); half of that still works.
PIECE_CHARS = 65_536
# Groups of which a worker holds texts for rows that lag behind; beyond it one is read once more.
MAX_HELD_GROUPS = 256
# One usable document among N is missed by 20 N draws with probability e^-20.
MAX_PASSES_WITHOUT_TEXT = 20
HUB_TIMEOUT_S = 2.5

Position = tuple[int, int]
"""(document, offset): index in the endless shuffled order, and its tokens already used."""


def split_text(text: str) -> Iterator[str]:
    """Pieces of at most PIECE_CHARS characters, cut before a space that follows a word if possible.

    No token of a GPT-style pattern spans such a place, so the pieces give the ids of the whole.
    """
    start = 0
    while len(text) - start > PIECE_CHARS:
        cut = text.rfind(" ", start + 1, start + PIECE_CHARS + 1)
        while cut > start and text[cut - 1].isspace():
            cut = text.rfind(" ", start + 1, cut)
        cut = cut if cut > start else start + PIECE_CHARS
        yield text[start:cut]
        start = cut
    yield text[start:]


@dataclass(frozen=True)
class Tokenizer:
    """Token ids of a text, between `prefix` and `suffix`: BOS and EOS, if the tokenizer adds them.

    `vocab_size` counts added tokens. `pad_id` is a mere filler, as padding is masked by length.
    """

    name: str
    vocab_size: int
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    pad_id: int
    encode_plain: Callable[[str], list[int]] = field(repr=False)

    def encode_pieces(self, text: str) -> Iterator[Sequence[int]]:
        """Token ids of one document, piece by piece, so that a huge one need not be read whole."""
        yield self.prefix
        yield from map(self.encode_plain, split_text(text))
        yield self.suffix

    def encode(self, text: str) -> list[int]:
        """Token ids of one document."""
        return list(itertools.chain.from_iterable(self.encode_pieces(text)))


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """`tekken` (Mistral NeMo's, from mistral-common), a tokenizer.json or its folder, or a hub id.

    Raises ValueError, in one line, where it cannot be loaded; within 5 s for a hub out of reach.
    """
    if name_or_path == "tekken":
        return _load_tekken()
    path = Path(name_or_path).expanduser()
    if not path.exists():
        return _from_backend(name_or_path, _load_from_hub(name_or_path))
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} holds no tokenizer.json; pass a folder that does, or `tekken`")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a file that it cannot parse
        raise ValueError(f"{file} is no tokenizer.json: {_one_line(error)}") from error
    return _from_backend(name_or_path, backend)


def _load_tekken() -> Tokenizer:
    import mistral_common  # here, since it takes 0.3 s and other tokenizers do without
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    file = Path(mistral_common.__file__).parent / "data" / "tekken_240718.json"
    tekken = Tekkenizer.from_file(file)
    encode_plain = functools.partial(tekken.encode, bos=False, eos=False)
    ends = (tekken.bos_id,), (tekken.eos_id,)
    return Tokenizer("tekken", tekken.n_words, *ends, tekken.pad_id, encode_plain)


def _from_backend(name: str, backend: tokenizers.Tokenizer) -> Tokenizer:
    # A tokenizer.json carries the truncation and padding of whoever saved it.
    backend.no_truncation()
    backend.no_padding()
    if not (ids := backend.get_vocab(with_added_tokens=True)):
        raise ValueError(f"the tokenizer {name} has no vocabulary")
    probe = backend.encode("a")
    pairs = list(zip(probe.special_tokens_mask, probe.ids, strict=True))
    prefix = tuple(i for _, i in itertools.takewhile(lambda pair: pair[0], pairs))
    suffix = tuple(i for _, i in itertools.takewhile(lambda pair: pair[0], pairs[::-1]))[::-1]
    known = (ids[pad] for pad in ("<pad>", "[PAD]", "<|pad|>") if pad in ids)
    pad_id = next(known, suffix[-1] if suffix else 0)
    vocab_size = max(ids.values()) + 1  # ids may have gaps
    encode_plain = functools.partial(_encode_plain, backend)
    return Tokenizer(name, vocab_size, prefix, suffix, pad_id, encode_plain)


def _encode_plain(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


def _load_from_hub(name: str) -> tokenizers.Tokenizer:
    """The fast tokenizer of a hub id: from the local cache, else from the hub."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.endswith(".json"):
        raise ValueError(f"tokenizer {name} does not exist; pass `tekken`, a file or a folder")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            f"tokenizer {name} is no file or folder here, and a hub id needs transformers; "
            "install it, or pass `tekken` or a tokenizer.json"
        )
    answers: list[bool] = []
    # Asked in a thread, since a name look-up knows no timeout, and while transformers is imported.
    asking = threading.Thread(target=_ask_hub, args=(answers,), daemon=True)
    asking.start()
    from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

    asking.join(HUB_TIMEOUT_S)
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=not answers).backend_tokenizer
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: no fast tokenizer
        reason = _one_line(error) if answers else "not in the cache, and its hub is out of reach"
        raise ValueError(
            f"tokenizer {name} cannot be loaded ({reason}); load it once where there is a "
            "network, or pass `tekken` or a tokenizer.json"
        ) from error


def _ask_hub(answers: list[bool]) -> None:
    """Put something into `answers` if the hub gives any answer."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(endpoint, timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        pass  # an answer, too
    except OSError:
        return
    answers.append(True)


def _one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class Corpus:
    """What the footers say about row groups, here groups; no text is held.

    Per group: the index of its file, its index in that file, and its number of rows.
    """

    files: tuple[Path, ...]
    file_holds_text: tuple[bool, ...]
    group_files: np.ndarray
    group_indices: np.ndarray
    group_rows: np.ndarray
    fingerprint: str

    @property
    def num_documents(self) -> int:
        return int(self.group_rows.sum())


def open_corpus(dataset: str) -> Corpus:
    """Read the footers of a parquet file, of all `*.parquet` in a folder, or of a glob's matches.

    Raises ValueError, in one line, where there is no file, no `text` column, or nothing in it.
    """
    path = Path(dataset).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.parquet"))
    elif path.exists():
        files = [path]
    else:
        files = [Path(f) for f in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(f)]
    if not files:
        raise ValueError(f"{dataset} is no parquet file, no folder with *.parquet, and no glob")
    digest, holds_text, groups = hashlib.sha256(), [], []
    for file_index, file in enumerate(files):
        metadata, is_text = _read_footer(file, digest)
        holds_text.append(is_text)
        for index in range(metadata.num_row_groups):
            groups.append((file_index, index, metadata.row_group(index).num_rows))
    group_files, group_indices, group_rows = np.array(groups, np.int64).reshape(-1, 3).T
    if group_rows.sum() == 0:
        raise ValueError(f"{dataset} holds no documents; pass a dataset with rows")
    if not any(holds_text):
        raise ValueError(f"the column `text` of {dataset} holds no strings; convert it first")
    columns = group_files, group_indices, group_rows
    return Corpus(tuple(files), tuple(holds_text), *columns, digest.hexdigest()[:16])


def _read_footer(file: Path, digest: Any) -> tuple[pq.FileMetaData, bool]:
    """The footer, added to `digest`, and whether the column `text` can hold text."""
    try:
        with open(file, "rb") as stream:
            metadata = pq.read_metadata(stream)
            size = stream.seek(0, os.SEEK_END)
            stream.seek(size - 8 - metadata.serialized_size)
            footer = stream.read(metadata.serialized_size)
        schema = metadata.schema.to_arrow_schema()
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{file} is no readable parquet file: {_one_line(error)}") from error
    digest.update(repr((file.name, size, metadata.num_rows)).encode() + footer)
    if schema.names.count("text") > 1:
        raise ValueError(f"{file} has several columns `text`")
    if "text" not in schema.names:
        raise ValueError(f"{file} has no column `text` (it has {', '.join(schema.names)})")
    kind = schema.field("text").type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return metadata, bool(re.fullmatch(r"(large_)?(string|binary)(_view)?", str(kind)))


def _permutation(size: int, *entropy: int) -> np.ndarray:
    """A shuffle that is the same everywhere: numpy fixes raw bits for good, not `permutation`."""
    return np.argsort(np.random.PCG64(entropy).random_raw(size), kind="stable")


@dataclass(frozen=True, eq=False)
class Streams(IterableDataset):
    """Streams `rows` of `global_rows`, each from its position on, split over loader workers.

    An item is one worker's share of one step: a window a row, and the counts of documents.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    sequence_length: int
    rows: range
    global_rows: int
    seed: int
    packing: bool
    positions: tuple[Position, ...]

    def __iter__(self) -> "Iterator[tuple[list[Window], collections.Counter[str]] | ValueError]":
        worker = get_worker_info()
        index, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        size = len(self.rows)
        rows = self.rows[index * size // num_workers : (index + 1) * size // num_workers]
        documents = Documents(self, rows)
        windows = _packed_windows if self.packing else _padded_windows
        streams = [windows(documents, row) for row in rows]
        try:
            while True:
                documents.counts.clear()
                share = [next(stream) for stream in streams]
                yield share, documents.counts.copy()
        except ValueError as error:  # raised here it would reach the user as a nested traceback
            yield error


class Documents:
    """Texts for the streams `rows` of one worker; one row group read at a time, one column of it.

    A group's texts for other streams of `rows` are kept until those streams come to them.
    """

    def __init__(self, plan: Streams, rows: range) -> None:
        self.plan, self.corpus, self.rows = plan, plan.corpus, rows
        self.counts: collections.Counter[str] = collections.Counter()
        self._next = np.array([plan.positions[row][0] for row in rows])
        self._held: dict[Position, dict[int, bytes | None]] = {}
        self._num_unusable_in_a_row = 0
        self._order = functools.lru_cache(4)(self._shuffle_groups)
        self._open = functools.lru_cache(8)(
            lambda index: pq.ParquetFile(self.corpus.files[index], buffer_size=2**20)
        )

    def tokens(self, document: int) -> Iterator[Sequence[int]]:
        """Token ids of a document piece by piece; no piece if there is no text in it."""
        raw = self._fetch(document)
        self._num_unusable_in_a_row += 1
        if self._num_unusable_in_a_row > MAX_PASSES_WITHOUT_TEXT * self.corpus.num_documents + 1:
            raise ValueError("the dataset holds no text that the tokenizer makes tokens of")
        if not raw:
            self.counts["skipped"] += 1
            return
        text = raw.decode("utf-8", errors="replace")
        if "\ufffd" in text and text.encode() != raw:
            self.counts["repaired"] += 1
        for ids in self.plan.tokenizer.encode_pieces(text):
            if len(ids):
                self._num_unusable_in_a_row = 0
            yield ids

    def _shuffle_groups(self, pass_index: int) -> tuple[np.ndarray, np.ndarray]:
        """The groups in the order of a pass, and the number of documents up to each one's end."""
        order = _permutation(len(self.corpus.group_rows), self.plan.seed, pass_index, 0)
        return order, np.cumsum(self.corpus.group_rows[order])

    def _fetch(self, document: int) -> bytes | None:
        pass_index, index = divmod(document, self.corpus.num_documents)
        place = int(np.searchsorted(self._order(pass_index)[1], index, side="right"))
        key = (pass_index, place)
        self._next[document % self.plan.global_rows - self.rows.start] = document
        texts = self._held.pop(key, None) or self._read_group(pass_index, place)
        text = texts.pop(document)
        if texts:
            self._held[key] = texts  # put back last, so that the first is the longest unused
        if len(self._held) > MAX_HELD_GROUPS:
            del self._held[next(iter(self._held))]
        return text

    def _read_group(self, pass_index: int, place: int) -> dict[int, bytes | None]:
        """Texts by document, of the group's documents that streams of `rows` have yet to use."""
        order, ends = self._order(pass_index)
        group, num_rows = int(order[place]), int(self.corpus.group_rows[order[place]])
        file_rows = _permutation(num_rows, self.plan.seed, pass_index, group + 1)
        start = pass_index * self.corpus.num_documents + int(ends[place]) - num_rows
        documents = np.arange(start, start + num_rows)
        streams = documents % self.plan.global_rows - self.rows.start
        wanted = (streams >= 0) & (streams < len(self.rows))
        wanted[wanted] = documents[wanted] >= self._next[streams[wanted]]
        wanted = np.flatnonzero(wanted)
        wanted = wanted[np.argsort(file_rows[wanted])]
        file_rows, documents = file_rows[wanted], documents[wanted]
        file_index = int(self.corpus.group_files[group])
        if not self.corpus.file_holds_text[file_index]:
            return dict.fromkeys(documents.tolist())
        texts: dict[int, bytes | None] = {}
        seen = 0
        try:
            for batch in self._open(file_index).iter_batches(
                batch_size=1024,
                row_groups=[int(self.corpus.group_indices[group])],
                columns=["text"],
                use_threads=False,  # this may be a forked process, where arrow's threads are gone
            ):
                low, high = np.searchsorted(file_rows, (seen, seen + len(batch)))
                column = batch.column(0).cast(pa.large_binary())
                values = column.take(pa.array(file_rows[low:high] - seen)).to_pylist()
                texts.update(zip(documents[low:high].tolist(), values, strict=True))
                seen += len(batch)
        except (OSError, pa.ArrowException) as error:
            file = self.corpus.files[file_index]
            raise ValueError(f"{file} cannot be read: {_one_line(error)}") from error
        return texts


class Window(NamedTuple):
    """T + 1 consecutive tokens of one row; `counted[i]`: token i + 1 is a training target."""

    tokens: np.ndarray
    counted: np.ndarray
    position: Position


def _packed_windows(documents: Documents, row: int) -> Iterator[Window]:
    """Documents row, row + G, ... joined and cut into windows."""
    plan = documents.plan
    size = plan.sequence_length + 1
    first, num_to_skip = plan.positions[row]
    tokens, is_start, filled = np.empty(size, np.int32), np.zeros(size, bool), 0
    for document in itertools.count(first, plan.global_rows):
        offset = 0
        for ids in documents.tokens(document):
            piece = np.array(ids, np.int32)
            while len(piece):
                if num_to_skip:
                    taken = min(num_to_skip, len(piece))
                    num_to_skip -= taken
                else:
                    taken = min(size - filled, len(piece))
                    tokens[filled : filled + taken] = piece[:taken]
                    is_start[filled] |= offset == 0
                    filled += taken
                piece, offset = piece[taken:], offset + taken
                if filled == size:
                    yield Window(tokens, ~is_start[1:], (document, offset))
                    tokens, is_start, filled = np.empty(size, np.int32), np.zeros(size, bool), 0


def _padded_windows(documents: Documents, row: int) -> Iterator[Window]:
    """Documents row, row + G, ... truncated or padded, one a window."""
    plan = documents.plan
    size = plan.sequence_length + 1
    for document in itertools.count(plan.positions[row][0], plan.global_rows):
        pieces = documents.tokens(document)
        ids = list(itertools.islice(itertools.chain.from_iterable(pieces), size))
        tokens = np.full(size, plan.tokenizer.pad_id, np.int32)
        tokens[: len(ids)] = ids
        # By length, never by value: where pad and EOS are one id, the real EOS is a target.
        yield Window(tokens, np.arange(1, size) < len(ids), (document + plan.global_rows, 0))


@dataclass(frozen=True)
class StepRows:
    """The rows of one rank at one step, as int64; a label is the next token, -100 if not counted.

    `positions`: where each row resumes after this step. Skipped documents are null, empty or no
    strings; repaired ones held bytes that are no UTF-8, read as U+FFFD.
    """

    input_ids_RT: torch.Tensor
    labels_RT: torch.Tensor
    positions: tuple[Position, ...]
    num_training_tokens: int
    num_skipped_documents: int
    num_repaired_documents: int


def build_loader(
    corpus: Corpus, tokenizer: Tokenizer, *, sequence_length: int, rows: range, global_rows: int,
    seed: int, packing: bool = True, num_workers: int = 0,
    positions: Sequence[Position] | None = None, pin_memory: bool = False,
) -> Generator[StepRows, None, None]:  # fmt: skip
    """The `rows` (of 0 ... global_rows - 1) of every step, endlessly; closing it ends the workers.

    `positions`, one for each of the `global_rows`, continues where those steps ended. Workers
    beyond one a row are not started. Raises ValueError for what cannot be, at once or, for text
    that cannot be read, at its step.
    """
    assert sequence_length >= 1, sequence_length
    assert 0 <= rows.start < rows.stop <= global_rows, (rows, global_rows)
    if corpus.num_documents < global_rows:
        raise ValueError(
            f"the dataset holds {corpus.num_documents} documents, fewer than the {global_rows} "
            "rows of a global batch; use a smaller batch or more data"
        )
    starts = tuple((row, 0) for row in range(global_rows)) if positions is None else positions
    if [document % global_rows for document, _ in starts] != list(range(global_rows)):
        raise ValueError(f"the position to resume from is not one of {global_rows} rows a step")
    starts = tuple((int(document), int(offset)) for document, offset in starts)
    streams = Streams(corpus, tokenizer, sequence_length, rows, global_rows, seed, packing, starts)
    num_workers = min(num_workers, len(rows))
    return _join_shares(streams, num_workers=num_workers, pin_memory=pin_memory)


def _join_shares(
    streams: Streams, *, num_workers: int, pin_memory: bool
) -> Generator[StepRows, None, None]:
    # Forked workers inherit the tokenizer instead of loading it again. Without a generator of its
    # own the loader draws its seed from the global one.
    forked: Any = {"worker_init_fn": _outlive_stop_signals, "multiprocessing_context": "fork"}
    shares = iter(DataLoader(
        streams, batch_size=None, collate_fn=lambda share: share, generator=torch.Generator(),
        num_workers=num_workers, **(forked if num_workers else {}),
    ))  # fmt: skip
    try:
        while True:
            windows, counts = [], collections.Counter()
            for _ in range(max(1, num_workers)):  # the loader hands out its workers' items in turn
                share = next(shares)
                if isinstance(share, ValueError):
                    raise share
                windows += share[0]
                counts += share[1]
            tokens = torch.from_numpy(np.stack([window.tokens for window in windows])).long()
            counted = torch.from_numpy(np.stack([window.counted for window in windows]))
            pair = tokens[:, :-1].contiguous(), tokens[:, 1:].masked_fill(~counted, IGNORED_LABEL)
            inputs, labels = (rows.pin_memory() if pin_memory else rows for rows in pair)
            positions = tuple(window.position for window in windows)
            skipped, repaired = counts["skipped"], counts["repaired"]
            yield StepRows(inputs, labels, positions, int(counted.sum()), skipped, repaired)
    finally:
        del shares  # ends the workers now, not when an error's traceback is let go


def _outlive_stop_signals(_worker: int) -> None:
    """Ctrl-C and scancel reach workers too; the trainer still needs rows until its next step ends.

    Only a SIGTERM from the trainer itself, which is how the loader ends a stuck worker, counts.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def heed_parent() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=heed_parent, daemon=True).start()
