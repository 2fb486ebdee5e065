"""Clients: what a report calls them, which attacks match them, which of them stand on the card."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from attacks import traits_of
from mjp_privacy.experiment.cell_facts import CellFacts, ClientFacts
from mjp_privacy.metrics.coded import Images
from mjp_privacy.report.lines import MODEL_FACTS, Line, Scalar, client_text, exact_images, target_of
from mjp_privacy.report.worst_case import Group, meets_trained_model, reconstructs

DEFENCES = ("withhold", "positions", "position_noise", "defenses", "lora")
"""Facts of a client by which it keeps something from the server, besides MJP."""

OF_A_DEFENCE = frozenset(
    ("setting", "gamma", "dal", "dal_lambda", "plain_share", "mask", *DEFENCES, *MODEL_FACTS)
)
"""Facts in which a defended client differs from an undefended one; all others are circumstances."""

RECIPE = (
    *("partners", "steps", "dal", "plain_share", "mask", "augment", "withhold", "positions"),
    *("position_noise", "server_lr", "upload", "weight_decay", "optimizer", "momentum", "autocast"),
    *("defenses", "lora"),
)
"""Facts that stand in a client's name where they are not the default."""

PLAIN = "plain"
"""What a client without a defence is called."""

CARD_ROWS = 5
"""The card shows at most this many clients; the tables have them all."""

PRECISIONS = ("bfloat16", "float16", "float32", "float64")
SETTINGS = ("c", "b", "a")
"""The card takes a client in the first of these that was run: (c) asks for the plain picture."""


@dataclass(frozen=True)
class Client:
    """All lines of a report on one client: Client(group).name is "MJP γ .27, DAL in the loss"."""

    group: Group
    like_groups: tuple[Group, ...] = ()
    """Groups of the same run whose pictures are compared with the same images."""

    @property
    def floors(self) -> tuple[Line, ...]:
        """Scored controls that need no gradient: its own, else those of a like group."""
        for group in (self.group, *self.like_groups):
            lines = (line for line in group.controls if line.role == "floor")
            if scored := tuple(x for x in lines if x.count("psnr", "standard")):
                return scored
        return ()

    @property
    def cell(self) -> CellFacts:
        """Facts that all of the client's lines share; those of the attack are the first line's."""
        return self.lines[0].cell

    @property
    def lines(self) -> tuple[Line, ...]:
        """Its attacks and controls."""
        return (*self.group.attacks, *self.group.controls)

    @cached_property
    def masks(self) -> bool:
        """Whether it masks patches as MJP does; False: it shuffles at most."""
        return self.cell.gamma > 0 and (
            any(line.some_above_zero("zero_rows") for line in self.lines)
            or any(reconstructs(line) and made_for_masks(line) for line in self.group.attacks)
        )

    @property
    def defended(self) -> bool:
        """Whether it does anything against inversion: MJP, noise, withheld gradients."""
        return self.cell.gamma > 0 or any(
            getattr(self.cell.client, name) != getattr(ClientFacts, name) for name in DEFENCES
        )

    @property
    def noisy(self) -> bool:
        """Whether its defence adds errors to the upload, which an attack can weigh."""
        return bool(self.cell.client.defenses) or self.cell.client.position_noise > 0

    @property
    def name(self) -> str:
        """What it does, without its model: `plain`, or `MJP γ .27, gaussian noise 0.01`."""
        cell = self.cell
        first = f"{self._rule}γ {short_gamma(cell.gamma)}" if cell.gamma else PLAIN
        facts = {key: value for key, value in cell.columns.items() if key in RECIPE}
        further = client_text(facts, [key for key in RECIPE if key in facts])
        further = further.replace("_", " ").replace("defenses ", "")
        return first if further == "–" else f"{first}, {further}"

    @property
    def _rule(self) -> str:
        """How its patches are shuffled; empty where nothing that was run can tell."""
        if self.masks:
            return "MJP "
        counted = any(line.count("zero_rows", "diagnostic") for line in self.lines)
        return "shuffled " if counted else ""

    @property
    def details(self) -> str:
        """Its model and precision: `ViT-Ti, float32`."""
        return f"{self.cell.model.label}, {self.cell.dtype}"

    @cached_property
    def matching(self) -> tuple[Line, ...]:
        """The attacks on the trained model that reconstructed something, and that know the client's
        masks if it has any; one that got an exact picture counts whatever it knows."""
        return tuple(
            line
            for line in self.group.attacks
            if reconstructs(line)
            and meets_trained_model(line)
            and (self.knows(line) or exact_images(line))
        )

    def knows(self, line: Line) -> bool:
        """Whether an attack knows the client's masks, if it has any."""
        return not self.masks or knows_masks(line)


def clients_of(groups: Sequence[Group]) -> list[Client]:
    """A client for every group that has an attack, in the order of the groups."""
    return [
        Client(group, tuple(other for other in groups if _same_images(group, other)))
        for group in groups
        if group.attacks
    ]


def _same_images(group: Group, other: Group) -> bool:
    """Whether both groups' pictures are compared with the same images: those of one run, unshuffled
    in both, or in settings (b) of one γ."""
    mine, its = (*group.attacks, *group.controls), (*other.attacks, *other.controls)
    if not mine or not its or mine[0].run != its[0].run:
        return False
    one, two = mine[0].cell, its[0].cell
    shuffled = one.setting == "b", two.setting == "b"
    targets = shuffled[0] == shuffled[1] and (not shuffled[0] or one.gamma == two.gamma)
    augmented = one.client.augment == two.client.augment
    seeds = one.seed == two.seed and one.model.size == two.model.size
    if not (targets and augmented and seeds):
        return False
    one_set, its_set = ({line.images for line in lines} for lines in (mine, its))
    return one_set == its_set or _names(one_set) == _names(its_set)


