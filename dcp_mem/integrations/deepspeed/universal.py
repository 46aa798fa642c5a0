"""Loads of ZeRO checkpoints on another number of data-parallel ranks than saved them.

DeepSpeed loads such a checkpoint from files of its universal form, which it opens by path. So:

    find      the checkpoint, and by its files' names the number of ranks that saved it; files that
              DeepSpeed saved itself are left to DeepSpeed
    write     its files into a directory on each node, or into one that the nodes share
    convert   them there, by DeepSpeed's own `ds_to_universal`, in a process of its own
    complete  buffers and frozen parameters, which DeepSpeed doesn't load from the universal form
    load      the rest, by DeepSpeed, with its switch for universal checkpoints on
    mend      what DeepSpeed gets wrong with several groups of parameters; remove the files
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_mem.comm import is_first_of_node
from dcp_mem.comm.agreement import on_all_ranks, on_rank_0
from dcp_mem.comm.bridge.calls import direct_call
from dcp_mem.common.log import log
from dcp_mem.config import Settings
from dcp_mem.errors import ConfigError
from dcp_mem.integrations import nebula
from dcp_mem.integrations.nebula.run import current

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
_CONVERTER = (
    "from deepspeed.checkpoint.ds_to_universal import main, parse_arguments; "
    "main(parse_arguments())"
)
_PIECE = 1 << 24
_TEXT = (
    "This file's content lies in node memory, or on storage, under {tag}: "
    "load it by dcp_mem.integrations.deepspeed.\n"
)
_BEGINNING = _TEXT.partition("{")[0].encode()
_LARGEST_BYTES = 4096
"""No placeholder is larger, neither ours nor that of DeepSpeed's engine for Nebula."""
_CONVERSION_SECONDS = 6 * 3600.0
"""How long the ranks wait for the one that converts."""


def place(path: Path) -> None:
    """Put a placeholder at a path; the last part of its directory is the checkpoint's tag."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_TEXT.format(tag=path.parent.name))


def has_content(path: Path) -> bool:
    """Return whether DeepSpeed has saved a file itself: it is there, and is no placeholder."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(_LARGEST_BYTES + 1)
    if len(start) > _LARGEST_BYTES:
        return True
    if _BEGINNING.startswith(start[: len(_BEGINNING)]):  # also if its writer was killed
        return False
    # DeepSpeed's engine for Nebula saves an empty text in the place of the states.
    return not isinstance(torch.load(path, map_location="cpu", weights_only=False), str)


def saved_ranks(files: Sequence[str]) -> int:
    """Return how many data-parallel ranks saved a checkpoint of ZeRO; 0 if ZeRO didn't save it."""
    return len({match[1] for match in map(_OPTIMIZER.fullmatch, files) if match})


def unconvertible(files: Sequence[str]) -> list[str]:
    """Return the files of experts' states, and of further tensor-parallel or pipeline ranks."""
    states = [name for name in files if name.endswith("_states.pt")]
    return [name for name in states if not (_OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name))]


