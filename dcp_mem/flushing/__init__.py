"""From memory to storage: what is next (`flusher`), in which order (`flush`), the nodes' `parts`, the bytes (`uploading`).

What lost nodes leave undone is done by those that hold copies (`standing_in`).

What it costs is counted and capped in `metering`, and told in `telling`; what attempts leave behind goes in `leftovers`.
"""
