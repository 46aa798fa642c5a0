"""All commands: what each is called, does and takes. What runs them is the module of that name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from dcp_mem.cli.parsing import argument, at_home, command, key_values, option, repeating, words_of
from dcp_mem.config import transport_point

_LS = """List a job's checkpoints in this node's memory and on storage, newest first.

Saves that newer ones superseded before their flush are counted (on_slow_storage="newest").

Without ROOT and --job: list the jobs in this node's memory, and what each has there. Exit code 1 if
there is nothing, or if a checkpoint can't be loaded from anywhere.

Examples:
  dcp-mem ls s3://ckpts/run-42
  dcp-mem ls                                # what lies in this node's memory
  dcp-mem ls --job my-run                   # a job that is in memory only
  dcp-mem ls /mnt/nfs/run-42 --json | jq -r '.checkpoints[].name'
"""

_SHOW = """Show what a checkpoint consists of: tensors, byte items, segments and the files that
describe it.

ID is the checkpoint's step, name or save id. Tensors themselves aren't read.

Examples:
  dcp-mem show s3://ckpts/run-42 step-100
  dcp-mem show s3://ckpts/run-42 step-100 --all | grep embed
  dcp-mem show - step-1 --job my-run        # in memory only: "-" in place of ROOT
  dcp-mem show /mnt/nfs/run-42 step-100 --json | jq '.tensors[] | select(.bytes > 1e9)'
"""

_VERIFY = """Read every byte of checkpoints, in this node's memory and on storage, and compare it
with its CRC32C checksums.

ID is the step, name or save id of one checkpoint; without it, all are read. Exit code 1 if anything
is damaged; the command says which MiB of which tensor. A checkpoint that is in memory only has no
checksums yet, unless it was copied between nodes: the flush computes them. Standard error shows
what is under way, and what took long.

Examples:
  dcp-mem verify s3://ckpts/run-42
  dcp-mem verify s3://ckpts/run-42 step-100
  dcp-mem verify /mnt/nfs/run-42 --json | jq '.results[].damages[]'
"""

_REJECT = """Mark a checkpoint as not to be resumed from, in this node's memory and on storage.

ID is a step, a name or a save id; a save id means that save alone, and no later one of its name.
Restarts pass over the checkpoint from then on, and their report has TEXT; a load that names it
still takes it. It stays where it is until `dcp-mem rm` removes it, and retention doesn't count it.
--undo takes the mark back: run it on each node whose memory has one (`dcp-mem ls` shows it). Exit
code 1 if there is no such checkpoint.

Examples:
  dcp-mem reject s3://ckpts/run-42 1200 --why "the loss is NaN"
  dcp-mem reject /mnt/nfs/run-42 step-1200 --undo
  dcp-mem reject - 7 --job my-run --why "wrong learning rate"
"""

_RM = """Remove checkpoints from this node's memory and from storage.

ID is a step, a name or a save id; all that lies under the name is removed. On a terminal the
command asks first; elsewhere it needs --yes. The newest checkpoint that is durable and whole stays
unless --force is given: a restart would have nothing to load. A checkpoint that is being read or
flushed stays (exit code 1); on storage, --force removes it all the same. An interrupted command can
be repeated: no reader sees what it has left on storage as a checkpoint.

Examples:
  dcp-mem rm s3://ckpts/run-42 step-100 step-200
  dcp-mem rm /mnt/nfs/run-42 step-100 --yes
  dcp-mem rm - step-1 --job my-run --yes --force
"""

_GC = """Free what nobody needs any more: memory of dead jobs on this node, and what interrupted
saves have left on storage.

Only lists what there is, unless --yes is given. Live jobs, committed checkpoints and files of other
programs are never touched. With ROOT or --job, only that job's memory is looked at; only with ROOT,
its storage. Memory with checkpoints that were meant for storage and never got there stays unless
--force is given. A dead job may be one that is about to start again: it then has to load from
storage.

Examples:
  dcp-mem gc                                # dead jobs in this node's memory: only shows them
  dcp-mem gc --yes
  dcp-mem gc s3://ckpts/run-42 --older-than 48 --yes
"""

_WATCH = """Follow what lies in this node's memory, and what is on its way to storage, until Ctrl-C.

Storage itself isn't read. Without ROOT and --job: all jobs of the node. With --json, one object per
look, each on a line of its own.

Examples:
  dcp-mem watch
  dcp-mem watch s3://ckpts/run-42 --every 0.5
  dcp-mem watch --times 1 --json | jq .jobs[].checkpoints[0].state
