"""Programs that search for a violation of what Onward promises.

Each looks by a technique of its own, small under `make test` and for as long as it is given under
`make torture`. See `docs/reliability.md`.
"""
