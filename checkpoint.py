"""What does a checkpoint on disk look like, which one is whole, and who writes and reads it?

A checkpoint is a folder ``step-00000040``: per rank the bytes of its shards (``rank-0.bin``), and
``checkpoint.json``, which says where each shard lies, with its checksum, and holds all the rest:
the step, the position in the data, the random state, and what the run was. It is written as
``step-00000040.partial`` and renamed when every byte is on disk, so it is whole or not there.

torch.distributed.checkpoint plans who writes what and reshards when it reads; its own files are
pickles, which can run code when they are read. The storage classes here write bytes and JSON only:
nothing is ever unpickled from a checkpoint.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from processes import lock_folder
from utils import DTYPES, warn

INDEX_NAME = "checkpoint.json"
PARTIAL = ".partial"
NUM_THREADS = 8  # that read or write: each computes checksums at about 1 GB/s
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


@dataclass(frozen=True)
class Progress:
    """How far a run came, beside its tensors."""

    step: int
    positions: list[list[int]]
    """(document, offset) of each row of the global batch: where it goes on after this step."""
    optimizer_steps: int
    """Updates taken: steps without a training token take none."""
    random: dict[str, Any]
    identity: dict[str, Any]
    """What must be the same in a run that goes on from here."""

    def __post_init__(self) -> None:
        for number in (self.step, self.optimizer_steps, *itertools.chain(*self.positions)):
            if type(number) is not int or number < 0:
                raise TypeError(f"{number!r} is no step or position")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: every file is there, with all its bytes."""

    folder: Path
    progress: Progress
    tensors: dict[str, Any]


def list_steps(parent: Path) -> list[Path]:
    """Folders in ``parent`` that are named like a checkpoint, the newest first."""
    folders = [path for path in parent.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(folders, key=lambda path: int(path.name[5:]), reverse=True)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read what a checkpoint says of itself; the bytes of its tensors are only counted.

    Raises ValueError, in one line, where it is not whole.
    """
    try:
        index = json.loads((folder / INDEX_NAME).read_text())
        content = index["content"]
        if index["crc32"] != _checksum_of(content):
            raise ValueError(f"{INDEX_NAME} was changed")
        for name, num_bytes in content["files"].items():
            if not re.fullmatch(r"rank-\d+\.bin", name):
                raise ValueError(f"strange file name {name!r}")
            if (folder / name).stat().st_size != num_bytes:
                raise ValueError(f"{name} does not hold {num_bytes} bytes")
        chunks = [chunk for tensor in content["tensors"].values() for chunk in tensor["chunks"]]
        if {chunk["file"] for chunk in chunks} != content["files"].keys():
            raise ValueError("its shards lie in other files than it lists")
        return Checkpoint(folder, Progress(**content["progress"]), content["tensors"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder} is no whole checkpoint ({reason_of(error)})") from error


def _checksum_of(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def save(
    tensors: dict[str, Tensor], on_host: dict[str, Tensor], parent: Path, progress: Progress,
    group: dist.ProcessGroup | None,
) -> Path:  # fmt: skip
    """Write a checkpoint: ``tensors`` say how they are sharded, ``on_host`` holds this rank's part.

    All ranks of the group call it; only ``on_host`` is read, so training may go on meanwhile.
    Returns its folder. Raises dcp.CheckpointException, on all ranks, when one of them fails.
    """
    file_name = f"rank-{dist.get_rank() if group else 0}.bin"
    writer = _Writer(parent / f"step-{progress.step:08d}", progress, file_name, on_host)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group)
    return writer.folder


def load(
    tensors: dict[str, Tensor], checkpoint: Checkpoint, group: dist.ProcessGroup | None
) -> None:
    """Read a checkpoint into ``tensors``, however they are sharded now.

    Raises dcp.CheckpointException, on all ranks, when one of them finds a damaged file.
    """
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(tensors, storage_reader=_Reader(checkpoint), planner=planner, process_group=group)


def remove_partial(parent: Path) -> None:
    """Remove what saves that were cut short have left."""
    for path in parent.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def keep_newest(parent: Path, keep: int, step: int) -> None:
    """Remove the checkpoints up to ``step`` that are older than the ``keep`` newest whole ones."""
    num_whole = 0
    for path in (path for path in list_steps(parent) if int(path.name[5:]) <= step):
        if num_whole >= keep:
            os.replace(path, f"{path}{PARTIAL}")  # never half a checkpoint under a whole one's name
            shutil.rmtree(f"{path}{PARTIAL}", ignore_errors=True)
        else:
            with contextlib.suppress(ValueError):
                read_checkpoint(path)
                num_whole += 1


class _Writer(dcp.FileSystemWriter):
    """Each rank's shards, from their copies on the host, into a file of its own.

    The first rank writes the index and renames.
    """

    def __init__(
        self, folder: Path, progress: Progress, file_name: str, on_host: dict[str, Tensor]
    ) -> None:
        self.folder, self.progress, self.file_name = folder, progress, file_name
        self.on_host = on_host
        self.partial = folder.with_name(folder.name + PARTIAL)
        super().__init__(self.partial)  # which makes this folder

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        lock_folder(self.folder.parent)  # somebody may have removed it, and the lock with it
        return super().prepare_local_plan(plan)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        name = self.file_name
        tensors = [self.on_host[item.index.fqn] for item in plan.items]
        starts = itertools.accumulate((tensor.nbytes for tensor in tensors), initial=0)

        def write(item: dcp.WriteItem, tensor: Tensor, start: int) -> WriteResult:
            assert item.tensor_data is not None and item.tensor_data.chunk.sizes == tensor.shape
            data = _bytes_of(tensor)
            with open(self.partial / name, "r+b") as file:
                file.seek(start)
                file.write(data)
            place = {"file": name, "start": start, "crc32": zlib.crc32(data)}
            return WriteResult(item.index, data.nbytes, place)

        with open(self.partial / name, "wb") as file, ThreadPoolExecutor(NUM_THREADS) as threads:
            results = list(threads.map(write, plan.items, tensors, starts))
            os.fsync(file.fileno())
        return _done(results)

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        written = [result for of_rank in results for result in of_rank]
        places = {result.index: result.storage_data for result in written}
        files: dict[str, int] = {}
        for result in written:
            name = result.storage_data["file"]
            files[name] = files.get(name, 0) + result.size_in_bytes
        if any((self.partial / name).stat().st_size != size for name, size in files.items()):
            raise OSError(f"not all nodes see the same files in {self.partial}")
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, dcp.TensorStorageMetadata)
            chunks = [
                {"offsets": list(chunk.offsets), "shape": list(chunk.sizes)}
                | places[MetadataIndex(name, chunk.offsets)]
                for chunk in tensor.chunks
            ]
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
        self._commit({"progress": asdict(self.progress), "files": files, "tensors": tensors})

    def _commit(self, content: dict[str, Any]) -> None:
        index = self.partial / INDEX_NAME
        index.write_text(json.dumps({"crc32": _checksum_of(content), "content": content}))
        _sync(index)
        _sync(self.partial)
        if self.folder.exists():  # a damaged one, which the run did not go on from
            discarded = self.folder.with_name(f"{self.folder.name}.old{PARTIAL}")
            shutil.rmtree(discarded, ignore_errors=True)
            os.replace(self.folder, discarded)
        os.replace(self.partial, self.folder)
        _sync(self.folder.parent)
        remove_partial(self.folder.parent)


class _Reader(dcp.FileSystemReader):
    """Reads and checks whole shards, several at a time; takes from each what this rank needs."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.folder)
        self.checkpoint = checkpoint

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        tensors, places = {}, {}
        for name, tensor in self.checkpoint.tensors.items():
            chunks = [
                dcp.ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["shape"]))
                for chunk in tensor["chunks"]
            ]
            kind = TensorProperties(dtype=_DTYPES[tensor["dtype"]])
            tensors[name] = dcp.TensorStorageMetadata(kind, torch.Size(tensor["shape"]), chunks)
            for chunk in tensor["chunks"]:
                places[MetadataIndex(name, chunk["offsets"])] = (tensor["dtype"], chunk)
        return dcp.Metadata(tensors, storage_data=places)

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        def read(item: dcp.ReadItem) -> None:
            shard = self._read_shard(*self.storage_data[item.storage_index])
            ranges = zip(item.storage_offsets, item.lengths, strict=True)
            target = planner.resolve_tensor(item).detach()
            target.copy_(shard[tuple(slice(start, start + length) for start, length in ranges)])
            planner.commit_tensor(item, target)

        with ThreadPoolExecutor(NUM_THREADS) as threads:
            list(threads.map(read, plan.items))
        return _done(None)

    def _read_shard(self, dtype_name: str, chunk: dict[str, Any]) -> Tensor:
        shard = torch.empty(chunk["shape"], dtype=_DTYPES[dtype_name])
        data = _bytes_of(shard)
        with open(self.checkpoint.folder / chunk["file"], "rb") as file:
            file.seek(chunk["start"])
            num_bytes = file.readinto(data)
        if num_bytes != data.nbytes or zlib.crc32(data) != chunk["crc32"]:
            raise ValueError(f"{chunk['file']} was changed")
        return shard