"""

_REPORT = """Write an HTML page about a job's checkpoints: saves, flushes and recoveries over time,
sizes, throughput, what saves cost training, and what went wrong.

The page is one file without scripts, and needs no network. It is made from the histories on storage
and in this node's memory; on a node where the job never ran, only what became durable is known. An
existing FILE is replaced. Exit code 1 if nothing is known of the job.

Examples:
  dcp-mem report s3://ckpts/run-42
  dcp-mem report s3://ckpts/run-42 -o run-42.html
  dcp-mem report --job my-run               # a job that is in memory only
  dcp-mem report /mnt/nfs/run-42 -o - | mail -a 'Content-Type: text/html' ops@example.org
  dcp-mem report /mnt/nfs/run-42 --json | jq .totals.blocked_share
"""

_FLUSH = """Bring the complete checkpoints in this node's memory to storage, and wait until they are
there.

These are the checkpoints that the job meant for storage and that its agent hasn't put there yet:
after a crash, or before the node goes away. The agent does it, with the credentials of this shell.
Checkpoints that were saved to stay in memory (persist=False, or between every_n_saves(n)) are left
alone unless --all is given. Where several nodes hold a checkpoint, run the command on each of them:
storage has the checkpoint once all nodes have put their part. Exit code 1 if a checkpoint didn't
get there.

Examples:
  dcp-mem flush s3://ckpts/run-42
  dcp-mem flush s3://ckpts/run-42 --all     # also what was to stay in memory
  dcp-mem flush /mnt/nfs/run-42 --all --newest 1
  dcp-mem flush s3://ckpts/run-42 --job my-run --all   # a job that was in memory only
"""

_DOCTOR = """Check this machine and, with ROOT, its storage for what training needs; say what to do
about problems.

On storage it writes one kilobyte under a name of its own (.dcp_mem-doctor-…), reads it, tries to
replace it, and deletes it. Exit code 1 if a check fails; a warning is no failure.

With --peers it measures the network between nodes instead: start one process on each node, by
torchrun or srun; the first one prints the outcome. With --transport nixl beside it, each node also
reads 1 GiB from another one by NIXL; it fails where that doesn't work.

Examples:
  dcp-mem doctor
  dcp-mem doctor s3://ckpts/run-42
  dcp-mem doctor abfs://ckpts/run-42 --storage-option account_name=mine
  torchrun --no-python --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 \\
      dcp-mem doctor --peers
"""

_EXPORT = """Write a checkpoint out for other programs. One process does it, and needs far less
memory than the checkpoint takes. ID is the checkpoint's step, name or save id.

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

_FOLLOW = """Follow a training run, which may be on this node or elsewhere: print each new
checkpoint, the newest first, or run a command for it.

Checkpoints that come while a command runs are skipped, but for the newest. It ends with Ctrl-C or
SIGTERM (the command is sent that, too), or as the options say. Exit code 1 if a command has failed.

--exec takes a command and its arguments, without a shell, in which these stand for

\b
{path}  where torch's readers find the checkpoint: a directory of links in tmpfs
        if this node's memory has it, else its directory or URL on storage. The
        links go when the command has ended; it may delete them, and must not
        write to them.
{name}  the checkpoint's name
{step}  its training step; "" where that isn't known

Examples:
  dcp-mem follow s3://ckpts/run-42
  dcp-mem follow s3://ckpts/run-42 --exec 'python evaluate.py {path} --step {step}'
  dcp-mem follow /mnt/nfs/run-42 --durable --until-ended --exec 'rsync -a {path} /mnt/kept/'
  dcp-mem follow - --job my-run --timeout 3600 --exec 'sh -c "date; ls \\"$1\\"" sh {path}'
"""

_ID = argument("checkpoint_id", metavar="ID")
_EXPORT_ONLY = {"prefix": "safetensors", "trust": "torch", "target_options": "dcp"}
"""Options of `export` that are of one format alone."""


def _check_reject(given: Mapping[str, Any]) -> str:
    return "give either --why TEXT or --undo" if given["undo"] == bool(given["why"]) else ""


def _check_report(given: Mapping[str, Any]) -> str:
    is_mixed = given["output"] == "-" and given["is_json"]
    return "--json answers on standard output too: give -o FILE" if is_mixed else ""


def _check_flush(given: Mapping[str, Any]) -> str:
    return "--newest needs --all" if given["newest"] and not given["is_all"] else ""


