"""Compressed data: a small file does not fill a memory, and takes no more time than its content."""

from __future__ import annotations

import gzip
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.base.errors import DataError
from meshwright_run.data.files import open_decompressed, read_file
from meshwright_run.data.progress import ReadProgress

zstandard = pytest.importorskip("zstandard")
LIMIT_S, LIMIT_MB = 20.0, 500


def _compressed(path: Path, size: int) -> Path:
    opened = gzip.open if path.suffix == ".gz" else zstandard.open
    with opened(path, "wb") as file:
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    return path


def _parquet(path: Path, size: int) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": ["x" * (size >> 4)] * 16})
    parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    return path


@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param("corpus.txt.gz", _compressed, id="corpus.txt-gz"),
        pytest.param("corpus.json.gz", _compressed, id="corpus.json-gz", marks=pytest.mark.slow),
        pytest.param("corpus.jsonl.zst", _compressed, id="corpus.jsonl-zst", marks=pytest.mark.slow),
        pytest.param("corpus.parquet", _parquet, id="parquet", marks=pytest.mark.slow),
    ],
)
def test_a_small_file_that_becomes_a_large_one_is_refused(
    name: str, make: Callable[[Path, int], Path], tmp_path: Path
) -> None:
    path = make(tmp_path / name, 1 << 30)
    assert path.stat().st_size < 2_000_000
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(DataError, match=r"500 times as large|must hold an array"):
        list(read_file(path, ReadProgress()))
    assert time.monotonic() - began < LIMIT_S
    if make is not _parquet:
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < LIMIT_MB * 1000


def test_a_large_frame_is_read_in_time_that_grows_with_it(tmp_path: Path) -> None:
    # What a decompressor gives at once was cut again for each small read.
    path = _compressed(tmp_path / "zeros.txt.zst", 60 << 20)
    began, count = time.monotonic(), 0
    with open_decompressed(path, ReadProgress()) as file:
        while some := file.read(1 << 12):
            count += len(some)
    assert count == 60 << 20
    assert time.monotonic() - began < LIMIT_S


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_what_is_compressed_well_is_read(suffix: str, tmp_path: Path) -> None:
    text = b"".join(b'{"text": "%d is even or odd"}\n' % number for number in range(30_000))
    path = tmp_path / f"corpus.jsonl{suffix}"
    path.write_bytes(gzip.compress(text) if suffix == ".gz" else zstandard.compress(text))
    found = list(read_file(path, ReadProgress()))
    assert len(found) == 30_000
    assert found[-1][0] == {"text": "29999 is even or odd"}
    # Cut, it is reported as before.
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="corrupt or truncated"):
        list(read_file(path, ReadProgress()))


def test_a_document_that_is_too_long_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright_run.data.files.MAX_BYTES", 10)
    (tmp_path / "a.txt").write_text("x" * 10)
    assert next(read_file(tmp_path / "a.txt", ReadProgress()))[0] == {"text": "x" * 10}
    (tmp_path / "a.txt").write_text("x" * 11)
    with pytest.raises(DataError, match=r"more than 10 bytes\. Split it into several"):
        list(read_file(tmp_path / "a.txt", ReadProgress()))
