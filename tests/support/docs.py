"""The code blocks of README and docs, and what a training script has before any checkpoint."""

import re
from typing import Any

import torch
from torch import nn

from tests.support import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


LOOP = """
from tests.support.docs import training
model, optimizer, scheduler, dataloader, train = training()
steps = 25
"""


def training() -> tuple[Any, ...]:
    """What a training script has before it thinks of checkpoints."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)

    def train(step: int) -> torch.Tensor:
        loss = model(torch.full((2, 4), 0.1 * step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return loss.detach()  # type: ignore[no-any-return]

    return model, optimizer, scheduler, None, train


def blocks(language: str) -> dict[str, str]:
    """The blocks of a language in README and docs, by page and number."""
    block = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    return {
        f"{page.relative_to(REPOSITORY)} {number}": text
        for page in PAGES
        for number, text in enumerate(block.findall(page.read_text()), 1)
    }
