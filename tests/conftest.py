"""Hooks for the suite's own tests only."""

import signal

import pytest


# A module's tests share the runs that its fixtures start, so a worker takes whole modules, in the order in which they
# come: by default those with the fewest tests, which are the longest, would come last.
@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # in the background, and so in all runs that tests would interrupt
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist, config.option.loadscopereorder = "loadfile", False


# Tests marked `long` take minutes: they run when asked for by `-m long`, and are counted as deselected otherwise.
def pytest_collection_modifyitems(config, items):
    if "long" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)
