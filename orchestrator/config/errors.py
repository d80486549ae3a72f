"""What is wrong with a configuration: every problem at once, each one naming the key and the
remedy.
"""

from __future__ import annotations


class ConfigError(Exception):
    """A cluster cannot be started as configured. ``problems`` has one sentence each, beginning with
    the key's path.
    """

    def __init__(self, problems: list[str], source: str | None = None) -> None:
        self.problems = problems
        self.source = source
        heading = f"{source}: " if source else ""
        super().__init__(heading + "\n".join(problems))
