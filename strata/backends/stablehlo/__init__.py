"""StableHLO: graphs as modules of text, and the `xla` device that runs them through PJRT. See README.md."""
