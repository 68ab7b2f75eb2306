"""Loads the plugin, nothing else."""

pytest_plugins = ["ddp_conformance.plugin"]
