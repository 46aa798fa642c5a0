"""`dcp-mem export`: write a checkpoint out for other programs."""

from __future__ import annotations

from typing import Any

from dcp_mem.cli.options import CommonOptions
from dcp_mem.cli.screen import size
from dcp_mem.operations.export import (
    Exported,
    export_dcp,
    export_files,
    export_safetensors,
    export_torch,
)


def run(
    common: CommonOptions,
    checkpoint_id: str,
    target: str,
    kind: str,
    prefix: str,
    trust: bool,
    target_options: dict[str, Any],
) -> int:
    settings, checkpoint, storage = common.find(checkpoint_id)
    exported: Exported
    if kind == "dcp":
        with common.screen.progress("exporting") as progress:
            exported = export_dcp(
                settings,
                storage,
                checkpoint,
                target,
                target_options,
                progress,
            )
    elif kind == "torch":
        exported = export_torch(settings, checkpoint, target, trust=trust)
    elif kind == "files":
        exported = export_files(settings, storage, checkpoint, target)
    else:
        exported = export_safetensors(settings, checkpoint, target, prefix=prefix)
    common.screen.answer(
        name=checkpoint.name,
        format=kind,
        target=exported.target,
        files=list(exported.files),
        bytes=exported.nbytes,
    )
    count = f"{len(exported.files)} files" if len(exported.files) > 1 else "1 file"
    common.screen.line(
        f"{checkpoint.name} is in {exported.target}: {count}, {size(exported.nbytes)}"
    )
    return 0
