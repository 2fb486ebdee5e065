"""A federation whose clients train low-rank adapters: only these move, and uploads are recorded."""

from pathlib import Path

import pytest
import torch

from mjp_privacy import load_model
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.federation.campaign import inapplicable_attacks
from mjp_privacy.federation.comparison import defence_text
from mjp_privacy.federation.config import plain
from mjp_privacy.models.sizes import LowRank
from mjp_privacy.report.charts.tradeoff import family_and_strength
from mjp_privacy.report.clients import Client
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.worst_case import reduced_groups
from mjp_privacy.uploads.folder import UploadFolder
from tests.helpers.federations import config, run, task
from tests.helpers.runs import rows

CLIENT = {"batch": 3, "lora": {"rank": 2, "targets": ["qkv", "fc1"]}}
ATTACKS = [
    {"name": "patch_gradient"},
    {"name": "inverting_gradients", "options": {"steps": 2}},
]
REFUSED = (
    "the upload holds no gradient of pos_embed, patch_embed.proj.weight: the client sends low-rank "
    "adapters (LoRA), and its own weights are frozen"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("federation"), client=CLIENT)


def test_only_adapters_and_the_head_move(finished: Path) -> None:
    before = task(finished.parent, client=CLIENT).initial_weights()
    after = load_model(checkpoint=finished / "model.safetensors")
    assert after.adapters == LowRank(2, ("qkv", "fc1"))
    moved = {
        name for name, weight in after.named_parameters() if not torch.equal(weight, before[name])
    }
    assert moved == {name for name in before if "lora_" in name or name.startswith("head.")}


def test_whole_uploads_of_the_adapters_are_recorded(finished: Path) -> None:
    uploads = UploadFolder(finished / "uploads").entries()
    sent = task(finished.parent, client=CLIENT).model
    names = {name for name, _ in sent.named_parameters() if "lora_" in name}
    assert len(uploads) == 4
    for upload in uploads:
        assert set(upload.names()) == names | {"head.weight", "head.bias"}
        assert not upload.header.partial
        assert upload.header.recipe["lora"] == "{rank: 2, targets: [qkv, fc1]}"


def test_recorded_uploads_are_attacked_with_their_adapters(finished: Path, tmp_path: Path) -> None:
    experiment = load_experiment({"name": "recorded", "attacks": ATTACKS})
    attack_uploads(experiment, finished / "uploads", tmp_path, device="cpu")
    found = rows(tmp_path).groupby("attack")
    assert set(found.get_group("patch_gradient")["reason"]) == {REFUSED}
    assert set(found.get_group("inverting_gradients")["status"]) == {"ok"}


def test_tables_and_charts_name_it_as_a_defence(finished: Path, tmp_path: Path) -> None:
    text = defence_text(plain(config(client=CLIENT)))
    assert text == "lora {rank: 2, targets: [qkv, fc1]}"
    assert family_and_strength(text)[0] == "withheld"
    experiment = load_experiment({"name": "recorded", "attacks": [{"name": "mean_image"}]})
    attack_uploads(experiment, finished / "uploads", tmp_path, device="cpu")
    (group, *_) = reduced_groups(load_runs([tmp_path]).lines)
    client = Client(group)
    assert client.defended
    assert client.name == "plain, lora {rank: 2, targets: [qkv, fc1]}"


def test_what_will_not_apply_is_said_before_training() -> None:
    lines = inapplicable_attacks(config(client=CLIENT, attacks=ATTACKS))
    assert lines == (f"patch_gradient: {REFUSED}",)
