"""Where labels come from, in every layout, and every way they can be wrong."""

from pathlib import Path

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import open_images
from mjp_privacy.data.labels import synset_indices
from tests.helpers.image_files import FLAT_VAL, make_images, zipped

SYNSETS = ["n01440764", "n03445777", "n15075141"]  # tench, golf ball, toilet tissue
INDICES = [0, 574, 999]


def labels_of(path: Path, labels: Path | None = None) -> dict[str, int | None]:
    return {record.image_id: record.label for record in open_images(path, labels).records}


def source_of(path: Path, labels: Path | None = None) -> set[str]:
    return {record.label_source for record in open_images(path, labels).records}


def error_of(path: Path, labels: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        open_images(path, labels)
    return str(caught.value)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    return make_images(tmp_path / "flat", ["a.png", "b.png", "c.png"])


@pytest.fixture
def val(tmp_path: Path) -> Path:
    return make_images(tmp_path / "val", FLAT_VAL)


# no labels, folders -----------------------------------------------------------------------------


def test_flat_folder_has_no_labels(flat: Path) -> None:
    assert set(labels_of(flat).values()) == {None}
    assert source_of(flat) == {"none"}
    assert open_images(flat).labels_described == "The images carry no labels."


@pytest.mark.parametrize("wrapper", ["", "val/", "imagenet/val/"])
@pytest.mark.parametrize("as_zip", [False, True])
def test_some_synset_folders_give_imagenet_indices(
    tmp_path: Path, wrapper: str, as_zip: bool
) -> None:
    names = [
        f"{wrapper}{synset}/ILSVRC2012_val_0000000{at}.JPEG" for at, synset in enumerate(SYNSETS)
    ]
    folder = make_images(tmp_path / "some", names)
    path = zipped(folder) if as_zip else folder
    assert labels_of(path) == dict(zip(names, INDICES, strict=True))
    assert source_of(path) == {"synset"}
    assert "ImageNet class indices" in open_images(path).labels_described


def test_one_synset_folder_and_folders_below_it(tmp_path: Path) -> None:
    assert labels_of(make_images(tmp_path / "one", ["n03445777/a.png"])) == {"n03445777/a.png": 574}
    tiny = make_images(tmp_path / "tiny", [f"{synset}/images/0.png" for synset in SYNSETS])
    assert list(labels_of(tiny).values()) == INDICES


def test_flat_images_named_by_synset(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "flat", [f"{synset}_{3}.JPEG" for synset in SYNSETS])
    assert list(labels_of(folder).values()) == INDICES
    assert "file names" in open_images(folder).labels_described
    make_images(folder, ["n00000001_7.JPEG"])
    assert source_of(folder) == {"none"}


def test_other_class_folders_are_numbered_in_sorted_order(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "pets", ["dog/a.png", "cat/old/b.png", "cow/c.png"])
    assert labels_of(folder) == {"cat/old/b.png": 0, "cow/c.png": 1, "dog/a.png": 2}
    assert source_of(folder) == {"folder"}
    assert "in sorted order (cat = 0, cow = 1, dog = 2)" in open_images(folder).labels_described


def test_folders_named_by_numbers_keep_them(tmp_path: Path) -> None:
    """ImageNetV2 names its folders 0 to 999: sorted as text, 10 would come before 2."""
    folder = make_images(tmp_path / "v2", ["0/a.png", "2/b.png", "10/c.png"])
    assert labels_of(folder) == {"0/a.png": 0, "10/c.png": 10, "2/b.png": 2}
    assert "numbers that name" in open_images(folder).labels_described
    padded = make_images(tmp_path / "padded", ["001/a.png", "002/b.png"])
    assert list(labels_of(padded).values()) == [0, 1]


def test_one_plain_folder_is_no_class(tmp_path: Path) -> None:
    assert source_of(make_images(tmp_path / "wrapped", ["photos/a.png", "photos/b.png"])) == {
        "none"
    }


def test_images_beside_folders(tmp_path: Path) -> None:
    assert source_of(make_images(tmp_path / "mixed", ["a.png", "cat/b.png", "dog/c.png"])) == {
        "none"
    }
    message = error_of(make_images(tmp_path / "stray", ["a.png", "n01440764/b.png"]))
    assert "1 of 2 images lie outside them: a.png" in message


def test_unknown_synsets_and_splits_are_refused(tmp_path: Path) -> None:
    message = error_of(make_images(tmp_path / "in21k", ["n01440764/a.png", "n00000001/b.png"]))
    assert "none of the 1000 of ILSVRC 2012: n00000001" in message
    message = error_of(make_images(tmp_path / "splits", ["train/cat/a.png", "val/cat/b.png"]))
    assert "several splits: train, val" in message
    assert str(tmp_path / "splits" / "val") in message


# CSV --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["file", "image", "image_id", "filename", "File"])
def test_given_csv(flat: Path, tmp_path: Path, column: str) -> None:
    table = write(tmp_path / "l.csv", f"x,label,{column}\n,3,a.png\n,n03445777,b.png\n,0,c.png\n")
    assert labels_of(flat, table) == {"a.png": 3, "b.png": 574, "c.png": 0}
    assert source_of(flat, table) == {"csv"}
    assert "l.csv (3 images, 3 classes)" in open_images(flat, table).labels_described


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
    rows = "".join(
        f"{form.format(name)},{at}\n" for at, name in enumerate(["a.png", "b.png", "c.png"])
    )
    assert list(labels_of(flat, write(tmp_path / "l.csv", "file,label\n" + rows)).values()) == [
        0,
        1,
        2,
    ]


def test_names_shared_by_two_folders_are_not_guessed(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "two", ["x/a.png", "y/a.png"])
    table = write(tmp_path / "l.csv", "file,label\nx/a.png,1\na.png,2\n")
    assert "leaves 1 of 2 images without a label: y/a.png" in error_of(folder, table)


def test_rows_of_other_images_are_no_harm(flat: Path, tmp_path: Path) -> None:
    rows = "a.png,1\nb.png,2\nc.png,3\nelsewhere/d.png,4\n\n"
    table = write(tmp_path / "l.csv", "file,label\n" + rows)
    assert list(labels_of(flat, table).values()) == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("file,label\nx.png,1\ny.png,1\n", "names none of the 3 images: its 2 names are x.png"),
        ("file,label\na.png,1\n", "leaves 2 of 3 images without a label: b.png, c.png"),
        ("file,label\na.png,1\na.png,2\n", "gives a.png twice, with the labels 1 and 2"),
        ("file,label\na.png,cat\n", "line 2: expected a label that is a class index"),
        ("file,label\na.png,-1\n", "got '-1'"),
        ("file,label\na.png,\n", "got ''"),
        ("file,label\na.png\n", "line 2: expected a label file; got 1 cells under 2 columns"),
        ("file,label\n,1\n", "line 2: expected the name of an image"),
        ("file,label\na.png,n00000001\n", "line 2: expected one of the 1000 synsets"),
        ("file,label\n", "names none of the 3 images: its 0 names"),
        ("a.png,1\n", "starts with 'a.png,1'; expected a CSV with the columns"),
        ("", "starts with ''"),
    ],
)
def test_wrong_csv(flat: Path, tmp_path: Path, text: str, expected: str) -> None:
    assert expected in error_of(flat, write(tmp_path / "l.csv", text))


