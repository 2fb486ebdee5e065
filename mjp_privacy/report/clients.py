"""Clients: what a report calls them, which attacks match them, which of them stand on the card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import pandas as pd

from mjp_privacy.experiment.cell_facts import AttackFacts, CellFacts, defaults_of
from mjp_privacy.models.checkpoints import E_UNK_SET
from mjp_privacy.report.figures import (
    PSNR,
    THRESHOLDS,
    WORST_CASE,
    DerivedLine,
    derive,
    exact_share,
    mean_of,
    success_share,
)
from mjp_privacy.report.lines import (
    DIAGNOSTIC,
    MODEL_FACTS,
    Line,
    client_text,
    target_of,
)

DEFENCES = ("withhold", "positions", "position_noise", "defenses", "lora", "train")
"""Facts of a client by which it keeps something from the server, besides MJP."""

OF_A_DEFENCE = frozenset(
    ("setting", "gamma", "dal", "dal_lambda", "plain_share", "mask", *DEFENCES, *MODEL_FACTS)
)
"""Facts in which a defended client differs from an undefended one; all others are circumstances."""

OF_WEIGHTS = frozenset(MODEL_FACTS - {"model"})
"""Facts of a model but for its label."""

RECIPE = (
    *("partners", "steps", "dal", "plain_share", "mask", "augment", "withhold", "positions"),
    *("position_noise", "server_lr", "upload", "weight_decay", "optimizer", "momentum", "autocast"),
    *("defenses", "lora", "train"),
)
"""Facts that stand in a client's name where they are not the default."""

PLAIN = "plain"
"""What a client without a defence is called."""

PUBLISHED = "april"
"""The published attack."""

CARD_ROWS = 5
"""The card shows at most this many clients; the tables have them all."""

PRECISIONS = ("bfloat16", "float16", "float32", "float64")
SETTINGS = ("c", "b", "a")
"""The card takes a client in the first of these that was run: (c) asks for the plain picture."""


