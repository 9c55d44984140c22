"""The tables by name. Each is a function that computes the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from zeroshard.errors import ConfigError, did_you_mean

from . import infinity, others, sizes, successors, throughput, zero
from .table import Table

TABLES: dict[str, Callable[[], Table]] = {
    "zero-table1": zero.table1,
    "zero-table2": zero.table2,
    "zero-volumes": zero.volumes,
    "zero-r": zero.zero_r,
    "zero-fig2": throughput.fig2,
    "zero-fig3": throughput.fig3,
    "zero-fig6": sizes.zero_fig6,
    "zero-cached": sizes.zero_cached,
    "zero-fig7": throughput.fig7,
    "zero-fig8": throughput.fig8,
    "infinity-fig2a": infinity.fig2a,
    "infinity-fig2b": sizes.fig2b,
    "infinity-fig5": throughput.infinity_fig5,
    "throughput-others": others.throughput_others,
    "infinity-efficiency": infinity.requirements,
    "infinity-fig6a": sizes.infinity_fig6a,
    "infinity-fig6b": infinity.fig6b,
    "infinity-shapes": sizes.shapes,
    "offload-table4": sizes.adam_rates,
    "offload-fig7": sizes.offload_fig7,
    "zeropp-volumes": successors.zeropp_volumes,
    "zeropp-memory": successors.zeropp_memory,
    "deepspeed-estimators": successors.estimators,
}


def check_names(names: Sequence[str]) -> list[str]:
    """Return the names without duplicates, or all names if none is given. Raises ConfigError for an unknown name."""
    for name in names:
        if name not in TABLES:
            raise ConfigError(f"papers: unknown table {name!r}.{did_you_mean(name, TABLES)} Known: {', '.join(TABLES)}.")
    return list(dict.fromkeys(names)) or list(TABLES)


def write(table: Table, folder: Path) -> list[Path]:
    """Write <name>.md, <name>.csv and, if the table has a figure, <name>.png; return their paths."""
    from . import figures

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{table.name}.{suffix}" for suffix in ("md", "csv")]
    paths[0].write_text(table.markdown())
    paths[1].write_text(table.csv())
    return paths + figures.draw(table, folder / f"{table.name}.png")
