"""The one error that hvrun turns into a line on stderr and exit code 2."""


class LaunchError(Exception):
    """The job cannot be started as asked; the text names the remedy."""