@dataclass(eq=False)
class Client:
    """All lines of a run on one target: its attacks, its controls, what is derived from them."""

    attacks: list[Line] = field(default_factory=list)
    controls: list[Line] = field(default_factory=list)
    derived: list[DerivedLine] = field(default_factory=list)
    title: str = ""
    """What tells it from the others of the report, such as `MJP γ .27, DAL in the loss`."""
    others: Sequence[Client] = field(default=(), repr=False)
    """All targets of the report, this one among them; some may have no attacks."""

    @property
    def lines(self) -> list[Line]:
        """Its attacks and controls."""
        return [*self.attacks, *self.controls]

    @property
    def cell(self) -> CellFacts:
        """Facts that all of the client's lines share; those of the attack are the first line's."""
        return self.lines[0].cell

    @cached_property
    def floors(self) -> list[Line]:
        """Scored controls that need no gradient: its own, else those of another target of the run
        whose pictures are compared with the same images."""

        def compared(client: Client) -> object:
            cell = client.cell
            target = cell.gamma if cell.setting == "b" else None  # there the shuffled pictures
            return client.lines[0].run, target, cell.augment, cell.seed, cell.pixels

        likes = (x for x in self.others if x is not self and compared(x) == compared(self))
        same = (x for x in likes if images_of(x.lines) == images_of(self.lines))
        for client in (self, *same):
            floors = [line for line in client.controls if line.cell.role == "floor"]
            if scored := [line for line in floors if line.count(*PSNR)]:
                return scored
        return []

    def of_images(self, metric: str, variant: str) -> pd.Series[float]:
        """What is the same for every attack on an image: its value from the first line that has
        one."""
        values = pd.concat([line.scored(metric, variant) for line in self.lines])
        return values[~values.index.duplicated()]

    @cached_property
    def floor(self) -> Line | None:
        """The control that scores best without any gradient, of those with the most pictures; where
        none was run a uniform grey, whose PSNR every run stores; None where there is no truth."""
        if self.floors:
            return max(self.floors, key=lambda line: (line.count(*PSNR), mean_of(line, *PSNR)))
        grey = self.of_images("grey_psnr", DIAGNOSTIC).sort_index()
        if grey.empty:
            return None
        rows = pd.DataFrame({"status": "ok", "reason": "", "psnr.standard": grey})
        if cut := [line.frame["group"] for line in self.lines if "group" in line.frame]:
            photographs = pd.concat(cut).astype(object).dropna()
            rows["group"] = photographs[~photographs.index.duplicated()].reindex(grey.index)
        facts = {"attack": "uniform grey", "attack_name": "grey", "role": "floor"}
        cell = replace(self.cell, **{**defaults_of(AttackFacts), **facts})
        return replace(self.lines[0], cell=cell, stored=rows, left_out=())

    @cached_property
    def masks(self) -> bool:
        """Whether it masks patches as MJP does, which an attack that applies to masked patches
        alone shows by its success; False: it shuffles at most."""
        return self.cell.gamma > 0 and (
            any(line.some_above_zero("zero_rows") for line in self.lines)
            or any(
                line.reconstructs and "masks" in line.traits and "steps" not in line.traits
                for line in self.attacks
            )
        )

    @property
    def defences(self) -> list[str]:
        """What it does against inversion besides MJP: the facts of DEFENCES that it uses."""
        return [name for name in DEFENCES if getattr(self.cell, name) != getattr(CellFacts, name)]

    @property
    def defended(self) -> bool:
        """Whether it does anything against inversion: MJP, noise, withheld gradients."""
        return self.cell.gamma > 0 or bool(self.defences)

    @property
    def untrained(self) -> bool:
        """Whether it runs MJP on a model that was not trained with it."""
        notes = self.cell.notes or ()
        return self.cell.gamma > 0 and any(str(note).startswith(E_UNK_SET) for note in notes)

    @cached_property
    def name(self) -> str:
        """What it does, without its model: `plain`, or `MJP γ .27, gaussian noise 0.01`."""
        cell, first = self.cell, PLAIN
        if cell.gamma:
            counted = any(line.count("zero_rows", DIAGNOSTIC) for line in self.lines)
            rule = "MJP " if self.masks else "shuffled " if counted else ""  # "": nothing can tell
            first = f"{rule}γ {short_gamma(cell.gamma)}"
        further = client_text(cell.columns, [key for key in RECIPE if key in cell.columns])
        further = further.replace("_", " ").replace("defenses ", "")
        return first if further == "–" else f"{first}, {further}"

    @property
    def details(self) -> str:
        """Its model and precision: `ViT-Ti, float32`."""
        return f"{self.cell.model}, {self.cell.dtype}"

    @cached_property
    def matching(self) -> list[Line]:
        """The attacks on the trained model that reconstructed something, and that know the client's
        masks if it has any; one that got an exact picture counts whatever it knows."""
        made = [line for line in self.attacks if line.reconstructs and line.meets_trained_model]
        return [line for line in made if self.knows(line) or line.exact_images]

    def knows(self, line: Line) -> bool:
        """Whether an attack knows the client's masks, if it has any."""
        return not self.masks or "masks" in line.traits

    # the lines behind its figures -----------------------------------------------------------------

    @cached_property
    def published(self) -> Line | None:
        """The line of the published attack; None where it was not run or not scored."""
        lines = (line for line in self.attacks if line.cell.known_as == PUBLISHED)
        return next((line for line in lines if line.count(*PSNR)), None)

    @cached_property
    def one_upload(self) -> Line | None:
        """The best per image of the attacks on one upload; None where none matches the client."""
        return self._best([line for line in self.matching if line.uploads == 1], single=True)

    @cached_property
    def any_uploads(self) -> Line | None:
        """The best per image over all attacks; None where none uses several uploads."""
        several = any(line.uploads > 1 for line in self.matching)
        return self._best(self.matching, single=False) if several else None

    def _best(self, lines: Sequence[Line], *, single: bool) -> Line | None:
        """The worst case over these lines, or the line itself where there is only one."""
        scored = [line for line in lines if line.count(*PSNR)]
        worst = (line for line in self.derived if line.rule is WORST_CASE and scored)
        of_uploads = (line for line in worst if (line.uploads == 1) == single)
        return next(iter((*of_uploads, *scored)), None)


