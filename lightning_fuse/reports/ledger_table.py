"""The ledger as tables for people: bytes, traffic, launches, checkpoint, and what is not counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_fuse.reports.ledger import NOT_COUNTED, Counted, Ledger, counted, ledger_of
from lightning_fuse.reports.ledger_traffic import launches, step_paths, update_paths
from lightning_fuse.reports.ledger_words import setup_of

DECIMAL = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
BINARY = {"GB": (2**30, "GiB"), "MB": (2**20, "MiB"), "kB": (2**10, "KiB")}
SMALLEST_HALF = 2.0**-24  # the smallest float16 above 0; half of it, and less, rounds to 0


@dataclass
class Section:
    """One table.

    Attributes:
        title: Its title.
        head: Names of the columns.
        rows: Cells.
        notes: Lines below it.
    """

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: tuple[str, ...] = ()


def size(count: int) -> str:
    """Bytes in decimal units with the binary ones beside: ``16 GB (14.9 GiB)``."""
    for factor, unit in DECIMAL:
        if count >= factor:
            divisor, binary = BINARY[unit]
            return f"{count / factor:,.4g} {unit} ({count / divisor:,.4g} {binary})"
    return f"{count} B"


def sections(ledger: Ledger, sizes: Sequence[int], activations: int | None = None) -> list[Section]:
    """Everything the ledger says about a model.

    Args:
        ledger: Its bytes.
        sizes: Elements of every tensor that is stepped.
        activations: Bytes that one step was seen to need beside it, or None.

    Returns:
        Bytes, traffic and launches.
    """
    return [_bytes(ledger, activations), _traffic(ledger), _launches(sizes)]


def show_run(config: Mapping[str, Any], module: Any) -> None:
    """Prints the ledger of a run that is about to start: ``python train.py ledger=true``.

    Args:
        config: Its resolved configuration.
        module: Its recipe.
    """
    tensors = counted(module, module.groups_of_optimizers())
    show(of_tensors(tensors, ledger_of(tensors, setup_of(config))))


def of_tensors(tensors: Sequence[Counted], ledger: Ledger, activations: int | None = None) -> list[Section]:
    """The sections of a model whose tensors are known.

    Args:
        tensors: Them.
        ledger: Their ledger.
        activations: See ``sections``.

    Returns:
        The sections.
    """
    sizes = [_product(tensor.shape) for tensor in tensors if tensor.trained and tensor.parameter]
    return sections(ledger, sizes, activations)


def batch_section(batch: Mapping[str, int]) -> Section:
    """Samples per update: state does not depend on them.

    Args:
        batch: devices, accumulate and micro_batch; what is missing counts as 1.

    Returns:
        The section.
    """
    devices, windows, micro = (batch.get(key, 1) for key in ("devices", "accumulate", "micro_batch"))
    row = (str(devices), str(windows), str(micro), f"{devices * windows * micro:,}")
    notes = ("parameters, gradients and state per device do not depend on it; activations grow with micro_batch",)
    head = ("devices", "micro-batches per window", "samples in each", "samples per update")
    return Section("Batch", head, [row], notes)


def gradient_section(gradient: float, loss_scale: float) -> Section:
    """One gradient on its way through a scaled backward pass.

    Args:
        gradient: Of the unscaled loss.
        loss_scale: The factor on the loss.

    Returns:
        The section.
    """
    scaled = scaled_gradient(gradient, loss_scale)
    rows = [
        ("without a loss scale", f"{gradient:.6g}", _in_half(gradient)),
        ("in backward, scaled", f"{scaled:.6g}", _in_half(scaled)),
        ("before clipping, unscaled", f"{scaled / loss_scale:.6g}", "float32"),
    ]
    return Section(f"A gradient at loss scale {loss_scale:g}", ("where", "value", "in float16"), rows)


def scaled_gradient(gradient: float, loss_scale: float) -> float:
    """What a gradient is during backward.

    Raises:
        ValueError: The scale is not above 0.
    """
    if not loss_scale > 0:
        raise ValueError(f"loss_scale={loss_scale:g}: a loss scale is above 0, for instance 32768")
    return gradient * loss_scale


def show(found: Sequence[Section]) -> None:
    """Prints sections as tables; plain text where rich is missing."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(plain(found))
        return
    console = Console()
    for section in found:
        table = Table(title=section.title, title_justify="left", title_style="bold")
        for index, name in enumerate(section.head):
            words = any(row[index][:1].isalpha() or not row[index] for row in section.rows)
            table.add_column(name, justify="left" if words else "right", overflow="fold")
        for row in section.rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        for note in section.notes:
            console.print(Text(note, style="dim"))
        console.print()


