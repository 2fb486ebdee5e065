"""What these tests share: photographs, and a federation's uploads that nobody changes."""

from __future__ import annotations

from tests.experiment.conftest import folder, images, recorded

__all__ = ["folder", "images", "recorded"]
