"""What attacks of anybody's break is their rows, with the reason; all others go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks import ATTACKS, step
from attacks.budget import over_budget
from attacks.step import (
    WrongAnswer,
    checked_reconstruction,
    in_smaller_pieces,
    joined,
    run_steps,
)
from mjp_privacy.client.defenses.noise import GaussianNoise
from mjp_privacy.core.registry import Entry
from mjp_privacy.experiment import work
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.interfaces import (
    AttackerView,
    ClientUpdate,
    Pixels,
    Reconstruction,
)
from tests.helpers.models import tiny
from tests.helpers.own_attacks import ANSWERS, WHERE, raised
from tests.helpers.runs import (
    attack,
    cells,
    logged,
    one_cell,
    outcome,
    rows,
    same_results,
    written,
)

FILE = "helpers/own_attacks.py"


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with ATTACKS.registered("faulty", Entry(f"{WHERE}:Faulty")):
        yield


def with_faulty(**options: Any) -> dict[str, Any]:
    return one_cell(attacks=[{"name": "faulty", "options": options}, {"name": "patch_gradient"}])


NAMED = {
    "runtime": f"RuntimeError: sizes do not match ({FILE}:",
    "key": f"KeyError: 'no such thing' ({FILE}:",
    "assertion": f"AssertionError ({FILE}:",
    "exit": f"SystemExit: 5 ({FILE}:",
    "recursion": f"RecursionError: too deep ({FILE}:",
    "user": "prior 'x': expected a file",
    "singular": "linear algebra",
    "torch": f"({FILE}:",
    "nothing": "NoneType",
    "tensor": "Tensor",
    "shape": "images",
    "whole": "uint8",
    "complex": "complex64",
    "list": "list",
    "nan": "not finite",
    "mask": "mask",
    "permutation": "permutation",
    "diagnostics": "rank",
    "names": "3",
    "inapplicable": "99",
}
"""What the reason of each wrong answer names."""


@pytest.fixture(scope="module")
def faulty(three: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an attack for each wrong answer, and of one that is right."""
    out = tmp_path_factory.mktemp("faulty")
    wrong = [{"name": "faulty", "label": a, "options": {"answer": a}} for a in ANSWERS]
    config = one_cell(attacks=[*wrong, {"name": "patch_gradient"}])
    with ATTACKS.registered("faulty", Entry(f"{WHERE}:Faulty")):
        assert attack(three, out, config).exit_code == 3
    return out


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_faulty_attack_is_rows_with_the_reason(faulty: Path, answer: str) -> None:
    """The image that it bears where it is alone, 2.png, has its picture."""
    told = outcome(faulty, attack=answer)
    failed = {name: reason for name, (status, reason) in told.items() if status == "failed"}
    assert set(failed) == {"0.png", "1.png", "2.png"} - ({"2.png"} if answer != "nan" else set())
    assert all(NAMED[answer] in reason for reason in failed.values()), failed
    traced = [line for line in logged(faulty) if line.get("traceback")]
    own = any(NAMED[answer] in line["message"] for line in traced)
    assert own == (answer not in ("user", "singular", "nan"))


@pytest.mark.parametrize("member", ["needs", "unsupported"])
def test_so_is_one_that_fails_before_it_runs(three: Path, tmp_path: Path, member: str) -> None:
    assert attack(three, tmp_path, with_faulty(member=member)).exit_code == 3
    for status, reason in outcome(tmp_path, attack="faulty").values():
        assert status == "failed"
        assert reason.startswith("ValueError: ")
        assert f"({FILE}:" in reason
    others = outcome(tmp_path, attack="patch_gradient").values()
    assert {status for status, _ in others} == {"ok"}


def test_a_defence_that_fails_is_the_rows_of_its_clients(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GaussianNoise, "apply", lambda *_: 1 / 0)
    entry = {"models": ["ViT"], "settings": ["a"]}
    grid = [entry, entry | {"client": {"defenses": [{"gaussian_noise": 0.1}]}}]
    config = one_cell(grid=grid, attacks=[{"name": "patch_gradient"}])
    assert attack(three, tmp_path, config).exit_code == 3
    found = rows(tmp_path)
    assert set(found[found["defenses"] == ""]["status"]) == {"ok"}
    defended = found[found["defenses"] != ""]
    assert set(defended["status"]) == {"failed"}
    assert defended["reason"].str.startswith("ZeroDivisionError").all()


