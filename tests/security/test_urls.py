"""URLs in files: a kind that is not on the list is refused before fsspec sees it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fsspec
import pytest
from security.small_run import write_small_run
from support.commands import invoke_in_process

from meshwright.base.errors import ConfigError
from meshwright.checkpoint.remote_storage import PROTOCOLS, RemoteStorage, is_url, open_storage
from meshwright.checkpoint.storage import DEFAULT_OPTIONS, LocalStorage

# What older versions of fsspec render with Jinja, without a sandbox.
TEMPLATE = json.dumps({"version": 1, "templates": {"u": "{{ ''.__class__ }}"}, "gen": [], "refs": {}})
REFUSED = [
    "reference://",
    f"reference://::data:application/json,{TEMPLATE}",
    "reference://::file:///tmp/references.json",
    "simplecache::s3://bucket/prefix",
    "filecache::reference://x",
    "zip://inner::s3://bucket/archive.zip",
    "s3://bucket/prefix::reference://x",
    "file:///tmp/x::reference://y",
    "memory://a::b",
    "data:application/json,{}://",
    "REFERENCE://x",
    "S3::reference://x",
    "a::\nreference://x",
    *(f"{name}://host/path" for name in ("sftp", "ssh", "ftp", "http", "https", "github", "git", "smb", "dask", "dir")),
    *(f"{name}://path" for name in ("blockcache", "simplecache", "zip", "tar", "libarchive", "jupyter", "generic")),
    *(f"{name}://path" for name in sorted(set(fsspec.available_protocols()) - set(PROTOCOLS))),
]


@pytest.fixture(autouse=True)
def no_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec makes no file system here."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError(f"fsspec was asked for {arguments}")

    for module, name in (("fsspec", "get_filesystem_class"), ("fsspec.core", "url_to_fs"), ("fsspec", "filesystem")):
        monkeypatch.setattr(sys.modules[module], name, refuse)


@pytest.mark.parametrize("url", REFUSED)
def test_other_kinds_of_urls_are_refused(url: str, tmp_path: Path) -> None:
    if is_url(url):
        with pytest.raises(ConfigError, match=r"not opened"):
            open_storage(url)
    else:
        assert isinstance(open_storage(url), LocalStorage)


def test_a_name_that_a_server_lists_makes_no_chain() -> None:
    with pytest.raises(ConfigError, match="chain of URLs"):
        RemoteStorage("memory://bucket", DEFAULT_OPTIONS).child("step-00000001::reference://y")


def test_every_command_that_takes_a_url_refuses_it(tmp_path: Path) -> None:
    url, run = "reference://::data:x", write_small_run(tmp_path)
    for arguments in (
        ("checkpoint", "show", url),
        ("checkpoint", "verify", url),
        ("export", url, tmp_path / "exported"),
        ("train", run, "--set", f"resume={url}"),
        ("train", run, "--set", f"checkpoint={{every: 1, path: '{url}'}}"),
    ):
        code, output = invoke_in_process(*arguments)
        assert (code, "not opened" in output) == (2, True), output
    assert not (tmp_path / "out").exists()