def plain(found: Sequence[Section]) -> str:
    """Sections as aligned text."""
    lines: list[str] = []
    for section in found:
        table = [section.head, *section.rows]
        widths = [max(len(row[index]) for row in table) for index in range(len(section.head))]
        lines += [section.title, *("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in table)]
        lines += [*section.notes, ""]
    return "\n".join(lines)


def _bytes(ledger: Ledger, activations: int | None) -> Section:
    each = max(1, ledger.trained)
    rows: list[tuple[str, int, str]] = [("parameters", ledger.parameters, "")]
    if ledger.buffers:
        rows.append(("buffers", ledger.buffers, ""))
    rows.append(("gradients", ledger.gradients, "all of them, as at the step"))
    for moment in ledger.setup.moments:
        values, scales = ledger.of_moment(moment.name)
        rows.append((moment.name, values, "" if not scales else "codes"))
        if scales:
            rows.append((f"{moment.name} scales", scales, "float32, one per block"))
    if "qmap" in ledger.state:
        rows.append(("code tables", ledger.state["qmap"], "shared"))
    for key in ("master", "remainder"):
        if key in ledger.state:
            rows.append(("master weights", ledger.state[key], f"master={ledger.setup.master}"))
    if "step" in ledger.state:
        rows.append(("step counters", ledger.state["step"], f"{ledger.tensors:,} tensors"))
    rows.append(("optimizer state in all", ledger.state_total, f"allocated: {size(ledger.allocated)}"))
    rows.append(("counted in all", ledger.total, ""))
    rows.append(("checkpoint", ledger.checkpoint, "tensors; file format and loop state are some kB more"))
    if activations is not None:
        rows.append(("peak of a step", ledger.peak(activations), f"with {size(activations)} seen in one step"))
    cells = [(name, size(count), f"{count / each:.3f}", note) for name, count, note in rows]
    setup = ledger.setup
    title = (
        f"{ledger.elements:,} parameters: {setup.optimizer}, state={setup.state}, master={setup.master}, "
        f"precision={setup.precision}" + (f", shards={setup.shards}" if setup.shards > 1 else "")
    )
    notes = (*ledger.notes, f"not counted: {'; '.join(NOT_COUNTED)}")
    return Section(title, ("what", "bytes", "per parameter", ""), cells, notes)


def _traffic(ledger: Ledger) -> Section:
    rows = []
    for what, paths in (("update", update_paths(ledger.setup)), ("whole step", step_paths(ledger.setup))):
        for path in paths:
            moved = path.bytes_per_element
            rows.append((what, path.name, str(len(path.passes)), f"{moved:.4g}", size(round(moved * ledger.trained))))
    notes = ("read and written, for rows of 128 elements or more; what caches keep between passes is not taken off",)
    return Section("Memory traffic of a step", ("", "path", "passes", "bytes per parameter", "in all"), rows, notes)


def _launches(sizes: Sequence[int]) -> Section:
    rows = [(row.path, f"{row.cpu:,}", f"{row.cuda:,}") for row in launches(sizes)]
    notes = ("of AdamW; torch's multi-tensor kernels by the limits of its launcher, ours at most",)
    head = ("path", "operator calls on a CPU", "kernels on a GPU")
    return Section(f"Launches of a step over {len(sizes):,} tensors", head, rows, notes)


def _in_half(value: float) -> str:
    if abs(value) <= SMALLEST_HALF / 2:
        return "lost: rounds to 0"
    return "overflows" if abs(value) >= 65520 else "kept" if abs(value) >= 2.0**-14 else "kept with fewer bits"


def _product(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
