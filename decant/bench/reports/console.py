from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.table import Table


def make_table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    return table


class Bars:
    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        self.progress = Progress(*columns, console=console)
        self.progress.disable = not console.is_terminal

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
