"""The one exception that users see without a traceback."""


class UserError(Exception):
    """A mistake the user can fix. The message says what was expected, what came, what to do."""