def _check_doctor(given: Mapping[str, Any]) -> str:
    if given["transport"] is not None and given["is_of_peers"]:
        transport_point(given["transport"])
    is_alone = given["transport"] is not None and not given["is_of_peers"]
    return "--transport goes with --peers" if is_alone else ""


def _check_export(given: Mapping[str, Any]) -> str:
    for name, kind in _EXPORT_ONLY.items():
        if given[name] and given["kind"] != kind:
            return f"--{name.rstrip('s').replace('_', '-')} is for --format {kind}"
    return ""


COMMANDS = [
    command("ls", "List checkpoints, or the jobs in this node's memory.", _LS, needs="nothing"),
    command(
        "show",
        "Show what a checkpoint consists of.",
        _SHOW,
        _ID,
        option("--all is_all", "List everything, not only the first 40 of each kind."),
    ),
    command(
        "verify",
        "Read every byte of checkpoints and compare it with its checksums.",
        _VERIFY,
        argument("checkpoint_id", metavar="[ID]", required=False),
    ),
    command(
        "reject",
        "Mark a checkpoint as not to be resumed from, or take that back.",
        _REJECT,
        _ID,
        option("--why TEXT", "The reason, for people."),
        option("--undo", "Take the mark back."),
        check=_check_reject,
    ),
    command(
        "rm",
        "Remove checkpoints from memory and storage.",
        _RM,
        argument("ids", metavar="ID...", nargs=-1, required=True),
        option("--yes", "Don't ask."),
        option(
            "--force",
            "Also remove the newest durable checkpoint, and what is being read from storage.",
        ),
    ),
    command(
        "gc",
        "Free memory of dead jobs, and what interrupted saves have left on storage.",
        _GC,
        option("--yes", "Free it; without this, only list it."),
        option("--force", "Also free checkpoints that never reached storage; they are lost then."),
        option(
            "--older-than HOURS",
            "On storage: only what hasn't been touched for so long.",
            type=click.FloatRange(min=0),
            default=24.0,
        ),
        needs="nothing",
    ),
    command(
        "watch",
        "Follow a job's checkpoints in memory and on their way to storage.",
        _WATCH,
        *repeating("looks", shortest_seconds=0.1),
        needs="nothing",
    ),
    command(
        "report",
        "Write an HTML page about a job's saves, flushes and recoveries.",
        _REPORT,
        option(
            "-o --output FILE",
            "The file to write; - for standard output.",
            default="report.html",
            callback=at_home,
        ),
        needs="job",
        check=_check_report,
    ),
    command(
        "flush",
        "Bring complete checkpoints in memory to storage, and wait for that.",
        _FLUSH,
        option("--all is_all", "Also flush what was saved to stay in memory."),
        option("--newest N", "With --all: only the newest N of these.", type=click.IntRange(min=1)),
        option("--timeout SECONDS", "Stop waiting then; the agent goes on.", type=float),
        check=_check_flush,
    ),
    command(
        "doctor",
        "Check this machine and the storage for what training needs.",
        _DOCTOR,
        option("--peers is_of_peers", "Measure the network between nodes instead."),
        option(
            "--transport [auto|nixl|tcp|…]", "With --peers: also try and measure what copies go by."
        ),
        needs="nothing",
        check=_check_doctor,
    ),
    command(
        "export",
        "Write a checkpoint out for other programs.",
        _EXPORT,
        _ID,
        argument("target", callback=at_home),
        option(
            "--format kind",
            "What to write; see above.",
            type=click.Choice(["dcp", "torch", "safetensors", "files"]),
            default="dcp",
        ),
        option(
            "--prefix TEXT",
            "safetensors: only tensors whose names begin so; the names lose it.",
            default="",
        ),
        option(
            "--trust",
            "torch: unpickle byte items without restrictions; that may run code in them.",
        ),
        option(
            "--target-option target_options KEY=VALUE",
            "dcp: as --storage-option, for TARGET.",
            multiple=True,
            callback=key_values,
        ),
        check=_check_export,
    ),
    command(
        "follow",
        "Run a command for each new checkpoint of a training run.",
        _FOLLOW,
        option(
            "--exec words COMMAND", "Run this for each checkpoint; see above.", callback=words_of
        ),
        option("--durable only_durable", "Only checkpoints that storage has."),
        option(
            "--until-ended",
            "End with the run, if it ends on this node; a killed run may be restarted, and "
            "doesn't.",
        ),
        option(
            "--timeout SECONDS",
            "End when no new checkpoint has come for so long.",
            type=click.FloatRange(0.0),
        ),
        *repeating("checkpoints", shortest_seconds=0.05),
    ),
]
"""In the order of the help."""