def test_unreadable_label_files(flat: Path, tmp_path: Path) -> None:
    write(tmp_path / "labels.csv", "file,label\n")
    assert f"Did you mean {tmp_path / 'labels.csv'}?" in error_of(flat, tmp_path / "label.csv")
    assert "expected a label file; got a folder" in error_of(flat, tmp_path)
    (tmp_path / "latin.csv").write_bytes(b"file,label\n\xe9.png,1\n")
    assert "not UTF-8" in error_of(flat, tmp_path / "latin.csv")


def test_damaged_label_file_in_a_zip(flat: Path) -> None:
    write(flat / "labels.csv", "file,label\na.png,1\n")
    path = zipped(flat)
    path.write_bytes(path.read_bytes().replace(b"a.png,1", b"a.png,2"))
    assert "labels.csv damaged inside the zip" in error_of(path)


# ImageNet val, flat -----------------------------------------------------------------------------

SOLUTION = "ImageId,PredictionString\n" + "".join(
    f"ILSVRC2012_val_{number:08d},{synset} 1 2 3 4 n01440764 5 6 7 8\n"
    for number, synset in enumerate([*SYNSETS, SYNSETS[0]], 1)
)
FORMATS = {
    "val.txt": "".join(f"{name} {at}\n" for name, at in zip(FLAT_VAL, [*INDICES, 0], strict=True)),
    "LOC_val_solution.csv": SOLUTION,
    "imagenet_2012_validation_synset_labels.txt": "\n".join([*SYNSETS, SYNSETS[0]]) + "\n",
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("place", ["inside", "beside", "zip", "beside zip", "zip with folder"])
def test_flat_val_finds_its_label_file(val: Path, name: str, place: str) -> None:
    write((val.parent if "beside" in place else val) / name, FORMATS[name])
    prefix = "val/" if place == "zip with folder" else ""
    path = zipped(val, prefix) if "zip" in place else val
    expected = dict(zip([prefix + name for name in FLAT_VAL], [*INDICES, 0], strict=True))
    assert labels_of(path) == expected
    assert source_of(path) == {"file"}


@pytest.mark.parametrize("name", FORMATS)
def test_label_file_given(val: Path, tmp_path: Path, name: str) -> None:
    table = write(tmp_path / "anything.dat", FORMATS[name])
    assert list(labels_of(val, table).values()) == [*INDICES, 0]
    assert source_of(val, table) == {"file"}


def test_flat_val_without_label_file(val: Path) -> None:
    assert source_of(val) == {"none"}


def test_label_files_of_other_flat_images_are_left_alone(flat: Path) -> None:
    write(flat / "val.txt", "notes 1\n")
    assert source_of(flat) == {"none"}


def test_devkit_ground_truth_is_refused(val: Path, tmp_path: Path) -> None:
    table = write(val / "ILSVRC2012_validation_ground_truth.txt", "490\n361\n171\n822\n")
    for message in (error_of(val), error_of(val, table)):
        assert "not the sorted synsets" in message
        assert "Give val.txt" in message
    write(val / "val.txt", FORMATS["val.txt"])
    assert source_of(val) == {"file"}


def test_synset_list_must_fit(val: Path) -> None:
    table = write(val / "synset_labels.txt", "n01440764\n" * 3)
    assert "3 labels without names for 4 images" in error_of(val)
    write(table, "n01440764\n" * 3 + "n00000001\n")
    assert "line 4: expected one of the 1000 synsets" in error_of(val)


def test_whole_synset_list_for_part_of_val(val: Path) -> None:
    (val / FLAT_VAL[1]).unlink()
    lines = [SYNSETS[0], SYNSETS[0], SYNSETS[1], SYNSETS[2]] + [SYNSETS[0]] * 49_996
    write(val / "synset_labels.txt", "\n".join(lines))
    assert list(labels_of(val).values()) == [0, 574, 999]


def test_val_txt_must_be_right(val: Path) -> None:
    write(val / "val.txt", FORMATS["val.txt"].replace("999", "1000"))
    assert "class index 1000; expected 0..999" in error_of(val)
    write(val / "val.txt", FORMATS["val.txt"] + "\nILSVRC2012_val_00000009.JPEG\n")
    assert "line 6: expected `name index`" in error_of(val)


def test_synsets_are_sorted() -> None:
    indices = synset_indices()
    assert len(indices) == 1000
    assert sorted(indices) == list(indices)
    assert [indices[synset] for synset in SYNSETS] == INDICES
