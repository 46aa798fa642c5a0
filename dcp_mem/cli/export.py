"""`dcp-mem export`: write a checkpoint out for other programs."""

from __future__ import annotations

import click

from dcp_mem.cli.options import CommonOptions, parse_storage_options, subcommand
from dcp_mem.cli.screen import size
from dcp_mem.errors import ConfigError
from dcp_mem.operations.export import (
    Exported,
    export_dcp,
    export_files,
    export_safetensors,
    export_torch,
)

FORMATS = ("dcp", "torch", "safetensors", "files")
_HELP = """Write a checkpoint out for other programs. One process does it, and needs far less memory
than the checkpoint takes.

\b
dcp          a DCP directory at TARGET, any path or URL; torch's readers load it
torch        one local file for torch.load, nested as the state dict was
safetensors  a local directory in Hugging Face's layout; tensors only
files        a local directory of the files that were saved through Nebula's
             API or by DeepSpeed, each for torch.load

What is read from storage is verified.

Examples:
  dcp-mem export s3://ckpts/run-42 step-100 /mnt/nfs/kept/step-100
  dcp-mem export s3://ckpts/run-42 step-100 model.pt --format torch
  dcp-mem export s3://ckpts/run-42 step-100 ./hf --format safetensors --prefix model.
  dcp-mem export s3://ckpts/run-42 global_step100 ./ds/global_step100 --format files
  dcp-mem export - step-1 /mnt/nfs/step-1 --job my-run    # from memory
"""


@subcommand("export", _HELP)
@click.argument("checkpoint_id", metavar="ID")
@click.argument("target")
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    default="dcp",
    show_default=True,
    help="What to write; see above.",
)
@click.option(
    "--prefix",
    default="",
    metavar="TEXT",
    help="safetensors: only tensors whose names begin so; the names lose it.",
)
@click.option(
    "--trust",
    is_flag=True,
    help="torch: unpickle byte items without restrictions; that may run code in them.",
)
@click.option(
    "--target-option",
    metavar="KEY=VALUE",
    multiple=True,
    help="dcp: as --storage-option, for TARGET.",
)
def command(
    common: CommonOptions,
    checkpoint_id: str,
    target: str,
    kind: str,
    prefix: str,
    trust: bool,
    target_option: tuple[str, ...],
) -> int:
    if prefix and kind != "safetensors":
        raise ConfigError("--prefix is for --format safetensors")
    settings, checkpoint, storage = common.find(checkpoint_id)
    exported: Exported
    if kind == "dcp":
        with common.screen.progress("exporting") as progress:
            exported = export_dcp(
                settings,
                storage,
                checkpoint,
                target,
                parse_storage_options(target_option),
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
