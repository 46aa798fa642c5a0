"""Run Megatron-LM's own tests of `dist_checkpointing` on CPU ranks, through dcp_mem or without it.

    PYTHONPATH=. python .ci/megatron_suite.py CHECKOUT [FILE …] [--ranks 8] [--by memory …]
        [--every 20]

CHECKOUT is a directory with Megatron-LM at the tag of the installed megatron-core; nothing of it
is changed. FILE is a test file, relative to tests/unit_tests/dist_checkpointing; by default all.
`--every` takes a sample, for the files with hundreds of tests. `--by` says what saves and loads:

    megatron    Megatron's own strategies
    memory      MemorySaveStrategy and MemoryLoadStrategy in their place
    reading     Megatron's own saves, MemoryLoadStrategy loads from memory's empty root
    writing     MemorySaveStrategy saves, Megatron's own loads what was flushed
    functions   MemoryCheckpointing's methods in place of Megatron's functions

Megatron's tests take NCCL and GPUs for granted. Here the groups are gloo's, what they want on a GPU
lies on the CPU, Megatron's local layers and torch's AdamW stand in for Transformer Engine's, and
groups of the same ranks are one group, since each costs threads. Ranks are forks of one process
that has imported Megatron. They start each test together. If a test fails, or if a rank doesn't
come back from it, all ranks are ended and new ones go on with the next test. A test that fails
because Megatron can't have its parallel sizes on so few ranks counts by itself, as "needs more
ranks".

Prints how many tests of each file have which outcome, as a table, and those whose outcomes differ.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import inspect
import json
import logging
import os
import re
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
SUITE = "tests/unit_tests/dist_checkpointing"
WAYS = ("megatron", "memory", "reading", "writing", "functions")

TEST_SECONDS = 90.0
STRAGGLER_SECONDS = 25.0
AFTER_FAILURE_SECONDS = 4.0
START_SECONDS = 120.0
FLUSH_SECONDS = 60.0
LONGEST_REASON = 160
LOG_CHARACTERS = 3000
PR_SET_PDEATHSIG = 1

TRANSFORMER_ENGINE = (
    "transformer_engine",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.fp8",
)
OUTCOMES = ("passed", "failed", "skipped", "needs more ranks")
TOO_FEW_RANKS = re.compile(r"world_size \(\d+\) is not divisible by")


def _module(path: Path) -> Any:
    """Import a file of this repository, whose package has the same name as Megatron-LM's."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PRIVATE = _module(ROOT / "tests/support/private.py")


# -- what Megatron takes for granted, on CPUs -----------------------------------------------------


def do_without_nvidia() -> None:
    """Give Megatron's tests gloo's groups and the CPU where they ask for NCCL's and for CUDA."""
    helper = _module(ROOT / "tests/support/frameworks/megatron_cpu.py")
    helper.do_without_gpu()
    # What torch logs for its developers is no line that these tests look for.
    for name in ("dcp_logger", "_default_"):
        logging.getLogger(f"c10d-NullHandler-{name}").disabled = True
    cuda: Any = torch.cuda
    cuda.set_device = cuda.empty_cache = lambda *args: None
    cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
    cuda.memory_allocated = lambda device=None: 0
    cuda.Stream = cuda.Event = cuda.current_stream = lambda *args, **options: MagicMock()
    cuda.stream = lambda stream: nullcontext()
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )
    from megatron.core import utils

    utils.is_te_min_version = lambda *args, **options: False
    from torch.distributed.device_mesh import DeviceMesh

    from_group: Any = DeviceMesh.from_group
    DeviceMesh.from_group = staticmethod(
        lambda group, device, *rest: from_group(group, "cpu", *rest)
    )  # type: ignore[assignment]


class FusedAdam(torch.optim.AdamW):
    """What Megatron's tests expect of Transformer Engine's: the step isn't each parameter's."""

    def __init__(
        self, params: Any, *, lr: float | None = None, adam_w_mode: bool = True, **options: Any
    ) -> None:
        super().__init__(params, lr=lr or 0.0, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)


