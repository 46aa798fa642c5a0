"""When the demo saves, kills and stops."""

from dataclasses import dataclass
from typing import Final

KILLED_RANK: Final = 1
KILLED_SAVE: Final = 3  # the first two saves are whole, the third is cut short


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of the demo; all else follows from them."""

    steps: int
    save_every: int

    def __post_init__(self) -> None:
        if self.save_every < 1 or self.steps < 5 * self.save_every:
            raise ValueError(
                f"the demo needs at least 5 saves: --steps {self.steps} is less than "
                f"5 x --save-every {self.save_every}"
            )

    @property
    def killed(self) -> int:
        """The step whose save is cut short by the kill."""
        return KILLED_SAVE * self.save_every

    @property
    def survivor(self) -> int:
        """The newest step that is whole in memory after the kill."""
        return self.killed - self.save_every

    @property
    def stop_after(self) -> int:
        """The last step of the run that loses its memory: half way between two saves."""
        return self.steps - self.save_every - self.save_every // 2

    @property
    def stored(self) -> int:
        """The newest step that is on storage when the memory is lost."""
        return self.stop_after - self.stop_after % self.save_every


def checkpoint_id(step: int) -> str:
    """Return the id of the checkpoint taken after a step."""
    return f"step-{step}"
