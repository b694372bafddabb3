"""The wire is typed, and says what it promises."""
