"""The demo's output on the terminal."""

from collections.abc import Iterable
from textwrap import indent
from typing import Final

from rich.console import Console

from dcp_mem.demo.account import Claim, Costs, Recovery

MB: Final = 1_000_000


def heading(console: Console, text: str) -> None:
    """Print a line that opens a part of the story."""
    console.print(f"\n{text}", style="bold", markup=False, highlight=False, soft_wrap=True)


def detail(console: Console, text: str) -> None:
    """Print a line, or several, within a part; taken literally."""
    console.print(indent(text, "  "), markup=False, highlight=False, soft_wrap=True)


def milliseconds(seconds: float) -> str:
    """Format a duration in milliseconds."""
    return f"{seconds * 1000:.0f} ms"


def show_costs(console: Console, costs: Costs) -> None:
    """Print what checkpointing cost the training."""
    heading(console, "What it cost")
    state = f"{costs.parameters / 1e6:.1f} M parameters, {costs.state_bytes / MB:.0f} MB of state"
    detail(console, f"model and optimizer   {state}")
    detail(console, f"a training step       {costs.step_seconds:.2f} s (median)")
    saves = f"median of {costs.saves}; the first {milliseconds(costs.first_save_seconds)}"
    detail(console, f"a save held it up     {milliseconds(costs.save_seconds)} ({saves})")
    part = milliseconds(costs.stage_seconds)
    detail(console, f"  dcp_mem's part      {part}; the rest is get_state_dict and DCP's calls")
    detail(console, f"  flush to storage    {costs.flush_seconds:.2f} s, behind the training")


def show_recoveries(console: Console, recoveries: Iterable[Recovery]) -> None:
    """Print where each recovery came from, and how long it took."""
    heading(console, "What came back (training again: new processes included)")
    for recovery in recoveries:
        found = recovery.found
        restored = f"{found.checkpoint_id} from {found.source} in {found.seconds:.2f} s"
        again = f"training again after {recovery.back_seconds:.1f} s"
        detail(console, f"{recovery.cause:<24}  {restored}; {again}")
        for reason in found.passed_over:
            detail(console, f"{'':<24}  passed over: {reason}")


def show_claims(console: Console, claims: Iterable[Claim]) -> None:
    """Print which claims the records confirm, and which they don't."""
    heading(console, "What the records show")
    for claim in claims:
        verdict = "[green]yes[/green]" if claim.holds else "[bold red]NO [/bold red]"
        console.print(f"  {verdict}  {claim.text}", highlight=False, soft_wrap=True)
