// The map: this zone with its buffers, the zones it exchanges facts with, and the gate of each direction.

import { byId, h, renew, s } from "./dom.js";
import { count, percent, span } from "./format.js";
import { signs } from "./icons.js";
import { known, latest, rates, seriesOf } from "./store.js";
import { fillLevel } from "./judge.js";

// On a phone the words of a lane stand above and below its gate, where they have the room that is missing beside it.
const WIDE = { width: 760, own: { x: 8, width: 196 }, peer: { x: 600, width: 152 }, row: 122, pitch: 54, tanks: 4 };
const NARROW = { width: 400, own: { x: 4, width: 116 }, peer: { x: 284, width: 112 }, row: 196, pitch: 88, tanks: 2 };
const PEERS_MAX = 6;
const phone = matchMedia("(max-width: 640px)");
const shape = () => (phone.matches ? NARROW : WIDE);
const letters = (width) => Math.floor(width / 10);

/** Draw the map. */
export function map() {
  const all = grouped(known.state.links);
  // A picture of many zones is none: those that need somebody are drawn, and the table has all.
  const peers = all.length <= PEERS_MAX ? all : all.sort((a, b) => trouble(b) - trouble(a)).slice(0, PEERS_MAX);
  if (!peers.length) {
    renew(byId("map"), h("p", { class: "empty" }, "No link is configured: there is nothing to pull and nobody to serve."));
    return;
  }
  const height = Math.max(peers.length * shape().row, 216) + 16;
  const picture = s("svg", { viewBox: `0 0 ${shape().width} ${height}`, role: "img", "aria-label": spoken(peers) },
    ownBox(height), peers.map((peer, index) => peerRow(peer, (height / peers.length) * (index + 0.5))));
  const more = all.length - peers.length;
  renew(byId("map"), picture, more ? h("p", { class: "empty" }, `and ${count(more)} more zones: `, h("a", { href: "#links" }, "all links")) : null);
}

const trouble = ({ inbound, outbound }) => [...inbound, ...outbound].filter((link) => link.mode !== "normal").length;

/** Bring the two directions to one zone together. */
function grouped(links) {
  const peers = new Map();
  for (const link of links) {
    if (!peers.has(link.zone)) peers.set(link.zone, { zone: link.zone, inbound: [], outbound: [] });
    peers.get(link.zone)[link.side === "receiver" ? "inbound" : "outbound"].push(link);
  }
  return [...peers.values()];
}

function spoken(peers) {
  const way = (links, word) => links.map((link) => `${word} ${link.zone} is ${link.mode}`);
  return peers.flatMap(({ inbound, outbound }) => [...way(inbound, "from"), ...way(outbound, "to")]).join("; ");
}

function ownBox(height) {
  const { own } = shape();
  return s("g", {},
    s("rect", { class: "box own", x: own.x, y: 8, width: own.width, height: height - 16, rx: 12 }),
    label(own.x + own.width / 2, 36, "name", fitted(known.state.zone, letters(own.width))),
    label(own.x + own.width / 2, 54, "muted", "this zone"),
    tanks(height));
}

/** Draw the store and the forward buffer of each stream as tanks that fill and drain. */
function tanks(height) {
  const streams = [...new Set(known.state.buffers.map((each) => each.stream))];
  const { own, tanks: most } = shape();
  const shown = streams.slice(0, most);
  const step = (own.width - 24) / Math.max(shown.length, 1);
  const [top, bottom] = [72, height - 52];
  const drawn = shown.flatMap((stream, index) => {
    const middle = own.x + 12 + step * (index + 0.5);
    const of = (kind) => known.state.buffers.find((each) => each.stream === stream && each.buffer === kind);
    return [
      tank(of("store"), middle - 20, top, bottom, "store"),
      tank(of("forward"), middle + 4, top, bottom, "forward"),
      label(middle, bottom + 20, "muted", fitted(stream, Math.floor(step / 7.4))),
    ];
  });
  const left = streams.length - shown.length;
  return [drawn, left > 0 ? label(own.x + own.width / 2, height - 15, "muted", `and ${left} more streams`) : null];
}

