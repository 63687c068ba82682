"""The director of the demo: starts everything, cuts the network, kills a node, heals it all, and has it audited."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from bsfg.cli.common import orderly_end, run
from bsfg.cli.demo import referee
from bsfg.cli.demo.crew import Crew, killed
from bsfg.cli.demo.picture import Silent, StoryLines, introduce, show_keeping, show_on, show_verdict
from bsfg.cli.demo.referee import DemoVerdict
from bsfg.cli.demo.server import check_installed
from bsfg.cli.demo.site import CAUGHT_UP, EVENTS, ORDERS, DemoLink, DemoNode, DemoSite, DemoZone
from bsfg.cli.demo.stage import DemoStage, DemoStep, StageWatch
from bsfg.cli.output import console, print_json
from bsfg.clock import SystemClock
from bsfg.errors import BsfgError, PeerUnreachable, SparkFailed
from bsfg.gate import Mode
from bsfg.wording import counted

NORMAL_SHARE, APART_SHARE, AFTER_SHARE = 0.3, 0.35, 0.25
CLOCK = SystemClock()
DEAD_SECONDS = 2.0
READY_SECONDS = 60.0
AUDIT_SECONDS = 300.0
SOCKET_PATH_MAX = 60
"""Above this length of the folder's name there is no room for the names of sockets in it."""


def steps_of(site: DemoSite) -> list[DemoStep]:
    """Give the story, step by step."""
    number = {2: "Two", 3: "Three"}[len(site.zones)]
    between = "Plant A and the IDMZ" if site.three_zones else "the two zones"
    joined = "A Spark pipeline in each zone begins to pull" if site.spark else "The nodes begin to pull"
    return [
        DemoStep("start", f"{number} zones start, each with a certificate of its own"),
        DemoStep("join", joined),
        DemoStep("normal", "Normal: facts cross as they come"),
        DemoStep("cut", f"The network between {between} is cut"),
        DemoStep("kill", "The node of Plant A is killed (SIGKILL)"),
        DemoStep("restart", "It is started again"),
        DemoStep("heal", "The network heals: reconciliation"),
        DemoStep("after", "Normal again"),
        DemoStep("settle", "The producers pause, the last facts arrive"),
        DemoStep("audit", "Audit: both ends of every link, fact by fact"),
    ]


@dataclass(slots=True)
class Times:
    """When the spans of normal operation began and ended, to measure the lag in them."""

    normal_from: int = 0
    cut: int = 0
    after_from: int = 0
    pause: int = 0


