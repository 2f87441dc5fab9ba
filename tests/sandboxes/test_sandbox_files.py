"""File work beneath directories that nobody vouches for."""

import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.errors import SandboxError
from clawgym_env.sandboxes import files


def test_snapshot_depth_is_bounded(tmp_path):
    source = tmp_path / "source"
    source.joinpath(*["d"] * files.MAX_DEPTH).mkdir(parents=True)
    files.copy_tree(source, tmp_path / "copy", 0)
    source.joinpath(*["d"] * (files.MAX_DEPTH + 1)).mkdir()
    with pytest.raises(SandboxError, match="deeper than"):
        files.copy_tree(source, tmp_path / "other", 0)


def test_snapshot_entries_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_ENTRIES", 3)
    (tmp_path / "source").mkdir()
    for name in "abc":
        (tmp_path / "source" / name).touch()
    files.copy_tree(tmp_path / "source", tmp_path / "copy", 0)
    (tmp_path / "source" / "d").touch()
    with pytest.raises(SandboxError, match="more than 3 files"):
        files.copy_tree(tmp_path / "source", tmp_path / "other", 0)


def test_special_bits_are_not_copied(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tool").touch()
    (tmp_path / "source" / "tool").chmod(0o6755)
    files.copy_tree(tmp_path / "source", tmp_path / "copy", 0)
    assert stat.S_IMODE((tmp_path / "copy" / "tool").stat().st_mode) == 0o755


def test_source_that_is_a_link_or_missing(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for name in ("link", "missing"):
        with pytest.raises(SandboxError, match=name):
            files.copy_tree(tmp_path / name, tmp_path / "copy", 0)


def test_write_over_a_directory_leaves_nothing(tmp_path):
    (tmp_path / "dir").mkdir()
    with pytest.raises(SandboxError, match="dir"):
        files.write_file(tmp_path, "dir", b"x", 0o644, None)
    with pytest.raises(SandboxError, match="dir"):
        files.write_file(tmp_path, "dir/" + "x" * 300, b"x", 0o644, None)
    assert os.listdir(tmp_path) == ["dir"]
    assert os.listdir(tmp_path / "dir") == []


def test_remove_follows_no_link(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "tree" / "a" / "b").mkdir(parents=True)
    (tmp_path / "tree" / "a" / "link").symlink_to(tmp_path / "kept")
    files.remove_tree(tmp_path / "tree")
    files.remove_tree(tmp_path / "tree")
    assert os.listdir(tmp_path) == ["kept"]
    (tmp_path / "link").symlink_to("kept")
    with pytest.raises(SandboxError, match="link"):
        files.remove_tree(tmp_path / "link")
    assert os.listdir(tmp_path / "kept") == ["file"]


@given(path=st.text(alphabet="ab./\0", max_size=12))
def test_a_path_stays_beneath_or_is_refused(path, tmp_path_factory):
    top = tmp_path_factory.mktemp("top")
    root = top / "x" / "y"
    root.mkdir(parents=True)
    try:
        files.write_file(root, path, b"data", 0o644, None)
    except SandboxError:
        pass
    else:
        assert files.read_file(root, path, 4) == b"data"
        assert root.joinpath(path).read_bytes() == b"data"
    assert os.listdir(top) == ["x"]
    assert os.listdir(top / "x") == ["y"]