def use_fused_adam() -> None:
    """Have Megatron take the optimizer above for Transformer Engine's; no test here steps it."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


def use_local_layers() -> None:
    """Have models consist of Megatron's own layers where they want Transformer Engine's."""
    from megatron.core.models.bert import bert_layer_specs
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.T5 import t5_spec

    gpt: Any = gpt_layer_specs
    taken = inspect.signature(gpt.get_gpt_layer_local_spec).parameters
    block_spec = gpt.get_gpt_decoder_block_spec
    gpt.get_gpt_layer_with_transformer_engine_spec = lambda *args, **options: (
        gpt.get_gpt_layer_local_spec(
            *args, **{name: value for name, value in options.items() if name in taken}
        )
    )
    gpt.get_gpt_decoder_block_spec = lambda config, use_transformer_engine=False, **options: (
        block_spec(config, False, **options)
    )
    bert: Any = bert_layer_specs
    bert.bert_layer_with_transformer_engine_spec = bert.bert_layer_local_spec
    bert.get_bert_layer_with_transformer_engine_spec = lambda: bert.bert_layer_local_spec
    t5: Any = t5_spec
    for part in ("encoder", "decoder"):
        local = getattr(t5, f"{part}_model_with_local_spec")
        setattr(t5, f"{part}_model_with_transformer_engine_default_spec", local)
    # The experts are made and saved here, never multiplied.
    from megatron.core.transformer.moe import experts

    if hasattr(experts, "gg"):  # up to 0.16
        experts.gg.assert_grouped_gemm_is_available = lambda: None
    te: Any = {name: types.ModuleType(name) for name in TRANSFORMER_ENGINE}
    te["transformer_engine.pytorch.fp8"].check_fp8_support = lambda: (False, "no GPU")
    te["transformer_engine.pytorch.fp8"].fp8_autocast = None
    sys.modules.update(te)


def use_gloo() -> None:
    """Make every process group a gloo group, and groups of the same ranks one group."""
    init, new, barrier = dist.init_process_group, dist.new_group, dist.barrier
    destroy = dist.destroy_process_group
    groups: dict[tuple[int, ...], Any] = {}

    def new_group(ranks: Sequence[int] | None = None, *_: Any, **__: Any) -> Any:
        members = tuple(ranks if ranks is not None else range(dist.get_world_size()))
        if members not in groups:
            groups[members] = new(list(members), backend="gloo")
        return groups[members]

    def destroy_group(group: Any = None) -> None:
        if group is None:
            groups.clear()
            destroy()

    changed: Any = dist
    changed.init_process_group = lambda backend=None, **options: init("gloo", **options)
    changed.new_group = new_group
    changed.destroy_process_group = destroy_group
    changed.barrier = lambda group=None, **_: barrier(group)


def do_without_downloads() -> None:
    """Have Megatron's fixture for test data get nothing, and its GPU kernels not be imported."""
    sys.modules["megatron.core.transformer.custom_layers.batch_invariant_kernels"] = MagicMock()
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    stub: Any = types.ModuleType(name)
    stub.download_and_extract_asset = lambda assets_dir: False
    sys.modules[name] = stub


# -- dcp_mem in Megatron's place ------------------------------------------------------------------


def _place(directory: Any) -> tuple[str, str]:
    return os.path.split(os.fspath(directory).rstrip("/"))


def replace_strategies(saves: bool, loads: bool, memory_root: str) -> None:
    """Put dcp_mem's strategies where Megatron has its own, as defaults and by name.

    Args:
        saves: Whether MemorySaveStrategy saves.
        loads: Whether MemoryLoadStrategy loads.
        memory_root: For both.
    """
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import torch as megatrons

    from dcp_mem import MemoryStorageReader, MemoryStorageWriter
    from dcp_mem.integrations.megatron import MemoryLoadStrategy, MemorySaveStrategy
    from dcp_mem.integrations.megatron.releases import RELEASE, done_request

    writers: dict[str, MemoryStorageWriter] = {}

    class Save(megatrons.TorchDistSaveShardedStrategy):  # type: ignore[misc]
        """Saves into memory, and returns when storage has it, since tests delete directories."""

        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            root, name = _place(checkpoint_dir)
            if root not in writers:
                writers[root] = MemoryStorageWriter(root, memory_root=memory_root)
            strategy = MemorySaveStrategy(writers[root])
            strategy.keep_only_main_replica = self.keep_only_main_replica
            strategy.save(sharded_state_dict, checkpoint_dir)
            writers[root].wait(name, timeout=FLUSH_SECONDS)

        def async_save(
            self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore"
        ) -> Any:
            self.save(sharded_state_dict, checkpoint_dir)
            return done_request(async_strategy)

    class Load(megatrons.TorchDistLoadShardedStrategy):  # type: ignore[misc]
        """Loads by a reader of the directory's parent."""

        def load(self, sharded_state_dict: Any, checkpoint_dir: Any, *_: Any) -> Any:
            strategy = self._strategy(checkpoint_dir)
            loaded = strategy.load(sharded_state_dict, checkpoint_dir)
            self.cached_global_metadata = strategy.cached_global_metadata
            return loaded

        def load_tensors_metadata(self, checkpoint_dir: Any, metadata: Any = None) -> Any:
            return self._strategy(checkpoint_dir).load_tensors_metadata(checkpoint_dir, metadata)

        def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
            return self._strategy(checkpoint_dir).load_sharded_metadata(checkpoint_dir)

        def _strategy(self, checkpoint_dir: Any) -> MemoryLoadStrategy:
            root, _ = _place(checkpoint_dir)
            return MemoryLoadStrategy(MemoryStorageReader(root, memory_root=memory_root))

    replaced: dict[str, tuple[str, Any]] = {}
    if saves:
        replaced["SAVE_SHARDED"] = ("TorchDistSaveShardedStrategy", Save)
    if loads:
        replaced["LOAD_SHARDED"] = ("TorchDistLoadShardedStrategy", Load)
    for action, (name, ours) in replaced.items():
        setattr(megatrons, name, ours)
        if RELEASE >= (0, 17):
            setattr(serialization, name, ours)
        else:
            from megatron.core.dist_checkpointing.strategies import base

            made = ours("torch_dist", 1) if action == "SAVE_SHARDED" else ours()
            base.register_default_strategy(
                getattr(base.StrategyAction, action), "torch_dist", 1, made
            )


