"""The commit that a run writes down is that of the code that made it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mjp_privacy.core import machine


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the two packages and results, all committed."""
    for file in ("mjp_privacy/core/version.py", "attacks/april.py", "results/rows.csv"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "all")
    monkeypatch.setattr(version, "PACKAGES", tmp_path / "mjp_privacy")
    monkeypatch.setattr(version, "CODE", (tmp_path / "mjp_privacy", tmp_path / "attacks"))
    monkeypatch.setattr(version, "__file__", str(tmp_path / "mjp_privacy/core/version.py"))
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    """What git prints."""
    author = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *author, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_it_is_the_checkout_s(checkout: Path) -> None:
    assert machine.commit() == git(checkout, "rev-parse", "--short=12", "HEAD")


def test_a_tag_s_name_does_not_take_its_place(checkout: Path) -> None:
    git(checkout, "tag", "--annotate", "v1.0", "--message", "one")
    assert machine.commit() == git(checkout, "rev-parse", "--short=12", "HEAD")


@pytest.mark.parametrize("file", ["attacks/april.py", "attacks/new.py", "mjp_privacy/new.py"])
def test_changed_or_new_code_has_a_plus(checkout: Path, file: str) -> None:
    (checkout / file).write_text("changed = True\n")
    assert machine.commit().endswith("+")


@pytest.mark.parametrize("file", ["results/rows.csv", "results/other.csv", "notes.md"])
def test_a_result_or_a_text_has_none(checkout: Path, file: str) -> None:
    (checkout / file).write_text("new\n")
    assert machine.commit() == git(checkout, "rev-parse", "--short=12", "HEAD")


def test_installed_in_another_s_repository_is_no_checkout(checkout: Path) -> None:
    git(checkout, "rm", "--quiet", "--cached", "mjp_privacy/core/version.py")
    git(checkout, "commit", "--quiet", "--message", "another project")
    assert machine.commit() == ""


def test_without_git_or_a_repository_there_is_none(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "PACKAGES", tmp_path_factory.mktemp("nowhere"))
    assert machine.commit() == ""
    monkeypatch.setenv("PATH", "")
    assert machine.commit() == ""


def test_short_keeps_the_plus() -> None:
    assert machine.short_commits("d0c3d5c82c4a+") == "d0c3d5c+"
    assert machine.short_commits("d0c3d5c82c4a, 526a732") == "d0c3d5c, 526a732"
    assert (
        machine.short_commits("526a732, lattice 8dfd72f00 since")
        == "526a732, lattice 8dfd72f since"
    )
