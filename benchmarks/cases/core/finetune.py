"""What saves of a fine-tuning run cost, where most of the model is frozen.

A small transformer with adapters of peft runs real steps on the CPU, and saves after each: with the
frozen parameters declared (`frozen=`), and without. What it must not cost more than is a copy of
what trains, tensor by tensor as it lies after a step. Nodes copy what has changed to each other,
or keep parity of it.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

import dcp_mem
from benchmarks.harness.clock import seconds
from benchmarks.harness.floors import warm_mapping, ways_to_copy
from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.samples import Sample, fastest
from benchmarks.harness.scratch import Skipped, need, scratch
from benchmarks.harness.tables import (
    AMOUNT,
    BYTES,
    Part,
    Section,
    attempt,
    beside_floor,
    beside_peer,
    named,
    size,
    within,
)
from dcp_mem import MemoryStorageWriter, TrainState
from dcp_mem.common.files import allocated_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.harness.floors import Copy, Mapping
    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings

TITLE = "Fine-tuning with a frozen base"
HELD_UP = 1.20
"""How long a save may hold training up, in times of the copy of what trains."""
SENT, SENT_MORE = 1.10, 1 << 20
"""What storage, or another node, may receive of a later checkpoint: times what trains, and more."""
KEPT_BASE, KEPT_TRAINED = 1.02, 3.0
"""What memory may hold with `keep_memory=2`: times the base, and times what trains."""
WIDTH, LAYERS, QUICK_LAYERS = 1024, 8, 2
ADAPTER_RANKS = (64, 208)
"""Of the adapters: small ones, and as many bytes as the adapters of a 7B model have (131 MB)."""
STORED_SAVES = 4
NODES = 3
WARM_UPS = 3
PATIENCE = 1200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a process measures."""

    memory: Path
    disk: Path
    layers: int
    adapter_rank: int
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was found.

    Attributes:
        copies: Seconds of a copy of what trains, by the way to copy.
        frozen: Seconds of a save with `frozen=`.
        plain: Seconds of the same save without.
        memory_nbytes: That tmpfs holds with `frozen=` and `keep_memory=2`.
        sent_nbytes: That storage receives of a later checkpoint, with `frozen=`.
        sent_plain_nbytes: The same without.
    """

    base_nbytes: int
    trained_nbytes: int
    copies: dict[str, Sample]
    frozen: Sample
    plain: Sample
    memory_nbytes: int
    sent_nbytes: Sample
    sent_plain_nbytes: Sample


def run(settings: Settings) -> Section:
    layers = QUICK_LAYERS if settings.quick else LAYERS
    parts = [
        attempt(
            "adapters",
            f"{layers} layers, adapters of rank {adapter_rank}",
            partial(_part, settings, layers, adapter_rank),
        )
        for adapter_rank in ADAPTER_RANKS
    ]
    return Section(TITLE, parts)


def _part(settings: Settings, layers: int, adapter_rank: int) -> Part:
    if find_spec("peft") is None or find_spec("transformers") is None:
        raise Skipped("needs transformers and peft: pip install transformers peft")
    need(settings.tmpfs, 8 << 30)
    make_spec = partial(Spec, layers=layers, adapter_rank=adapter_rank, repeats=settings.repeats)
    with scratch(settings.tmpfs) as memory, scratch(settings.disk) as disk:
        spec = make_spec(memory=memory, disk=disk)
        m = in_fresh_processes(_measure, spec, timeout=PATIENCE)[0]
    with scratch(settings.tmpfs) as memory, scratch(settings.disk) as disk:
        spec = make_spec(memory=memory, disk=disk)
        copied = in_fresh_processes(_replicated, spec, ranks=NODES, timeout=PATIENCE)[0]
    copy = fastest(m.copies.values())
    most_memory = KEPT_BASE * m.base_nbytes + KEPT_TRAINED * m.trained_nbytes
    rows = [
        beside_floor(
            "a save with frozen=; floor: a copy of what trains", copy, m.frozen, at_most=HELD_UP
        ),
        beside_peer("a save with frozen=; peer: without", m.frozen, m.plain),
        within(
            "memory with frozen= and keep_memory=2",
            Sample((float(m.memory_nbytes),)),
            most_memory,
            BYTES,
        ),
        within(
            "sent to storage of a later checkpoint, with frozen=",
            m.sent_nbytes,
            SENT * m.trained_nbytes + SENT_MORE,
            BYTES,
        ),
        beside_peer(
            "the same; peer: without frozen=",
            m.sent_nbytes,
            m.sent_plain_nbytes,
            unit=BYTES,
            words=AMOUNT,
        ),
        *(
            within(
                f"sent to other nodes of a later checkpoint, with {redundancy}",
                sent_nbytes,
                SENT * m.trained_nbytes + SENT_MORE,
                BYTES,
            )
            for redundancy, sent_nbytes in copied.items()
        ),
    ]
    notes = [
        f"base {size(m.base_nbytes)}",
        f"what trains, adapters and AdamW's state: {size(m.trained_nbytes)}",
        f"copies of what trains: {named(m.copies)}",
        "the state dict is made before the clock starts; each save comes after a real step",
        "storage is a directory on disk: what hasn't changed is linked there",
        f"copies and parity: {NODES} nodes save the same model together; what all send is counted",
    ]
    return Part(rows, notes)


def _measure(rank: Rank, spec: Spec) -> Measured:
    app, step = _training(spec)
    tensors = [one for one in tree_leaves(app.state_dict()) if isinstance(one, torch.Tensor)]
    hot = [one for one in tensors if not app.is_frozen("", one)]
    base_nbytes = sum(one.nbytes for one in tensors if app.is_frozen("", one))
    floor = [one.detach() for one in hot]
    with ExitStack() as stack:
        mapping = stack.enter_context(warm_mapping(spec.memory / "floor", floor))
        ways = stack.enter_context(ways_to_copy(rank.threads, floor))
        frozen = stack.enter_context(
            closing(_Saves(app, step, spec.memory / "frozen", frozen=app.is_frozen))
        )
        plain = stack.enter_context(closing(_Saves(app, step, spec.memory / "plain")))
        samples = rank.in_turn(
            {
                **{name: partial(_copied, step, mapping, way) for name, way in ways.items()},
                "frozen": frozen.save,
                "plain": plain.save,
            },
            repeats=spec.repeats,
            warm_ups=WARM_UPS,
        )
        memory_nbytes = allocated_bytes(str(spec.memory / "frozen"))
        copies = {name: samples[name] for name in ways}
    sent = {
        name: _sent(app, step, spec, name, options)
        for name, options in (("stored", {"frozen": app.is_frozen}), ("stored-plain", {}))
    }
    return Measured(
        base_nbytes=base_nbytes,
        trained_nbytes=sum(one.nbytes for one in hot),
        copies=copies,
        frozen=samples["frozen"],
        plain=samples["plain"],
        memory_nbytes=memory_nbytes,
        sent_nbytes=sent["stored"],
        sent_plain_nbytes=sent["stored-plain"],
    )


def _copied(step: Any, mapping: Mapping, way: Copy) -> float:
    """Return the seconds that a copy of what trains takes after a step."""
    step()
    return seconds(partial(mapping.fill, way))


def _replicated(rank: Rank, spec: Spec) -> dict[str, Sample]:
    """Return the bytes that all ranks sent of each checkpoint but the first, by redundancy."""
    app, step = _training(spec)
    ways = {
        "replicas=1": {"replicas": 1},
        "replicas=1 and frozen=": {"replicas": 1, "frozen": app.is_frozen},
        f"parity({NODES - 1})": {"redundancy": dcp_mem.parity(NODES - 1)},
    }
    return {
        name: _copied_nbytes(app, step, spec.memory / f"{number}-{rank.rank}", options)
        for number, (name, options) in enumerate(ways.items())
    }


def _copied_nbytes(app: TrainState, step: Any, memory: Path, options: Any) -> Sample:
    found = []
    with closing(_Saves(app, step, memory, **options)) as saves:
        for number in range(1, STORED_SAVES + 1):
            saves.save()
            saves.writer.wait(f"step-{number}", "replicated", timeout=PATIENCE)
            (status,) = [one for one in saves.writer.status() if one.name == f"step-{number}"]
            found.append(float(status.replication_sent_nbytes))
    return Sample(tuple(found[1:]))


def _training(spec: Spec) -> tuple[TrainState, Callable[[], None]]:
    """Return what is saved of a run that has made a step, and what makes the next one."""
    model, trained = _model(spec.layers, spec.adapter_rank)
    optimizer = torch.optim.AdamW(trained, 1e-4)
    step = partial(_step, model, optimizer)
    step()
    return TrainState(model, optimizer, rng=False), step


class _Saves:
    """Saves of one run, each after a step of training."""

    def __init__(
        self, app: TrainState, step: Any, memory: Path, path: Path | None = None, **options: Any
    ) -> None:
        url = None if path is None else str(path)
        self.writer = MemoryStorageWriter(
            url, memory_root=str(memory), job="bench", keep_memory=2, **options
        )
        self._app, self._step, self._count = app, step, 0

    def save(self) -> float:
        self._step()
        self._count += 1
        tree = {"app": self._app.state_dict()}
        return seconds(
            lambda: dcp_mem.save(
                tree, checkpoint_id=f"step-{self._count}", storage_writer=self.writer
            )
        )

    def close(self) -> None:
        self.writer.close()


def _sent(app: TrainState, step: Any, spec: Spec, name: str, options: Any) -> Sample:
    """Return the bytes that storage received of each checkpoint but the first."""
    with closing(_Saves(app, step, spec.memory / name, spec.disk / name, **options)) as saves:
        found = []
        for number in range(1, STORED_SAVES + 1):
            saves.save()
            saves.writer.wait(f"step-{number}")
            (status,) = [one for one in saves.writer.status() if one.name == f"step-{number}"]
            found.append(float(status.transfer.sent_nbytes))
    return Sample(tuple(found[1:]))


def _model(layers: int, adapter_rank: int) -> tuple[torch.nn.Module, list[torch.nn.Parameter]]:
    """Return a transformer with adapters, and the parameters that train."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=8192,
        tie_word_embeddings=False,
    )
    chosen = LoraConfig(r=adapter_rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model: torch.nn.Module = get_peft_model(LlamaForCausalLM(config), chosen)
    return model, [one for one in model.parameters() if one.requires_grad]


def _step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.randint(0, 8192, (1, 16))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