def replace_functions(memory_root: str) -> None:
    """Put MemoryCheckpointing's methods where Megatron has its functions.

    Args:
        memory_root: Of dcp_mem.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import serialization

    from dcp_mem.integrations.megatron import MemoryCheckpointing, checkpointing

    originals = types.SimpleNamespace(**vars(dist_checkpointing))
    checkpointing.dist_checkpointing = originals
    ours = MemoryCheckpointing(memory_root=memory_root)

    def save(sharded_state_dict: Any, checkpoint_dir: Any, *rest: Any, **options: Any) -> Any:
        request = ours.save(sharded_state_dict, checkpoint_dir, *rest, **options)
        root, name = _place(checkpoint_dir)
        ours.writer(root).wait(name, timeout=FLUSH_SECONDS)
        return request

    replaced = {
        name: getattr(ours, name)
        for name in (
            "load",
            "load_common_state_dict",
            "load_content_metadata",
            "load_plain_tensors",
            "load_tensors_metadata",
        )
    }
    for module in (dist_checkpointing, serialization):
        for name, function in {**replaced, "save": save}.items():
            setattr(module, name, function)
    changed: Any = dist_checkpointing
    changed.check_is_distributed_checkpoint = ours.check_is_distributed_checkpoint


def put_in_place(way: str, memory_root: str) -> None:
    """Have the rank's saves and loads go the given way."""
    if way == "functions":
        replace_functions(memory_root)
    elif way != "megatron":
        replace_strategies(way in ("memory", "writing"), way in ("memory", "reading"), memory_root)


# -- a rank ---------------------------------------------------------------------------------------


class InStep:
    """A pytest plugin: tells the parent each outcome, and waits for its leave to go on."""

    def __init__(self, channel: socket.socket, done: frozenset[str], every: int) -> None:
        self._channel, self._done, self._every = channel, done, every
        self._outcome, self._reason = "passed", ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [one for one in items[:: self._every] if _name(one.nodeid) not in self._done]
        self._tell(collected=[_name(one.nodeid) for one in items])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed or report.skipped:
            self._tell(refused=_last_line(report.longrepr), outcome=report.outcome)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.skipped and self._outcome == "passed"):
            self._outcome, self._reason = report.outcome, _last_line(report.longrepr)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._tell(test=_name(nodeid), outcome=self._outcome, reason=self._reason)
        self._outcome, self._reason = "passed", ""
        if self._channel.recv(1) != b"+":
            os._exit(0)

    def _tell(self, **values: Any) -> None:
        self._channel.sendall(json.dumps(values).encode() + b"\n")


def _name(nodeid: str) -> str:
    return nodeid.split(f"{SUITE}/")[-1]


def _last_line(report: Any) -> str:
    crash = getattr(report, "reprcrash", None)
    if crash is not None:
        text = crash.message
    elif isinstance(report, tuple):
        text = str(report[-1])
    else:
        text = str(report).strip().splitlines()[-1] if str(report).strip() else ""
    return text.strip()[:2000]


