from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from decant.models.recipe import Recipe

LINE_EVERY = 25
# Weight of the newest step in the displayed rate, which smooths it.
SMOOTHING = 0.1


class Bar:
    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.rate = 0.0
        self.console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task("", total=recipe.steps)

    def report(self, step: int, loss: float, seconds: float) -> None:
        newest = self.recipe.tokens_per_step / seconds
        self.rate += (newest - self.rate) * (SMOOTHING if self.rate else 1.0)
        text = f"loss {loss:.3f} {self.rate:,.0f} tokens/s"
        self.progress.update(self.task, completed=step, description=text)
        if not self.console.is_terminal and step % LINE_EVERY == 0:
            self.console.print(f"step {step}/{self.recipe.steps} {text}")

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
