"""The Python in README and docs runs; YAML and shell can be parsed, and links lead somewhere."""

import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest
import yaml

from dcp_mem import MemoryStorageReader
from tests.support import REPOSITORY
from tests.support.docs import LOOP, PAGES, blocks
from tests.support.processes.forks import forked

WRITER = """
import torch
import torch.distributed.checkpoint as dcp
from dcp_mem import MemoryStorageWriter
root, step, loss, state = "abfs://ckpts/run-42", 100, 0.5, {"w": torch.ones(3)}
"""
FIRST_SAVE = """
import dcp_mem, torch
state, first_step, last_step, train = {"w": torch.ones(3)}, 0, 25, lambda step: None
with dcp_mem.MemoryStorageWriter("abfs://ckpts/run-42") as writer:
    dcp_mem.save(state, checkpoint_id="step-0", storage_writer=writer)
"""
FILES = """
import dcp_mem.integrations.nebula as nm
nm.init("abfs://ckpts/run-42")
nm.Checkpoint("global_step10").save("model", 7)
nm.flush_persistence()
"""
MEGATRON = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from megatron.core.dist_checkpointing import ShardedTensor
iteration, weight = 0, torch.zeros(4)
def sharded_state_dict():
    return {"model": {"weight": ShardedTensor.from_rank_offsets("weight", weight)}, \
"iteration": iteration}
def load_state_dict(state):
    weight.copy_(state["model"]["weight"])
def train(iteration):
    weight.fill_(iteration)
"""
FOLLOWED = """
import os, signal, subprocess, threading, torch, dcp_mem
import torch.distributed.checkpoint as dcp
root, state = "abfs://ckpts/run-42", {"w": torch.ones(3)}
with dcp_mem.MemoryStorageWriter(root) as writer:
    writer.annotate_next_save(step=1000)
    dcp_mem.save({"w": torch.full((3,), 5.0)}, checkpoint_id="step-1000", storage_writer=writer)
"""
TRAINER = """
from tests.support.frameworks.lightning_job import Model
model = Model()
"""
BASE = """
import os
os.mkdir("base")
with open("base/config.json", "w") as stream:
    stream.write("{}")
"""
EXPORTED = """
from safetensors.torch import load_file
assert manager.status()[0].exported_to == export.to + "/step-20"
assert 1 <= len(os.listdir(export.to)) <= 2
assert os.path.exists(export.to + "/step-20/config.json")
found = load_file(export.to + "/step-20/model-00001-of-00001.safetensors")
assert {name: str(tensor.dtype) for name, tensor in found.items()} == {
    "weight": "torch.bfloat16", "bias": "torch.bfloat16"}