function tank(buffer, x, top, bottom, kind) {
  const room = bottom - top;
  const share = Math.min(1, (buffer?.fill_percent ?? 0) / 100);
  // Something that is there is seen, however little it is.
  const level = buffer && buffer.end > buffer.start ? Math.max(3, share * room) : 0;
  const says = `${kind} buffer: ${percent(buffer?.fill_percent ?? 0)} full`;
  return s("g", {},
    s("title", {}, says),
    s("rect", { class: "tank", x, y: top, width: 16, height: room, rx: 4 }),
    s("rect", { class: `level ${fillLevel(buffer?.fill ?? "healthy")}`, x: x + 1, y: bottom - level, width: 14, height: level, rx: 3 }),
    label(x + 8, top + 14, "muted", kind[0].toUpperCase()));
}

function peerRow({ zone, inbound, outbound }, y) {
  const lanes = [...outbound.map((link) => [link, 1]), ...inbound.map((link) => [link, -1])];
  const { peer, pitch } = shape();
  const first = y - ((lanes.length - 1) * pitch) / 2;
  return s("g", {},
    s("rect", { class: "box", x: peer.x, y: y - pitch / 2 - 19, width: peer.width, height: pitch + 38, rx: 12 }),
    label(peer.x + peer.width / 2, y + 6, "name", fitted(zone, letters(peer.width))),
    lanes.map(([link, way], index) => lane(link, way, first + index * pitch)));
}

/** Draw one direction: a line with an arrow, its gate in the middle, and in words what the colours say. */
function lane(link, way, y) {
  const { own, peer } = shape();
  const [left, right] = [own.x + own.width + 6, peer.x - 6];
  const middle = (left + right) / 2;
  const tip = way > 0 ? `M${right} ${y}l-11 -6v12z` : `M${left} ${y}l11 -6v12z`;
  const line = way > 0 ? `M${left} ${y}H${right - 9}` : `M${right} ${y}H${left + 9}`;
  return s("g", { class: link.mode },
    s("path", { class: `lane ${link.mode}`, d: line }),
    moving(link) ? s("path", { class: "flow", d: line }) : null,
    s("path", { class: `tip ${link.mode}`, d: tip }),
    s("circle", { class: "gate", cx: middle, cy: y, r: 17 }),
    s("g", { transform: `translate(${middle - 10} ${y - 10}) scale(.83)` }, signs(link.mode, { class: "sign" })),
    words(link, middle, y));
}

function words(link, middle, y) {
  const toCome = link.to_come ? `${count(link.to_come)} to come` : "";
  if (phone.matches) return [label(middle, y - 24, "mode", link.mode), label(middle, y + 34, "muted", toCome || figures(link))];
  return [
    label(middle - 26, y - 8, "muted", fitted(link.side === "receiver" ? link.link : `to ${link.zone}`, 21), "end"),
    label(middle + 26, y - 8, "mode", link.mode, "start"),
    label(middle + 26, y + 18, "muted", figures(link), "start"),
    toCome ? label(middle - 26, y + 18, "muted", toCome, "end") : null,
  ];
}

/** Give what moves over a link in words: the lag where we receive, what is unconfirmed where we send. */
function figures(link) {
  if (link.side === "sender") {
    const own = known.state.consumers.filter((each) => each.name.startsWith(`${link.zone.toLowerCase()}.`));
    if (!own.length) return "nobody has come yet";
    const backlog = own.reduce((total, each) => total + each.backlog, 0);
    return backlog ? `${count(backlog)} unconfirmed` : "all confirmed";
  }
  if (link.mode === "held" || link.mode === "autonomous") return "nothing moves";
  if (link.to_come === null) return "unknown";
  return link.lag === null ? "nothing new" : `lag ${span(link.lag_seconds)}`;
}

function moving(link) {
  if (link.mode !== "normal" && link.mode !== "reconciliation") return false;
  if (link.side === "receiver") return seriesOf("end").some(({ of, values }) => of[1] === "forward" && latest(rates(values)) > 0);
  const prefix = `${link.zone.toLowerCase()}.`;
  return seriesOf("frontier").some(({ of, values }) => of[0].startsWith(prefix) && latest(rates(values)) > 0);
}

function label(x, y, kind, text, anchor = "middle") {
  return s("text", { x, y, class: kind, "text-anchor": anchor }, text);
}

function fitted(text, characters) {
  return text.length <= characters ? text : `${text.slice(0, Math.max(1, characters - 1))}…`;
}