def be_rank(
    rank: int, work: Work, place: Path, port: int, channel: socket.socket, done: frozenset[str]
) -> NoReturn:
    """Run the tests of a file as one of the ranks."""
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _log_to(place / f"rank{rank}.log")
        # Processes that Megatron spawns would import this script, and torch with it.
        del sys.modules["__main__"].__file__
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
        os.environ |= {"WORLD_SIZE": str(work.ranks), "MASTER_ADDR": "localhost"}
        from tests.unit_tests.test_utilities import Utils

        Utils.rank, Utils.world_size = rank, work.ranks
        put_in_place(work.way, str(place / "memory"))
        options = [
            f"--rootdir={work.checkout}",
            f"--confcutdir={work.checkout / 'tests/unit_tests'}",
            # What a parent of the ranks' directories has is common to all of them.
            f"--basetemp={place / 'temporary' / str(rank)}",
            f"-c{os.devnull}",
            "-pno:cacheprovider",
        ]
        tests = str(work.checkout / SUITE / work.file)
        pytest.main([tests, *options], plugins=[InStep(channel, done, work.every)])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _log_to(path: Path) -> None:
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)


# -- the parent -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What the ranks do.

    Attributes:
        checkout: Megatron-LM.
        file: Of the tests.
        way: Who saves and loads.
        ranks: How many.
        place: Directory for all that they write.
        every: Of this many tests, the first is run.
    """

    checkout: Path
    file: str
    way: str
    ranks: int
    place: Path
    every: int


class Batch:
    """Ranks that run the tests of one file, but for those that are done."""

    def __init__(self, work: Work, done: frozenset[str]) -> None:
        """Fork the ranks."""
        self.channels: list[socket.socket] = []
        self._pids: list[int] = []
        place = self._place = Path(tempfile.mkdtemp(dir=work.place))
        (place / "temporary").mkdir()
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        for rank in range(work.ranks):
            here, there = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                be_rank(rank, work, place, port, there, done)
            there.close()
            self._pids.append(pid)
            self.channels.append(here)

    def end(self) -> None:
        """Kill the ranks and all that they started; the flush agent ends by itself."""
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for channel in self.channels:
            channel.close()

    def answers(self, seconds: float, after_first: float) -> dict[int, dict[str, Any]]:
        """Return what each rank tells next, without those who are late or gone."""
        found: dict[int, dict[str, Any]] = {}
        limit = time.monotonic() + seconds
        with selectors.DefaultSelector() as waiting:
            for rank, channel in enumerate(self.channels):
                waiting.register(channel, selectors.EVENT_READ, rank)
            while waiting.get_map() and (left := limit - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    line = _line(self.channels[key.data])
                    waiting.unregister(key.fileobj)
                    if line:
                        answer = found[key.data] = json.loads(line)
                        is_failure = answer.get("outcome") == "failed"
                        patience = AFTER_FAILURE_SECONDS if is_failure else after_first
                        limit = min(limit, time.monotonic() + patience)
        return found

    def end_of_log(self) -> str:
        """Return the end of what rank 0 has printed."""
        return (self._place / "rank0.log").read_text(errors="replace")[-LOG_CHARACTERS:]

    def go_on(self) -> None:
        """Let the ranks begin the next test."""
        for channel in self.channels:
            channel.sendall(b"+")


def _line(channel: socket.socket) -> bytes:
    """Read a line; empty if the rank has ended."""
    line = b""
    with suppress(ConnectionError):
        while not line.endswith(b"\n") and (byte := channel.recv(1)):
            line += byte
    return line


Fate = tuple[str, str]
"""Outcome and reason of a test."""


def run_file(work: Work) -> Iterator[tuple[str, Fate]]:
    """Run the tests of a file; yield each one's fate, joined from all ranks."""
    done: set[str] = set()
    is_over = False
    while not is_over:
        batch = Batch(work, frozenset(done))
        try:
            is_over = True
            for test, fate in _run(batch, work):
                yield test, fate
                done.add(test)
                is_over = fate[0] != "failed" or "::" not in test
        finally:
            batch.end()


def _run(batch: Batch, work: Work) -> Iterator[tuple[str, Fate]]:
    """Run tests up to the first that fails, and with it."""
    told = batch.answers(START_SECONDS, START_SECONDS).get(0)
    if told is None or "collected" not in told:
        told = told or {"refused": f"no start: {batch.end_of_log()}", "outcome": "failed"}
        yield f"{work.file} as a whole", (told["outcome"], told["refused"])
        return
    for test in told["collected"]:
        fate = _joined(batch.answers(TEST_SECONDS, STRAGGLER_SECONDS), work.ranks)
        yield test, fate
        if fate[0] == "failed":
            return
        batch.go_on()


