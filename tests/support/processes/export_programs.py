"""A program that stands in for the one that makes exports: it answers at once, or never.

`python -m tests.support.processes.export_programs DESCRIPTOR`, as the agent starts it.
"""

import json
import pickle
import sys

from dcp_mem.flushing.exporter import ExportTask


def main() -> None:
    with open(int(sys.argv[1]), "rb") as stream:
        task: ExportTask = pickle.load(stream)
    if task.request == b"answer":
        answer = {"state": "exported", "error": "", "target": "there", "nbytes": 7}
        print(json.dumps(answer), flush=True)
        return
    sys.stdin.read()  # ends with the agent
    sys.exit(3)


if __name__ == "__main__":
    main()
