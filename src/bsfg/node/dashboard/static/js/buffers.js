// The buffers of each stream: how full, how far everybody has confirmed, how long the rest has waited.

import { byId, foreign, h, renew, s, said, table } from "./dom.js";
import { bytes, count, counted, hours, moment, offset, percent, rate, span, whole } from "./format.js";
import { icon } from "./icons.js";
import { backlogLevel, fillLevel } from "./judge.js";
import { known } from "./store.js";

const SAYS = { store: "what this zone produced", forward: "what other zones sent" };

/** Draw a card per stream, and the table of consumers. */
export function buffers() {
  const streams = [...new Set(known.state.buffers.map((each) => each.stream))];
  renew(byId("buffers"), streams.map((stream) => h("article", { class: "card", data: { key: stream } },
    h("header", {}, h("h2", {}, foreign(stream))),
    h("div", { class: "lanes" }, known.state.buffers.filter((each) => each.stream === stream)
      .sort((a, b) => b.buffer.localeCompare(a.buffer)).map(part)))));
  consumers();
}

function part(buffer) {
  const level = fillLevel(buffer.fill);
  const own = known.state.consumers.filter((each) =>
    each.stream === buffer.stream && each.buffer === buffer.buffer && each.retired_reason === null);
  return h("div", { class: "lane-part", data: { key: buffer.buffer } },
    h("h3", {}, h("span", {}, buffer.buffer === "store" ? "Store buffer" : "Forward buffer", " ", h("small", {}, SAYS[buffer.buffer])),
      h("span", { class: `${level}-text` }, percent(buffer.fill_percent))),
    fillBar(buffer, level),
    ruler(buffer, own),
    caption(buffer, own),
    figures(buffer));
}

function fillBar(buffer, level) {
  const width = Math.min(100, buffer.fill_percent);
  const says = `${percent(buffer.fill_percent)} of ${bytes(buffer.capacity_bytes)} used`;
  return s("svg", { viewBox: "0 0 100 5", preserveAspectRatio: "none", height: 14, role: "img", "aria-label": says },
    s("rect", { class: "track", width: 100, height: 5, "vector-effect": "non-scaling-stroke" }),
    s("rect", { class: `part ${level}`, width: buffer.end > buffer.start ? Math.max(0.6, width) : 0, height: 5 }));
}

/** Draw the retained offsets as a ruler: what is confirmed by all, what is not, and where each consumer stands. */
function ruler(buffer, own) {
  const retained = buffer.end - buffer.start;
  const at = (offset) => (retained ? (100 * Math.min(retained, Math.max(0, offset - buffer.start))) / retained : 0);
  const frontier = buffer.first_unconfirmed === null ? buffer.end : buffer.first_unconfirmed;
  const says = retained ? `offsets ${buffer.start} to ${buffer.end - 1}, confirmed below ${frontier}` : "empty";
  return s("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", height: 22, role: "img", "aria-label": says },
    s("rect", { class: "track", width: 100, height: 6, "vector-effect": "non-scaling-stroke" }),
    s("rect", { class: "confirmed", width: at(frontier), height: 6 }),
    s("rect", { class: "unconfirmed", x: at(frontier), width: retained ? 100 - at(frontier) : 0, height: 6 }),
    own.map((each) => s("line", { class: "mark", x1: at(each.committed + 1), x2: at(each.committed + 1), y1: 0, y2: 6, "vector-effect": "non-scaling-stroke" },
      s("title", {}, `${each.name} has confirmed through ${each.committed}`))));
}

function caption(buffer, own) {
  if (buffer.end <= buffer.start) return h("p", { class: "caption" }, "empty");
  const waiting = buffer.first_unconfirmed === null ? 0 : buffer.end - buffer.first_unconfirmed;
  const readers = own.length ? counted(own.length, "consumer") : "no consumer";
  return h("p", { class: "caption" },
    h("span", {}, offset(buffer.start)),
    h("span", {}, waiting ? `${count(waiting)} not confirmed, ${readers}` : `all confirmed, ${readers}`),
    h("span", {}, offset(buffer.end - 1)));
}

function figures(buffer) {
  const retained = buffer.end > buffer.start;
  return h("dl", { class: "figures" },
    figure("Used", whole(`${bytes(buffer.used_bytes)} of ${bytes(buffer.capacity_bytes)}`)),
    figure("Offsets kept", retained ? `${offset(buffer.start)}–${offset(buffer.end - 1)}` : "none"),
    figure("Confirmed below", buffer.first_unconfirmed === null ? "all" : offset(buffer.first_unconfirmed)),
    figure("Coming in, last minute", buffer.facts_per_second === null ? "unknown" : rate(buffer.facts_per_second)),
    figure("Full in", buffer.facts_per_second === null ? "unknown" : buffer.hours_left === null ? "not filling" : hours(buffer.hours_left)),
    figure("Oldest unconfirmed", waits(buffer), buffer.expiry_near ? "alert" : null),
    figure("Gap records", count(buffer.gaps)),
    figure("In quarantine", count(buffer.quarantined), buffer.quarantined ? "alert" : null));
}

function waits(buffer) {
  if (buffer.oldest_unconfirmed_seconds === null) return "–";
  const of = buffer.max_age_seconds === null ? ", never expires" : ` of ${span(buffer.max_age_seconds)}`;
  return whole(`${span(buffer.oldest_unconfirmed_seconds)}${of}`);
}

function figure(name, value, level = null) {
  return h("div", {}, h("dt", {}, name), h("dd", { class: level && `${level}-text` }, value));
}

function consumers() {
  const found = known.state.consumers;
  if (!found.length) {
    renew(byId("consumers"), h("p", { class: "empty" }, said("No consumer is known. `bsfg consumers add` makes one.")));
    return;
  }
  const head = ["Consumer", "Reads", "Frontier", "Backlog", "Kind", "Last fetch"];
  renew(byId("consumers"), table(
    h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col", class: ["Frontier", "Backlog"].includes(name) && "number" }, name)))),
    h("tbody", {}, found.map(consumer))));
}

function consumer(each) {
  const level = backlogLevel(each.backlog);
  const retired = each.retired_reason !== null;
  const fetched = each.last_fetch_unix_ms === null ? "not since the start" : moment(each.last_fetch_unix_ms);
  return h("tr", { data: { key: each.name } },
    h("td", {}, h("strong", {}, foreign(each.name))),
    h("td", {}, foreign(each.stream), ", ", each.buffer),
    h("td", { class: "number" }, each.committed < 0 ? "–" : offset(each.committed)),
    h("td", { class: "number" }, retired ? "–" : h("span", { class: `pill ${level}` }, icon(level), count(each.backlog))),
    h("td", {}, retired ? h("span", { class: "text" }, "retired: ", foreign(each.retired_reason)) : each.required ? "required" : "optional"),
    h("td", { class: "time" }, fetched));
}
