"""Several uploads, labels of attacks, clients of grid entries, and images an attack cannot do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mjp_privacy.experiment.identity import cell_key, run_id

from attacks import ATTACKS
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import expand
from mjp_privacy.experiment.config_files import load_experiment
from mjp_privacy.experiment.overrides import with_gamma
from mjp_privacy.interfaces import Reconstruction
from mjp_privacy.models.jigsaw import draw_masks
from tests.helpers.rounds_attack import ROUNDS, SEEN, Rounds, mjp, rounds
from tests.helpers.runs import attack, cells, names, photographs, rows, values, written

CONFIGS = Path(__file__).parents[2] / "configs"
STATUS = ["image_id", "status", "reason"]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    SEEN.clear()
    with ATTACKS.registered("rounds", ROUNDS):
        yield


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("images"), 3)


# identity -----------------------------------------------------------------------------------------


def test_cells_of_older_configs_keep_their_key_and_run_id() -> None:
    """Digests of the release before labels, clients of entries and their further fields."""
    experiment = load_experiment(CONFIGS / "demo.yaml")
    found = {}
    for c in expand(experiment):
        own = cell_key(c, experiment), run_id(c, experiment, None, True)
        found[c.model, c.setting, c.dtype, c.attack.name] = own
    expected = {
        ("ViT", "a", "float32", "april"): ("f5e654e45f94a036", "c03368e735ffe851"),
        ("ViT (w/o PEs)", "b", "float64", "april"): ("9d68dd6844e1b6b7", "fd851f239e821eed"),
        ("ViT+MJP", "c", "float32", "april"): ("7c409c17905b7b87", "bc67c9ee7c0f3e26"),
        ("ViT+MJP", "b", "float64", "april_unk_aware"): ("aa039ad8d7a94603", "2617a5b46df3d3e7"),
    }
    assert {line: found[line] for line in expected} == expected
    changed = {"mode": "train", "batch": 2, "dal": True, "dal_lambda": 0.3}
    content = {"name": "x", "models": {"ViT": {}}, "grid": [{"models": ["ViT"], "settings": ["a"]}]}
    experiment = load_experiment(content | {"client": changed})
    whole = load_experiment(content)
    entry = content["grid"][0] | {"client": changed}  # type: ignore[index]
    own = load_experiment(content | {"grid": [entry]})
    keys = [cell_key(expand(e)[0], e) for e in (experiment, own, whole)]
    assert keys[0] == keys[1] != keys[2]


def test_a_label_is_a_line_of_its_own_and_what_an_entry_names(images: Path, tmp_path: Path) -> None:
    config = mjp("c", rounds("two", rounds=2), rounds("three", rounds=3), {"name": "april"})
    first = config["grid"][0]
    config["grid"] = [first | {"attacks": ["three"]}, first | {"attacks": ["april", "two"]}]
    attack(images, tmp_path, config)
    found = [(entry["attack"], entry["attack_name"]) for entry in cells(tmp_path)]
    assert found == [("three", "rounds"), ("two", "rounds"), ("april", "april")]
    assert [len(view.updates) for view in SEEN] == [3, 2]
    assert set(rows(tmp_path)["attack"]) == {"two", "three", "april"}
    experiment = load_experiment(config)
    assert [c.attack.title for c in expand(with_gamma(experiment, 0.1))] == [
        "three",
        "two",
        "april",
    ]


def test_labels_that_name_two_attacks_are_refused() -> None:
    for twice in ([rounds("x"), rounds("x", rounds=2)], [rounds("april"), {"name": "april"}]):
        with pytest.raises(UserError, match=r"labels that differ, got '(x|april)' 2 times"):
            load_experiment(mjp("c", *twice))
    content = mjp("c", rounds("x"))
    content["grid"][0]["attacks"] = ["rounds"]
    with pytest.raises(UserError, match=r"Unknown attack 'rounds'\. Available: x"):
        load_experiment(content)


def test_an_entry_has_a_client_of_its_own(images: Path, tmp_path: Path) -> None:
    config = mjp("c", rounds(), client={"dal": True}, block=2)
    first = config["grid"][0]
    config["grid"] = [first, first | {"client": {"batch": 2}}, first | {"client": {"dal": False}}]
    attack(images, tmp_path, config, limit=2)
    assert [(entry["batch"], entry["dal"]) for entry in cells(tmp_path)] == [
        (1, True),
        (2, True),
        (1, False),
    ]
    seen = [(view.updates[0].batch, view.updates[0].dal_lambda) for view in SEEN]
    assert seen == [(1, 0.01), (2, 0.01), (1, 0.0)]
    changed = [c.client for c in expand(with_gamma(load_experiment(config), 0.1))]
    assert changed == [ClientConfig(dal=True), ClientConfig(batch=2, dal=True), ClientConfig()]


@pytest.mark.parametrize(
    ("client", "said"),
    [
        ({"bacth": 2}, "bacth: unknown field. Did you mean batch?"),
        ({"mode": "test"}, "mode: Input should be 'eval' or 'train'"),
        ({"batch": 2}, "grid.0.block: a block holds whole client steps; expected a multiple"),
        ({"batch": 0}, "batch: Input should be greater than or equal to 1; got 0"),
        ({"dal_lambda": -1}, "dal_lambda: Input should be greater than or equal to 0; got -1"),
    ],
)
def test_mistakes_in_the_client_of_an_entry_are_named(client: dict[str, Any], said: str) -> None:
    config = mjp("c", {"name": "april"})
    config["grid"][0]["client"] = client
    with pytest.raises(UserError) as caught:
        load_experiment(config)
    assert said in str(caught.value)
    assert "grid.0" in str(caught.value)


# several uploads ----------------------------------------------------------------------------------


def test_uploads_are_rounds_with_fresh_masks(images: Path, tmp_path: Path) -> None:
    attack(images, tmp_path, mjp("c", rounds()))
    (view,) = SEEN
    assert [update.round for update in view.updates] == [0, 1, 2]
    assert view.against == "plain"
    assert all(update.weights_before is None for update in view.updates)
    stored = rows(tmp_path).drop_duplicates("image_id")["image_id"]
    ids = sorted(stored, key=lambda i: int(i.split(".")[0]) != int(view.labels[0]))  # type: ignore[index]
    first = ids[0]
    masks = []
    for round, update in enumerate(view.updates):
        mask, _ = draw_masks([first], grid=4, gamma=0.5, round=round, seed=0)
        assert torch.equal(update.grads["pos_embed"][0, 0, 1:].eq(0).all(-1), mask[0])
        masks.append(mask)
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_the_scored_input_is_that_of_round_0(images: Path, tmp_path: Path) -> None:
    attack(images, tmp_path, mjp("c", rounds(), rounds("one", rounds=1)))
    one, three = values(tmp_path, attack="one"), values(tmp_path, attack="rounds")
    same = [c for c in one.index if c[1] not in ("gradient_residual",)]
    assert one[same].equals(three[same])


def test_attacks_share_the_rounds_they_both_see(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    update = FedSGDClient.update

    def counted(self: FedSGDClient, inputs: Any, **arguments: Any) -> Any:
        made.append(inputs)
        return update(self, inputs, **arguments)

    monkeypatch.setattr(FedSGDClient, "update", counted)
    attack(images, tmp_path, mjp("c", *(rounds(f"{r} rounds", rounds=r) for r in (1, 4, 2))))
    assert len(made) == 4
    uploads = [view.updates for view in SEEN]
    assert [len(u) for u in uploads] == [1, 4, 2]
    assert uploads[0][0] is uploads[1][0] is uploads[2][0]
    assert uploads[1][1] is uploads[2][1]


def test_several_uploads_have_no_one_shuffled_image(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FedSGDClient, "update", lambda *_, **__: pytest.fail("not needed"))
    assert attack(images, tmp_path, mjp("b", rounds())).exit_code == 0
    found = rows(tmp_path)
    assert set(found["status"]) == {"unsupported"}
    assert found["reason"].str.contains("each upload was shuffled differently").all()
    files = written(tmp_path)
    attack(images, tmp_path, mjp("b", rounds()))
    assert written(tmp_path) == files


def test_the_attacker_knows_the_clients_labels_and_the_wanted_image(
    images: Path, tmp_path: Path
) -> None:
    for setting, against in (("a", "plain"), ("b", "input"), ("c", "plain")):
        attack(images, tmp_path / setting, mjp(setting, rounds(rounds=1)))
        assert SEEN[-1].against == against
        assert sorted(SEEN[-1].labels.tolist()) == [0, 1, 2]  # type: ignore[union-attr]


# images that an attack does not apply to ----------------------------------------------------------


@pytest.mark.parametrize("breaks", [False, True])
def test_inapplicable_images_are_unsupported_and_no_failures(
    images: Path, tmp_path: Path, breaks: bool
) -> None:
    config = mjp("c", rounds(rounds=2, inapplicable=[0 if breaks else 1], breaks=breaks))
    summary = attack(images, tmp_path, config)
    assert (summary.exit_code, summary.failures) == (0, ())
    found = rows(tmp_path)
    said = found[STATUS].drop_duplicates().set_index("image_id")
    assert list(said["status"]).count("unsupported") == (3 if breaks else 1)
    assert set(said.loc[said["status"] == "unsupported", "reason"]) == {"too dark"}
    assert sorted(said.index) == names(3)
    files = written(tmp_path)
    attack(images, tmp_path, config)
    assert written(tmp_path) == files


def test_steps_taken_one_by_one_keep_masks_labels_and_rounds(images: Path, tmp_path: Path) -> None:
    attack(images, tmp_path / "whole", mjp("c", rounds(rounds=2)))
    attack(images, tmp_path / "steps", mjp("c", rounds(rounds=2, breaks=True)))
    whole, steps = values(tmp_path / "whole"), values(tmp_path / "steps")
    assert "mask_recall" in whole.index.get_level_values("metric")
    assert whole.equals(steps)
    assert [view.labels.tolist() for view in SEEN[-3:]] == [  # type: ignore[union-attr]
        [label]
        for label in SEEN[0].labels.tolist()  # type: ignore[union-attr]
    ]
    assert all([u.round for u in view.updates] == [0, 1] for view in SEEN)


def test_an_attack_without_a_reconstruction_is_a_failure(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rounds, "run", lambda *_, **__: Reconstruction(None, inapplicable={1: "x"}))
    assert attack(images, tmp_path, mjp("c", rounds())).exit_code == 3
    said = rows(tmp_path)[STATUS].drop_duplicates()
    assert sorted(said["status"]) == ["failed", "failed", "unsupported"]
