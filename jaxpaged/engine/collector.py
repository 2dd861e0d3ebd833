"""Python's collector of garbage, kept out of the way of steps and tokens."""

import gc

OBJECTS_BEFORE_COLLECTION = 50_000  # that live on; Python's own number is 700


def calm_collector() -> None:
    """Look through less, and seldom; for a process that has loaded what it needs.

    What lives as long as the process is not looked through at every collection, and what a step
    makes and drops for hundreds of rows is no reason for one.
    """
    gc.collect()
    gc.freeze()
    youngest, *older = gc.get_threshold()
    if youngest:  # 0: somebody has switched it off
        gc.set_threshold(max(youngest, OBJECTS_BEFORE_COLLECTION), *older)