def _names(every: Set[Images]) -> frozenset[str]:
    return frozenset().union(*(images.names for images in every))


def client_titles(clients: Sequence[Client]) -> list[str]:
    """Names that tell the clients apart: model, precision and run stand in a name only where they
    differ, the number of the first line where nothing else does, and a word where the attacker asks
    for the picture as it was shuffled: setting (b)."""
    runs = len({client.lines[0].run for client in clients}) > 1
    models = len({client.cell.model.label for client in clients}) > 1
    seeds = len({client.cell.seed for client in clients}) > 1
    batches = len({client.cell.client.batch for client in clients}) > 1
    titles = []
    for client in clients:
        cell = client.cell
        parts = [f"{client.name}, as shuffled" if cell.setting == "b" else client.name]
        parts += [cell.model.label] if models else []
        if models and client.name == PLAIN:  # the model may be named after a defence
            parts = [f"{cell.model.label}, no defence used"]
        parts += [cell.dtype] if cell.dtype != "float32" else []
        parts += [f"seed {cell.seed}"] if seeds else []
        parts += [f"batch {cell.client.batch}"] if batches else []
        known = {key: value for key, value in cell.other.items() if value is not None}
        label = known.pop("client_label", None)
        parts += [str(label)] if label is not None else []
        parts += [f"{key.replace('_', ' ')} {value}" for key, value in known.items()]
        titles.append(" · ".join([*parts, *([client.lines[0].run] if runs else [])]))
    return [
        title if titles.count(title) == 1 else f"{title} · line {client.lines[0].number}"
        for title, client in zip(titles, clients, strict=True)
    ]


def short_gamma(gamma: float) -> str:
    """γ as the paper writes it: `.27`, and `1` for 1."""
    text = f"{gamma:g}"
    return text[1:] if text.startswith("0.") else text


def made_for_masks(line: Line) -> bool:
    """Whether the line's attack applies to masked patches alone, so that its success shows them."""
    return knows_masks(line) and "steps" not in traits_of(line.cell.attack.known_as)


def knows_masks(line: Line) -> bool:
    """Whether the line's attack knows MJP's masks."""
    return "masks" in traits_of(line.cell.attack.known_as)


# which of them are compared, and which stand on the card -----------------------------------------


def circumstances(client: Client) -> tuple[tuple[str, Scalar], ...]:
    """What two clients must share so that the defence is what they differ in."""
    cell = client.cell
    shared = [(key, value) for key, value in target_of(cell) if key not in OF_A_DEFENCE]
    return (*shared, ("size", cell.model.size), ("data", cell.command.data))


def same_client(client: Client) -> object:
    """What stays the same when only the setting's target and the precision change."""
    cell = client.cell
    facts = (cell.model.label, cell.gamma, cell.client, cell.seed, repr(cell.other))
    return client.lines[0].run, facts


def same_kind(client: Client) -> object:
    """What two clients share whose attacks can be compared: an attack on one would say something of
    the other as well, whatever their model, γ, precision or run."""
    cell = client.cell
    shuffled = cell.setting == "b", bool(cell.gamma), client.masks
    return shuffled, cell.client.batch, cell.client.withhold


def distinct_clients(groups: Sequence[Group]) -> list[Client]:
    """Every client with rows once, in the order of the groups: of several settings and precisions
    the lowest precision, and setting (c) before (b) before (a)."""
    clients = clients_of(groups)
    chosen: dict[object, Client] = {}
    for client in sorted(clients, key=_preference):
        chosen.setdefault(same_client(client), client)
    kept = {id(client) for client in chosen.values()}
    return [c for c in clients if id(c) in kept and any(len(line.images) for line in c.lines)]


def _preference(client: Client) -> tuple[bool, int, int]:
    setting, dtype = client.cell.setting, client.cell.dtype
    return (
        not client.matching,
        SETTINGS.index(setting) if setting in SETTINGS else len(SETTINGS),
        PRECISIONS.index(dtype) if dtype in PRECISIONS else len(PRECISIONS),
    )


def card_clients(groups: Sequence[Group]) -> tuple[list[Client], int]:
    """The clients on the card, and how many more there are: a choice of `distinct_clients`.

    Clients on which no matching attack was run are left to the tables, unless there are no others
    or the client is the only undefended one. The first undefended client stands first, the first
    with masks second.
    """
    every = distinct_clients(groups)
    ranked = [client for client in every if client.matching] or every
    undefended = [client for client in (*ranked, *every) if not client.defended][:1]
    masked = [client for client in ranked if client.masks][:1]
    wanted = {id(client.group): client for client in (*undefended, *masked, *ranked)}
    shown = list(wanted.values())[:CARD_ROWS]
    return shown, len(every) - len(shown)


def main_client(clients: Sequence[Client]) -> int:
    """The place of the client that the answer is about: one that an attack made for it met, if
    there is any; of these one with MJP, else one with another defence, else the undefended."""

    def rank(place: int) -> tuple[bool, bool, bool, int]:
        client = clients[place]
        return not client.matching, not client.masks, not client.defended, place

    return min(range(len(clients)), key=rank)
