"""A plan for people: one line, an HTML table, a figure."""
from __future__ import annotations

import html as markup
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refit.plan import Plan


def human_bytes(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def human_seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def one_line(plan: Plan) -> str:
    stats = plan.stats
    return (f"<refit.Plan {plan.digest[:8]}: {plan.source_ranks} -> {plan.destination_ranks} ranks, "
            f"{stats.params} params, {human_bytes(stats.moved_bytes)} moved>")


def bytes_per_rank(plan: Plan) -> list[int]:
    """Sent by each source rank, received by each destination rank."""
    moved = [0] * plan.world_size
    for (sender, receiver), size in plan.traffic().items():
        moved[sender] += size if sender < plan.source_ranks else 0
        moved[receiver] += size
    return moved


def html(plan: Plan) -> str:
    stats = plan.stats
    rows = [
        ("digest", plan.digest),
        ("ranks", f"{plan.source_ranks} source, {plan.destination_ranks} destination"
         + (", colocated" if plan.colocated else "")),
        ("params", f"{stats.params} in {stats.param_stacks} stacks, {stats.tensors} tensors of all ranks"),
        ("moved", f"{human_bytes(stats.moved_bytes)} (inside hosts {human_bytes(stats.peer_bytes)}, "
         f"between hosts {human_bytes(stats.network_bytes)}, on one GPU {human_bytes(stats.local_bytes)})"),
        ("predicted", f"{human_seconds(stats.predicted_seconds)}, lower bound {human_seconds(stats.lower_bound_seconds)}"),
        ("binding link", stats.binding_link),
        ("schedule", f"{stats.messages} messages in {stats.rounds} rounds"),
        ("staging of a rank, max", human_bytes(stats.staging_bytes_max)),
    ]
    body = "".join(f"<tr><th style='text-align:left'>{markup.escape(label)}</th>"
                   f"<td style='text-align:left'>{markup.escape(value)}</td></tr>" for label, value in rows)
    return f"<table><caption>refit.Plan</caption><tbody>{body}</tbody></table>"


def figure(plan: Plan) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("Plan.plot needs matplotlib: pip install matplotlib") from None
    drawn = Figure(figsize=(11, 5), layout="constrained")
    matrix_axes, rank_axes = drawn.subplots(1, 2)
    _draw_matrix(plan, drawn, matrix_axes)
    _draw_ranks(plan, rank_axes)
    return drawn


def _draw_matrix(plan: Plan, drawn: Any, axes: Any) -> None:
    """Few ranks are named one by one. Of many some are, and lines lie between hosts."""
    from matplotlib.colors import LogNorm

    traffic = plan.traffic()
    senders = sorted({sender for sender, _ in traffic} | set(range(plan.source_ranks)))
    receivers = list(range(plan.source_ranks, plan.world_size))
    mebibytes = [[traffic.get((sender, receiver), 0) / 2**20 for receiver in receivers] for sender in senders]
    moved = [size / 2**20 for size in traffic.values() if size]
    spread = bool(moved) and max(moved) > 50 * min(moved)
    image = axes.imshow(mebibytes, aspect="auto", cmap="viridis", interpolation="nearest",
                        norm=LogNorm(min(moved), max(moved)) if spread else None)
    if spread:
        axes.set_facecolor("white")  # pairs that move nothing
    axes.set(title="MiB from sender to receiver" + (" (logarithmic)" if spread else ""), xlabel="destination rank",
             ylabel="sender")
    for axis, ranks, most, line in ((axes.xaxis, receivers, 10, axes.axvline), (axes.yaxis, senders, 16, axes.axhline)):
        step = -(-len(ranks) // most)
        axis.set_ticks(range(0, len(ranks), step), labels=[str(rank) for rank in ranks[::step]])
        ends = [at for at in range(1, len(ranks)) if plan.host(ranks[at]) != plan.host(ranks[at - 1])]
        for at in ends if len(ends) <= 64 else []:
            line(at - 0.5, color="white", linewidth=0.5, alpha=0.5)
    drawn.colorbar(image, ax=axes)


def _draw_ranks(plan: Plan, axes: Any) -> None:
    moved = [size / 2**20 for size in bytes_per_rank(plan)]
    # Neighbors touch, so that hundreds of them are no pattern of gaps.
    width = 0.8 if plan.world_size <= 64 else 1.0
    sources, destinations = range(plan.source_ranks), range(plan.source_ranks, plan.world_size)
    axes.bar(sources, moved[:plan.source_ranks], width=width, label="sent by the source")
    axes.bar(destinations, moved[plan.source_ranks:], width=width, label="received by the destination")
    axes.set(title="MiB by rank", xlabel="rank", ylim=(0, 1.18 * max(moved, default=0) or 1))
    axes.legend(loc="upper center", ncols=2)
