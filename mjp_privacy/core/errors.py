"""The one exception users see without a traceback."""


class UserError(Exception):
    """Something the user can mend. The message says what was expected, what came, what to do."""
