"""Where labels come from, in every layout, and every way they can be wrong."""

import os
import zipfile
from pathlib import Path

import pytest

from mjp_privacy.data import open_images
from mjp_privacy.data.labels import synset_indices
from tests.helpers.image_files import FLAT_VAL, error_of, make_images, zipped

SYNSETS = ["n01440764", "n03445777", "n15075141"]  # tench, golf ball, toilet tissue
INDICES = [0, 574, 999]
CSV = "file,label\na.png,1\n"


def labels_of(path: Path, labels: Path | None = None) -> dict[str, int | None]:
    return {record.image_id: record.label for record in open_images(path, labels).records}


def source_of(path: Path, labels: Path | None = None) -> str:
    (source,) = {record.label_source for record in open_images(path, labels).records}
    return source


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    return make_images(tmp_path / "flat", ["a.png", "b.png", "c.png"])


@pytest.fixture
def val(tmp_path: Path) -> Path:
    return make_images(tmp_path / "val", FLAT_VAL)


FOLDERS: dict[str, tuple[list[str], str, list[int | None]]] = {
    "flat": (["a.png", "b.png"], "none", [None] * 2),
    "one plain folder": (["photos/a.png", "photos/b.png"], "none", [None] * 2),
    "beside folders": (["a.png", "cat/b.png", "dog/c.png"], "none", [None] * 3),
    "one synset": ([f"{SYNSETS[1]}/a.png"], "synset", [574]),
    "below": ([f"val/{synset}/images/0.png" for synset in SYNSETS], "synset", INDICES),
    "file names": ([f"{synset}_3.JPEG" for synset in SYNSETS], "synset", INDICES),
    "other file names": ([f"{SYNSETS[0]}_3.png", "n00000001_7.png"], "none", [None] * 2),
    "classes": (["cat/old/b.png", "cow/c.png", "dog/a.png"], "folder", [0, 1, 2]),
    "numbers": (["0/a.png", "10/c.png", "2/b.png"], "folder", [0, 10, 2]),
    "padded": (["001/a.png", "002/b.png"], "folder", [0, 1]),
    "too large for a class": (["20240131/a.png", "7/b.png"], "folder", [0, 1]),
}
"""Names, the source of labels, and the labels."""


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("as_zip", [False, True])
def test_labels_from_folders_and_names(tmp_path: Path, kind: str, as_zip: bool) -> None:
    names, source, labels = FOLDERS[kind]
    folder = make_images(tmp_path / "in", names)
    path = zipped(folder) if as_zip else folder
    assert source_of(path) == source
    assert labels_of(path) == dict(zip(names, labels, strict=True))
    assert len(synset_indices()) == 1000
    assert sorted(synset_indices()) == list(synset_indices())


def test_folders_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    for names, words in (
        (["a.png", "n01440764/b.png"], ["a.png"]),
        (["n01440764/a.png", "n00000001/b.png"], ["n00000001"]),
        (["train/cat/a.png", "val/cat/b.png"], ["train, val", "in2/val"]),
    ):
        folder = make_images(tmp_path / f"in{names[0].count('/')}", names)
        message = error_of(folder)
        assert all(word in message for word in words)


# CSV ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["folder", "zip", "zipped folder"])
def test_csv_inside_comes_before_folders_and_after_one_that_is_given(
    tmp_path: Path, form: str
) -> None:
    folder = make_images(tmp_path / "in", [f"{synset}/x,{synset}.png" for synset in SYNSETS])
    rows = [f'"{synset}/x,{synset}.png",{at}\r\n' for at, synset in enumerate(SYNSETS)]
    write(folder / "labels.csv", "\ufefffile,label\r\n" + "".join(rows))
    path = folder if form == "folder" else zipped(folder, "in/" if form != "zip" else "")
    assert list(labels_of(path).values()) == [0, 1, 2]
    given = write(tmp_path / "given.csv", "file,label\n" + "".join(rows).replace(",0", ",9"))
    assert list(labels_of(path, given).values()) == [9, 1, 2]


def test_csv_may_name_files_from_elsewhere_and_what_is_no_file(flat: Path, tmp_path: Path) -> None:
    """By another suffix, too; a name that two images may have is not guessed."""
    for column, form in (
        ("file", "./{}.png"),
        ("image_id", "some\\{}.png"),
        ("File", "/data/v1/{}.png"),
        ("filename", "{}.jpg"),
    ):
        rows = "".join(
            f"x,{label},{form.format(name)}\n"
            for name, label in zip("abc", (0, SYNSETS[1], 2), strict=True)
        )
        more = "".join(f"x,4,{name}\n" for name in ("elsewhere/d.png", "..png", ".", "/"))
        table = write(tmp_path / "l.csv", f"x,label,{column}\n{rows}{more}\n")
        assert labels_of(flat, table) == {"a.png": 0, "b.png": 574, "c.png": 2}
        assert source_of(flat, table) == "csv"
    folder = make_images(tmp_path / "two", ["x/a.png", "y/a.png"])
    table = write(tmp_path / "l.csv", "file,label\nx/a.png,1\na.png,2\n")
    assert "y/a.png" in error_of(folder, table)


