"""Which code ran, with which seeds, how much memory there is; words of strangers in messages."""

import subprocess
from pathlib import Path

import pytest
import torch

from mjp_privacy.core import machine
from mjp_privacy.core.text import plain, shown


def git(folder: Path, *arguments: str) -> str:
    author = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    command = ["git", *author, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_changed_or_new_code_has_a_plus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But no other changed file, and a tag takes no commit's place."""
    for file in ("mjp_privacy/core/machine.py", "attacks/april.py", "results/rows.csv"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "all")
    git(tmp_path, "tag", "--annotate", "v1.0", "--message", "one")
    monkeypatch.setattr(machine, "PACKAGE", tmp_path / "mjp_privacy")
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "mjp_privacy/core/machine.py"))
    head = git(tmp_path, "rev-parse", "--short=12", "HEAD").strip()
    for file, plus in (("results/rows.csv", ""), ("mjp_privacy/new.py", "+")):
        (tmp_path / file).write_text("changed = True\n")
        assert machine.commit() == head + plus
    (tmp_path / "mjp_privacy/new.py").unlink()
    (tmp_path / "attacks/april.py").write_text("changed = True\n")
    assert machine.commit() == f"{head}+"


def test_a_seed_is_the_same_everywhere() -> None:
    assert machine.derive_seed("jigsaw", 0, "cat.png") == 6797301178043176049
    numbers = torch.rand(2, generator=machine.torch_generator("a"))
    assert torch.equal(numbers, torch.rand(2, generator=machine.torch_generator("a")))


def test_free_memory_is_the_least_of_machine_and_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, used = tmp_path / "max", tmp_path / "current"
    limit.write_text("3000000\n")
    used.write_text("1000000\n")
    monkeypatch.setattr(machine, "CGROUPS", ((str(limit), str(used)),))
    assert machine.free_bytes(torch.device("cpu")) == 2_000_000
    limit.write_text("max\n")
    unlimited = machine.free_bytes(torch.device("cpu"))
    assert unlimited is None or unlimited > 2_000_000


def test_invisible_characters_are_escaped_and_long_and_many_words_are_cut() -> None:
    for text, drawn in (
        ("grün 猫 é", "grün 猫 é"),
        ("a\x1b[2Jb\n\tc\r", r"a\x1b[2Jb\n\tc\r"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("a\u2028b\u200bc\ufeff\U000e0041", r"a\u2028b\u200bc\ufeff\U000e0041"),
        ("a\udcffb\0", r"a\udcffb\x00"),
    ):
        assert shown(text) == drawn
        shown(text).encode()  # a lone surrogate would not be printable
    text = shown("a" * 5000 + "\x1b" * 5000 + "z")
    assert (len(text) <= 300, text[:3], text[-1]) == (True, "aaa", "z")
    assert plain("a\nb\x1b", keep="\n") == "a\nb\\x1b"
