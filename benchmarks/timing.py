"""Medians of calls that take turns, so that what else the machine does falls on all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

SHORTEST = 0.02  # seconds of one timing: quicker calls are timed several at once


def medians(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of each call: the median over rounds, in each of which every call has its turn."""
    repeats = {}
    for name, call in calls.items():
        call()
        begun = time.perf_counter()
        call()
        repeats[name] = max(1, round(SHORTEST / (time.perf_counter() - begun)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begun = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            seconds[name].append((time.perf_counter() - begun) / repeats[name])
    return {name: statistics.median(times) for name, times in seconds.items()}