class DemoDirector:
    """One performance."""

    def __init__(self, site: DemoSite, stage: DemoStage, crew: Crew, seconds: float) -> None:
        self.site, self.stage, self.crew, self.seconds = site, stage, crew, seconds
        self._nodes: dict[str, Process] = {}
        self._producers: dict[str, Process] = {}
        self._pipelines: dict[str, Process] = {}
        self._ready: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._times = Times()

    def _span(self) -> tuple[int, int] | None:
        """Give when facts were appended whose longest way is told; None for all."""
        return None

    def _more(self) -> dict[str, Any]:
        """Give what only some stories have to tell in the end."""
        return {}

    async def play(self) -> DemoVerdict:
        """Play the whole piece and give the verdict; processes are left to the crew."""
        started = time.monotonic()
        await self._start()
        await self._join()
        with self.stage.step("normal") as step:
            await self._cross(NORMAL_SHARE * self.seconds, step)
        await self._disturb()
        await self._settle()
        audits = await self._audit()
        ways = await asyncio.to_thread(referee.ways_of, self.site, self._told())
        times = self._times
        return DemoVerdict(
            engine="spark" if self.site.spark else "native",
            ways=ways,
            audits=audits,
            modes=referee.modes_of(self.site),
            before=referee.Lag.of(ways, (times.normal_from, times.cut - referee.SPAN_MARGIN_MS)),
            after=referee.Lag.of(ways, (times.after_from, times.pause)),
            overall=referee.Lag.of(ways, self._span()),
            append_ms=sorted(value for each in self.stage.producing.values() for value in each.append_ms),
            answer_ms_max=max(each.answer_ms_max for each in self.stage.producing.values()),
            seconds=time.monotonic() - started,
            **self._more(),
        )

    async def linger(self) -> None:
        """Go on after the verdict, until somebody has seen enough."""
        for name in self._producers:
            self._say(name, "resume")
        await asyncio.Event().wait()

    async def end(self) -> None:
        """Stop watching; the processes are the crew's to end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self.site.links:
            link.wire.close()

    # The steps.

    async def _start(self) -> None:
        with self.stage.step("start") as step:
            await self._prepare()
            self.stage.note = "certificates"
            await asyncio.to_thread(self.site.write)
            # A pipeline waits for its node as long as it must, and its Java takes the longest of all to start.
            if self.site.spark:
                await asyncio.gather(*(self._start_pipeline(zone) for zone in self.site.zones))
            self.stage.note = "the nodes"
            await self._start_nodes()
            self._follow(StageWatch(self.site, self.stage).run())
            await self._start_producer(self.site.plant, self.site.enterprise, "machines", EVENTS)
            await self._start_producer(self.site.enterprise, self.site.plant, "orders", ORDERS)
            await self.stage.until(
                lambda: all(each.answered for each in self.stage.producing.values()), "the first facts to be stored"
            )
            step.detail = "mutual TLS 1.3; producers append on both sides"

    async def _prepare(self) -> None:
        """Have there what the configurations name."""
        for link in self.site.links:
            await link.wire.open()

    async def _start_nodes(self) -> None:
        await asyncio.gather(*(self.start_node(node) for node in self.site.nodes))

    async def _join(self) -> None:
        with self.stage.step("join") as step:
            if self.site.spark:
                await self.stage.until(lambda: len(self._ready) == len(self.site.zones), "Spark to start (Java)")
            waiting = sum(each.backlog for each in self.stage.links.values())
            await self.stage.until(self._is_normal, "every gate to be normal")
            step.detail = f"{counted(waiting, 'fact')} that had waited crossed" if waiting else "every gate is normal"
        self._times.normal_from = CLOCK.now_unix_ms()

    async def _cross(self, seconds: float, step: DemoStep) -> None:
        """Watch facts cross for a while."""
        before, began = self.stage.received, time.monotonic()
        await self.stage.during(seconds)
        rate = (self.stage.received - before) / (time.monotonic() - began)
        lags = [each.lag_ms for each in self.stage.links.values() if each.lag_ms is not None]
        step.detail = f"{rate:,.0f} facts/s" + (f", lag {max(lags):.0f} ms" if lags else "")

    async def _disturb(self) -> None:
        """Do what must not lose anything."""
        await self._cut()
        await self._kill()
        await self._heal()

    async def _cut(self) -> None:
        plant = self.site.plant
        links = [link for link in self.site.links if plant in (link.sender, link.receiver)]
        with self.stage.step("cut") as step:
            self._times.cut = CLOCK.now_unix_ms()
            for link in links:
                link.wire.cut()
            self.stage.is_cut = True
            await self.stage.until(lambda: self._is_apart(links), "both sides to notice")
            await self.stage.during(APART_SHARE * self.seconds)
            waiting = sum(self.stage.links[link.key].backlog for link in links)
            step.detail = f"both sides go on; {counted(waiting, 'fact')} wait on disk"

    async def _kill(self) -> None:
        plant = self.site.plant
        (node,) = plant.nodes
        seen, producing = self.stage.zones[plant.name], self.stage.producing[plant.name]
        with self.stage.step("kill") as step:
            self.stage.node(node).pid, seen.alive = 0, False
            await killed(self._nodes.pop(node.name))
            told = dict(producing.told)
            absent = await asyncio.to_thread(referee.missing, plant, EVENTS, told)
            await self.stage.during(DEAD_SECONDS)
            step.detail = f"its folder alone has {len(told) - absent:,} of {len(told):,} acknowledged facts"
        with self.stage.step("restart") as step:
            waiting = producing.sent - producing.answered
            began = time.monotonic()
            await self.start_node(node)
            took = time.monotonic() - began
            target = producing.sent
            await self.stage.until(lambda: producing.answered >= target, "the producer's outbox to empty")
            await self.stage.until(lambda: seen.alive and seen.appended >= target, "a look at the node")
            step.detail = f"up after {took:.1f} s; the producer's outbox had kept {counted(waiting, 'fact')}"

    async def _heal(self) -> None:
        with self.stage.step("heal") as step:
            waiting = sum(self.stage.links[link.key].backlog for link in self.site.links)
            began = time.monotonic()
            for link in self.site.links:
                link.wire.mend()
            self.stage.is_cut = False
            await self.stage.until(self._is_normal, "the backlog to cross")
            step.detail = f"{counted(waiting, 'fact')} crossed in {time.monotonic() - began:.1f} s"
        self._times.after_from = CLOCK.now_unix_ms()
        with self.stage.step("after") as step:
            await self._cross(AFTER_SHARE * self.seconds, step)

    async def _settle(self) -> None:
        with self.stage.step("settle") as step:
            self._times.pause = CLOCK.now_unix_ms()
            for name in self._producers:
                self._say(name, "pause")
            producing = self.stage.producing.values()
            await self.stage.until(lambda: all(each.silent for each in producing), "the producers' last answers")
            await self.stage.until(self._is_settled, "the last facts to be confirmed")
            step.detail = f"{self.stage.sent:,} sent, all confirmed"

    async def _audit(self) -> list[dict[str, Any]]:
        with self.stage.step("audit") as step:
            self.stage.note = "Spark to start for the audit" if self.site.spark else "the audit"
            engine = "spark" if self.site.spark else "native"
            named = [orjson.dumps(audited(link)).decode() for link in self.site.links]
            settings = orjson.dumps(self._spark_settings("audit")).decode()
            process = await self.crew.start("audit", "bsfg.cli.demo.referee", engine, settings, *named)
            assert process.stdout is not None
            try:
                async with asyncio.timeout(AUDIT_SECONDS):
                    answer = await process.stdout.readline()
            except TimeoutError:
                answer = b""
            if not answer:
                raise SparkFailed(f"the audit did not end well: {self.crew.last_words('audit')}")
            found: list[dict[str, Any]] = orjson.loads(answer)
            clean = "they agree" if all(each["clean"] for each in found) else "THEY DIFFER"
            step.detail = (
                f"{counted(sum(each['facts'] for each in found), 'fact')} compared, hash chains verified: {clean}"
            )
        return found

    # Conditions.

    def _is_normal(self) -> bool:
        """Tell whether every gate is normal, and nothing waits that came before."""
        seen = self.stage.links.values()
        return all(each.mode == Mode.NORMAL and each.backlog <= CAUGHT_UP[each.link.stream] for each in seen)

    def _is_apart(self, links: list[DemoLink]) -> bool:
        """Tell whether both sides of some links know that the other is away."""
        seen = [self.stage.links[link.key] for link in links]
        return all(each.mode == each.sender_mode == Mode.AUTONOMOUS for each in seen)

    def _is_settled(self) -> bool:
        stage = self.stage
        arrived = stage.received == stage.sent == sum(each.answered for each in stage.producing.values())
        return arrived and not any(each.backlog for each in stage.links.values())

    def _told(self) -> dict[str, dict[str, int]]:
        return {name: dict(each.told) for name, each in self.stage.producing.items()}

    # The processes.

    async def start_node(self, node: DemoNode) -> None:
        """Start a node, and wait until it serves."""
        ready = node.folder / "ready"
        ready.unlink(missing_ok=True)
        process = await self.launch_node(node)
        ends = time.monotonic() + READY_SECONDS
        while not (ready.exists() and ready.read_bytes()):
            if process.returncode is not None or time.monotonic() > ends:
                raise PeerUnreachable(
                    f"the node of {node.name} did not start", hint=f"It said: {self.crew.last_words(node.name)}"
                )
            await asyncio.sleep(0.02)

    async def launch_node(self, node: DemoNode) -> Process:
        """Start a node, whether it will be active or stand by."""
        process = await self.crew.start(
            node.name, "bsfg.cli.zones", "node", "-c", "zone.toml", "--ready-file", "ready", folder=node.folder
        )
        self._nodes[node.name] = process
        self.stage.node(node).pid = process.pid
        self._follow(self._guard(process, node))
        return process

    async def _guard(self, process: Process, node: DemoNode) -> None:
        """Notice when a node ends that nobody has killed."""
        await process.wait()
        if self._nodes.get(node.name) is process:
            words = self.crew.last_words(node.name)
            self.stage.fail(PeerUnreachable(f"the node of {node.name} ended by itself", hint=f"It said: {words}"))

    async def _start_pipeline(self, zone: DemoZone) -> None:
        name = f"pipeline-{zone.name}"
        settings = [f"--conf={key}={value}" for key, value in self._spark_settings(zone.name).items()]
        command = ["pipeline", "replicate", "-c", "zone.toml", "--address", zone.address, "--json", *settings]
        process = await self.crew.start(name, "bsfg.cli.zones", *command, folder=zone.config.parent)
        self._pipelines[zone.name] = process
        self._follow(self._listen_to_pipeline(process, zone, name))

    async def _listen_to_pipeline(self, process: Process, zone: DemoZone, name: str) -> None:
        assert process.stdout is not None
        async for _ in process.stdout:
            self._ready.add(zone.name)
            self.stage.tell()
        await process.wait()
        words = self.crew.last_words(name)
        self.stage.fail(SparkFailed(f"the pipeline of {zone.title} ended by itself", hint=f"It said: {words}"))

    async def _start_producer(self, zone: DemoZone, target: DemoZone, kind: str, stream: str) -> None:
        endpoint = {key: str(value) for key, value in asdict(zone.endpoint("producer")).items() if key in _ENDPOINT}
        settings = {
            "endpoint": endpoint,
            "stream": stream,
            "from_zone": zone.name,
            "to_zone": target.name,
            "outbox": str(zone.config.parent / "outbox"),
        }
        process = await self.crew.start(kind, "bsfg.cli.demo.people", kind, orjson.dumps(settings).decode())
        self._producers[zone.name] = process
        self._follow(self._listen_to_producer(process, zone, kind))

    async def _listen_to_producer(self, process: Process, zone: DemoZone, kind: str) -> None:
        assert process.stdout is not None
        seen = self.stage.producing[zone.name]
        async for line in process.stdout:
            report = orjson.loads(line)
            seen.sent, seen.answered, seen.silent = report["sent"], report["answered"], report["silent"]
            seen.told.update(report["news"])
            seen.append_ms += report["append_ms"]
            seen.answer_ms_max = report["answer_ms_max"]
            self.stage.tell()
        await process.wait()
        words = self.crew.last_words(kind)
        self.stage.fail(PeerUnreachable(f"the producer of {zone.title} ended by itself", hint=f"It said: {words}"))

    def _say(self, name: str, word: str) -> None:
        stdin = self._producers[name].stdin
        assert stdin is not None
        stdin.write(f"{word}\n".encode())

    def _follow(self, work: Coroutine[Any, Any, None]) -> None:
        async def followed() -> None:
            try:
                await work
            except (BsfgError, OSError) as error:
                self.stage.fail(error)

        self._tasks.append(asyncio.create_task(followed()))

    def _spark_settings(self, name: str) -> dict[str, str]:
        """Give small settings: several Sparks share this machine, and nothing may be left outside the folder."""
        place = self.crew.temporary / name
        with contextlib.suppress(FileExistsError):
            place.mkdir()
        settings = {
            "spark.driver.memory": "512m",
            "spark.local.dir": str(place),
            "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={place} -XX:-UsePerfData -XX:TieredStopAtLevel=1",
        }
        if len(str(place)) > SOCKET_PATH_MAX:
            settings["spark.python.unix.domain.socket.enabled"] = "false"
        return settings


def audited(link: DemoLink) -> dict[str, str | None]:
    """Say for the audit what a link is, and whose facts are at a server and not in a folder."""
    sender, receiver = (None if zone.server else str(zone.data) for zone in (link.sender, link.receiver))
    at_server = next((str(zone.config) for zone in (link.sender, link.receiver) if zone.server), None)
    return {
        "name": link.name, "key": link.key, "config": str(link.receiver.config), "address": link.receiver.address,
        "identity": f"{link.receiver.name}-pipeline", "sender": sender, "receiver": receiver, "at_server": at_server,
    }  # fmt: skip


_ENDPOINT = ("address", "ca", "certificate", "key", "server_name")


def perform(site_of: Callable[[Path], DemoSite], seconds: float, *, keep: bool, as_json: bool) -> bool:
    """Play on a site in a folder of our own, show and judge; tell whether every promise was kept."""
    # gRPC reads this when it is loaded; what it says of connections that the demo itself breaks is of no use.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    screen = console(stderr=as_json)
    show = show_on(screen, as_json=as_json)
    with orderly_end():
        folder = Path(tempfile.mkdtemp(prefix="bsfg-demo-"))
        try:
            site = site_of(folder)
            if site.spark and find_spec("pyspark") is None:
                raise ModuleNotFoundError("No module named 'pyspark'", name="pyspark")
            if site.two_nodes:
                check_installed()
            if type(show) is not Silent:
                introduce(screen, site)
            return run(played(site, screen, show, seconds, keep=keep, as_json=as_json)).ok
        finally:
            shutil.rmtree(folder, ignore_errors=True)


async def played(
    site: DemoSite, screen: Console, show: Silent, seconds: float, *, keep: bool, as_json: bool
) -> DemoVerdict:
    """Do what happens on and around the stage."""
    from bsfg.cli.demo import takeover

    steps, kind = steps_of, DemoDirector
    if site.two_nodes:
        steps, kind = takeover.steps_of, takeover.TakeoverDirector
    stage = DemoStage(site, steps(site), lambda step: show.on_step(stage, step))
    async with Crew(site.root) as crew:
        director = kind(site, stage, crew, seconds)
        try:
            show.begin(stage)
            try:
                verdict = await director.play()
            finally:
                show.end()
            if as_json:
                print_json(verdict.to_dict())
            else:
                show_verdict(screen, verdict)
            if keep:
                # Go on until Ctrl-C, which is how this is meant to end.
                show_keeping(screen, site)
                if not isinstance(show, StoryLines):
                    show.begin(stage, told=False)
                with contextlib.suppress(asyncio.CancelledError):
                    await director.linger()
        finally:
            show.end()
            await director.end()
    return verdict
