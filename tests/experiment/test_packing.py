"""Stored pictures: one type for reconstructions, a scale in the file, and places that are found."""

import json
from pathlib import Path

import pytest
import safetensors
import torch
from mjp_privacy.experiment.packing import pack, unpack
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mjp_privacy.experiment.store import RunStore

SCALES = {"1": 1.0, "1/255": 1 / 255}


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path)


def bytes_of(seed: int, count: int = 2) -> Tensor:
    """Pictures whose values are all multiples of 1/255."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, 8, 8), generator=generator).float() / 255


def outside_reader(path: Path) -> dict[str, Tensor]:
    """What somebody reads who knows the file alone: number x scale."""
    with safe_open(path, "pt") as file:
        facts = file.metadata()
        read = {n: file.get_tensor(n) * SCALES[facts[f"scale:{n}"]] for n in file.keys()}
    return read | ({"target": read[facts["target"]]} if "target" in facts else {})


@pytest.mark.parametrize("exact", [True, False])
def test_a_reconstruction_has_one_type_whatever_its_values(store: RunStore, exact: bool) -> None:
    plain = bytes_of(0)
    images = plain.clone() if exact else torch.rand(2, 3, 8, 8)
    store.write_reconstructions(
        "cell", 0, {"images": images, "target": plain, "plain": plain}, ["a", "b"]
    )
    path = store.reconstruction_path("cell", 0)
    with safe_open(path, "pt") as file:
        assert file.get_slice("images").get_dtype() == "F32"
        assert file.get_slice("plain").get_dtype() == "U8"
        assert file.metadata()["scale:images"] == "1"
        assert file.metadata()["scale:plain"] == "1/255"
    read = outside_reader(path)
    error = (read["images"].double() - read["target"].double()).square().mean()
    assert (float(error) < 1e-12) is exact
    assert read["images"].equal(images)
    assert torch.allclose(read["plain"], plain, rtol=0, atol=1e-7)


def test_every_tensor_has_a_scale() -> None:
    given = {"images": torch.rand(1, 3, 4, 4), "plain": bytes_of(1, 1), "input": torch.rand(1, 3)}
    given |= {"target": torch.rand(1, 3), "mask": torch.ones(1, 4).bool()}
    given |= {"permutation": torch.arange(4)[None]}
    stored, metadata = pack(given)
    scales = {name: "1/255" if name == "plain" else "1" for name in stored}
    assert metadata == {f"scale:{name}": scale for name, scale in scales.items()}
    found = unpack(stored, metadata)
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].equal(tensor)
        assert found[name].dtype == tensor.dtype


def test_a_scale_counts_for_more_than_the_type() -> None:
    levels = torch.arange(3, dtype=torch.uint8)
    assert unpack({"x": levels}, {"scale:x": "1"})["x"].tolist() == [0, 1, 2]
    assert unpack({"x": levels}, {})["x"].equal(levels.float() / 255)


def test_only_float32_is_taken_for_a_reconstruction() -> None:
    for images in (torch.rand(1, 3, 4, 4).double(), torch.ones(1, 3, 4, 4, dtype=torch.uint8)):
        with pytest.raises(TypeError, match="reconstructions are float32"):
            pack({"images": images})


def test_a_file_takes_four_bytes_for_a_guess_and_one_for_the_truth(store: RunStore) -> None:
    plain = bytes_of(2, 20)
    tensors = {"images": plain.clone(), "target": plain, "plain": plain, "input": plain.flip(0)}
    store.write_reconstructions("cell", 0, tensors, [str(i) for i in range(20)])
    size = store.reconstruction_path("cell", 0).stat().st_size
    assert size < 6 * plain.numel() + 1500


@pytest.mark.parametrize("as_bytes", [True, False])
def test_files_without_scales_are_read_and_added_to(store: RunStore, as_bytes: bool) -> None:
    """As earlier versions wrote them: reconstructions as bytes where that lost nothing."""
    levels = (bytes_of(3) * 255).round().to(torch.uint8)
    images = levels if as_bytes else torch.rand(2, 3, 8, 8)
    path = store.reconstruction_path("cell", 0)
    path.parent.mkdir(parents=True)
    old = {"images": images, "plain": levels.clone()}
    save_file(old, path, {"image_ids": json.dumps(["a", "b"]), "target": "plain"})
    values = images.float() / 255 if as_bytes else images
    found = store.find_reconstruction("cell", "b")
    assert found is not None
    assert found["images"].equal(values[1])
    assert found["target"].equal(levels[1].float() / 255)
    more = {"images": torch.rand(1, 3, 8, 8), "plain": bytes_of(4, 1), "target": bytes_of(4, 1)}
    store.pictures.put("cell", 0, more, ["c"])
    assert outside_reader(path)["images"].equal(torch.cat([values, more["images"]]))


# where an image is --------------------------------------------------------------------------------


def level(store: RunStore, image_id: str) -> float | None:
    found = store.find_reconstruction("cell", image_id)
    return None if found is None else float(found["images"].mean())


def write(root: Path, block: int, levels: dict[str, float]) -> None:
    """By another store, as by another process."""
    images = torch.stack([torch.full((3, 2, 2), value) for value in levels.values()])
    RunStore(root).write_reconstructions("cell", block, {"images": images}, list(levels))


def test_what_another_process_writes_is_seen(store: RunStore) -> None:
    assert level(store, "a") is None
    assert store.reconstructed("cell") == []
    write(store.root, 0, {"a": 0.25, "b": 0.5})
    assert level(store, "a") == 0.25
    write(store.root, 0, {"b": 0.5, "a": 0.75})  # of the same size, at another place
    assert level(store, "a") == 0.75
    write(store.root, 10, {"z": 0.5})
    write(store.root, 2, {"c": 1.0, "a": 0.0})
    assert level(store, "z") == 0.5
    assert level(store, "a") == 0.75  # of two blocks, the first
    assert store.reconstructed("cell") == ["b", "a", "c", "z"]
    store.reconstruction_path("cell", 10).unlink()
    assert level(store, "z") is None


def test_the_ids_of_a_file_are_read_once(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in range(5):
        write(store.root, block, {f"{block}-{i}": i / 10 for i in range(10)})
    opened: list[str] = []
    original = safetensors.safe_open

    def counted(path: Path, *arguments: str, **options: str) -> object:
        opened.append(Path(path).name)
        return original(path, *arguments, **options)

    monkeypatch.setattr(safetensors, "safe_open", counted)
    for block in range(5):
        for i in range(10):
            assert level(store, f"{block}-{i}") == pytest.approx(i / 10)
    assert level(store, "elsewhere") is None
    assert len(opened) == 5 + 50


def test_files_that_are_not_blocks_are_left_out(store: RunStore) -> None:
    write(store.root, 0, {"a": 0.5})
    path = store.reconstruction_path("cell", 0)
    path.with_name(".00001.safetensors.7.tmp").write_bytes(b"half")
    path.with_name("notes.safetensors").write_bytes(b"not ours")
    assert store.reconstructed("cell") == ["a"]


def test_stores_of_one_folder_are_equal_whatever_they_have_read(store: RunStore) -> None:
    write(store.root, 0, {"a": 0.5})
    level(store, "a")
    assert store == RunStore(store.root)
    assert hash(store) == hash(RunStore(store.root))
