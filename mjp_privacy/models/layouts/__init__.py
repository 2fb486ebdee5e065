"""How libraries name a Vision Transformer's parameters, and those names in this package's own."""

from mjp_privacy.models.layouts.known import LAYOUTS
from mjp_privacy.models.layouts.layout import Layout
from mjp_privacy.models.layouts.recognition import fitting, recognised

__all__ = ["LAYOUTS", "Layout", "fitting", "recognised"]