class UniversalLoads:
    """Loads a DeepSpeed engine's checkpoints, whatever the number of ranks that saved them.

    `tag_of`: returns dcp_mem's tag for a directory and a tag of DeepSpeed's. `shared_dir`: a
    directory that all nodes see, where rank 0 converts for all; None has each node convert in its
    directory for temporary files.
    """

    def __init__(
        self,
        engine: Any,
        tag_of: Callable[[str, str], str],
        shared_dir: str | os.PathLike[str] | None,
    ) -> None:
        self._engine, self._tag_of, self._shared_dir = engine, tag_of, shared_dir
        # Not the instance's, which may be ours already.
        self._load = type(engine).load_checkpoint.__get__(engine)

    def load_checkpoint(
        self, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Load a checkpoint as DeepSpeed's `load_checkpoint` does. Call this on all ranks.

        `tag`: DeepSpeed's tag; None for the one in the directory's file `latest`. Raises
        ConfigError.
        """
        tag = _latest(load_dir) if tag is None else str(tag)
        if (
            tag is None
            or not self._may_convert(load_dir, tag, *args, **kwargs)
            or self._is_deepspeeds(Path(load_dir, tag))
        ):
            return self._load(load_dir, tag, *args, **kwargs)
        found, files = nebula.newest_files(self._tag_of(str(load_dir), tag))
        saved, size = saved_ranks(files), dist.get_world_size(group=self._dp_group)
        if saved in (0, size):
            return self._load(load_dir, tag, *args, **kwargs)
        facts = f"{found} was saved by {saved} data-parallel ranks, and {size} load it"
        if unconvertible(files):
            raise ConfigError(
                f"{facts}; {unconvertible(files)[0]} tells of expert, tensor or pipeline "
                f"parallelism, with which dcp_mem doesn't convert: load it with {saved}"
            )
        log.warning("%s: DeepSpeed's ds_to_universal converts it", facts)
        with self._converted(found, files, tag) as directory:
            self._complete(directory / tag, files)
            engine = self._engine
            with _switched_on(engine), _links_kept(engine.optimizer, engine.module):
                path, client_state = self._load(str(directory), tag, *args, **kwargs)
            if engine.zero_optimization_partition_weights():
                _mend_zero_3(engine.optimizer.optimizer, directory / tag)
            dist.barrier()  # behind it the files are removed
        name = None if path is None else os.path.join(load_dir, tag, os.path.basename(path))
        return name, client_state

    @property
    def _dp_group(self) -> Any:
        return self._engine.optimizer.dp_process_group

    def _may_convert(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether DeepSpeed would load ZeRO's partitions, and not a universal checkpoint."""
        engine = self._engine
        if not engine.zero_optimization() or engine.load_universal_checkpoint():
            return False
        asked = inspect.signature(self._load).bind(*args, **kwargs)
        asked.apply_defaults()
        with_optimizer = asked.arguments["load_optimizer_states"]
        only_module = asked.arguments["load_module_only"]
        return with_optimizer and (not only_module or engine.zero_optimization_partition_weights())

    def _is_deepspeeds(self, directory: Path) -> bool:
        """Return whether a directory, as rank 0 sees it, has states that DeepSpeed saved itself."""
        return on_rank_0(
            current().ranks(),
            f"looking into {directory}",
            lambda: any(map(has_content, directory.glob("*_states.pt"))),
        )

    @contextmanager
    def _converted(self, found: str, files: Sequence[str], tag: str) -> Iterator[Path]:
        """Yield a directory that has the checkpoint in universal form, under DeepSpeed's tag."""
        settings = current().settings
        place = _place(settings, self._shared_dir)
        is_maker = dist.get_rank() == 0 if self._shared_dir else is_first_of_node()

        def make() -> None:
            if is_maker:
                shutil.rmtree(place, ignore_errors=True)  # a load that was killed left it
                place.mkdir(mode=0o700, parents=True)
                _convert(found, files, place / "files", place / found / tag)

        purpose = settings.purpose("convert")
        ranks = direct_call(None, False, purpose).ranks
        ranks = ranks.dedicated(str(purpose), _CONVERSION_SECONDS, "DCP_MEM_TIMEOUT")
        try:
            on_all_ranks(ranks, f"converting {found} for another number of ranks", make)
            yield place / found
        finally:
            if is_maker:
                shutil.rmtree(place, ignore_errors=True)

    def _complete(self, directory: Path, files: Sequence[str]) -> None:
        """Load what DeepSpeed leaves out: buffers, and parameters without gradients."""
        load, module = self._engine.checkpoint_engine.load, self._engine.module
        by_rank = sorted(
            (int(match[1] or 0), match[0]) for match in map(_MODEL.fullmatch, files) if match
        )
        frozen = {name: one for name, one in module.named_parameters() if not one.requires_grad}
        is_partitioned = bool(frozen) and self._engine.zero_optimization_partition_weights()
        states = [
            load(str(directory / name), map_location="cpu")
            for _, name in (by_rank if is_partitioned else by_rank[:1])
        ]
        saved = states[0]["module"]
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in saved:
                    buffer.copy_(saved[name])
            for name, parameter in frozen.items():
                if is_partitioned:
                    self._copy_partition(name, parameter, states)
                elif name in saved:
                    parameter.copy_(saved[name])

    def _copy_partition(self, name: str, parameter: Any, states: Sequence[Any]) -> None:
        """Copy this rank's part of a frozen parameter that ZeRO 3 has partitioned evenly."""
        fragments = [state.get("frozen_param_fragments") or {} for state in states]
        if name not in fragments[0]:  # exclude_frozen_parameters has left it out
            return
        whole = torch.cat([one[name].flatten() for one in fragments])[: parameter.ds_numel]
        own = parameter.ds_tensor.data.view(-1)
        start = own.numel() * dist.get_rank(group=self._dp_group)
        part = whole[start : start + own.numel()]  # the last ones are padded
        own[: part.numel()].copy_(part)


def _latest(load_dir: str) -> str | None:
    path = Path(load_dir, "latest")
    return path.read_text().strip() if path.is_file() else None


def _place(settings: Settings, shared_dir: str | os.PathLike[str] | None) -> Path:
    """Return the directory to convert in: the same for a job's ranks on a node, or on all."""
    if shared_dir is not None:
        return Path(shared_dir, f"dcp_mem-universal-{settings.job}")
    owner = f"{os.getuid()}-{socket.gethostname()}"
    return Path(tempfile.gettempdir(), f"dcp_mem-universal-{owner}-{settings.job}")


def _convert(tag: str, files: Sequence[str], source: Path, target: Path) -> None:
    """Write a checkpoint's files, and have DeepSpeed convert them. Raises ConfigError."""
    source.mkdir()
    target.mkdir(parents=True)
    arguments = ["--input_folder", str(source), "--output_folder", str(target)]
    try:
        _write(tag, files, source)
        subprocess.run(
            [sys.executable, "-c", _CONVERTER, *arguments, "--inject_missing_state"],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        output = (getattr(error, "output", None) or str(error)).rstrip()
        log.error("converting %s: %s", tag, output)
        raise ConfigError(
            f"{tag} was saved by {saved_ranks(files)} data-parallel ranks, and can't be converted "
            f"for another number: {output.splitlines()[-1]} (see the log). Load it with as many "
            f"ranks; or, if {source.parent} has no room for three times the checkpoint, set TMPDIR "
            f"or give use_memory(shared_dir=…)"
        ) from None
    shutil.rmtree(source)


def _write(tag: str, files: Sequence[str], directory: Path) -> None:
    checkpoint = nebula.get_checkpoint(tag)
    for name in files:
        if name.endswith("_states.pt"):
            with checkpoint.open(name) as stream, open(directory / name, "wb") as file:
                shutil.copyfileobj(stream, file, _PIECE)


@contextmanager
def _switched_on(engine: Any) -> Iterator[None]:
    """Have the engine load universal checkpoints, as its config's `load_universal` does."""
    engine.load_universal_checkpoint = lambda: True
    try:
        yield
    finally:
        del engine.load_universal_checkpoint


@contextmanager
def _links_kept(optimizer: Any, module: torch.nn.Module) -> Iterator[None]:
    """Keep what ZeRO 1 and 2 know as parameters' weights in fp32 and moments.

    DeepSpeed's `map_to_flat_opt_states` leaves a link to a moment of Adam's in the place of the
    weights, which `safe_get_full_fp32_param` follows, and links to copies of the moments.
    """
    mappings = [getattr(parameter, "_hp_mapping", None) for parameter in module.parameters()]
    weights = [(mapping, mapping.hp_fragment) for mapping in mappings if mapping is not None]
    yield
    for mapping, weight in weights:
        mapping.hp_fragment = weight
    if weights:
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _mend_zero_3(optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Give each group its own options, and each partition its own count of steps.

    DeepSpeed gives all groups those of the first one, and all partitions one tensor to count in,
    so that each partition's step would count for all.
    """
    path = directory / "zero" / "optimizer_state.pt"
    saved = torch.load(path, map_location="cpu", mmap=True, weights_only=False)["param_groups"]
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
    for state in optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()
