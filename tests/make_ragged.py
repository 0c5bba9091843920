"""Make tests/data/ragged.parquet: short passages of very different lengths, from the small corpus.

With one padded document per row, rows of 64 tokens have from 2 to 64 training tokens: what tells a
mean over all tokens from a mean of means.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
NUM_PASSAGES = 600

if __name__ == "__main__":
    source = HERE.parent / "data" / "sample.parquet"
    text = " ".join(pq.read_table(source, columns=["text"])["text"].to_pylist()[:40])
    lengths = np.random.default_rng(0).integers(4, 240, NUM_PASSAGES)
    stops = lengths.cumsum()
    passages = [text[stop - length : stop] for stop, length in zip(stops, lengths, strict=True)]
    table = pa.table({"text": passages})
    pq.write_table(table, HERE / "data" / "ragged.parquet", row_group_size=64, compression="zstd")