def clients_of(lines: Sequence[Line]) -> list[Client]:
    """What was attacked, in the order of the first line of each, also where only controls were run;
    derived lines are numbered after all others."""
    by_target: dict[object, Client] = {}
    for line in lines:
        client = by_target.setdefault((line.run, target_of(line.cell)), Client())
        (client.attacks if line.cell.role == "attack" else client.controls).append(line)
    clients = list(by_target.values())
    number = max((line.number for line in lines), default=0)
    for client in clients:
        client.others = clients
        derived = derive(client.attacks, client.matching, client.masks)
        client.derived = [replace(line, number=number + at) for at, line in enumerate(derived, 1)]
        number += len(client.derived)
        client.title = f"{client.name}, {client.details}"
    attacked = attacked_ones(clients)
    for client, title in zip(attacked, client_titles(attacked), strict=True):
        client.title = title
    return clients


def attacked_ones(clients: Sequence[Client]) -> list[Client]:
    """Those with an attack; on the others only controls were run."""
    return [client for client in clients if client.attacks]


def derived_lines(clients: Sequence[Client]) -> list[DerivedLine]:
    """The derived lines of all, in the order of their numbers."""
    return [line for client in clients for line in client.derived]


def images_of(lines: Sequence[Line]) -> set[str]:
    """Every image that one of the lines has rows of."""
    different = {id(line.images): line.images for line in lines}  # most lines share theirs
    return set().union(*different.values())


def client_titles(clients: Sequence[Client]) -> list[str]:
    """Names that tell the clients apart: model, precision and run stand in a name only where they
    differ, the number of the first line where nothing else does. Recorded uploads are called by
    their label in place of their model, which is named after label and round."""
    models, seeds, batches, runs = (
        len({attrgetter(fact)(client.lines[0]) for client in clients}) > 1
        for fact in ("cell.model", "cell.seed", "cell.batch", "run")
    )
    titles = []
    for client in clients:
        cell = client.cell
        parts = [f"{client.name}, as shuffled" if cell.setting == "b" else client.name]
        known = {key: value for key, value in cell.other.items() if value is not None}
        label = known.pop("client_label", None)
        called = str(label) if label is not None else cell.model if models else ""
        if called and client.name == PLAIN != called:  # it may be called after a defence
            parts = [f"{called}, no defence used"]
        elif label is None or not client.name.startswith(called):
            parts += [called] if called else []
        parts += [cell.dtype] if cell.dtype != "float32" else []
        parts += [f"seed {cell.seed}"] if seeds else []
        parts += [f"batch {cell.batch}"] if batches else []
        parts += [f"{key.replace('_', ' ')} {value}" for key, value in known.items()]
        titles.append(" · ".join([*parts, *([client.lines[0].run] if runs else [])]))
    return [
        title if titles.count(title) == 1 else f"{title} · line {client.lines[0].number}"
        for title, client in zip(titles, clients, strict=True)
    ]


def short_gamma(gamma: float) -> str:
    """γ as the paper writes it: `.27`, and `1` for 1."""
    return f"{gamma:g}".removeprefix("0") or "0"


# which of them are compared, and which stand on the card -----------------------------------------


def circumstances(client: Client) -> tuple[Any, ...]:
    """What two clients must share so that the defence is what they differ in."""
    cell = client.cell
    return target_of(cell, OF_A_DEFENCE), cell.pixels, cell.data


def same_client(client: Client) -> object:
    """What stays the same when only the setting's target and the precision change."""
    return client.lines[0].run, target_of(client.cell, {"setting", "dtype", *OF_WEIGHTS})


