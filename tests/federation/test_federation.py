"""The federation in one process against torch's own optimisers, its splits, its configs; after it
was killed; and with damaged files, which are named."""

import copy
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from attacks import find_attack
from mjp_privacy.client.upload import sinusoidal_table
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import json_line
from mjp_privacy.federation import rounds
from mjp_privacy.federation.config import load_federation
from mjp_privacy.federation.rounds import evaluations, federate, kept_names, stored_config
from mjp_privacy.federation.task import (
    ServerState,
    Task,
    data_path,
    dirichlet,
    federation_images,
    iid,
    learning_rate,
    mean_gradient,
)
from mjp_privacy.interfaces import ClientUpdate
from mjp_privacy.models.jigsaw import Grid
from tests.helpers.federations import MJP, assert_close, config, run, task
from tests.helpers.uploads import NAME, flip, load_uploads

MINUTE, QUICK = "configs/federated/minute.yaml", "configs/federated/quick.yaml"
Weights = dict[str, torch.Tensor]


def rounds_of(federation: Task, number: int) -> Weights:
    weights, state = federation.initial_weights(), ServerState()
    for round in range(number):
        clients = federation.participants(round)
        uploads = federation.client_updates(weights, clients, round)
        weights, state = federation.server_step(weights, state, uploads, round)
    return weights


def stepped(
    federation: Task, before: Weights, places: list[int], steps: int = 1, **options: Any
) -> Weights:
    """Weights after steps of torch's SGD on these images, as an ordinary training loop."""
    model = copy.deepcopy(federation.with_weights(before))
    mean, std = (torch.tensor(MJP[name]).view(3, 1, 1) for name in ("mean", "std"))
    pixels = (federation.images[places].float() / 255 - mean) / std
    labels = torch.tensor([federation.train.labels[place] for place in places])
    optimizer = torch.optim.SGD(model.parameters(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pixels), labels).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


# clients and server -------------------------------------------------------------------------------


def test_fedsgd_is_sgd_on_the_union_of_the_batches(tmp_path: Path) -> None:
    federation = task(tmp_path)
    expected = federation.initial_weights()
    for round in range(3):
        clients = federation.participants(round)
        places = [place for client in clients for place in federation.drawn(client, round)]
        expected = stepped(federation, expected, places, lr=0.1)
    assert_close(rounds_of(federation, 3), expected)


def test_fedavg_is_the_mean_of_the_clients_weights(tmp_path: Path) -> None:
    client = {"batch": 3, "upload": "weight_difference", "lr": 0.05, "weight_decay": 0.01}
    federation = task(tmp_path, client=client, server={"lr": 1.0})
    start = federation.initial_weights()
    one, other = (
        stepped(federation, start, federation.drawn(client, 0), lr=0.05, weight_decay=0.01)
        for client in federation.participants(0)
    )
    assert_close(rounds_of(federation, 1), {name: (one[name] + other[name]) / 2 for name in start})


