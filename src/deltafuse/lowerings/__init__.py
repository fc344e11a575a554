"""Lowerings of other tools' Custom nodes: files that ``fuse verify --lowering`` takes, a shipped one by its name."""
