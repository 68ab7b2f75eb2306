"""Hooks for the suite's own tests only."""

import signal

import pytest


# A module's tests share the runs that its fixtures start, so a worker takes whole modules, in the order in which they
# come: by default those with the fewest tests, which are the longest, would come last. And what is started in the
# background ignores Ctrl-C, as would all runs that the tests start and interrupt.
@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist, config.option.loadscopereorder = "loadfile", False


# Tests marked `long` take minutes: they run when asked for by `-m long`, and are skipped otherwise, for xdist does not
# count what is deselected.
def pytest_collection_modifyitems(config, items):
    if "long" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: pytest tests -m long"))
