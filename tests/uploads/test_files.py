"""Uploads as files: what is written, what a run makes of it, and what damage does to it."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mjp_privacy import save_upload
from mjp_privacy.cli import main
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.federation.rounds import CLOSED_FORM
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.tensor_files import BLANK_DIGEST, DIGEST_KEY
from mjp_privacy.report.contents import read_contents
from mjp_privacy.uploads.folder import REFUSED, Group, examine, group_uploads, known_uploads
from mjp_privacy.uploads.record import record_weights
from tests.helpers import federations
from tests.helpers.models import planted_model
from tests.helpers.planted import gradient_of, planted_images
from tests.helpers.runs import TINY, cells, written
from tests.helpers.uploads import (
    ATTACKS,
    NAME,
    ONE,
    attacked,
    change_truth,
    check_uploads,
    copied,
    edit,
    edit_all,
    flip,
    load_uploads,
)

MATCHING = "inverting_gradients"
OTHER, LATER = NAME.replace("_000_", "_001_"), NAME.replace("at00001", "at00002")

# what is written, and what a run makes of it ------------------------------------------------------


def test_what_is_written_is_the_clients_gradient_and_attacked_once(folder: Path) -> None:
    """What attacks make of it: the oracle's case `uploads`."""
    upload = next(u for u in load_uploads(folder) if u.name == NAME)
    truth, model = upload.truth(), load_model(checkpoint=upload.weights_path)
    labels, held = torch.tensor(upload.header.labels), upload.tensors()
    given = FedSGDClient(model).gradients(ClientInput(truth.images, labels, truth.image_ids))
    assert set(held) == {*CLOSED_FORM} & {name for name, _ in model.named_parameters()}
    assert all(torch.allclose(tensor, given[n][0], atol=1e-6) for n, tensor in held.items())
    header = upload.header
    assert (header.round, header.partial, header.series) == (1, True, "b1s1_r00001_000")
    assert header.mean == pytest.approx((0.4, 0.5, 0.6))
    scores, before = attacked(folder, **ONE)[1], written(folder.parent / "run")
    assert scores.equals(attacked(folder, **ONE)[1])  # finds nothing to do
    assert written(folder.parent / "run") == before


def test_probes_are_set_aside_and_have_the_clients_own_steps_unless_they_say(
    tmp_path: Path,
) -> None:
    """What the server averages does not depend on what is recorded."""
    client = {"batch": 3, "steps": 2, "upload": "weight_difference", "lr": 0.05}
    record = {"rounds": [1], "images": 2, "probes": [{}, {"steps": 1}]}
    one, other = (
        federations.run(tmp_path, name, client=client, record=r)
        for name, r in (("with", record), ("without", {}))
    )
    weights = load_file(other / "model.safetensors")
    assert all(w.equal(weights[n]) for n, w in load_file(one / "model.safetensors").items())
    uploads = load_uploads(one / "uploads")
    assert sorted({(u.header.recipe.steps, u.name[:4]) for u in uploads}) == [
        (1, "b1s1"),
        (2, "b1s2"),
    ]


