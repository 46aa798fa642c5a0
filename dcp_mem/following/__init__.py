"""`follow`: a process that is no part of a run takes its checkpoints as they come.

A follower looks at memory and storage, again and again. What is new is elected and opened as a load
does it, and handed out under a lease:

    follower    `follow`, and the iteration: look, take, hand out
    checkpoint  the reader that opens the newest, and keeps it open by links of its own; and what
                the loop body gets of it: loads, and files for programs that take a path

`policy/following.py` decides what is new, `loading/survey.py` looks at storage. This room may
import `functional` and what lies below it.
"""
