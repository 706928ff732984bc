"""The ledger as tables for people: bytes, traffic, launches, checkpoint, and what is not counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_fuse.kernels import KERNELS
from lightning_fuse.ledger.count import NOT_COUNTED, Ledger, count_module
from lightning_fuse.ledger.traffic import launches, step_paths, update_paths

DECIMAL = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
BINARY = {"GB": (2**30, "GiB"), "MB": (2**20, "MiB"), "kB": (2**10, "KiB")}
# Kinds of state that are no moment: what the table calls them, and a note.
BESIDE = {
    "qmap": ("code tables", "shared"),
    "master": ("master weights", "float32"),
    "remainder": ("master weights", "the part that the parameter lacks"),
    "step": ("step counters", ""),
}
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


def sections(ledger: Ledger, words: str, activations: int | None = None) -> list[Section]:
    """Everything the ledger says about a model.

    Args:
        ledger: Its bytes.
        words: The choices, for the title: ``adamw_fused, state=int8``.
        activations: Bytes that one step was seen to need beside it, or None.

    Returns:
        Bytes, traffic and launches.
    """
    return [_bytes(ledger, words, activations), _traffic(ledger), _launches(ledger.sizes)]


def show_run(config: Mapping[str, Any], module: Any) -> None:
    """Prints the ledger of a run that is about to start: ``train ledger=true``.

    Args:
        config: Its resolved configuration.
        module: Its recipe.
    """
    show(sections(count_recipe(module, str(config["precision"])), title_of(config)))


def count_recipe(module: Any, precision: str, shards: int = 1) -> Ledger:
    """The ledger of a recipe: a module with ``optimizer_groups`` and ``optimizer_factory``; see ``recipes.Recipe``.

    Args:
        module: On the meta device or any other.
        precision: Lightning's word.
        shards: Devices that share state.

    Returns:
        Its bytes.
    """
    several = getattr(module, "groups_of_optimizers", None)
    groups = [module.optimizer_groups()] if several is None else several()
    return count_module(module, module.optimizer_factory, precision, optimizers=groups, shards=shards)


def title_of(config: Mapping[str, Any]) -> str:
    """The choices of a resolved configuration that decide bytes, in a line."""
    chosen = {"state": config["state"]["format"], "master": config["master"], "precision": config["precision"]}
    return ", ".join([config["optimizer"]["name"], *(f"{key}={word}" for key, word in chosen.items())])


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
    """Prints sections as tables."""
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


def _bytes(ledger: Ledger, words: str, activations: int | None) -> Section:
    each = max(1, ledger.trained)
    rows: list[tuple[str, int, str]] = [("parameters", ledger.parameters, "")]
    if ledger.buffers:
        rows.append(("buffers", ledger.buffers, ""))
    rows.append(("gradients", ledger.gradients, "all of them, as at the step"))
    # Moments in their order, then what is beside them.
    for key in sorted(ledger.state, key=lambda key: (key in BESIDE, list(ledger.state).index(key))):
        name, note = BESIDE.get(key, (key, ""))
        if key.endswith(".codes"):
            name, note = key.removesuffix(".codes"), "codes"
        elif key.endswith(".scale") or key.startswith("absmax"):
            name, note = f"{key.removesuffix('.scale').replace('absmax', 'state')} scales", "float32, one per block"
        rows.append((name, ledger.state[key], note or (f"{len(ledger.sizes):,} tensors" if key == "step" else "")))
    rows.append(("optimizer state in all", ledger.state_total, f"allocated: {size(ledger.allocated)}"))
    rows.append(("counted in all", ledger.total, ""))
    rows.append(("checkpoint", ledger.checkpoint, "tensors; file format and loop state are some kB more"))
    if activations is not None:
        rows.append(("peak of a step", ledger.peak(activations), f"with {size(activations)} seen in one step"))
    cells = [(name, size(count), f"{count / each:.3f}", note) for name, count, note in rows]
    title = f"{ledger.elements:,} parameters: {words}" + (f", shards={ledger.shards}" if ledger.shards > 1 else "")
    notes = [*ledger.notes]
    if ledger.shards > 1:
        notes.append("shards as FSDP2's fully_shard makes them, in a loop of yours; train has strategy=auto and ddp")
    notes.append(f"not counted: {'; '.join(NOT_COUNTED)}")
    return Section(title, ("what", "bytes", "per parameter", ""), cells, tuple(notes))


def _traffic(ledger: Ledger) -> Section:
    rows = []
    adamw = all(name in ("FusedAdamW", "AdamW") for name in ledger.optimizers)
    for what, paths in (("update", update_paths(ledger.widths, adamw)), ("whole step", step_paths(ledger.widths))):
        for path in paths:
            moved = path.bytes_per_element
            rows.append((what, path.name, str(len(path.passes)), f"{moved:.4g}", size(round(moved * ledger.trained))))
    notes = ("read and written, for rows of 128 elements or more; what caches keep between passes is not taken off",)
    return Section("Memory traffic of a step", ("", "path", "passes", "bytes per parameter", "in all"), rows, notes)


def _launches(sizes: Sequence[int]) -> Section:
    gpu_kernel = "triton" in KERNELS
    rows = [
        (row.path, f"{row.cpu:,}", "not counted" if row.cuda is None else f"{row.cuda:,}")
        for row in launches(sizes, gpu_kernel)
    ]
    ours = (
        "ours at most"
        if gpu_kernel
        else ("on a GPU this version runs ours with the reference kernel, plain operations of torch for each parameter")
    )
    notes = (f"of AdamW; torch's multi-tensor kernels by the limits of its launcher; {ours}",)
    head = ("path", "operator calls on a CPU", "kernels on a GPU")
    return Section(f"Launches of a step over {len(sizes):,} tensors", head, rows, notes)


def _in_half(value: float) -> str:
    if abs(value) <= SMALLEST_HALF / 2:
        return "lost: rounds to 0"
    return "overflows" if abs(value) >= 65520 else "kept" if abs(value) >= 2.0**-14 else "kept with fewer bits"
