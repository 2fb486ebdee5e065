"""Where labels come from, in every layout, and every way they can be wrong."""

from __future__ import annotations

import os
import time
import zipfile
from pathlib import Path

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import open_images
from mjp_privacy.data.labels import synset_indices
from tests.helpers.image_files import FLAT_VAL, make_images, zipped

SYNSETS = ["n01440764", "n03445777", "n15075141"]  # tench, golf ball, toilet tissue
INDICES = [0, 574, 999]
CSV = "file,label\na.png,1\n"


def labels_of(path: Path, labels: Path | None = None) -> dict[str, int | None]:
    return {record.image_id: record.label for record in open_images(path, labels).records}


def source_of(path: Path, labels: Path | None = None) -> str:
    (source,) = {record.label_source for record in open_images(path, labels).records}
    return source


def error_of(path: Path, labels: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        open_images(path, labels)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000
    return message


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    return make_images(tmp_path / "flat", ["a.png", "b.png", "c.png"])


@pytest.fixture
def val(tmp_path: Path) -> Path:
    return make_images(tmp_path / "val", FLAT_VAL)


# folders ----------------------------------------------------------------------------------------

FOLDERS: dict[str, tuple[list[str], str, list[int | None], str]] = {
    "none": (["a.png", "b.png"], "none", [None] * 2, "no labels"),
    "one plain folder": (["photos/a.png", "photos/b.png"], "none", [None] * 2, "no labels"),
    "beside folders": (["a.png", "cat/b.png", "dog/c.png"], "none", [None] * 3, "no labels"),
    "one synset": ([f"{SYNSETS[1]}/a.png"], "synset", [574], "ImageNet"),
    "below": ([f"{synset}/images/0.png" for synset in SYNSETS], "synset", INDICES, "ImageNet"),
    "named": ([f"{synset}_3.JPEG" for synset in SYNSETS], "synset", INDICES, "file names"),
    "named otherwise": (
        [f"{SYNSETS[0]}_3.png", "n00000001_7.png"],
        "none",
        [None] * 2,
        "no labels",
    ),
    "classes": (
        ["cat/old/b.png", "cow/c.png", "dog/a.png"],
        *("folder", [0, 1, 2], "cat = 0, cow = 1, dog = 2"),
    ),
    "numbers": (["0/a.png", "10/c.png", "2/b.png"], "folder", [0, 10, 2], "numbers"),
    "padded": (["001/a.png", "002/b.png"], "folder", [0, 1], "001 = 0"),
    **{
        number: (["7/b.png", f"{number}/a.png"], "folder", [1, 0], "sorted")
        for number in ("20240131", "1000000")
    },
}
"""Names, the source of labels, the labels, and a word of the sentence on them."""


@pytest.mark.parametrize("kind", FOLDERS)
def test_labels_from_folders_and_names(tmp_path: Path, kind: str) -> None:
    names, source, labels, word = FOLDERS[kind]
    folder = make_images(tmp_path / "in", names)
    assert source_of(folder) == source
    assert word in open_images(folder).labels_described
    found = labels_of(folder)
    if kind in ("20240131", "1000000"):
        assert sorted(found.values()) == [0, 1]  # too large for a class: a place
    else:
        assert [found[name] for name in names] == labels


@pytest.mark.parametrize("wrapper", ["", "val/", "imagenet/val/"])
@pytest.mark.parametrize("as_zip", [False, True])
def test_some_synset_folders_give_imagenet_indices(
    tmp_path: Path, wrapper: str, as_zip: bool
) -> None:
    names = [f"{wrapper}{synset}/{FLAT_VAL[at]}" for at, synset in enumerate(SYNSETS)]
    folder = make_images(tmp_path / "some", names)
    path = zipped(folder) if as_zip else folder
    assert labels_of(path) == dict(zip(names, INDICES, strict=True))


def test_folders_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    for names, words in (
        (["a.png", "n01440764/b.png"], ["a.png"]),
        (["n01440764/a.png", "n00000001/b.png"], ["n00000001"]),
        (["train/cat/a.png", "val/cat/b.png"], ["train, val", "in2/val"]),
    ):
        folder = make_images(tmp_path / f"in{names[0].count('/')}", names)
        message = error_of(folder)
        assert all(word in message for word in words)


def test_synsets_are_sorted() -> None:
    indices = synset_indices()
    assert len(indices) == 1000
    assert sorted(indices) == list(indices)
    assert [indices[synset] for synset in SYNSETS] == INDICES


# CSV --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["file", "image", "image_id", "filename", "File"])
def test_given_csv(flat: Path, tmp_path: Path, column: str) -> None:
    table = write(tmp_path / "l.csv", f"x,label,{column}\n,3,a.png\n,n03445777,b.png\n,0,c.png\n")
    assert labels_of(flat, table) == {"a.png": 3, "b.png": 574, "c.png": 0}
    assert source_of(flat, table) == "csv"
    assert "3 images, 3 classes" in open_images(flat, table).labels_described


@pytest.mark.parametrize("as_zip", [False, True])
def test_csv_inside_comes_before_folders(tmp_path: Path, as_zip: bool) -> None:
    folder = make_images(tmp_path / "in", [f"{synset}/x,{synset}.png" for synset in SYNSETS])
    rows = [f'"{synset}/x,{synset}.png",{at}\n' for at, synset in enumerate(SYNSETS)]
    write(folder / "labels.csv", "\ufefffile,label\n" + "".join(rows))
    path = zipped(folder) if as_zip else folder
    assert list(labels_of(path).values()) == [0, 1, 2]
    given = write(tmp_path / "given.csv", "file,label\n" + "".join(rows).replace(",0", ",9"))
    assert list(labels_of(path, given).values()) == [9, 1, 2]


def test_csv_inside_a_zipped_folder(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "sample", ["x/a.png", "y/b.png"])
    write(folder / "labels.csv", "file,label\nx/a.png,5\ny/b.png,6\n")
    assert labels_of(zipped(folder, "sample/")) == {"sample/x/a.png": 5, "sample/y/b.png": 6}
    (folder / "y" / "b.png").unlink()
    assert labels_of(zipped(folder, "sample/")) == {"sample/x/a.png": 5}
    assert labels_of(folder) == {"x/a.png": 5}


@pytest.mark.parametrize("form", ["{}", "./{}", "somewhere/{}", "some\\{}", "/data/v1/{}"])
def test_csv_may_name_files_from_elsewhere(flat: Path, tmp_path: Path, form: str) -> None:
    rows = "".join(f"{form.format(name)},{at}\n" for at, name in enumerate(sorted(labels_of(flat))))
    table = write(tmp_path / "l.csv", f"file,label\n{rows}elsewhere/d.png,4\n\n")
    assert list(labels_of(flat, table).values()) == [0, 1, 2]


def test_names_shared_by_two_folders_are_not_guessed(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "two", ["x/a.png", "y/a.png"])
    table = write(tmp_path / "l.csv", "file,label\nx/a.png,1\na.png,2\n")
    assert "1 of 2 images without a label: y/a.png" in error_of(folder, table)


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_ends_of_lines_and_a_mark_of_bytes(newline: str, start: str, tmp_path: Path) -> None:
    folder = make_images(tmp_path / "in", ["a.png"])
    write(folder / "labels.csv", start + CSV.replace("\n", newline))
    assert labels_of(folder) == {"a.png": 1}


@pytest.mark.parametrize(
    "name", [".", "in/", "in/.", "/", "..", "..png", "in/..png", "a/..", "..."]
)
def test_names_that_are_no_files_are_no_harm(name: str, tmp_path: Path) -> None:
    """Beside rows that name the images without their folder and by another suffix."""
    folder = make_images(tmp_path / "in", ["a.png", "b.png"])
    table = write(tmp_path / "labels.csv", f"file,label\n{name},7\na.jpg,1\nb.jpg,2\n")
    try:
        assert list(labels_of(folder, table).values()) == [1, 2]
    except UserError as error:
        assert "line 2" in str(error)  # noqa: PT017


# mistakes in label files --------------------------------------------------------------------------

KAGGLE = "ImageId,PredictionString\n"
WRONG: dict[str, tuple[str, str]] = {  # the text, and what of it the message names
    "other images": ("file,label\nx.png,1\ny.png,1\n", "2 names are x.png"),
    "no rows": ("file,label\n", "0 names"),
    "some images": (CSV, "2 of 3 images without a label: b.png, c.png"),
    "no header": ("a.png,1\n", "'a.png,1'"),
    "empty": ("", "''"),
    "words": ("\x1b]0;title\x07 what\n", "what"),
    "two labels": (CSV + "a.png,2\n", "two, 1 and 2"),
    "two labels of a path": (CSV + "b.png,2\n./a.png,3\n", "line 4: expected one label of a.png"),
    "a word": ("file,label\na.png,cat\n", "line 2"),
    "negative": ("file,label\na.png,-1\n", "'-1'"),
    "fraction": ("file,label\na.png,1.0\n", "'1.0'"),
    "other digits": ("file,label\na.png,٣\n", "line 2"),
    "nothing": ("file,label\na.png,\n", "''"),
    "synset": ("file,label\na.png,n00000001\n", "line 2"),
    "2^63": (f"file,label\na.png,{1 << 63}\n", "line 2: expected a class index"),
    "500 digits": (f"file,label\na.png,{'9' * 500}\n", "line 2"),
    "5,000 digits": (f"file,label\na.png,{'9' * 5000}\n", "line 2"),
    "huge field": (f"file,label\n{'a' * 100_000}.png,1\n", "100006 characters"),
    "cells too few": ("file,label\na.png\n", "line 2: expected a label file; got 1 cells"),
    "cells too many": (CSV + "b.png,2,3\n", "line 3: expected a label file; got 3 cells"),
    "no name": ("file,label\n,1\n", "line 2: expected the name"),
    "spaces for a name": (CSV + '" ",2\n', "line 3: expected the name"),
    "a dot for a name": (CSV + "./,2\n", "line 3: expected the name"),
    "column twice": ("file,label,label\na.png,1,2\n", "line 1"),
    "column twice in case": ("file,Label,label\na.png,1,2\n", "label twice"),
    "open quote": (CSV + '"b.png,2\n', "labels.csv"),
    "zero byte": (CSV + "b.png\0,2\n", "zero byte"),
    "escapes": ("file,label\na\x1b[2J.png,x\x1b[2J\n", r"'x\x1b[2J'"),
    "lines above": ("\n\nfile,label\na.png,x\n", "line 4"),
    "val.txt, many digits": (f"a.png {'9' * 4300}\n", "line 1"),
    "val.txt, digits": (f"a.png {'9' * 30}\n", "line 1: expected a class index"),
    "val.txt, beyond": ("a.png 1000\n", "0 to 999"),
    "val.txt, twice": ("a.png 1\na.png 2\n", "line 2: expected one label of a.png"),
    "val.txt, no index": ("a.png 1\n\nb.png\n", "line 3"),
    "kaggle, no synset": (KAGGLE + "a,\n", "line 2"),
    "kaggle, no name": (KAGGLE + ",n01440764 1 2\n", "line 2"),
    "devkit": ("490\n361\n171\n", "val.txt"),
    "synsets, too few": ("n01440764\n", "1 labels without names for 3 images"),
    "synsets, unknown": ("n01440764\nn00000001\nn01440764\n", "line 2"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("place", ["given", "inside", "zip"])
def test_a_mistake_is_named_with_its_line(
    case: str, place: str, flat: Path, tmp_path: Path
) -> None:
    text, expected = WRONG[case]
    table = write((tmp_path if place == "given" else flat) / "labels.csv", text)
    given = table if place == "given" else None
    message = error_of(zipped(flat) if place == "zip" else flat, given)
    assert expected in message
    assert "labels.csv" in message


def test_label_files_that_cannot_be_read(flat: Path, tmp_path: Path) -> None:
    write(tmp_path / "labels.csv", CSV)
    assert f"{tmp_path / 'labels.csv'}?" in error_of(flat, tmp_path / "label.csv")
    assert "a folder" in error_of(flat, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "pipe" in error_of(flat, tmp_path / "pipe")
    for encoding in ("utf-16", "latin-1", "utf-32"):
        (tmp_path / "l.csv").write_bytes("file,label\né.png,1\n".encode(encoding))
        assert "l.csv" in error_of(flat, tmp_path / "l.csv")
    with (tmp_path / "l.csv").open("wb") as file:
        file.truncate(65 << 20)
    assert "64" in error_of(flat, tmp_path / "l.csv")
    write(flat / "labels.csv", CSV)
    path = zipped(flat)
    path.write_bytes(path.read_bytes().replace(b"a.png,1", b"a.png,2"))
    assert "labels.csv damaged" in error_of(path)
    (flat / "labels.csv").unlink()
    os.mkfifo(flat / "labels.csv")
    assert "labels.csv" in error_of(flat)
    (flat / "labels.csv").unlink()
    path = zipped(flat)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("labels.csv", CSV + "\n" * (65 << 20))
    assert "labels.csv a zip bomb" in error_of(path)


def test_a_line_of_spaces_takes_no_time(flat: Path, tmp_path: Path) -> None:
    """A pattern that tries every way to part the spaces would take minutes."""
    lines = "\n".join(f"a{' ' * 4000}b x" for _ in range(200))
    table, start = write(tmp_path / "val.txt", f"a.png 1\n{lines}"), time.process_time()
    assert "line 2" in error_of(flat, table)
    assert time.process_time() - start < 5


# ImageNet val, flat -----------------------------------------------------------------------------

OWN = [*SYNSETS, SYNSETS[0]]
FORMATS = {
    "val.txt": "".join(f"{name} {at}\n" for name, at in zip(FLAT_VAL, [*INDICES, 0], strict=True)),
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
        zip([prefix + name for name in FLAT_VAL], [*INDICES, 0], strict=True)
    )
    assert source_of(path, given) == "file"


def test_label_files_are_found_for_flat_val_alone(val: Path, flat: Path) -> None:
    assert source_of(val) == "none"
    write(flat / "val.txt", "notes 1\n")
    assert source_of(flat) == "none"
    write(val / "ILSVRC2012_validation_ground_truth.txt", "490\n361\n171\n822\n")
    assert "val.txt" in error_of(val)  # the devkit's numbers, which are in another order
    write(val / "val.txt", FORMATS["val.txt"])
    assert source_of(val) == "file"


def test_whole_synset_list_for_part_of_val(val: Path) -> None:
    (val / FLAT_VAL[1]).unlink()
    lines = [SYNSETS[0], SYNSETS[0], SYNSETS[1], SYNSETS[2]] + [SYNSETS[0]] * 49_996
    write(val / "synset_labels.txt", "\n".join(lines))
    assert list(labels_of(val).values()) == [0, 574, 999]