def test_a_stop_is_no_fault_of_the_attack(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(ANSWERS, "runtime", lambda view: raised(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            attack(three, tmp_path, with_faulty())
    # nor is whatever an attack raises after a signal: libraries turn it into errors of their own
    for module in (step, work):
        monkeypatch.setattr(module, "interrupted", lambda: True)
    with pytest.raises(RuntimeError, match="sizes do not match"):
        attack(three, tmp_path, with_faulty())


# run_steps ----------------------------------------------------------------------------------------


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(int(torch.tensor(shape).prod())).reshape(shape).float()


def view_of(steps: int, batch: int = 2) -> AttackerView:
    update = ClientUpdate(
        {"w": numbers(steps, 3)},
        batch=batch,
        noise={"w": numbers(steps)},
        rounding={"w": numbers(steps) + 10},
    )
    pixels = Pixels(8, (0.5,) * 3, (0.5,) * 3)
    return AttackerView(tiny(), [update, update], pixels, labels=torch.arange(steps * batch))


@dataclass
class Breaking:
    """Its linear algebra breaks down where a view holds a step whose first number is in `bad`."""

    bad: tuple[float, ...]
    seen: list[float] = field(default_factory=list)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        first = view.updates[0].grads["w"][:, 0].tolist()
        if set(first) & set(self.bad):
            raise torch.linalg.LinAlgError("no convergence")
        self.seen.append(float(torch.rand((), generator=generator)))
        return Reconstruction(torch.zeros(len(first) * 2, 3, 8, 8))


def generator_of(asked: list[int]) -> Callable[[int], torch.Generator]:
    def make(step: int) -> torch.Generator:
        asked.append(step)
        return torch.Generator().manual_seed(step)

    return make


@pytest.mark.parametrize("bad", [0.0, 3.0, 6.0])
def test_a_step_that_breaks_down_loses_its_own_images_alone(bad: float) -> None:
    asked: list[int] = []
    attack = Breaking((bad,))
    done = run_steps(attack, view_of(3), 6, generator_of(asked))  # type: ignore[arg-type]
    lost = int(bad // 3)
    assert set(done.failed) == {2 * lost, 2 * lost + 1}
    assert all("no convergence" in reason for reason in done.failed.values())
    made = done.reconstruction.images
    assert made is not None
    assert made.isnan().flatten(1).any(-1).nonzero().flatten().tolist() == sorted(done.failed)
    assert asked == [0, 0, 1, 2]  # the block, then each step from its own beginning
    expected = [torch.rand((), generator=torch.Generator().manual_seed(s)) for s in range(3)]
    assert attack.seen == [float(e) for s, e in enumerate(expected) if s != lost]


def test_pieces_are_divided_until_they_work_and_stay_in_order() -> None:
    tried: list[str] = []

    def attempt(piece: str) -> str:
        tried.append(piece)
        if len(piece) > 2 or piece == "x":
            raise ValueError(piece)
        return piece.upper()

    def halves(piece: str, error: BaseException) -> list[str]:
        middle = len(piece) // 2
        return [piece[:middle], piece[middle:]] if middle else []

    found = in_smaller_pieces(["abcd", "ef", "x"], attempt, halves, lambda p, e: f"no {e}")
    assert found == ["AB", "CD", "EF", "no x"]
    assert tried == ["abcd", "ab", "cd", "ef", "x"]


# answers and their parts --------------------------------------------------------------------------


def test_parts_that_lack_something_are_filled() -> None:
    whole = Reconstruction(
        numbers(2, 3, 2, 2),
        mask=torch.tensor([[True], [False]]),
        permutation=torch.tensor([[0], [0]]),
        diagnostics={"cond_a": torch.tensor([1.0, 2.0])},
        inapplicable={1: "too dark"},
    )
    bare = Reconstruction(torch.full((1, 3, 2, 2), torch.nan))
    both = joined([bare, whole])
    assert both.images is not None
    assert both.images.shape == (3, 3, 2, 2)
    assert both.mask is not None
    assert both.mask.tolist() == [[False], [True], [False]]
    assert both.diagnostics["cond_a"].isnan().tolist() == [True, False, False]
    assert dict(both.inapplicable) == {2: "too dark"}
    assert joined([bare, bare]).mask is None


def test_an_answer_is_checked_and_loses_its_graph() -> None:
    view = view_of(3)
    images = torch.zeros(6, 3, 8, 8, requires_grad=True)
    made = checked_reconstruction(Reconstruction(images, inapplicable={5: "too dark"}), view, 6)
    assert made.images is not None
    assert not made.images.requires_grad
    assert dict(made.inapplicable) == {5: "too dark"}
    with pytest.raises(WrongAnswer, match="images"):
        checked_reconstruction(Reconstruction(images), view, 4)


# budgets ------------------------------------------------------------------------------------------


REASON = "over budget: attack.seconds = 0.3"


@pytest.fixture(autouse=True)
def _slow_registered() -> Iterator[None]:
    with ATTACKS.registered("slow", Entry(f"{WHERE}:Slow")):
        yield


def with_slow(budget: Any = 0.3, **options: Any) -> dict[str, Any]:
    return one_cell(attacks=[{"name": "slow", "options": options, "seconds": budget}])


def diagnostic(run: Path, name: str) -> dict[str, float]:
    found = rows(run)
    found = found[found["metric"] == name]
    return dict(zip(found["image_id"], found["value"], strict=True))


def test_an_attack_that_looks_gives_its_best_so_far(three: Path, tmp_path: Path) -> None:
    started = time.process_time()
    assert attack(three, tmp_path, with_slow(looks=True)).exit_code == 0
    assert time.process_time() - started < 15  # it wants 3 s; the rest is torch's start
    assert outcome(tmp_path) == {"0.png": ("ok", ""), "1.png": ("ok", REASON), "2.png": ("ok", "")}
    assert diagnostic(tmp_path, "over_budget") == {"0.png": 0, "1.png": 1, "2.png": 0}
    assert set(diagnostic(tmp_path, "attack_seconds").values()) == {0.3}


def test_one_that_does_not_look_is_over_budget_and_its_neighbours_are_not(
    three: Path, tmp_path: Path
) -> None:
    summary = attack(three, tmp_path, with_slow())
    assert summary.exit_code == 0
    assert any(REASON in line for line in summary.inapplicable)
    expected = {"0.png": ("ok", ""), "1.png": ("unsupported", REASON), "2.png": ("ok", "")}
    assert outcome(tmp_path) == expected


@pytest.mark.parametrize("looks", [True, False])
def test_a_resume_keeps_them_and_more_time_makes_them_again(
    three: Path, tmp_path: Path, looks: bool
) -> None:
    run, config = tmp_path / "run", with_slow(0.1, looks=looks, seconds=0.3)
    attack(three, run, config)
    assert outcome(run)["1.png"] == ("ok" if looks else "unsupported", over_budget(0.1))
    RunStore(run).compact(cells(run)[0]["run_id"], fewest_files=1)
    before = written(run)
    attack(three, run, config, attack_seconds=0.05)  # less than the config's own
    assert written(run) == before
    attack(three, run, config, attack_seconds=60.0)
    assert outcome(run)["1.png"] == ("ok", "")
    attack(three, tmp_path / "fresh", config, attack_seconds=60.0)
    same_results(run, tmp_path / "fresh")
    assert [e["run_id"] for e in cells(run)] == [e["run_id"] for e in cells(tmp_path / "fresh")]


def test_the_budget_is_no_part_of_what_a_cell_is(three: Path, tmp_path: Path) -> None:
    for name, seconds in (("with", 60.0), ("without", None)):
        attack(three, tmp_path / name, with_slow(seconds, looks=True, seconds=0.01))
    first, second = (cells(tmp_path / name)[0] for name in ("with", "without"))
    assert first["run_id"] == second["run_id"]
    assert first["cell_key"] == second["cell_key"]
    kept = ~rows(tmp_path / "with")["metric"].isin(["attack_seconds", "over_budget"])
    same = rows(tmp_path / "with")[kept]["value"].tolist()
    assert same == pytest.approx(rows(tmp_path / "without")["value"].tolist(), nan_ok=True)
