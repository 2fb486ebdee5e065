"""What a chart is to those who show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chart:
    """A drawing as inline SVG, made by us; its text is escaped already.

    Text and axes in `currentColor` are readable on the light page and on the dark one.
    """

    name: str  # id on the page and file name of its download: "success"
    title: str
    caption: str
    svg: str
