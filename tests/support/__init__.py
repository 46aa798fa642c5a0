"""What tests share: processes, nodes, checkpoints, storage and jobs.

pytest collects nothing here.
"""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
"""Where the project is checked out."""
