"""Real environments and a real pip, with a wheel made on the spot in place of the package index."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from clawgym_env.errors import HarnessError
from clawgym_env.harnesses.venvs import VenvInstall


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "clawtoy-1.0.dist-info"
    with zipfile.ZipFile(folder / "clawtoy-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("clawtoy.py", "print('toy')\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: clawtoy\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("CLAWGYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_install_use_and_remove(index: Path) -> None:
    toy = VenvInstall("clawtoy", "1.0")
    toy.folder.mkdir(parents=True)
    (toy.folder / "rest").write_text("of an interrupted installation")
    assert not toy.installed()

    lines: list[str] = []
    toy.install(lines.append)
    assert toy.installed()
    assert not (toy.folder / "rest").exists()
    assert any("Successfully installed clawtoy" in line for line in lines)
    done = subprocess.run([toy.python, "-I", "-m", "clawtoy"], capture_output=True, check=True)
    assert done.stdout == b"toy\n"

    places = [source for source, _ in toy.mounts()]
    assert toy.folder in places
    interpreter = toy.python.resolve()
    assert interpreter.is_relative_to("/usr") or any(
        interpreter.is_relative_to(place) for place in places
    )

    lines.clear()
    toy.install(lines.append)
    assert lines == [f"clawtoy==1.0 is installed in {toy.folder}"]

    toy.python.unlink()
    toy.python.symlink_to("/no/such/python")
    assert not toy.installed()
    toy.remove()
    assert not toy.folder.exists()
    toy.remove()


def test_a_failed_installation_leaves_nothing_and_says_why(index: Path) -> None:
    toy = VenvInstall("clawtoy", "2.0")
    with pytest.raises(HarnessError, match=r"could not install clawtoy==2\.0 .exit status 1") as e:
        toy.install(lambda line: None)
    assert "No matching distribution found" in str(e.value)
    assert not toy.folder.exists()


def test_an_interrupted_installation_leaves_nothing(index: Path) -> None:
    def interrupt(line: str) -> None:
        if "clawtoy" in line and "making" not in line:
            raise KeyboardInterrupt

    toy = VenvInstall("clawtoy", "1.0")
    with pytest.raises(KeyboardInterrupt):
        toy.install(interrupt)
    assert not toy.folder.exists()


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLAWGYM_CACHE", str(tmp_path / "file"))
    with pytest.raises(HarnessError, match="set CLAWGYM_CACHE to another folder"):
        VenvInstall("clawtoy", "1.0").install(print)
