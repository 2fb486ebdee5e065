"""strip.png: the same pictures through the columns of the card, for a paper or a README."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mjp_privacy.core.files import write_atomically
from mjp_privacy.core.text import plain
from mjp_privacy.report.card import HEADINGS, Card, any_uploads_line, one_upload_line
from mjp_privacy.report.clients import Client, card_clients
from mjp_privacy.report.lines import Line
from mjp_privacy.report.pictures.files import Pixels, pixels
from mjp_privacy.report.tables.text import capped
from mjp_privacy.report.worst_case import Group, picture_ids

SIDE, GAP, HEAD = 192, 6, 62  # pixels
LETTERS = 26  # of a line over a tile
INK = (31, 41, 51)


@dataclass(frozen=True)
class Strip:
    """The columns of a strip: the lines behind the card's main figures, under their headings."""

    columns: tuple[tuple[str, Line], ...]
    client: Client

    @property
    def chooser(self) -> Line | None:
        """The line by whose PSNR pictures are chosen: the best with one upload, or the first."""
        by_heading = dict(self.columns)
        return by_heading.get(HEADINGS["one_upload"]) or next(iter(by_heading.values()), None)


def card_strip(groups: Sequence[Group], card: Card) -> Strip | None:
    """The strip of a card's main client; None where the card has no client."""
    clients, _ = card_clients(groups)
    if not clients:
        return None
    row, client = card.rows[card.main], clients[card.main]
    attacks = client.group.attacks
    if row.one_upload is None and row.any_uploads is None:
        with_pictures = (line for line in attacks if picture_ids(line))
        return Strip(tuple((line.attack, line) for line in with_pictures), client)
    published = [x for x in attacks if row.published and x.number == row.published.line]
    lines = [next(iter(published), None), one_upload_line(client), any_uploads_line(client)]
    columns = zip(HEADINGS.values(), lines, strict=False)
    return Strip(tuple((title, line) for title, line in columns if line is not None), client)


def picture_score(line: Line, image_id: str) -> str:
    """What a picture is worth, as tables write it: `24.1 dB`, `exact`; empty without a score."""
    if line.scored("psnr", "paper").get(image_id) == math.inf:
        return "exact"
    value = line.scored("psnr", "standard").get(image_id)
    return "" if value is None else f"{capped(float(value), 1)} dB"


def write_strip(strip: Strip, image_ids: Sequence[str], path: Path) -> bool:
    """Draw the strip, a row for each image; False where no picture is stored."""
    from PIL import Image, ImageDraw, ImageFont

    rows = [tiles for image_id in image_ids if (tiles := _tiles(strip, image_id))]
    if not rows:
        return False
    width = max(map(len, rows)) * (SIDE + GAP) - GAP
    sheet = Image.new("RGB", (width, len(rows) * (SIDE + HEAD)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    for row, tiles in enumerate(rows):
        for column, (heading, made) in enumerate(tiles):
            left, top = column * (SIDE + GAP), row * (SIDE + HEAD)
            draw.multiline_text((left, top + 3), heading, fill=INK, font=font)
            tile = Image.fromarray(made).resize((SIDE, SIDE), Image.Resampling.NEAREST)
            sheet.paste(tile, (left, top + HEAD))
    write_atomically(path, lambda temporary: sheet.save(temporary, "png"))
    return True


def _tiles(strip: Strip, image_id: str) -> list[tuple[str, Pixels]]:
    """Headings and pictures of one image: the original, what was fed, the columns."""
    tiles: list[tuple[str, Pixels]] = []
    for heading, line in strip.columns:
        stored = line.reconstruction(image_id)
        if stored is None or "images" not in stored:
            continue
        if not tiles and "plain" in stored:
            tiles.append(("original", pixels(stored["plain"])))
            if "input" in stored and not stored["input"].equal(stored["plain"]):
                tiles.append(("what the client fed", pixels(stored["input"])))
        said = textwrap.wrap(plain(heading), LETTERS, max_lines=2)
        said.append(picture_score(line, image_id) or "not scored")
        tiles.append(("\n".join(said), pixels(stored["images"])))
    return tiles
