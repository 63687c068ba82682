"""`bsfg gate`: see, hold and release the gates of the links."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bsfg.cli.common import Json, ListsByDefault, Reason, argument, checked_reason, flag, gates, option, suggestion
from bsfg.cli.connection import Target, admin_of, connects
from bsfg.cli.output import console, examples, fitting, print_json, table, time_text
from bsfg.errors import GateHeld, InvalidArgument, InvalidTransition, UnknownLink
from bsfg.wording import one_line

if TYPE_CHECKING:
    from bsfg.wire.adminclient import AdminClient
    from bsfg.wire.connection import Connection
    from bsfg.wire.service import GateView

app = typer.Typer(
    cls=ListsByDefault,
    help="See, hold and release the gates of the links.",
    epilog=examples(
        ("bsfg gate", "the mode of every link and side, and who holds it"),
        ("bsfg gate hold from-enterprise --reason 'firewall works' --for 2h", "stop pulling for two hours"),
        ("bsfg gate hold enterprise --reason 'audit under way'", "stop serving a zone"),
        ("bsfg gate release from-enterprise --reason 'works are done'", "go on"),
    ),
)


class Side(StrEnum):
    """Which end of a link this node is."""

    RECEIVER = "receiver"
    SENDER = "sender"


LinkName = Annotated[
    str, argument("LINK", "An inbound link by its name, or a zone that is served.", autocompletion=gates)
]
SideOption = Annotated[
    Side | None,
    typer.Option(help="receiver for a link that pulls, sender for a zone that is served. Needed if both fit."),
]


@app.command("list")
@connects("viewer", "operator")
def list_gates(node: Target, json: Json = False) -> None:
    """List the gates of all links: mode, since when, and for a held one who holds it, why and until when."""
    found = node.run(lambda connection: admin_of(connection).gates())
    if json:
        print_json([as_dict(view) for view in found])
    elif found:
        console().print(fitting(partial(_table, found), (True, False), prose=("reason",)))
    else:
        console().print("No link is configured: there is nothing to pull and nobody to serve.")


@app.command("hold")
@connects("operator")
def hold(
    node: Target,
    link: LinkName,
    reason: Reason,
    side: SideOption = None,
    duration: Annotated[str | None, option("TIME", "Release it by itself after 30m, 2h, 1d …", "--for")] = None,
    replace: Annotated[bool, flag("--replace", "Replace a hold that is there.")] = False,
    json: Json = False,
) -> None:
    """Close the gate of a link until it is released, or for a while.

    Nothing is lost meanwhile: on the receiver's side pulling stops, on the sender's side the other zone is refused,
    and facts wait in the store buffer. A hold outlives a restart of the node.
    """
    why, seconds = checked_reason(reason), _seconds(duration)

    async def call(connection: Connection) -> GateView:
        admin = admin_of(connection)
        view = await _the_gate(admin, link, side)
        if view.gate.held_by and not replace:
            hint = "Release it first, or give --replace to hold it with another reason or end."
            raise GateHeld(f"{_name(view)} is already held{_held_text(view)}", hint=hint, link=link)
        until = None
        if seconds is not None:
            # The node ends the hold by its own clock, so the end is counted from there.
            until = int((await admin.status())["now_unix_ms"] + 1000 * seconds)
        return await admin.hold_gate(view.link, why, side=view.side, until_unix_ms=until)

    _show(node.run(call), "is held", json)


@app.command("release")
@connects("operator")
def release(node: Target, link: LinkName, reason: Reason, side: SideOption = None, json: Json = False) -> None:
    """Open a held gate; the next fetch that succeeds begins reconciliation."""
    why = checked_reason(reason)

    async def call(connection: Connection) -> GateView:
        admin = admin_of(connection)
        view = await _the_gate(admin, link, side)
        try:
            return await admin.release_gate(view.link, why, side=view.side)
        except InvalidTransition:
            hint = "There is nothing to release; `bsfg gate` shows all gates."
            raise InvalidTransition(f"{_name(view)} is not held, it is {view.gate.mode}", hint=hint) from None

    _show(node.run(call), "is released", json)


def as_dict(view: GateView) -> dict[str, Any]:
    """Give the JSON form of a gate."""
    gate = view.gate
    return {
        "link": view.link,
        "side": view.side,
        "mode": str(gate.mode),
        "since_unix_ms": gate.since_unix_ms,
        "reason": gate.reason,
        "held_by": gate.held_by or None,
        "held_until_unix_ms": gate.held_until_unix_ms,
    }


def _seconds(text: str | None) -> float | None:
    from bsfg.config.kinds import DURATION, WrongValue

    try:
        return None if text is None else DURATION.read(text)
    except WrongValue as problem:
        raise InvalidArgument(f"--for {problem}") from None


async def _the_gate(admin: AdminClient, link: str, side: Side | None) -> GateView:
    """Find the gate that is meant; the side is clear when a name stands on one side only."""
    views = await admin.gates()
    fits = [view for view in views if view.link == link and side in (None, view.side)]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise InvalidArgument(f"{link!r} is a link and a zone that is served", hint="Give --side receiver or sender.")
    where = f" on the {side}'s side" if side else ""
    known = [view.link for view in views if side in (None, view.side)]
    raise UnknownLink(f"there is no link {link!r}{where}", hint=suggestion(link, known, "link"), link=link)


def _name(view: GateView) -> str:
    return f"the gate of {view.link} ({view.side})"


def _held_text(view: GateView) -> str:
    gate = view.gate
    until = f", until {time_text(gate.held_until_unix_ms)}" if gate.held_until_unix_ms else ""
    return one_line(f" by {gate.held_by} since {time_text(gate.since_unix_ms)}{until}: {gate.reason}")


def _show(view: GateView, what: str, json: bool) -> None:
    if json:
        print_json(as_dict(view))
        return
    from bsfg.cli.status import mode_text

    text = Text.assemble(f"{_name(view)} {what}".capitalize(), "; mode ", mode_text(view.gate.mode))
    text.append(_held_text(view) if view.gate.held_by else "")
    console().print(text, soft_wrap=True)


def _table(views: list[GateView], wide: bool) -> Any:
    from bsfg.cli.status import mode_text

    result = table("link", "side", "mode", *(("since",) if wide else ()), "reason")
    for view in views:
        gate = view.gate
        why = gate.reason
        if gate.held_by:
            until = f", until {time_text(gate.held_until_unix_ms)}" if gate.held_until_unix_ms else ""
            why = f"{gate.reason} ({gate.held_by}{until})"
        row: list[str | Text] = [view.link, view.side, mode_text(gate.mode)]
        result.add_row(*row, *((time_text(gate.since_unix_ms),) if wide else ()), Text(why))
    return result