def test_fedadam_is_torchs_adamw_at_a_rate_that_warms_up_and_falls_to_zero(tmp_path: Path) -> None:
    """On the same gradients: those of a network would differ by rounding, which Adam magnifies
    where they are zero."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 3, generator=generator)
    parameter = torch.nn.Parameter(start.clone())
    reference = torch.optim.AdamW([parameter], lr=0.01, weight_decay=0.1)
    rule = {"lr": 0.01, "weight_decay": 0.1, "warmup": 2, "schedule": "cosine"}
    server = task(tmp_path, server={"optimizer": "adam", **rule})
    weights, state = {"w": start}, ServerState()
    for round, share in enumerate((0.5, 1, 0.5, (1 + math.cos(math.pi * 3 / 4)) / 2)):
        gradient = torch.randn(5, 3, generator=generator)
        parameter.grad, reference.param_groups[0]["lr"] = gradient, 0.01 * share
        reference.step()
        upload = ClientUpdate({"w": -gradient.unsqueeze(0)}, kind="weight_difference")
        weights, state = server.server_step(weights, state, [upload], round)
        assert torch.allclose(weights["w"], parameter.detach(), atol=1e-6)
    assert learning_rate(server.config.server, 4, 4) == 0


@pytest.mark.parametrize("others", [[{"v": torch.ones(1)}], [{}], None])
def test_uploads_of_other_names_and_none_at_all_are_refused(others: Any) -> None:
    tensors = {1: torch.full((1, 2), 1.0), 3: torch.full((1, 2), 5.0)}
    several = [ClientUpdate({"w": tensor}, batch=images) for images, tensor in tensors.items()]
    assert mean_gradient(several)["w"].tolist() == [4.0, 4.0]  # by their images
    given = [] if others is None else [{"w": torch.ones(1)}, *others]
    with pytest.raises(UserError):
        mean_gradient(map(ClientUpdate, given))


def test_fixed_tables_defences_and_local_steps_are_the_clients_own(tmp_path: Path) -> None:
    """A table of sines stays and is not sent, noise differs between clients, and the mean of many
    local steps is not one step's."""
    fixed = task(tmp_path, model=MJP, gamma=0.5, client={"batch": 3, "positions": "sinusoidal"})
    assert "pos_embed" not in fixed.client_update(fixed.initial_weights(), 0, 0).grads
    table = sinusoidal_table(Grid(4, 4), 40).to(torch.float32)
    assert rounds_of(fixed, 2)["pos_embed"][0, 1:].equal(table)
    noisy = task(tmp_path, client={"batch": 3, "defenses": [{"gaussian_noise": 1.0}]})
    plain, weights = task(tmp_path), noisy.initial_weights()
    parts = [
        noisy.client_update(weights, c, 0).grads["cls_token"]
        - plain.client_update(weights, c, 0).grads["cls_token"]
        for c in (0, 1)
    ]
    assert not torch.allclose(parts[0], parts[1])
    several = {"batch": 3, "steps": 3, "upload": "weight_difference", "lr": 0.05}
    local = task(tmp_path, client=several, server={"lr": 1.0})
    after = stepped(local, weights, local.drawn(0, 0), 3, lr=0.05)
    sent = local.client_update(weights, 0, 0).grads
    assert_close({n: g[0] for n, g in sent.items()}, {n: after[n] - weights[n] for n in after})


@pytest.mark.parametrize("attack", ["token_peeling", "layer_span", "head_features"])
def test_what_an_attack_of_the_config_reads_is_recorded(tmp_path: Path, attack: str) -> None:
    federation = task(tmp_path, attacks=[{"name": attack}])
    model = federation.with_weights(federation.initial_weights())
    names = {name for name, _ in model.named_parameters()}
    read = {*find_attack(attack).needs(model)} & names  # type: ignore[union-attr]
    assert read <= {*kept_names(federation.config, model)} < names
    asked = task(
        tmp_path, record={"rounds": [0], "parameters": ["cls_token"]}, attacks=[{"name": attack}]
    )
    assert kept_names(asked.config, model) == ("cls_token",)


def test_everything_that_a_trained_head_sends_is_recorded(tmp_path: Path) -> None:
    """And an upload is called partial only where some of what was sent is not written."""
    client = {"train": "head", "withhold": ["head.bias"], "positions": "sinusoidal"}
    out = run(tmp_path, client=client)
    (header, *_) = (json.loads(p.read_text()) for p in sorted((out / "uploads").glob("*.json")))
    assert [*load_file(out / "uploads" / f"{NAME}.safetensors")] == ["head.weight"]
    assert not header.get("partial")


def test_fewer_images_than_asked_for_are_recorded_in_whole_batches(tmp_path: Path) -> None:
    """And refused before training where they fill none."""
    few = {"train_images": 7, "client": {"batch": 1}}
    record = {"rounds": [1], "images": 8, "probes": [{"batch": 2, "partners": "fresh"}]}
    out = run(tmp_path, record=record, **few)
    assert len(load_uploads(out / "uploads")) == 3
    for probe in ({"batch": 8}, {"batch": 4, "partners": "fresh"}):
        with pytest.raises(UserError, match=r"record\.probes.* 8 images, got 7"):
            run(tmp_path, "refused", record={**record, "probes": [probe]}, **few)
    assert not (tmp_path / "refused" / "metrics.jsonl").exists()


# images -------------------------------------------------------------------------------------------


