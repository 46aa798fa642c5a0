"""`dcp-mem show`: show what a checkpoint consists of."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from dcp_mem.cli.options import CommonOptions
from dcp_mem.cli.screen import Screen, age, facts_of, fields_of, moment, size, state
from dcp_mem.common.values import CheckpointStatus, counted, figures, shown
from dcp_mem.operations.contents import Contents, contents_of

_MOST = 40


def run(common: CommonOptions, checkpoint_id: str, is_all: bool) -> int:
    settings, checkpoint, storage = common.find(checkpoint_id)
    inside = contents_of(settings, storage, checkpoint)
    common.screen.answer(**facts_of(checkpoint), **fields_of(inside))
    _show(
        common.screen,
        checkpoint,
        inside,
        _MOST if not is_all else max(len(inside.tensors), len(inside.items)),
    )
    return 0


def _show(screen: Screen, checkpoint: CheckpointStatus, inside: Contents, most: int) -> None:
    transfer = checkpoint.transfer
    sent, reused = checkpoint.replication_sent_nbytes, checkpoint.replication_reused_nbytes
    saved_by = f"{counted(checkpoint.world_size, 'rank')} on {counted(len(inside.nodes), 'node')}"
    rows: list[list[str | Text]] = [
        ["name", Text(checkpoint.name, "bold")],
        ["save id", checkpoint.save_id or "none: written by torch"],
        ["state", state(checkpoint)],
        ["problem", Text(shown(checkpoint.problem or checkpoint.error), "red")],
        ["rejected", Text(shown(checkpoint.rejected), "yellow")],
        ["created", f"{moment(checkpoint.created)} ({age(checkpoint.created)} ago)"],
        ["step", "" if checkpoint.step is None else str(checkpoint.step)],
        ["metrics", figures(checkpoint.metrics)],
        ["places", " + ".join(checkpoint.places)],
        ["size", f"{size(checkpoint.nbytes)} in {counted(len(inside.segments), 'segment')}"],
        ["copies", _moved(sent, reused, "")],
        ["upload", _moved(transfer.sent_nbytes, transfer.reused_nbytes, " on storage")],
        ["export", _export(checkpoint)],
        ["saved by", saved_by if checkpoint.world_size else ""],
        ["catalog", inside.catalog],
    ]
    for name, value in rows:
        if value:
            screen.line(Text.assemble((f"{name:<10}", "dim"), value))
    _show_items(screen, inside, most)
    _show_files(screen, inside, most)


def _export(checkpoint: CheckpointStatus) -> Text | str:
    """Return where a checkpoint is exported to, or how far that is; "" where it isn't chosen."""
    if checkpoint.export is None:
        return ""
    if checkpoint.exported_to:
        return checkpoint.exported_to
    why = f": {shown(checkpoint.export_error)}" if checkpoint.export_error else ""
    return Text(f"{checkpoint.export}{why}", "red" if why else "")


def _moved(sent_nbytes: int, reused_nbytes: int, where: str) -> str:
    """Return what was sent, and what was copied from an earlier checkpoint instead; "" for none."""
    if not sent_nbytes and not reused_nbytes:
        return ""
    reused = f", {size(reused_nbytes)} reused{where}" if reused_nbytes else ""
    return f"{size(sent_nbytes)} sent{reused}"


def _show_items(screen: Screen, inside: Contents, most: int) -> None:
    _heading(screen, "tensors", inside.tensors, most)
    screen.table(
        inside.tensors[:most],
        {
            "NAME": lambda one: one.name,
            "DTYPE": lambda one: one.dtype,
            "SHAPE": lambda one: " x ".join(map(str, one.shape)) or "scalar",
            ">SHARDS": lambda one: str(one.shards),
            ">SIZE": lambda one: size(one.nbytes),
        },
    )
    _heading(screen, "byte items", inside.items, most)
    screen.table(
        inside.items[:most],
        {
            "NAME": lambda one: one.name,
            ">SIZE": lambda one: size(one.nbytes),
            "LOADS": lambda one: Text("refused" if one.refused else "", "red"),
        },
    )
    refused = next((one for one in inside.items if one.refused), None)
    if refused is not None:
        screen.line(
            f"refused: unpickling could run code (of {refused.name}: {shown(refused.refused)}). "
            "If you trust whoever wrote the checkpoint, pass weights_only=False to dcp_mem.load, "
            "or admit its classes by torch.serialization.add_safe_globals."
        )


def _show_files(screen: Screen, inside: Contents, most: int) -> None:
    _heading(screen, "segments", inside.segments, most)
    screen.table(
        inside.segments[:most],
        {
            ">RANK": lambda one: str(one.rank),
            "NODE": lambda one: one.node,
            ">SIZE": lambda one: size(one.nbytes),
            "WHERE": lambda one: " + ".join(one.places) or Text("nowhere", "red"),
            "FILE": lambda one: one.file,
        },
    )
    _heading(screen, "manifests on storage", inside.manifests, most)
    for file in inside.manifests[:most]:
        screen.line(file)


def _heading(screen: Screen, what: str, parts: Sequence[object], most: int) -> None:
    if not parts:
        return
    nbytes = sum(getattr(one, "nbytes", 0) for one in parts)
    total = f", {size(nbytes)}" if nbytes else ""
    first = f", the first {most} (--all shows all)" if len(parts) > most else ""
    screen.line()
    screen.line(Text.assemble((f"{what}: {len(parts)}", "bold"), total + first))