def same_kind(client: Client) -> object:
    """What two clients share whose attacks can be compared: an attack on one would say something of
    the other as well, whatever their model, γ, precision or run."""
    cell = client.cell
    shuffled = cell.setting == "b", bool(cell.gamma), client.masks
    return shuffled, cell.batch, cell.withhold


def distinct_clients(clients: Sequence[Client]) -> list[Client]:
    """Every client with rows once, in their order: of several settings and precisions the lowest
    precision, and setting (c) before (b) before (a)."""

    def preference(client: Client) -> tuple[Any, ...]:
        order = (SETTINGS, client.cell.setting), (PRECISIONS, client.cell.dtype)
        return not client.matching, *(k.index(x) if x in k else len(k) for k, x in order)

    chosen: dict[object, Client] = {}
    for client in sorted(attacked_ones(clients), key=preference):
        chosen.setdefault(same_client(client), client)
    kept = {*chosen.values()}
    return [c for c in clients if c in kept and any(len(line.images) for line in c.lines)]


def card_clients(clients: Sequence[Client]) -> tuple[list[Client], int, int]:
    """The clients on the card, the place of the one that the answer is about, and how many more
    there are: a choice of `distinct_clients`.

    Clients on which no matching attack was run are left to the tables, unless there are no others
    or the client is the only undefended one. The first undefended client stands first, the first
    with masks second. Of a client that was recorded in several rounds the answer is about the round
    that leaks most, for which another of its rounds makes room.
    """
    every = distinct_clients(clients)
    ranked = [client for client in every if client.matching] or every
    undefended = [client for client in (*ranked, *every) if not client.defended][:1]
    masked = [client for client in ranked if client.masks][:1]
    shown = list(dict.fromkeys((*undefended, *masked, *ranked)))[:CARD_ROWS]
    if not shown:
        return [], 0, 0
    chosen = shown[main_client(shown)]
    main = max(rounds_of(chosen, every), key=leaked)
    if main not in shown:
        shown[shown.index(chosen)] = main
    return shown, shown.index(main), len(every) - len(shown)


def rounds_of(client: Client, clients: Sequence[Client]) -> list[Client]:
    """Those of the clients that are this one, itself among them, as it was recorded in any round:
    they differ in their weights, learning rates and round alone."""
    if "round" not in client.cell.other:
        return [client]
    differ = {"round", "lr", "server_lr", "model", *OF_WEIGHTS}

    def recorded(one: Client) -> object:
        return one.lines[0].run, one.cell.architecture, target_of(one.cell, differ)

    return [one for one in clients if recorded(one) == recorded(client)]


def leaked(client: Client) -> tuple[float, ...]:
    """How much is known to leak, to be compared: shares of exact pictures and of those at 20 dB or
    more and the mean PSNR, from one upload first, then from any number."""
    values: list[float] = []
    for line in (client.one_upload, client.any_uploads):
        if line is None:
            values += [-1.0, -1.0, -1.0]
        else:
            values += [exact_share(line).percent, success_share(line, THRESHOLDS[0]).percent]
            values.append(mean_of(line, *PSNR))
    return tuple(values)


def main_client(clients: Sequence[Client]) -> int:
    """The place of the client that the answer is about: one that an attack made for it met, if
    there is any. Where one of `mjp list defenses` is compared with none it is a client with this
    one, best without MJP; else one with MJP, with another defence, or the undefended.

    Gradients that are withheld from some of the attacks alone are no defence that the run asks
    about: beside an undefended client that met more attacks it is about that one."""
    undefended = [len(client.attacks) for client in clients if not client.defended]
    most = max(undefended, default=0)
    used = {client.cell.defenses for client in clients}
    compared = len(used) == 2 and "" in used

    def rank(client: Client) -> tuple[bool, ...]:
        if compared:
            return not client.matching, not client.cell.defenses, client.masks
        withholds = client.defences == ["withhold"] and not client.cell.gamma
        aside = withholds and len(client.attacks) < most
        return not client.matching, not client.masks, aside or not client.defended, aside

    return min(range(len(clients)), key=lambda place: rank(clients[place]))