def test_images_are_dealt_out(tmp_path: Path) -> None:
    """Each once and evenly; a small alpha gives clients few classes."""
    parts = iid([0] * 23, 5, seed=0)
    assert sorted(place for part in parts for place in part) == list(range(23))
    assert {len(part) for part in parts} == {4, 5}
    labels, shares = [place % 10 for place in range(2000)], {}
    for alpha in (0.1, 100.0):
        parts = dirichlet(labels, 10, alpha=alpha, least=1, seed=0)
        assert sorted(place for part in parts for place in part) == list(range(2000))
        largest = [max([labels[p] for p in part].count(k) for k in range(10)) for part in parts]
        shares[alpha] = sum(m / len(part) for m, part in zip(largest, parts, strict=True)) / 10
    assert shares[0.1] > 0.4 > 0.15 > shares[100.0]
    with pytest.raises(UserError, match="alpha"):
        dirichlet([0, 1, 2], 3, alpha=0.01, least=2, seed=0)
    with pytest.raises(UserError, match=r"clients\.number"):
        task(tmp_path, clients={"number": 500})
    with pytest.raises(UserError, match=r"client\.dal"):  # the model has nothing to localize with
        task(tmp_path, client={"batch": 3, "dal": True})


def test_an_epoch_holds_every_image_once(tmp_path: Path) -> None:
    federation = task(tmp_path, client={"batch": 3, "partners": "fresh"})
    part = federation.parts[1]
    batches, epochs = len(part) // 3, []
    for epoch in range(3):
        drawn = [federation.drawn(1, epoch * batches + place) for place in range(batches)]
        images = [image for batch in drawn for image in batch]
        assert len(set(images)) == len(images) == batches * 3
        assert set(images) <= set(part)
        epochs.append(images)
    assert epochs[0] != epochs[1] != epochs[2]
    assert federation.drawn(1, 0) == epochs[0][:3]  # a function of client and round alone
    assert task(tmp_path).participants(2) == federation.participants(2)
    federation.parts[1] = part[:2]  # fewer than a batch: they are repeated
    assert set(federation.drawn(1, 0)) == set(part[:2])
    assert len(federation.drawn(1, 5)) == 3


def test_each_photograph_is_a_class(tmp_path: Path) -> None:
    minute = load_federation(MINUTE)
    train, test = federation_images(minute, "embedded", None)
    assert test is None  # clients train on all of them
    assert len(set(train.labels)) == 6
    few = config(model={"num_classes": 5})
    lacking = (few, None, r"model\.num_classes"), (minute, tmp_path, "--val")
    for asked, val, named in (*lacking, (minute, "embedded", "--val")):
        with pytest.raises(UserError, match=named):
            federation_images(asked, "embedded", val)
    assert data_path("embedded") == "embedded"
    assert data_path("images") == str(Path("images").resolve())


# killed, and given again --------------------------------------------------------------------------


def killed_in(round: int, monkeypatch: pytest.MonkeyPatch, *arguments: Any, **changes: Any) -> None:
    """A run that is stopped in this round, before the server's step."""
    uploads = Task.round_uploads

    def dies(self: Task, weights: Weights, at: int) -> Any:
        if at == round:
            raise KeyboardInterrupt
        return uploads(self, weights, at)

    with monkeypatch.context() as patched:
        patched.setattr(rounds, "CHECKPOINT_SECONDS", -1.0)
        patched.setattr(Task, "round_uploads", dies)
        with pytest.raises(KeyboardInterrupt):
            run(*arguments, **changes)


def test_a_killed_federation_ends_with_the_same_weights_and_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its attacks were corrected meanwhile, which are no part of the training."""
    mjp = {"model": MJP, "gamma": 0.5, "server": {"optimizer": "adam", "lr": 0.01}}
    whole = run(tmp_path, "whole", **mjp)
    killed_in(2, monkeypatch, tmp_path, "killed", **mjp, attacks=[{"name": "grey"}])
    killed = run(tmp_path, "killed", **mjp)
    ends = [load_file(out / "model.safetensors") for out in (whole, killed)]
    torch.testing.assert_close(*ends, rtol=0, atol=0)
    written = sorted(p.name for p in (whole / "uploads").iterdir())
    assert written == sorted(p.name for p in (killed / "uploads").iterdir())
    lines = [
        [{**json.loads(line), "timing": 0, "check": 0} for line in text.splitlines()]
        for text in ((out / "metrics.jsonl").read_text() for out in (whole, killed))
    ]
    assert lines[0] == lines[1]
    assert [line["round"] for line in lines[0]] == [0, 2, 4]


def test_what_is_trained_may_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the run was finished, or killed before its first checkpoint."""
    killed_in(0, monkeypatch, tmp_path)
    for _ in range(2):
        with pytest.raises(UserError, match=r"server\.lr"):
            run(tmp_path, server={"optimizer": "sgd", "lr": 0.2})
        assert (run(tmp_path) / "model.safetensors").is_file()
    with pytest.raises(UserError, match="finite"):
        run(tmp_path, "far", server={"optimizer": "sgd", "lr": 1e9})
    with pytest.raises(UserError, match="none"):
        federate(config(), tmp_path / "none", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


# configs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gamma": 0.3}, "unknown_embedding"),
        ({"clients": {"number": 2, "per_round": 3}}, "clients.per_round"),
        ({"record": {"rounds": [4]}}, "record.rounds"),
        ({"record": {"rounds": [4], "probes": [{"uploads": 3}]}}, "at most 1"),
        ({"record": {}, "attacks": [{"name": "april"}]}, "record.rounds"),
        ({"record": {"images": 8, "probes": [{"batch": 1, "partners": "fresh"}]}}, "probes.0"),
        ({"client": {"batch": 2, "server_lr": 0.1}}, "server.lr"),
        ({"client": {"bach": 2}}, "batch"),
        ({"client": {"batch": 2, "augment": "mixup"}}, "client.augment"),
        ({"sever": {}}, "server"),
        ({"data": {"store": "files"}}, "data.store"),
        ({"data": {"all_classes": False, "native_size": 64}}, "data.native_size"),
        ({"model": {**MJP, "drop_path": 0.2}}, "model.drop_path"),
    ],
)
def test_mistakes_in_a_config_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        config(**changes)
    assert named in str(caught.value)


