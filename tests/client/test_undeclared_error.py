"""A defence that changes an upload and does not say by how much: from the client to the rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.defenses.compression import Prune
from mjp_privacy.client.defenses.disturbance import Disturbed, Draws
from mjp_privacy.client.defenses.registry import DEFENSES, defense_of
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.registry import Entry
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.interfaces import ClientInput, Grads
from tests.contract.defense_errors import complaints
from tests.contract.planted_uploads import planted_uploads
from tests.helpers import uploads
from tests.helpers.federations import run
from tests.helpers.models import some_images, some_labels
from tests.helpers.models import tiny as tiny_model
from tests.helpers.runs import attack, one_cell, photographs, rows


@dataclass(frozen=True)
class Forgetful:
    """Prunes as `prune` does, and forgets to declare the error."""

    share: float
    name: ClassVar[str] = "forgetful"
    main: ClassVar[str | None] = "share"

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        return Disturbed(Prune(self.share).apply(sent, draws).sent)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with DEFENSES.registered("forgetful", Entry(f"{__name__}:Forgetful")):
        yield
    defense_of.cache_clear()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Uploads of a client without defences."""
    return run(tmp_path_factory.mktemp("federation")) / "uploads"


def undeclared(*defenses: Any, **client: Any) -> Any:
    """Of two images, the first zero everywhere: whether its upload hides an error."""
    images, ids = some_images(2), ("one", "two")
    inputs = ClientInput(images, some_labels(2), ids)
    config = ClientConfig(defenses=defenses, **client)
    update = make_upload(tiny_model(), [inputs], config, names=["pos_embed", "head.bias"])
    return None if update.undeclared is None else update.undeclared.tolist()


@pytest.mark.parametrize(
    ("defenses", "client", "expected"),
    [
        ([], {}, None),
        (["int8"], {}, [False, False]),
        ([{"gaussian_noise": 0}], {}, [False, False]),
        ([{"dp_sgd": 0}], {}, [False, False]),  # only scales, which `clipped` says
        ([{"dp_sgd": 1}], {}, [False, False]),
        (
            [{"dp_sgd": 1}],
            {"optimizer": "adamw", "upload": "weight_difference"},
            [True, True],  # AdamW divides the noise by numbers that stay with the client
        ),
        ([{"forgetful": 1}], {}, [False, False]),  # nothing was changed
        ([{"forgetful": 0.5}], {}, [True, True]),
        (["int8", {"forgetful": 0.5}, {"gaussian_noise": 0.1}], {}, [True, True]),
    ],
)
def test_the_client_notices(
    defenses: list[Any], client: dict[str, Any], expected: list[bool] | None
) -> None:
    assert undeclared(*defenses, **client) == expected


def diagnostic(out: Path) -> list[float]:
    found = rows(out)
    return sorted(set(found[found["metric"] == "undeclared_error"]["value"]))


def test_a_run_marks_it_and_the_contract_fails(tmp_path: Path) -> None:
    three = photographs(tmp_path / "images", 3)
    for defense, expected in (("prune 0.5", 0.0), ("forgetful 0.5", 1.0)):
        config = one_cell(attacks=[{"name": "patch_gradient"}], client={"defenses": [defense]})
        assert attack(three, tmp_path / defense, config, limit=1).exit_code == 0
        assert diagnostic(tmp_path / defense) == [expected]
    assert any("cls_token" in line for line in complaints(Forgetful(0.5), planted_uploads()[0]))


def of_uploads(folder: Path, out: Path) -> list[float]:
    experiment = load_experiment({"name": "again", "attacks": [{"name": "patch_gradient"}]})
    attack_uploads(experiment, folder, out, device="cpu")
    return diagnostic(out)


def test_a_recorded_upload_keeps_the_fact(tmp_path: Path) -> None:
    """Also where another defence of the recipe declares its error."""
    client = {"batch": 3, "defenses": ["int8", {"forgetful": 0.5}]}
    folder = run(tmp_path, client=client) / "uploads"
    assert all(json.loads(path.read_text())["undeclared"] for path in folder.glob("*.json"))
    assert of_uploads(folder, tmp_path / "run") == [1.0]


@pytest.mark.parametrize(
    ("recipe", "noise", "rounding", "expected"),
    [
        ({}, {}, {}, []),
        ({"defenses": ["int8"]}, {}, {}, [1.0]),
        ({"defenses": ["int8"]}, {}, {"pos_embed": 1e-6}, [0.0]),
        ({"defenses": ["dp_sgd 0.5"]}, {}, {}, [1.0]),
        ({"defenses": ["dp_sgd 0.5"]}, {"pos_embed": 1e-6}, {}, [0.0]),
        ({"defenses": ["dp_sgd 0"]}, {}, {}, [0.0]),  # clips alone
    ],
)
def test_a_header_that_names_defences_and_declares_nothing_is_flagged(
    recorded: Path, tmp_path: Path, recipe: Any, noise: Any, rounding: Any, expected: list[float]
) -> None:
    folder = uploads.copied(recorded, tmp_path / "uploads")
    uploads.edit_all(folder, recipe=recipe, noise=noise, rounding=rounding)
    assert of_uploads(folder, folder.parent / "run") == expected
