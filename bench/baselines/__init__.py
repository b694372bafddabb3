"""What users would run instead, each in an environment of its own. Every contender's module has a ``measure``."""