def _bytes_of(tensor: Any) -> memoryview:
    """The bytes of a tensor on the host, not a copy of them."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def _sync(path: Path) -> None:
    """Wait until a file, or the list of what is in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_checkpoints(
    parent: Path | None, resume: str, identity: dict[str, Any], training_steps: int
) -> Sequence[Checkpoint]:
    """Checkpoints that a run may go on from, the best first; none: it starts anew.

    ``resume`` is ``auto`` (those in ``parent``, the newest first; damaged ones are skipped, with a
    line on standard error), ``never``, or the folder of one checkpoint. Raises ValueError for a
    checkpoint of another run, naming what differs, and where newer ones stand in the way.
    """
    standing = _read_all(parent) if parent is not None else []
    found = standing if resume == "auto" else []
    if resume not in ("auto", "never"):
        if not Path(resume).is_dir():
            raise ValueError(
                f"--resume takes auto, never, or the folder of a checkpoint, not {resume}"
            )
        found = [read_checkpoint(Path(resume))]
    for checkpoint in found:
        theirs = checkpoint.progress.identity
        differing = [
            f"{name} ({theirs.get(name)} there, {identity.get(name)} here)"
            for name in sorted(theirs.keys() | identity.keys())
            if theirs.get(name) != identity.get(name)
        ]
        if differing:
            raise ValueError(f"{checkpoint.folder} is of another run: {', '.join(differing)}")
    start = found[0].progress.step if found else 0
    if start > training_steps:
        raise ValueError(
            f"{found[0].folder} is beyond --training-steps {training_steps}; ask for more steps"
        )
    if standing and standing[0].progress.step > start:
        raise ValueError(
            f"{standing[0].folder} is newer than step {start}, where this run would begin; "
            "give another --checkpoint-dir, or remove it"
        )
    return found


def _read_all(parent: Path) -> list[Checkpoint]:
    whole = []
    for path in list_steps(parent):
        try:
            whole.append(read_checkpoint(path))
        except ValueError as error:
            warn(f"skipped: {error}")
    return whole


def reason_of(error: BaseException) -> str:
    """Why a save or load failed, in one line: the first rank's error, not the stack of each."""
    if isinstance(error, dcp.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