KAGGLE = "ImageId,PredictionString\n"
WRONG: dict[str, tuple[str, str]] = {  # the text, and what of it the message names
    "other images": ("file,label\nx.png,1\ny.png,1\n", "x.png"),
    "some images": (CSV, "b.png, c.png"),
    "no header": ("a.png,1\n", "'a.png,1'"),
    "empty": ("", "''"),
    "two labels": (CSV + "a.png,2\n", "1 and 2"),
    "a word": ("file,label\na.png,cat\n", "line 2"),
    "synset": ("file,label\na.png,n00000001\n", "line 2"),
    "5,000 digits": (f"file,label\na.png,{'9' * 5000}\n", "line 2"),
    "huge field": (f"file,label\n{'a' * 100_000}.png,1\n", "100004"),
    "cells too many": (CSV + "b.png,2,3\n", "line 3"),
    "a dot for a name": (CSV + "./,2\n", "line 3"),
    "column twice in case": ("file,Label,label\na.png,1,2\n", "label twice"),
    "open quote": (CSV + '"b.png,2\n', "labels.csv"),
    "zero byte": (CSV + "b.png\0,2\n", "zero byte"),
    "lines above": ("\n\nfile,label\na.png,x\x1b[2J\n", r"line 4.*'x\x1b[2J'"),
    "val.txt, beyond": ("a.png 1000\n", "0 to 999"),
    "val.txt, twice": ("a.png 1\na.png 2\n", "line 2"),
    "val.txt, no index": ("a.png 1\n\nb.png\n", "line 3"),
    "kaggle, no synset": (KAGGLE + "a,\n", "line 2"),
    "devkit": ("490\n361\n171\n", "val.txt"),
    "val.txt, spaces": ("a.png 1\n" + f"a{' ' * 4000}b x\n" * 200, "line 2"),  # in no time
    "synsets, too few": ("n01440764\n", "1 labels without names for 3 images"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_named_with_its_line(case: str, flat: Path) -> None:
    text, expected = WRONG[case]
    write(flat / "labels.csv", text)
    for path in (flat, zipped(flat)):
        message = error_of(path)
        assert "labels.csv" in message
        at = -1
        for part in expected.split(".*"):
            at = message.index(part, at + 1)


def test_label_files_that_cannot_be_read(flat: Path, tmp_path: Path) -> None:
    write(tmp_path / "labels.csv", CSV)
    assert "label.csv" in error_of(flat, tmp_path / "label.csv")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        assert path.name in error_of(flat, path)
    for content in ("file,label\né.png,1\n".encode("utf-16"), b"file,label\n\xe9.png,1\n"):
        (tmp_path / "l.csv").write_bytes(content)
        assert "l.csv" in error_of(flat, tmp_path / "l.csv")
    os.truncate(tmp_path / "l.csv", 65 << 20)
    assert "64" in error_of(flat, tmp_path / "l.csv")
    write(flat / "labels.csv", CSV)
    path = zipped(flat)
    path.write_bytes(path.read_bytes().replace(b"a.png,1", b"a.png,2"))
    assert "labels.csv damaged" in error_of(path)
    (flat / "labels.csv").unlink()
    path = zipped(flat)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("labels.csv", CSV + "\n" * (65 << 20))
    assert "labels.csv a zip bomb" in error_of(path)


# ImageNet val, flat -------------------------------------------------------------------------------

OWN = [*SYNSETS, SYNSETS[0]]
LABELS = [*INDICES, 0]
FORMATS = {
    "val.txt": "".join(f"{name} {at}\n" for name, at in zip(FLAT_VAL, LABELS, strict=True)),
    "LOC_val_solution.csv": KAGGLE
    + "".join(
        f"{Path(name).stem},{synset} 1 2 3 4 n01440764 5 6 7 8\n"
        for name, synset in zip(FLAT_VAL, OWN, strict=True)
    ),
    "imagenet_2012_validation_synset_labels.txt": "\n".join(OWN) + "\n",
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("place", ["given", "inside", "beside", "zip", "beside zip", "in folder"])
def test_flat_val_finds_its_label_file(val: Path, name: str, place: str) -> None:
    outside = place == "given" or "beside" in place
    table = write((val.parent if outside else val) / name, FORMATS[name])
    if place == "given":
        table = table.rename(table.with_name("anything.dat"))
    prefix = "val/" if place == "in folder" else ""
    path = zipped(val, prefix) if place in ("zip", "beside zip", "in folder") else val
    given = table if place == "given" else None
    assert labels_of(path, given) == dict(
        zip([prefix + name for name in FLAT_VAL], LABELS, strict=True)
    )
    assert source_of(path, given) == "file"


def test_label_files_are_found_for_flat_val_alone_and_fit_a_part_of_it(
    val: Path, flat: Path
) -> None:
    assert source_of(val) == "none"
    write(flat / "val.txt", "notes 1\n")
    assert source_of(flat) == "none"
    devkit = write(val / "ILSVRC2012_validation_ground_truth.txt", "490\n361\n171\n822\n")
    assert "val.txt" in error_of(val)  # its numbers are in another order
    devkit.unlink()
    (val / FLAT_VAL[1]).unlink()
    lines = [SYNSETS[0], SYNSETS[0], SYNSETS[1], SYNSETS[2]] + [SYNSETS[0]] * 49_996
    write(val / "synset_labels.txt", "\n".join(lines))
    assert list(labels_of(val).values()) == INDICES
