"""The form of numbers and lists in a report."""

from __future__ import annotations

from collections.abc import Sequence


def number(value: float) -> str:
    return f"{value:z.3f}"


def signed(value: float) -> str:
    return f"{value:+.3f}"


def percent(share: float) -> str:
    return f"{share:.1%}"


def between(bounds: tuple[float, float] | None) -> str:
    return "one row" if bounds is None else f"{bounds[0]:.3f} to {bounds[1]:.3f}"


def p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    names = [*map(quoted, names)]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def quoted(name: str) -> str:
    """Quotes a name with a comma, so that it is not read as two names."""
    return f"“{name}”" if "," in name else name


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