def test_the_command_line_attacks_recorded_uploads(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config of attacks alone needs them, and a run does not stand among them."""
    config, out = tmp_path / "attacks.yaml", tmp_path / "run"
    config.write_text(json.dumps(ATTACKS))
    words = ["attack", str(config), "--out", str(out), "--device", "cpu", "--limit", "1"]
    assert main(words) == 2
    assert "--uploads" in capsys.readouterr().err
    assert main([*words, "--uploads", str(folder), "--engine", "here"]) == 0
    assert "1 image in 5 cells" in capsys.readouterr().out
    for among in (folder, folder / "run"):
        with pytest.raises(UserError, match="--uploads"):
            attack_uploads(load_experiment(ATTACKS | ONE), folder, among, into=True)


def test_an_upload_that_lacks_a_gradient_keeps_no_attack_from_others(tmp_path: Path) -> None:
    """It stands in a line of its own."""
    model, folder, images = planted_model(), tmp_path / "uploads", planted_images(1)
    sent = gradient_of(model, images, torch.tensor([3]))
    fewer = {name: gradient for name, gradient in sent.items() if name != "patch_embed.proj.weight"}
    for name, gradients in (("whole", sent), ("fewer", fewer)):
        save_upload(folder, model, gradients, name=name, images=images)
    scores = attacked(folder, attacks=[{"name": "patch_gradient"}])[1]
    assert sorted(scores.status) == ["ok", "unsupported"]


def test_no_picture_is_certain_under_another_normalisation_also_with_the_truth(
    tmp_path: Path,
) -> None:
    model, folder = planted_model().float(), tmp_path / "uploads"
    images = (planted_images(1) * 255).round().float() / 255
    sent = gradient_of(model, images, torch.tensor([3]), normalised=True)
    save_upload(folder, model, sent, images=images)
    told = attacked(folder, attacks=[{"name": "token_peeling"}])[2].set_index("metric").value
    assert (told["certain"], told["another_normalisation"]) == (0, 1)
    (row,) = read_contents([tmp_path / "run"]).card.rows
    assert "another_normalisation" in {flag.key for flag in row.flags}


def test_a_header_written_by_hand_is_enough(folder: Path) -> None:
    """The one that the documentation shows, on another model's upload."""
    text = Path("mjp_privacy/federation/README.md").read_text()
    shown = json.loads(text.split("```json\n")[1].split("```")[0])
    held = json.loads((folder / f"{NAME}.json").read_text())
    others = [path for path in folder.glob("*.safetensors") if path.stem != NAME]
    for path in [*folder.glob("*.json"), *folder.glob("truth/*"), *others]:
        path.unlink()
    own = {"weights": held["weights"], "mean": held["mean"], "std": held["std"], "model": {}}
    (folder / f"{NAME}.json").write_text(json.dumps(shown | own))
    assert "no private images" in check_uploads(folder)[0]
    assert list(attacked(folder, **ONE)[1].status) == ["unscored"]
    assert load_uploads(folder)[0].header.client == "3"


def test_a_mended_truth_or_header_is_attacked_anew(folder: Path) -> None:
    attacked(folder, **ONE)
    change_truth(folder, lambda held: held | {"images": held["images"].flip(-1).contiguous()})
    assert attacked(folder, **ONE)[1].value.min() < 40
    before = cells(folder.parent / "run")
    edit_all(folder, lr=0.5)
    attacked(folder, **ONE)
    assert cells(folder.parent / "run") != before


def test_another_folder_of_the_same_name_replaces_nothing(folder: Path, tmp_path: Path) -> None:
    """Whether its lines have the same names or others; one that was moved is the same folder."""
    out, experiment = tmp_path / "run", load_experiment(ATTACKS | ONE)
    attacked(folder, **ONE)
    before = written(out)
    for name, changes in (("b", {"label": "other"}), ("c", {"labels": None}), ("moved", {})):
        other = copied(folder, tmp_path / name / folder.name)
        if changes:
            edit_all(other, **changes)
            with pytest.raises(UserError, match="small"):
                attack_uploads(experiment, other, out)
        else:
            assert attack_uploads(experiment, other, out).failures == ()
        assert written(out) == before


# one's own gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_accuracy_is_said_only_of_what_was_fed(gamma: float, tmp_path: Path) -> None:
    """A saved MJP upload has no mask, and so nobody knows what the model saw."""
    model, images = planted_model(unknown_embedding=bool(gamma)), planted_images(1)
    sent = gradient_of(model, images, torch.tensor([3]))
    save_upload(tmp_path / "uploads", model, sent, images=images.float(), labels=3, gamma=gamma)
    experiment = load_experiment({"name": "uploads", **ONE})
    attack_uploads(experiment, tmp_path / "uploads", tmp_path / "run")
    store = RunStore(tmp_path / "run")
    row = store.read(store.read_cells()[0]["run_id"]).iloc[0]
    assert np.isnan(row["top1.intact"]) == bool(gamma)


def test_weight_decay_that_nobody_declared_is_kept(tmp_path: Path) -> None:
    """An attack on the gradients takes it out; a file holds what was sent."""
    model = planted_model(img_size=16).float()
    sent = gradient_of(model, planted_images(1, 16).float(), torch.tensor([3]))
    for name, weight in model.named_parameters():
        sent[name] = sent[name] + 0.05 * weight.detach()
    stored = load_file(save_upload(tmp_path / "uploads", model, sent))
    assert stored
    assert all(torch.equal(tensor, sent[name]) for name, tensor in stored.items())


def test_what_is_given_is_kept_and_nothing_else(
    model: LoadedModel, gradients: dict[str, Tensor], tmp_path: Path
) -> None:
    """A batch whose labels nobody knows keeps its images."""
    given: dict[str, Any] = {"name": "a", "series": "cat", "label": "my client", "round": 3}
    save_upload(tmp_path, model, gradients, **given, labels=3)
    images = planted_images(2)
    both = gradient_of(model, images, torch.tensor([3, 4]))
    save_upload(tmp_path, model, both, name="b", images=images)
    one, two = load_uploads(tmp_path)
    assert (one.header.labels, one.header.series, one.header.label) == ((3,), "cat", "my client")
    assert one.header.round == 3
    assert one.truth() is None
    assert (two.header.labels, two.header.recipe.batch) == (None, 2)
    truth = two.truth()
    assert truth.image_ids == ("b 0", "b 1")
    mistakes: list[tuple[Path, Any, str, str]] = [
        (tmp_path, gradients, "a", r"a\.json"),  # nothing is overwritten
        (tmp_path, [gradients, gradients], "c", "one upload"),
        (tmp_path / "a.json", gradients, "c", "folder"),
    ]
    for folder, sent, name, named in mistakes:
        with pytest.raises(UserError, match=named):
            save_upload(folder, model, sent, name=name)


# damage -------------------------------------------------------------------------------------------

SERIES = ["b1s1_r00001_000", "b1s1_r00001_001"]


def groups_of(folder: Path) -> list[Group]:
    """The lines of a folder, which are those that a worker sees."""
    examined = examine(folder)
    of_worker = group_uploads(known_uploads(folder)[0], refused=examined.reasons)
    groups = group_uploads(examined.known, refused=examined.refused)
    facts = [[(group.name, group.digest()) for group in of] for of in (groups, of_worker)]
    assert facts[0] == facts[1]
    return groups


IN_HEADER = [(b'_000"', b'_010"'), (b'"series"', b'"serier"'), (b'"series":', b'"series"z')]
"""Of bytes of a header one bit is another one: another series, another field, no JSON."""


@pytest.mark.parametrize("change", [None, *IN_HEADER])
def test_a_damaged_upload_leaves_its_series_out(
    folder: Path, change: tuple[bytes, bytes] | None
) -> None:
    """Its private images, or its header, which then says no more of which series it is."""
    header = folder / f"{LATER}.json"
    if change is None:
        flip(folder / "truth" / f"{LATER}.safetensors", 70_000)
    else:
        header.write_bytes(header.read_bytes().replace(*change))
    assert set(examine(folder).refused) == {NAME, LATER}
    (group,) = groups_of(folder)
    assert group.name == "small"
    (series,) = group.series
    assert (series.first.header.series, len(series.uploads)) == (SERIES[1], 2)


def test_lines_are_rounds_and_series_and_keep_their_names_beside_a_damaged_one(
    folder: Path,
) -> None:
    (group,) = group_uploads(load_uploads(folder))
    assert group.name == "small"
    assert [[u.header.round for u in s.uploads] for s in group.series] == [[1, 2], [1, 2]]
    assert len(group_uploads(load_uploads(folder), limit=1)[0].records) == 1
    # A series with a gap is a line of its own: its second upload has other weights.
    (folder / f"{OTHER.replace('at00001', 'at00002')}.json").unlink()
    groups = group_uploads(load_uploads(folder))
    assert sorted(len(group.series[0].uploads) for group in groups) == [1, 2]
    edit_all(folder, series=None)
    names = [group.name for group in groups_of(folder)]
    assert names == ["small, round 1", "small, round 2"]
    for name in (NAME, OTHER):
        flip(folder / f"{name}.safetensors", 3001)
    assert [group.name for group in groups_of(folder)] == names[1:]


def test_crops_of_one_photograph_are_drawn_together(folder: Path) -> None:
    for path in folder.glob("truth/*"):
        with safe_open(path, "pt") as file:
            metadata = {k: v for k, v in file.metadata().items() if k != DIGEST_KEY}
        save_file(load_file(path), path, metadata | {"photographs": '["one photograph"]'})
    attacked(folder, **ONE)
    line = read_contents([folder.parent / "run"]).lines[0]
    assert (len(line.images), line.units) == (2, 1)


def test_a_restored_upload_leaves_nothing_behind(folder: Path) -> None:
    """Nor does one that was damaged before another."""
    before = attacked(folder, **ONE)[1]
    files = (folder.parent / "run" / "rows").rglob("*.parquet")
    rows = {path: path.read_bytes() for path in files}
    for name in (LATER, OTHER):
        flip(folder / f"{name}.safetensors", 80_003)
        summary, scores, _ = attacked(folder, **ONE)
        assert summary.exit_code == 3
        assert any(name in failure for failure in summary.failures)
        pair = [name[:-1] + "1", name[:-1] + "2"]
        assert sorted(scores[scores.model == REFUSED].image_id) == pair
        assert (scores.model == "small").sum() == 1
        flip(folder / f"{name}.safetensors", 80_003)
    summary, scores, _ = attacked(folder, **ONE)
    assert summary.exit_code == 0
    assert scores.equals(before)
    assert all(path.read_bytes() == content for path, content in rows.items())


# seals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["safetensors", "json"])
def test_no_flipped_bit_goes_unnoticed(folder: Path, ending: str) -> None:
    draw, path = random.Random(16), folder / f"{NAME}.{ending}"
    whole = path.read_bytes()
    bits = [draw.randrange(8 * len(whole)) for _ in range(10)]
    if ending == "safetensors":
        length = 8 * (8 + int.from_bytes(whole[:8], "little"))
        seal = 8 * whole.index(DIGEST_KEY.encode())  # its name, and how the digest begins
        bits += [*(draw.randrange(length) for _ in range(10)), *range(seal, seal + 8 * 24, 23)]
    for bit in bits:
        flip(path, bit)
        assert NAME in examine(folder).refused, bit
        path.write_bytes(whole)
    assert not examine(folder).refused


def test_files_without_seals_are_read(folder: Path) -> None:
    """As strangers write them."""
    before = attacked(folder, **ONE)[1]
    for path in (*folder.glob("*.safetensors"), *folder.glob("truth/*")):
        with safe_open(path, "pt") as file:
            metadata = {k: v for k, v in file.metadata().items() if k != DIGEST_KEY}
        save_file(load_file(path), path, metadata or None)
    edit_all(folder)
    assert "note: " not in check_uploads(folder)[0]
    summary, scores, _ = attacked(folder, **ONE)
    assert summary.exit_code == 0
    assert sorted(scores.value) == sorted(before.value)
    # one that a person changed is read once its seal is taken out
    edit_all(folder, series=None)
    path = folder / f"{NAME}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seal": BLANK_DIGEST}))
    assert "seal" in examine(folder).reasons[NAME]
    edit(folder, noise={"pos_embed": 0.25})
    (changed,) = (upload for upload in examine(folder).sound if upload.name == NAME)
    assert changed.header.noise == {"pos_embed": 0.25}


def test_weights_are_stored_once_and_mended(tmp_path: Path) -> None:
    """Equal tensors of another model are another file."""
    others = {}, {"num_heads": 6}, {"activation": "quick_gelu"}
    model, *_ = models = [load_model(**{**TINY, **changes}) for changes in others]
    for other in models:
        other.load_state_dict(model.state_dict())
    places = [tmp_path / record_weights(tmp_path, each) for each in models * 2]
    assert places[:3] == places[3:]
    assert len(set(places)) == 3 == len(list((tmp_path / "weights").iterdir()))
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for each, place in zip(models, places, strict=False):
        again = load_model(checkpoint=place)
        assert again(again.normalize(image)).equal(each(each.normalize(image)))
    whole = places[0].read_bytes()
    # the lowest bit of a number's mantissa, or of its exponent: the file stays readable
    for damage in (lambda path: flip(path, 8 * (len(whole) - 3)), Path.unlink):
        damage(places[0])
        record_weights(tmp_path, model)
        assert places[0].read_bytes() == whole
