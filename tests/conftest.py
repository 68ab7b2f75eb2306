"""Tests marked `long` take minutes: they run when asked for by `-m long`, and are counted as deselected otherwise."""


def pytest_collection_modifyitems(config, items):
    if "long" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)
