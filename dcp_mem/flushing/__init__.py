"""From memory to storage: what is next (`flusher`), in which order (`flush`), the bytes (`uploading`).

What it costs is counted and capped in `metering`, and told in `telling`; what attempts leave behind goes in `leftovers`.
"""