def _joined(answers: Mapping[int, Mapping[str, Any]], ranks: int) -> Fate:
    """Join what the ranks say of a test: the worst counts."""
    if len(answers) == ranks and all(
        TOO_FEW_RANKS.search(answer.get("reason", "")) for answer in answers.values()
    ):
        return "needs more ranks", answers[0]["reason"]
    for rank, answer in sorted(answers.items()):
        if answer["outcome"] == "failed":
            return "failed", f"rank {rank}: {answer['reason']}"
    if len(answers) < ranks:
        return "failed", f"ranks {sorted(set(range(ranks)) - set(answers))} didn't come back"
    if answers[0]["outcome"] == "skipped":
        return "skipped", answers[0]["reason"]
    return "passed", ""


def run_all(arguments: argparse.Namespace) -> dict[str, dict[str, Fate]]:
    """Run the files each way; the fates, by way and test."""
    checkout = Path(arguments.checkout).resolve()
    suite = checkout / SUITE
    files = arguments.files or sorted(
        str(path.relative_to(suite)) for path in suite.rglob("test_*.py")
    )
    fates: dict[str, dict[str, Fate]] = {way: {} for way in arguments.by}
    for file in files:
        for way in arguments.by:
            started = time.monotonic()
            with PRIVATE.private_directory(f"megatron-{way}") as place:
                of_file = run_file(
                    Work(checkout, file, way, arguments.ranks, place, arguments.every)
                )
                for test, fate in of_file:
                    fates[way][test] = fate
                    if arguments.verbose:
                        print(
                            f"  {way:10} {fate[0]:8} {test}  {fate[1][-LOG_CHARACTERS:]}",
                            flush=True,
                        )
            counts = Counter(fate for test, (fate, _) in fates[way].items() if _is_of(test, file))
            print(
                f"{file} by {way}: {_said(counts)}, {time.monotonic() - started:.0f} s", flush=True
            )
            if arguments.answer:
                Path(arguments.answer).write_text(json.dumps(fates, indent=1))
    return fates


def _is_of(test: str, file: str) -> bool:
    return test.startswith((f"{file}::", f"{file} "))


def _said(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def show(fates: Mapping[str, Mapping[str, Fate]]) -> None:
    """Print how many tests of each file have which outcome, and the tests whose outcomes differ."""
    tests = list(dict.fromkeys(test for of_way in fates.values() for test in of_way))
    print(f"\n| file | by | {' | '.join(OUTCOMES)} |\n| --- | --- {'| --- ' * len(OUTCOMES)}|")
    for file in dict.fromkeys(re.split("::| ", test)[0] for test in tests):
        for way, of_way in fates.items():
            counts = Counter(fate for test, (fate, _) in of_way.items() if _is_of(test, file))
            print(f"| {file} | {way} | {' | '.join(str(counts[one]) for one in OUTCOMES)} |")
    print()
    for test in tests:
        found = {way: of_way.get(test, ("not run", "")) for way, of_way in fates.items()}
        if len({outcome for outcome, _ in found.values()}) > 1:
            print(test)
            for way, (outcome, reason) in found.items():
                said = re.sub(r"\s+", " ", reason)[:LONGEST_REASON]
                print(f"  {way}: {outcome} {said}")


def import_for_ranks() -> None:
    """Import what each rank would import again after each failure."""
    from tests.unit_tests import dist_checkpointing  # noqa: F401

    from dcp_mem.integrations import megatron  # noqa: F401


def main() -> None:
    """Parse the arguments, import what the ranks share, run, show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", help="directory with Megatron-LM")
    parser.add_argument("files", nargs="*", help="test files; by default all")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--by", nargs="+", choices=WAYS, default=["megatron", "memory"])
    parser.add_argument("--every", type=int, default=1, help="run only each N-th test of a file")
    parser.add_argument("--answer", help="file for all outcomes so far, as JSON")
    parser.add_argument("--verbose", action="store_true", help="print each test's outcome")
    arguments = parser.parse_args()
    sys.path[:0] = [arguments.checkout]
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "1"}
    torch.set_num_threads(1)
    do_without_downloads()
    do_without_nvidia()
    use_fused_adam()
    use_gloo()
    import_for_ranks()
    use_local_layers()
    fates = run_all(arguments)
    show(fates)


if __name__ == "__main__":
    main()