"""
BEFORE = {
    "README.md 1": LOOP,
    "docs/options.md 1": FIRST_SAVE,
    "docs/README.md 1": LOOP,
    "docs/async.md 1": LOOP,
    "docs/async.md 2": LOOP,
    "docs/following.md 2": FOLLOWED
    + "threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()",
    "docs/following.md 3": FOLLOWED,
    "docs/following.md 4": FOLLOWED
    + "checkpoints = iter(dcp_mem.follow(root)); checkpoint = next(checkpoints)",
    "docs/export.md 1": LOOP + BASE,
    "docs/huggingface.md 3": LOOP,
    "docs/lightning.md 1": TRAINER,
    "docs/manager.md 1": LOOP,
    "docs/nebula.md 1": "",
    "docs/nebula.md 2": FILES,
    "docs/migration.md 1": "",
    "docs/migration.md 2": "",
    "docs/migration.md 3": LOOP,
    "docs/megatron.md 1": MEGATRON,
    "docs/replication.md 1": WRITER,
    "docs/storage.md 1": WRITER,
}
"""What a block takes for given."""
AFTER = {
    "README.md 1": "assert manager.latest() == 20",
    "docs/README.md 1": "assert manager.latest() == 20",
    "docs/async.md 1": "assert [one.name for one in writer.status()][0] == 'step-24'",
    "docs/async.md 2": "assert manager.latest() == 20",
    "docs/following.md 2": "assert state['w'][0] == 5",
    "docs/following.md 3": "assert state['w'][0] == 5",
    "docs/following.md 4": "dcp.load(state, checkpoint_id='kept'); assert state['w'][0] == 5",
    "docs/export.md 1": EXPORTED,
    "docs/huggingface.md 3": "assert manager.latest() == 20",
    "docs/lightning.md 1": "assert trainer.global_step == 120",
    "docs/manager.md 1": "assert manager.latest() == 20",
    "docs/migration.md 2": "served.stop()",
    "docs/migration.md 3": "assert manager.latest() == 20",
    "docs/nebula.md 1": "assert state == {'weights': [1, 2, 3]}; assert nm.flush_persistence()",
    "docs/nebula.md 2": "assert state == {'model': 7}",
    "docs/megatron.md 1": "assert dist_checkpointing.latest(root) == iteration == weight[0] == 20",
    "docs/storage.md 1": (
        "dcp.save(state, checkpoint_id='a', storage_writer=writer); writer.close()"
    ),
}
"""What must hold then, or is still to be done."""
ELSEWHERE = {
    "docs/deepspeed.md 1",
    "docs/deepspeed.md 2",
    "docs/following.md 1",
    "docs/fsdp2.md 1",
    "docs/huggingface.md 1",
    "docs/huggingface.md 2",
    "docs/huggingface.md 4",
    "docs/lightning.md 2",
    "docs/nebula.md 3",
    "docs/torch-checkpointing.md 1",
    "docs/torchft.md 1",
    "docs/torchtitan.md 1",
    "docs/trackers.md 1",
    "docs/training-state.md 1",
    "docs/tutorial.md 1",
}
"""What has a test of its own."""


def _run(text: str, url: str, memory: str) -> None:
    os.environ["DCP_MEM_ROOT"] = memory
    os.chdir(os.path.dirname(url))  # frameworks leave their logs where they run
    exec(
        compile(
            text.replace("abfs://ckpts/run-42", url).replace("/mnt/ckpts/run-42", url),
            "docs",
            "exec",
        ),
        {"__name__": "__main__"},
    )


def test_every_block_is_run() -> None:
    assert set(blocks("python")) == set(BEFORE) | ELSEWHERE


@pytest.mark.parametrize("name", BEFORE)
def test_a_block_runs(name: str, memory_root: Path, tmp_path: Path) -> None:
    text = blocks("python")[name]
    if "replication" in name:  # one rank has nobody to replicate to
        text = text.replace('writer.wait("step-100", "replicated", timeout=60)', "writer.close()")
    url = str(tmp_path / "run-42")
    forked(_run, "\n".join([BEFORE[name], text, AFTER.get(name, "")]), url, str(memory_root))
    assert MemoryStorageReader(url, memory_root=tmp_path / "none").recoverable()


@pytest.mark.parametrize("text", blocks("yaml").values(), ids=blocks("yaml"))
def test_yaml_can_be_parsed(text: str) -> None:
    assert all(isinstance(document, dict) for document in yaml.safe_load_all(text))


@pytest.mark.parametrize("text", blocks("bash").values(), ids=blocks("bash"))
def test_shell_can_be_parsed(text: str) -> None:
    subprocess.run(["/bin/bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    )
    assert [link for link in links if "://" not in link and not _is_there(page, link)] == []


def _is_there(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    return target.exists() and (not anchor or anchor in _anchors(target))


def _anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_prose_keeps_to_100_columns(page: Path) -> None:
    """Tables and code may be wider, and so may a word that can't be broken, such as a link."""
    if page.name == "api.md":
        pytest.skip("it is written from the docstrings, signatures and all")
    prose = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "#", "![", "    "))]
    assert not [line for line in lines if len(line) > 100 and " " in line.strip()]


def test_pictures_are_those_that_are_drawn() -> None:
    drawn = runpy.run_path(str(REPOSITORY / "docs" / "pictures" / "draw.py"))["PICTURES"]
    there = {
        path.stem: path.read_text() for path in (REPOSITORY / "docs" / "pictures").glob("*.svg")
    }
    assert there == {name: draw().text() for name, draw in drawn.items()}


def test_the_api_reference_is_what_the_docstrings_say() -> None:
    made = runpy.run_path(str(REPOSITORY / "docs" / "reference.py"))["page"]()
    assert (REPOSITORY / "docs" / "api.md").read_text() == made, "run `python docs/reference.py`"


def test_tests_that_pages_name_are_there() -> None:
    """`tests/…/test_x.py::test_y`, as a page of what is tested where has them."""
    named = {
        (file, test)
        for page in PAGES
        for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())
    }
    assert named
    missing = [
        f"{file}::{test}"
        for file, test in sorted(named)
        if f"def {test}(" not in (REPOSITORY / file).read_text()
    ]
    assert missing == []