# damaged files ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of two images in rounds 1 and 2."""
    return run(tmp_path_factory.mktemp("federation"))


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished.parent, tmp_path / "copy")
    return tmp_path / "copy" / "out"


FIRST, SECOND = NAME, NAME.replace("at00001", "at00002")
Damage = Callable[[Any], object]


def content(folder: Path) -> Mapping[Path, bytes]:
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_damaged_config_is_named_and_written_again(out: Path) -> None:
    for content in (b"", b'{"name": "x", "nmae": "y"}'):
        (out / "federation.json").write_bytes(content)
        with pytest.raises(UserError, match=r"federation\.json"):
            stored_config(out)
    assert run(out.parent) == out  # its checkpoint says what was trained
    assert stored_config(out).name == "small"


def test_a_damaged_evaluation_is_named(out: Path) -> None:
    """A line of something else, a flipped bit."""
    path = out / "metrics.jsonl"
    before = path.read_bytes()
    wrong = json_line({"step": 2, "round": 2, "val_top1": 101}).encode()
    flipped = before.replace(b'"val_top1": 100.0', b'"val_top1": 101.0', 1)
    for named, content in (("val_top1", before + wrong), ("line 3", flipped)):
        path.write_bytes(content)
        for reads, place in ((evaluations, out), (run, out.parent)):
            with pytest.raises(UserError, match=rf"(?s)metrics\.jsonl.*{named}"):
                reads(place)
    path.write_bytes(b"".join(before.splitlines(keepends=True)[1:]))
    assert len(evaluations(out)) == 2  # the others still hold


# uploads ------------------------------------------------------------------------------------------


def weights(uploads: Path) -> Path:
    """The larger of the two files of weights by name; each is that of one round."""
    return max((uploads / "weights").iterdir())


DAMAGE: dict[str, Damage] = {
    "tensors": lambda u: flip(u / f"{FIRST}.safetensors", 80_003),
    "no header": lambda u: (u / f"{SECOND}.json").unlink(),
    "truth": lambda u: flip(u / "truth" / f"{FIRST}.safetensors", 70_000),
    "no truth": lambda u: (u / "truth" / f"{FIRST}.safetensors").unlink(),
    "not there": lambda u: [path.unlink() for path in u.rglob(f"{FIRST}.*")],
    "weights": lambda u: flip(weights(u), 500_000),
    "nothing left": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_uploads_are_named_and_made_again(
    out: Path, damage: Damage, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its checkpoint the same command makes all of them again, bit by bit. What becomes of
    their attack: tests/uploads/test_files.py."""
    uploads = content(out / "uploads")
    damage(out / "uploads")
    if damage in (DAMAGE["no truth"], DAMAGE["not there"], DAMAGE["nothing left"]):
        with pytest.raises(UserError, match=FIRST):
            run(out.parent)
    else:
        run(out.parent)
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "uploads" in line]
        assert FIRST in line or SECOND in line
    (out / "checkpoint.pt").unlink()
    run(out.parent)
    assert content(out / "uploads") == uploads
