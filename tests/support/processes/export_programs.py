"""A program that stands in for the one that makes exports: it answers at once, or never.

Or it answers, and leaves a process behind that has its standard output, until the agent lets go.

`python -m tests.support.processes.export_programs DESCRIPTOR`, as the agent starts it.
"""

import json
import os
import pickle
import sys

from dcp_mem.flushing.exporter import ExportTask


def main() -> None:
    with open(int(sys.argv[1]), "rb") as stream:
        task: ExportTask = pickle.load(stream)
    if task.request != b"wait":
        answer = {"state": "exported", "error": "", "target": "there", "nbytes": 7}
        print(json.dumps(answer), flush=True)
        if task.request == b"answer" or os.fork():
            return
    sys.stdin.read()  # ends with the agent
    sys.exit(3)


if __name__ == "__main__":
    main()
